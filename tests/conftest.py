"""Eight CPU devices, strict dtypes and one cache of compiled programs for every test; the tiny run that many use.

The files that take longest come first, so that the workers end together. ``GRPOJAX_TEST_USAGE=1`` has the suite say
what each worker took.
"""

import atexit
import ctypes
import gc
import logging
import os
import resource
import shutil
import signal
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import quick_xla

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick_xla.flags(8)}"
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A shell has what it starts in the background ignore Ctrl-C, and so would all that the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Of this run of the tests, and of every process that it starts.
if "GRPOJAX_TEST_CACHE" not in os.environ:
    _cache = tempfile.mkdtemp(prefix="grpojax-tests-")
    atexit.register(shutil.rmtree, _cache, ignore_errors=True)
    os.environ["GRPOJAX_TEST_CACHE"] = os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")

# No property fails by the clock: a busy machine is no fault of the code.
hypothesis.settings.register_profile("no clock", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("no clock")

HERE = Path(__file__).parent
LONGEST_FIRST = (
    "cli/test_recipes.py",
    "tpu_scripts/test_story.py",
    "run/test_learning.py",
    "variants/test_conformance.py",
    "run/test_train.py",
    "run/test_faults.py",
    "programs/test_roles.py",
    "extensions/plan/test_planner.py",
    "programs/test_update.py",
    "models/test_models.py",
    "programs/test_sampler.py",
)


def pytest_addoption(parser):
    group = parser.getgroup("grpojax")
    group.addoption("--skipped-to", metavar="FILE", help="write the names of tests and files that skip")
    group.addoption("--only", metavar="FILE", help="run the tests and the files of tests that are named there")


def pytest_configure(config):
    if config.option.skipped_to and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Skipped(Path(config.option.skipped_to)))


class Skipped:
    """Writes the names of tests, and of whole files, that skip."""

    def __init__(self, file: Path):
        self.file, self.names = file, set()

    def pytest_runtest_logreport(self, report):
        if report.skipped:
            self.names.add(report.nodeid)

    pytest_collectreport = pytest_runtest_logreport

    def pytest_sessionfinish(self):
        self.file.write_text("".join(f"{name}\n" for name in sorted(self.names)))


@pytest.fixture(scope="session")
def recipe(tmp_path_factory):
    """A recipe of 12 steps of the tiny random model."""
    from tiny_run import make_run

    return make_run(tmp_path_factory.mktemp("model"))


@pytest.fixture
def write(tmp_path):
    """Writes a file of this name, such as data to load, and gives its path."""

    def write(name, content):
        file = tmp_path / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(file)

    return write


@pytest.fixture
def fakes():
    """Runs that the test opens have a device that makes results up (`fake_device`)."""
    import fake_device

    with fake_device.in_place():
        yield


@pytest.fixture(autouse=True)
def logger_of_its_own():
    """A command takes the logger's lines to the console, which is none of the next test's business."""
    logger = logging.getLogger("grpojax")
    logger.handlers.clear()
    logger.propagate = True


@pytest.hookimpl(tryfirst=True)  # before -m takes its choice
def pytest_collection_modifyitems(items, config):
    place = {HERE / name: n for n, name in enumerate(LONGEST_FIRST)}
    assert all(path.exists() for path in place if path.parent.exists()), place  # an extension may be left out
    items.sort(key=lambda item: place.get(item.path, len(place)))

    missing = {}
    for item in items:
        if (kept := item.get_closest_marker("in_ci")) and item.get_closest_marker("slow"):
            left = missing.setdefault((item.path, item.originalname), set(kept.args))
            left.discard(item.callspec.id)
            if item.callspec.id not in kept.args:
                item.add_marker("exhaustive")
    # Cases of families and formats are there only beside the extension that brings these.
    whole = all(find_spec(f"grpojax.extensions.{name}") for name in ("delta", "int8", "mixtures"))
    if whole and not any("::" in given for given in config.args):
        assert not any(missing.values()), f"in_ci names cases that there are not: {missing}"
    if config.option.only:
        named = {*Path(config.option.only).read_text().splitlines()}

        def is_left_out(item):
            return not named & {item.nodeid, item.nodeid.partition("::")[0]}

        config.hook.pytest_deselected(items=[item for item in items if is_left_out(item)])
        items[:] = [item for item in items if not is_left_out(item)]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    """What is imported by now stays: a collection of garbage that walks through all of it is most of its cost."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


# ---------------------------------------------------------------------------------------------- memory

MIB = 2**20
# MiB that a worker may hold before it lets go of compiled programs: a quarter of the memory.
FULL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MIB // 4
_held = 0  # MiB that it held after it last did


def resident() -> int:
    """MiB that this process holds now; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // MIB
    except OSError:
        return 0


def give_back() -> None:
    """Makes the allocator return free memory to the system, if it supports that."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown():
    """Compiled programs stay until they are thrown away, and eight devices make them large."""
    global _held
    yield
    if resident() > max(FULL, _held + FULL // 4):
        jax.clear_caches()
        gc.collect()
        give_back()
        _held = resident()


USAGE = pytest.StashKey[list[str]]()


def usage() -> str:
    """What this process took, for the summary."""
    own, others = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    unit = MIB if sys.platform == "darwin" else 1024
    seconds = own.ru_utime + own.ru_stime, others.ru_utime + others.ru_stime
    return (
        f"{seconds[0]:.0f} s of CPU and {own.ru_maxrss // unit} MiB at most, "
        f"in processes of its own {seconds[1]:.0f} s and {others.ru_maxrss // unit} MiB"
    )


def pytest_sessionfinish(session):
    if (said := getattr(session.config, "workeroutput", None)) is not None:
        said["usage"] = usage()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    said = getattr(node, "workeroutput", {}).get("usage", "no word")
    node.config.stash.setdefault(USAGE, []).append(f"{node.gateway.id}: {said}")


def pytest_terminal_summary(terminalreporter, config):
    if "GRPOJAX_TEST_USAGE" in os.environ:
        for line in config.stash.get(USAGE, [usage()]):
            terminalreporter.write_line(line)
