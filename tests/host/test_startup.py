"""What stands before jax is imported."""

import importlib.metadata
import importlib.util
import logging
import os
import subprocess
import sys

import pytest
from refusals import RECIPE

from grpojax.cli import main as cli
from grpojax.host import startup
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.rewards import RewardConfig, Rewards


def test_reward_functions_in_this_folder_can_be_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    startup.prepare()
    startup.prepare()
    assert sys.path[-1] == str(tmp_path) and sys.path.count(str(tmp_path)) == 1


def test_an_installed_module_comes_before_a_file_of_its_name_and_the_error_names_its_file(tmp_path, monkeypatch):
    (tmp_path / "packaging.py").write_text("def mine(prompts, completions, tokens): return [1.0]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    startup.prepare()
    with pytest.raises(UserError, match="cannot be imported: AttributeError: .*packaging/__init__.py has no 'mine'"):
        Rewards([RewardConfig(name="packaging:mine")])


def test_what_is_set_in_the_environment_stays(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.delenv("TRANSFORMERS_NO_ADVISORY_WARNINGS", raising=False)
    startup.prepare()
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    assert os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] == "1"


def test_lines_go_to_standard_output_with_the_time(capsys):
    startup.prepare()
    log.info("step %d", 3)
    log.debug("nothing")
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and out.endswith(" step 3\n") and out[2] == out[5] == ":"
    assert log.level == logging.INFO


# ---------------------------------------------------------------------------------------------- no TPU in sight


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Has a machine with libtpu of files, variables and plugins choose; returns what ``JAX_PLATFORMS`` then is."""

    def choose(*files, plugins=(), libtpu=True, **environ):
        for name in files:
            name, _, text = name.partition("=")
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        points = [importlib.metadata.EntryPoint(name, "its.module", "jax_plugins") for name in plugins]
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: importlib.metadata.EntryPoints(points))
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: libtpu or None)
        startup.spare_libtpu(environ, tmp_path)
        return environ.get("JAX_PLATFORMS")

    return choose


PCI = "sys/bus/pci/devices/0000:00:0"
NETWORK = (f"{PCI}1/vendor=0x1ae0\n", f"{PCI}1/class=0x020000\n")  # of any machine of Google's
DISK = (f"{PCI}2/vendor=0x1ae0\n", f"{PCI}2/class=0x010802\n")
TPU = (f"{PCI}3/vendor=0x1ae0\n", f"{PCI}3/class=0x120000\n")
OTHER = (f"{PCI}4/vendor=0x8086\n", f"{PCI}4/class=0x120000\n")


def test_without_a_tpu_libtpu_is_not_asked(machine):
    assert machine() == "cpu"
    assert machine(*NETWORK, *DISK, *OTHER, TPU_SKIP_MDS_QUERY="1", TPU_LIBRARY_PATH="/lib/x.so") == "cpu"
    assert machine(libtpu=False) is None  # it would say nothing


@pytest.mark.parametrize("files", [TPU, (*NETWORK, *DISK, *TPU), ("dev/accel0",), ("dev/vfio/0",)])
def test_what_may_be_a_tpu_is_left_to_jax(machine, files):
    assert machine("dev/nvidia0", *files, plugins=["xla_cuda13"]) is None


@pytest.mark.parametrize(
    "environ",
    [
        {"TPU_WORKER_HOSTNAMES": "a,b"},
        {"TPU_ACCELERATOR_TYPE": "v5litepod-1"},
        {"JAX_FORCE_TPU_INIT": "1"},
    ],
)
def test_so_is_what_the_environment_says(machine, environ):
    assert machine(**environ) is None
    assert machine(JAX_PLATFORMS="tpu") == "tpu" and machine(JAX_PLATFORMS="") == ""


def test_a_gpu_is_found(machine):
    assert machine("dev/nvidia0") == "cpu"  # jax cannot use it
    assert machine("dev/nvidia0", plugins=["xla_cuda12"]) == "cuda,cpu"
    assert machine(plugins=["xla_cuda12"], CUDA_VISIBLE_DEVICES="") == "cpu"
    assert machine(plugins=["xla_cuda12"], CUDA_VISIBLE_DEVICES="1,2") == "cuda,cpu"
    assert machine(plugins=["xla_rocm7"]) is None


def test_a_gpu_needs_a_driver(machine):
    assert machine(plugins=["xla_cuda12"]) == "cpu"


def standard_error(*command):
    """Of a process with libtpu installed that has not been told to do without."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is absent: pip install 'grpojax[test-all]'")
    environ = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY")}
    done = subprocess.run([sys.executable, *command], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
def test_looking_for_devices_says_nothing():
    """Of a TPU that is not there libtpu says in four lines that its host's name is not known."""
    look = "import jax; print(jax.devices())"
    assert "hostname" in standard_error("-c", look)
    assert standard_error("-c", f"from grpojax.host import startup; startup.prepare(); {look}") == ""


SMALL = ("train.steps=1", "train.eval_limit=1", "rollout.prompts=8", "rollout.group=2", "rollout.max_tokens=4")


@pytest.mark.slow
def test_commands_say_nothing_on_standard_error(tmp_path):
    command = "-m", "grpojax.cli.main"
    run = f"run.dir={tmp_path}/run"
    assert standard_error(*command, "train", RECIPE, run, "optimizer.warmup_steps=0", *SMALL) == ""
    assert standard_error(*command, "eval", f"{tmp_path}/run", "--limit", "2", "--max-tokens", "4") == ""
    assert standard_error(*command, "sample", "builtin:tiny", "--prompt", "1", "--max-tokens", "2") == ""


def test_a_folder_that_is_gone_is_a_line(tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert cli.main(["recipes"]) == 2
    assert capsys.readouterr().err == "grpojax: the folder that you are in is gone; go to another one (cd)\n"
