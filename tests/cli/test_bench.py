"""The figures of `grpojax bench`."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import bench_runs
import pytest

from grpojax.cli import benchmark
from grpojax.cli import main as cli
from grpojax.device import Real
from grpojax.models import DecoderConfig
from grpojax.models.flops import decode_bytes, forward_flops, layer_weights
from grpojax.run import recipe as recipes

fake_runs = bench_runs.fake_runs


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


def test_the_rate_is_of_products_that_the_model_has(monkeypatch):
    """One with another MLP has none of its intermediate_size."""
    made, ones = [], benchmark.jnp.ones
    monkeypatch.setattr(benchmark.jnp, "ones", lambda shape, *args: made.append(shape) or ones(shape, *args))
    dense = DecoderConfig(
        family="qwen3", vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16,
        num_kv_heads=8, head_dim=128, rope_theta=1e6,
    )  # fmt: skip
    for mlp, width in ((None, 3072), (SimpleNamespace(width=10, name="another"), 10)):
        made.clear()
        assert benchmark.matmul_rate(dataclasses.replace(dense, mlp=mlp), 5, "float32") > 0
        assert made == [(5, 1024), (1024, width), (5, width)]


def test_figures_are_medians_after_the_warm_up(recipe, fake_runs, tmp_path):
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
    timed = fake_runs[0].config
    assert timed.train.eval_every == 0 and timed.data.validation is timed.profile.steps is None


@pytest.mark.slow
def test_rollouts_alone_are_drawn_and_nothing_is_learned(recipe, tmp_path, monkeypatch, capsys):
    """Each rollout draws the next prompts, and its tokens and FLOPs are those of a step's rollout."""
    opened, ran, ahead = [], benchmark.open_run, []
    monkeypatch.setattr(Real, "compile_ahead", lambda device, calls: ahead.append(calls))
    monkeypatch.setattr(benchmark, "open_run", lambda *a, **k: opened.append(ran(*a, **k)) or opened[-1])
    given = [str(recipe), f"run.dir={tmp_path / 'run'}", "--steps", "2", "--full-length"]
    given += ["--json", str(tmp_path / "out")]
    assert cli.main(["bench", *given, "--only", "rollout"]) == 0
    assert "update" not in capsys.readouterr().out and not ahead
    alone = json.loads((tmp_path / "out").read_text())
    assert opened[0].state.step == 0 and not (tmp_path / "run_bench" / "1" / "metrics.jsonl").read_text()
    assert cli.main(["bench", *given]) == 0
    assert ahead
    whole = json.loads((tmp_path / "out").read_text())
    assert alone.keys() < whole.keys() and alone["tokens_per_step"] == whole["tokens_per_step"]
    assert alone["rollout_gflop"] == pytest.approx(whole["rollout_gflop"], rel=0.2)  # other prompts


def test_a_recipe_that_ends_by_tokens_is_timed_for_steps(recipe, fake_runs, tmp_path):
    config = recipes.load(recipe, [f"run.dir={tmp_path}", "train.tokens=100"])
    benchmark.measure(config, steps=1)
    assert fake_runs[0].config.train.tokens is None and fake_runs[0].config.train.steps == 3


def test_each_run_has_a_folder_and_tokens_that_end_it_or_none(recipe, fake_runs, tmp_path):
    config = recipes.load(recipe, [f"run.dir={tmp_path}/run"])
    benchmark.measure(config, steps=1)
    benchmark.measure(config, steps=1, full_length=True)
    assert [Path(t.config.run.dir) for t in fake_runs] == [tmp_path / "run_bench" / "1", tmp_path / "run_bench" / "2"]
    assert not (tmp_path / "run").exists()
    assert [t.eos_ids for t in fake_runs] == [None, ()]


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
