"""The figures of `grpojax bench` of a run with a critic."""

import bench_runs

from grpojax.cli import benchmark
from grpojax.run import recipe as recipes

fake_runs = bench_runs.fake_runs


def test_a_critic_works_through_the_tokens_too_and_learns_with_the_policy(recipe, fake_runs, tmp_path):
    overrides = ["variant=ppo", "critic.warmup_steps=9", "mesh.data=8"]
    figures = benchmark.measure(recipes.load(recipe, [f"run.dir={tmp_path}", *overrides]), steps=1)
    assert figures["score_tokens_per_s"] == 3 * 7 / 3 and fake_runs[0].config.critic.warmup_steps == 0
