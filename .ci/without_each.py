"""Deletes each extension in a copy of the checkout: what is left imports, its tests are collected, and two steps train.

Those named as arguments, or all; two processes at a time. They are forked from this one, which has imported what they
need of others.
"""

import importlib
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

OF_OTHERS = ("jax", "flax.nnx", "optax", "orbax.checkpoint", "grain", "datasets", "transformers", "tokenizers",
             "matplotlib.pyplot", "pydantic", "hypothesis", "scipy.optimize", "pytest")  # fmt: skip
ARITHMETIC = [f"data.{part}=builtin:arithmetic/{part}.jsonl" for part in ("train", "test")]
AT_A_TIME = 2


def imports(copy: Path) -> None:
    runpy.run_path(str(copy / ".ci" / "import_all.py"), run_name="__main__")


def collects(copy: Path) -> None:
    import pytest

    imports(copy)
    # Nothing runs: assertions stay as they are.
    assert pytest.main(["--collect-only", "-q", "-q", "-n", "0", "-m", "", "--assert=plain"]) == 0


def trains(copy: Path) -> None:
    from grpojax.cli import main

    # The quickstart's problems are of an extension; these are files of the core.
    data = [*ARITHMETIC, "data.validation=null"]
    assert main.main(["train", "quickstart", *data, "train.steps=2", f"run.dir={copy / 'run'}"]) == 0


def start(copy: Path, work: Callable[[Path], None]) -> int:
    """A process in the copy that does some work, and writes what it says into a file beside the copy."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        said = os.open(f"{copy}.{work.__name__}", os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1), os.dup2(said, 2)
        os.chdir(copy)
        sys.path[:] = [str(copy), *(path for path in sys.path if path != str(Path(__file__).parent))]
        os.environ["PYTHONPATH"] = str(copy)
        work(copy)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)


def main() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    root = Path(__file__).parents[1]
    files = subprocess.check_output(["git", "ls-files", "-z"], cwd=root, text=True).split("\0")[:-1]
    names = sorted(
        {Path(name).parts[2] for name in files if name.startswith("grpojax/extensions/") and name.count("/") > 2}
    )
    names = sys.argv[1:] or names
    for name in OF_OTHERS:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as work:
        left, running = [(name, what) for name in names for what in (collects, trains)], {}
        while left or running:
            while left and len(running) < AT_A_TIME:
                name, what = left.pop(0)
                copy = Path(work, what.__name__, name)
                for file in files:
                    if not file.startswith((f"grpojax/extensions/{name}/", f"tests/extensions/{name}/")):
                        (copy / file).parent.mkdir(parents=True, exist_ok=True)
                        shutil.copy(root / file, copy / file)
                running[start(copy, what)] = name, what, copy, time.monotonic()
            pid, status = os.wait()
            name, what, copy, since = running.pop(pid)
            said = [line for line in Path(f"{copy}.{what.__name__}").read_text().splitlines() if line.strip()]
            if status:
                for other in running:
                    os.kill(other, signal.SIGKILL)
                print("\n".join(said[-40:]))
                sys.exit(f"without {name}: {what.__name__} failed")
            print(f"-- without {name}, {what.__name__}: {time.monotonic() - since:.0f} s: {said[-1]}", flush=True)
            shutil.rmtree(copy)


main()
