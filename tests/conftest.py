"""Eight CPU devices, strict dtypes and one cache of compiled programs for every test; the tiny run that many use."""

import os
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
# Programs here run for milliseconds and compile for seconds, half of them for LLVM to optimise.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
    ]
)
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Of this run of the tests, and of every process that it starts.
if "GRPOJAX_TEST_CACHE" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="grpojax-tests-")
    os.environ["GRPOJAX_TEST_CACHE"] = os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="session")
def recipe(tmp_path_factory):
    """A recipe of 12 steps of the tiny random model."""
    from tiny_run import make_run

    return make_run(tmp_path_factory.mktemp("model"))
