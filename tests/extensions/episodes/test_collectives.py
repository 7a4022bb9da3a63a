"""The programs of episodes, as `tests/run/test_collectives.py` has those of the core."""

import collectives
import pytest


@pytest.mark.exhaustive("run/test_collectives.py::test_results_lie_where_they_are_said_to")
def test_results_lie_where_they_are_said_to(recipe, tmp_path):
    case = ("environment={name: calculator, max_turns: 3}", "rollout.max_turn_tokens=5")
    found = collectives.check(recipe, f"run.dir={tmp_path}", *case)
    assert found == {"episode turns", "episodes", "reshard", "score", "update"}
