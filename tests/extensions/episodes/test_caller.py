"""The recipes in which a tiny policy learns to use tools, and the policy that they start from.

What makes problems and tools is imported inside of the tests: this file is collected without it.
"""

import itertools
import json
import random

import numpy as np
import pytest

from grpojax import data
from grpojax.cli import main as cli
from grpojax.data.chat_template import ChatTemplate
from grpojax.extensions.episodes import calls
from grpojax.models import hf

CALLER = data.locate("builtin:caller")


@pytest.fixture(scope="module")
def tok():
    return hf.load_tokenizer(str(CALLER))


def test_its_calls_are_read_and_its_turns_can_be_answered(tok):
    import make_caller

    text = "".join(text for text, _ in make_caller.call("calculate", "expression", "37 * 48"))
    (call,) = calls.read(text, calls.hermes)
    assert (call.name, dict(call.arguments)) == ("calculate", {"expression": "37 * 48"})
    assert calls.format_of(tok.chat_template) == "hermes"
    template = ChatTemplate(tok, {}, None)
    template.check_turns()
    answer = template.after_turn([{"role": "tool", "name": "calculate", "content": "1776"}], "<|end|>")
    assert answer == "<|tool|>1776<|end|><|assistant|>"


def tool_of(shown):
    """The tool of what is shown, as a run would have it."""
    if shown.tool == "search":
        pytest.importorskip("bm25s")
        from grpojax.extensions.problems.retrieval import Search

        return Search("facts:passages", top=2).search
    if shown.tool == "move":
        import make_caller

        from grpojax.extensions.problems.frozen_lake import FrozenLake

        lake = FrozenLake(most_moves=make_caller.MOVES)
        lake.reset(shown.question.split("\n", 1)[1].replace("\n", "/"))
        return lake.move
    from grpojax.extensions.problems.calculator import compute

    return compute


@pytest.mark.parametrize("task", ["products", "questions", "walks"])
@pytest.mark.slow
def test_what_it_was_shown_is_what_the_tools_answer(task):
    import make_caller

    if task == "questions":
        pytest.importorskip("bm25s")
    for shown in itertools.islice(getattr(make_caller, task)(random.Random(0)), 20):
        for way in shown.ways:
            tool, turns = tool_of(shown), "".join(text for text, _ in way).split("<|end|>")
            for turn, reply in itertools.pairwise(turns):
                for call in calls.read(turn.removeprefix("<|assistant|>"), calls.hermes):
                    assert call.name == shown.tool and reply == f"<|tool|>{tool(**call.arguments)}"


def train(name, directory, *overrides):
    """The metrics of the steps of a run of a recipe, in which nothing is held out."""
    command = ["train", name, "train.eval_every=0", "data.test=null", f"run.dir={directory}/run", *overrides]
    assert cli.main(command) == 0
    rows = map(json.loads, (directory / "run" / "metrics.jsonl").open())
    return [row for row in rows if "reward" in row]


@pytest.mark.exhaustive("extensions/episodes/test_caller.py::test_a_recipe_takes_a_step_from_episodes_of_the_policy")
def test_a_policy_that_rarely_calls_learns_to(tmp_path):
    steps = train("calculator", tmp_path)
    assert 0.01 < steps[0]["episode/calling"] < 0.2 and steps[0]["reward"] < 0.3
    assert steps[-1]["episode/calling"] > 0.9 and steps[-1]["reward"] > 0.9
    assert steps[-1]["episode/failures"] < 0.05 and steps[-1]["sampling/logp_difference_max"] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "calling"), [pytest.param("frozen_lake", 1.0, marks=pytest.mark.exhaustive), ("search", 0.1)]
)
def test_a_recipe_takes_a_step_from_episodes_of_the_policy(name, calling, tmp_path):
    if name == "search":
        pytest.importorskip("bm25s")
    (step,) = train(name, tmp_path, "train.steps=1", "rollout.prompts=8")
    assert step["episode/calling"] >= calling and step["episode/failures"] < 0.2
    assert 0 <= step["reward"] < 0.3 and step["sampling/logp_difference_max"] < 1e-4


@pytest.mark.exhaustive("extensions/episodes/test_caller.py::test_a_recipe_takes_a_step_from_episodes_of_the_policy")
def test_a_policy_that_walks_at_random_learns_to_cross_lakes(tmp_path):
    steps = train("frozen_lake", tmp_path)
    assert steps[0]["reward"] < 0.1 and np.mean([step["reward"] for step in steps[-4:]]) > 0.5


@pytest.mark.exhaustive("extensions/episodes/test_caller.py::test_a_recipe_takes_a_step_from_episodes_of_the_policy")
def test_a_policy_that_rarely_searches_learns_to_search_twice(tmp_path):
    pytest.importorskip("bm25s")
    steps = train("search", tmp_path)
    assert steps[0]["reward"] < 0.2 and steps[-1]["reward"] > 0.8
    assert steps[-1]["episode/calls"] > 1.3
