"""The figures of `grpojax bench` of a run with a critic."""

import bench_runs
import pytest

from grpojax.cli import benchmark
from grpojax.cli import main as cli
from grpojax.run import recipe as recipes

fake_runs = bench_runs.fake_runs


def test_a_critic_works_through_the_tokens_too_and_learns_with_the_policy(recipe, fake_runs, tmp_path):
    overrides = ["variant=ppo", "critic.warmup_steps=9", "mesh.data=8"]
    figures = benchmark.measure(recipes.load(recipe, [f"run.dir={tmp_path}", *overrides]), steps=1)
    assert figures["score_tokens_per_s"] == 3 * 7 / 3 and fake_runs[0].config.critic.warmup_steps == 0


@pytest.mark.parametrize("setting", ["rollout.ahead=1", "rollout.overlap=0.5"])
def test_rollouts_that_are_drawn_during_updates_are_not_timed_alone(recipe, tmp_path, setting, capsys):
    given = [str(recipe), f"run.dir={tmp_path}", setting, "variant={name: grpo, importance: truncate}"]
    assert cli.main(["bench", *given, "--only", "rollout"]) == 2
    assert f"--only rollout with {setting}: it is drawn during an update" in capsys.readouterr().err
