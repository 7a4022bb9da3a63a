"""Runs of the tiny model: in this process, or in one of their own."""

import dataclasses
import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import quick_xla

from grpojax.records import metrics as tracking
from grpojax.train import open_run

HERE = Path(__file__).parent


CLI = ("-m", "grpojax.cli.main")


def start(
    recipe: Path, directory: Path | str, *overrides: str, devices: int = 1, env=None, program=CLI
) -> subprocess.Popen:
    """``grpojax train`` as a process of its own, with what it says on a pipe; by these arguments of Python's."""
    return subprocess.Popen(
        [sys.executable, *program, "train", str(recipe), f"run.dir={directory}", *overrides],
        env=environment(devices) | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_together(recipe: Path, directory: Path, *overrides: str, processes: int, devices: int, program=CLI):
    """The processes of one run, each with so many devices."""
    return [
        start(recipe, directory, *overrides, devices=devices, env=env, program=program) for env in together(processes)
    ]


def together(processes: int) -> list[dict[str, str]]:
    """What the environment of each of some processes says, so that they join."""
    pytest.importorskip("grpojax.extensions.pods", reason="no extension joins several processes")
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
    group = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes)}
    return [group | {"JAX_PROCESS_ID": str(i)} for i in range(processes)]


def environment(devices: int = 1) -> dict[str, str]:
    """For a process that sees so many CPU devices, and these tests; and no torch, as at a user's."""
    paths = os.pathsep.join(map(str, [HERE / "without_torch", HERE.parent, HERE, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": paths, "XLA_FLAGS": quick_xla.flags(devices)}


def train_apart(recipe: Path, directory: Path, *overrides: str, devices: int = 1) -> str:
    """Trains to the end in another process; returns its output."""
    process = start(recipe, directory, *overrides, devices=devices)
    said, _ = process.communicate(timeout=1800)
    assert process.returncode == 0, said
    return said


def opened(recipe, devices=1, eos_ids=None):
    """An open run, by default on one device: eight devices share the cores of a small machine."""
    return open_run(recipe, jax.devices()[:devices], eos_ids=eos_ids)


def add_step(directory: Path) -> None:
    """Adds a step to a run directory, so that no other recipe may replace it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')


def numbers(directory: Path | str) -> list[dict[str, float]]:
    """The metrics of a run without times."""
    lines = tracking.read_metrics(directory)
    timed = ("time/", "tokens_per_s", "utilisation")
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines]


class Full:
    """A run's manager of checkpoints on a file system that is full for some saves."""

    def __init__(self, manager, saves):
        self._manager, self._saves, self._count = manager, saves, 0

    def __getattr__(self, name):
        return getattr(self._manager, name)

    def save(self, *args, **kwargs):
        self._count += 1
        if self._count in self._saves:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._manager.save(*args, **kwargs)


def plain_source(run):
    """The source that draws a run's rollouts, ahead of the steps or not."""
    return getattr(run.source, "source", run.source)


def draw(run, number=1, state=None):
    """The batch of a step as its source gives it; rewards may be under way."""
    state = dataclasses.replace(run.state if state is None else state, step=number - 1)
    return run.source.next(state, run.source.begin(state))
