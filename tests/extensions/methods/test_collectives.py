"""The programs of methods, as `tests/run/test_collectives.py` has those of the core."""

import collectives
import pytest

CASES = {
    "critic": ("variant={name: ppo, kl_coef: 0}", "critic={layers: 1, warmup_steps: 1}"),
    "influence": ("variant=nthr",),
    "partial": ("rollout.overlap=0.25", "rollout.ahead=1"),
}
NAMES = {"critic": {"critic", "critic update"}, "influence": {"influence", "score"}, "partial": {"score"}}


@pytest.mark.in_ci("critic")
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_results_lie_where_they_are_said_to(recipe, tmp_path, case):
    found = collectives.check(recipe, f"run.dir={tmp_path}", *CASES[case])
    assert found == {"update", "rollout", "reshard"} | NAMES[case]
