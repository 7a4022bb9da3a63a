"""The figures of `grpojax bench`."""

import dataclasses
import json
import types
from pathlib import Path

import numpy as np
import pytest

from grpojax.models import DecoderConfig, hf
from grpojax.models.decoder_config import Experts
from grpojax.models.flops import decode_bytes, forward_flops, layer_weights
from grpojax.run import recipe as recipes
from grpojax.tools import benchmark, cli, plan_shapes
from grpojax.types import Rollout


def test_flops_are_counted_on_tokens_in_use():
    c = DecoderConfig(
        family="llama", vocab_size=11, hidden_size=4, intermediate_size=8, num_layers=2, num_heads=2, num_kv_heads=1,
        head_dim=2, rope_theta=1e4,
    )  # fmt: skip
    # A prompt of 3 with completions of 1 and 2 tokens: 6 tokens, seen keys 6 + (1 + 3) + (3 + 6).
    weights = 2 * (4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 8)
    want = 2 * (6 * weights + 2 * 19 * 4 * 2 + 3 * 11 * 4)
    assert forward_flops(c, [3], [[1, 2]]) == want
    # In one of the layers a token sees two: keys 1 + 2 + 2, 2 and 2 + 2 for the other's 6, 1 + 3 and 3 + 6.
    windows = dataclasses.replace(c, window=2, windowed_layers=(1,))
    assert forward_flops(windows, [3], [[1, 2]]) == want - 2 * (19 - 11) * 4 * 2


def test_windowed_layers_read_fewer_blocks_of_the_cache():
    c = DecoderConfig(
        family="llama", vocab_size=11, hidden_size=4, intermediate_size=8, num_layers=3, num_heads=2, num_kv_heads=1,
        head_dim=2, rope_theta=1e4, window=6, windowed_layers=(0, 2),
    )  # fmt: skip
    weights = 2 * (3 * layer_weights(c) + 11 * 4)
    token = 2 * 2 * 2  # bytes of a key and a value in a layer
    # Prompts of 5 tokens; of 17 tokens a slot reads 5 blocks of 4 in one layer, and 2 in the others.
    want = weights + 7 * (3 * 5 + 3 * (20 + 2 * 8)) * token
    assert decode_bytes(c, 5, 17, prompts=7, slots=3, block=4) == want


class FakeTrainer:
    """Steps of 1, 2, ... seconds with one prompt of two tokens; in step n its samples have n and n + 1, after the two
    that an environment answered."""

    made: list["FakeTrainer"] = []

    def __init__(self, config, devices=None, *, eos_ids=None, on_step=None):
        self.config, self.eos_ids, self.on_step = config, eos_ids, on_step
        self.policy = types.SimpleNamespace(config=hf.read_config(config.model.path))
        self.learner = types.SimpleNamespace(scores_a_step=2 + (config.own_critic is not None))
        self.work = {}
        self.made.append(self)

    def run(self):
        directory = Path(self.config.run.dir)
        directory.mkdir(parents=True)
        lines = []
        for n in range(1, self.config.train.steps + 1):
            self.work = {"rollout": 1e9 * n, "score": 2e9 * n, "late": 0.0, "update": 6e9 * n}
            tokens, lengths = np.ones((1, 2, n + 3), np.int32), np.array([[n + 2, n + 3]])
            own = (np.arange(n + 3) > 1) & (np.arange(n + 3) < lengths[..., None])
            drawn = Rollout(tokens=tokens, logps=tokens * 0.0, lengths=lengths, stopped=lengths > 0, sampled=own)
            self.on_step([types.SimpleNamespace(ids=[1, 2])], drawn)
            times = {f"time/{name}_s": float(n) for name in benchmark.PHASES if name != "late"}
            times["time/reward_s"] = n / 8
            lines.append(json.dumps({"step": n, "useful_token_fraction": 0.5, **times}) + "\n")
        (directory / "metrics.jsonl").write_text("".join(lines))
        return True


@pytest.fixture
def trainers(monkeypatch):
    monkeypatch.setattr(benchmark, "Trainer", FakeTrainer)
    monkeypatch.setattr(benchmark, "matmul_rate", lambda *args: 1e9)
    monkeypatch.setattr(FakeTrainer, "made", [])
    return FakeTrainer.made


def test_the_rate_is_of_products_that_the_model_has(monkeypatch):
    """A mixture has no MLP of its intermediate_size."""
    made, ones = [], benchmark.jnp.ones
    monkeypatch.setattr(benchmark.jnp, "ones", lambda shape, *args: made.append(shape) or ones(shape, *args))
    dense = plan_shapes.SHAPES["qwen3-0.6b"]
    small = Experts(count=4, chosen=2, size=6)
    for experts, width in ((None, 3072), (small, 6), (dataclasses.replace(small, shared=10), 10)):
        made.clear()
        assert benchmark.matmul_rate(dataclasses.replace(dense, experts=experts), 5, "float32") > 0
        assert made == [(5, 1024), (1024, width), (5, width)]


def test_figures_are_medians_after_the_warm_up(recipe, trainers, tmp_path):
    config = recipes.load(recipe, [f"run.dir={tmp_path}", "train.ppo_epochs=2", "mesh.data=8", "profile.steps=[9, 12]"])
    figures = benchmark.measure(config, steps=3)  # steps 3, 4 and 5
    assert figures["tokens_per_step"] == 9
    assert (figures["first_step_s"], figures["step_s"]) == (1, 4)
    assert (figures["score_gflop"], figures["step_gflop"]) == (8, 36)
    assert figures["step_of_matmul_rate"] == 36 / 4 / 8  # eight devices of one GFLOP/s each
    assert figures["score_tokens_per_s"] == figures["update_tokens_per_s"] == 2 * 9 / 4
    assert not any(name.startswith("late") for name in figures)
    assert figures["reward_s"] == 0.5
    assert "rewards waited for 0.50 s a step" in benchmark.format_table(figures, "float32")
    assert "late" not in benchmark.format_table(figures, "float32")
    timed = trainers[0].config
    assert timed.train.eval_every == 0 and timed.data.validation is timed.profile.steps is None


def test_a_recipe_that_ends_by_tokens_is_timed_for_steps(recipe, trainers, tmp_path):
    config = recipes.load(recipe, [f"run.dir={tmp_path}", "train.tokens=100"])
    benchmark.measure(config, steps=1)
    assert trainers[0].config.train.tokens is None and trainers[0].config.train.steps == 3


def test_each_run_has_a_folder_and_tokens_that_end_it_or_none(recipe, trainers, tmp_path):
    config = recipes.load(recipe, [f"run.dir={tmp_path}"])
    benchmark.measure(config, steps=1)
    benchmark.measure(config, steps=1, full_length=True)
    assert [Path(t.config.run.dir) for t in trainers] == [tmp_path / "1", tmp_path / "2"]
    assert [t.eos_ids for t in trainers] == [None, ()]


def test_a_critic_works_through_the_tokens_too_and_learns_with_the_policy(recipe, trainers, tmp_path):
    overrides = ["variant=ppo", "critic.warmup_steps=9", "mesh.data=8"]
    figures = benchmark.measure(recipes.load(recipe, [f"run.dir={tmp_path}", *overrides]), steps=1)
    assert figures["score_tokens_per_s"] == 3 * 7 / 3 and trainers[0].config.critic.warmup_steps == 0


@pytest.mark.slow
def test_bench_prints_a_table(recipe, tmp_path, capsys):
    out = tmp_path / "figures.json"
    overrides = [f"run.dir={tmp_path / 'run'}", "mesh.data=8", "variant.kl_coef=0"]
    assert cli.main(["bench", str(recipe), *overrides, "--steps", "2", "--full-length", "--json", str(out)]) == 0
    assert "of matmul rate" in capsys.readouterr().out
    figures = json.loads(out.read_text())
    assert figures["tokens_per_step"] == 8 * 4 * 8  # 8 prompts, groups of 4, every sample at its longest
    assert figures["devices"] == 8 and figures["step_s"] > 0


def test_no_steps_are_refused(recipe, capsys):
    assert cli.main(["bench", str(recipe), "--steps", "0"]) == 2
    assert "--steps 0: must be at least 1" in capsys.readouterr().err
