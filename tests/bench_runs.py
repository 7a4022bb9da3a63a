"""Runs that `grpojax bench` times, without a step of theirs."""

import json
import types
from pathlib import Path

import numpy as np
import pytest

from grpojax.cli import benchmark
from grpojax.models import hf
from grpojax.types import Rollout


class FakeRun:
    """Steps of 1, 2, ... seconds with one prompt of two tokens; in step n its samples have n and n + 1, after the two
    that an environment answered."""

    made: list["FakeRun"] = []

    def __init__(self, config, devices=None, *, eos_ids=None):
        self.config, self.eos_ids = config, eos_ids
        self.policy = types.SimpleNamespace(config=hf.read_config(config.model.path))
        self.scores_a_step = 2 + (config.own_critic is not None)
        self.made.append(self)

    def train(self, on_step):
        directory = Path(self.config.run.dir)
        directory.mkdir(parents=True)
        lines = []
        for n in range(1, self.config.train.steps + 1):
            flops = {"rollout": 1e9 * n, "score": 2e9 * n, "late": 0.0, "update": 6e9 * n}
            tokens, lengths = np.ones((1, 2, n + 3), np.int32), np.array([[n + 2, n + 3]])
            own = (np.arange(n + 3) > 1) & (np.arange(n + 3) < lengths[..., None])
            drawn = Rollout(tokens=tokens, logps=tokens * 0.0, lengths=lengths, stopped=lengths > 0, sampled=own)
            batch = types.SimpleNamespace(problems=[types.SimpleNamespace(ids=[1, 2])], rollout=drawn)
            on_step(types.SimpleNamespace(batch=batch, flops=flops))
            times = {f"time/{name}_s": float(n) for name in benchmark.PHASES if name != "late"}
            times["time/reward_s"] = n / 8
            lines.append(json.dumps({"step": n, "useful_token_fraction": 0.5, **times}) + "\n")
        (directory / "metrics.jsonl").write_text("".join(lines))
        return True


@pytest.fixture
def fake_runs(monkeypatch):
    """The runs that are made, in place of real ones."""
    monkeypatch.setattr(benchmark, "open_run", FakeRun)
    monkeypatch.setattr(benchmark, "train", FakeRun.train)
    monkeypatch.setattr(benchmark, "matmul_rate", lambda *args: 1e9)
    monkeypatch.setattr(FakeRun, "made", [])
    return FakeRun.made
