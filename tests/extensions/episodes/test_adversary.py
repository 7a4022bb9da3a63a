"""A run whose policy makes tools do all that they must not."""

import multiprocessing.forkserver
import time
from collections import Counter
from pathlib import Path

import environment_classes
import numpy as np
import pytest
from runs import numbers, opened

from grpojax.records.samples import read_samples
from grpojax.run.recipe import load
from grpojax.train import train

ADVERSARY = (
    "environment={name: 'environment_classes:Adversary', format: 'environment_classes:behaviour_in', max_turns: 3, "
    "max_tool_tokens: 4, max_tool_bytes: 10000, seconds: 1.5, workers: 2, network: true}",
    "rewards=[{name: environment}]", "rollout={prompts: 4, group: 4, max_tokens: 24, max_turn_tokens: 5}",
    "data.validation=null", "train.eval_every=0", "train.steps=2", "train.seed=1", "variant.kl_coef=0",
)  # fmt: skip


def alive():
    """Processes that workers of this process are, or have left behind."""
    server, found = multiprocessing.forkserver._forkserver._forkserver_pid, []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (place / "stat").read_text().rpartition(")")[2].split()[:2]
            left = environment_classes.STAYS.encode() in (place / "cmdline").read_bytes()
        except OSError:  # gone meanwhile
            continue
        if state != "Z" and (int(parent) == server or left):
            found.append(place.name)
    return found


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")
@pytest.mark.slow
def test_a_run_learns_from_what_is_valid_and_leaves_nothing_behind(recipe, tmp_path):
    environment_classes.behaved.clear()
    others = set(alive())  # workers of tests before this one in the same process
    trainer = opened(load(recipe, [*ADVERSARY, f"run.dir={tmp_path}"]))
    assert train(trainer)
    assert len(environment_classes.behaved) >= 12  # of 16
    lines = [line for line in numbers(tmp_path) if "reward" in line]
    assert len(lines) == 2 and all(np.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in lines)
    reasons, redrawn = Counter(), 0
    for line in lines:
        _, samples = read_samples(tmp_path, line["step"])
        gone = [s for s in samples if s["reward"] is None]
        counted = {k.rpartition("/")[2]: n for k, n in line.items() if k.startswith("rewards/invalid/environment/")}
        assert 0 < len(gone) == sum(counted.values()) < len(samples) == 16
        assert all(s["advantage"] == 0 for s in gone) and any(s["advantage"] for s in samples)
        reasons.update(counted)
        redrawn += line.get("episode/redrawn/neighbour", 0)
    assert {"timeout", "crash"} <= set(reasons) <= {"timeout", "crash", "memory", "flood", "end"}
    assert redrawn > 0
    deadline = time.monotonic() + 20
    while set(alive()) - others and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not set(alive()) - others
