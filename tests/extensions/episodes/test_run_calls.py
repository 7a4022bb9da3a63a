"""What is said of the programs of episodes without running any is what the trainer calls them with."""

import pytest
import run_calls
from fake_environments import Fake

from grpojax.extensions.episodes import players


@pytest.mark.exhaustive("extensions/episodes/test_episodes.py::test_it_makes_no_difference_when_answers_come")
def test_a_runs_programs_are_called_with_what_is_said_of_them(recipe, tmp_path, monkeypatch):
    seen = run_calls.record(monkeypatch)
    monkeypatch.setattr(players, "environments_of", lambda *_: Fake())
    case = ["environment={name: 'a:B', max_turns: 3}", "rollout.max_turn_tokens=5"]
    run_calls.check(seen, recipe, tmp_path, case)
