"""On a mesh a program's results lie where they are said to, and nothing more moves for it."""

import collectives
import pytest
from plain_decoder import FORMATS

CASES = {
    "scores": ("variant={name: grpo, kl_coef: 0.1}", "train.minibatches=2", "train.reference_every=1"),
    "covariance": ("variant=clip_cov", "train.ppo_epochs=2"),
    "eight bits": ("rollout.weights=int8", "rollout.uncorrected=true"),
}
NAMES = {"update", "score", "rollout", "reshard"}
MORE = {"scores": {"reference refresh"}, "covariance": {"covariance mask"}}


@pytest.mark.in_ci("scores")
@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case != "eight bits" or "int8" in FORMATS])
def test_results_lie_where_they_are_said_to(recipe, tmp_path, case):
    assert collectives.check(recipe, f"run.dir={tmp_path}", *CASES[case]) == NAMES | MORE.get(case, set())
