"""`recorded` says where two recordings differ, and its recipes are such as the commands read."""

import copy
import json
from pathlib import Path

import pytest
import recorded

from grpojax import extension
from grpojax.run import recipe as sampled_recipe

A_RUN = {
    "metrics": [{"step": 1, "reward": 0.5, "loss": 0.0}, {"step": 2, "reward": 0.1, "loss": 1.0}],
    "texts": {"samples/step_000001.jsonl.gz": ["aa", "bb", "cc"], "eval/step_2.jsonl": ["dd"]},
    "weights": {"policy": {"embed": "11", "norm": "22"}, "critic": {"head": "33"}},
}
BEFORE = {"made": {"commit": "one", "jax": "0.10"}, "recipes": {"kl": A_RUN, "remax": copy.deepcopy(A_RUN)}}


@pytest.fixture
def compared(tmp_path, capsys):
    """Compares a recording with another one; the status and what was printed."""

    def compare(after):
        for name, recording in (("a.json", BEFORE), ("b.json", after)):
            (tmp_path / name).write_text(json.dumps(recording))
        status = recorded.main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")])
        return status, capsys.readouterr().out

    return compare


def changed(*path, to):
    """The recording with another value at a path in the recipe ``kl``; None removes it."""
    after = copy.deepcopy(BEFORE)
    *folders, last = path
    place = after["recipes"]["kl"]
    for folder in folders:
        place = place[folder]
    if to is None:
        del place[last]
    else:
        place[last] = to
    return after


def test_what_is_the_same_is_equal_whatever_the_commit(compared):
    after = copy.deepcopy(BEFORE)
    after["made"]["commit"] = "two"
    assert compared(after) == (0, "kl: equal\nremax: equal\n")


@pytest.mark.parametrize(
    "path,to,said",
    [
        (("metrics", 1, "reward"), 0.10000000000000002, "reward at step 2: 0.1 and 0.10000000000000002"),
        (("metrics", 0, "loss"), -0.0, "loss at step 1: 0.0 and -0.0"),
        (("metrics", 0, "loss"), None, "loss at step 1: 0.0 and nothing"),
        (("metrics", 1), None, "step at step 2: 2 and nothing"),
        (
            ("texts", "samples/step_000001.jsonl.gz"),
            ["aa", "xx", "yy"],
            "samples/step_000001.jsonl.gz: line 2 is the first of 2 that differ, of 3",
        ),
        (("texts", "eval/step_2.jsonl"), None, "eval/step_2.jsonl: line 1 is the first of 1 that differ, of 1"),
        (("weights", "policy", "norm"), "23", "weights of the policy: norm is the first of 1 that differ, of 2"),
        (("weights", "critic"), None, "weights of the critic: head is the first of 1 that differ, of 1"),
    ],
)
def test_the_first_difference_is_named(compared, path, to, said):
    assert compared(changed(*path, to=to)) == (1, f"kl: differs\n    {said}\nremax: equal\n")


def test_all_that_differs_of_a_recipe_is_told_and_of_a_kind_the_first(compared):
    after = changed("metrics", 0, "reward", to=1.0)
    after["recipes"]["kl"]["metrics"][1]["loss"] = 2.0
    after["recipes"]["kl"]["weights"]["policy"] = {"embed": "0", "norm": "0"}
    said = "reward at step 1: 0.5 and 1.0", "weights of the policy: embed is the first of 2 that differ, of 2"
    assert compared(after) == (1, "\n    ".join(["kl: differs", *said]) + "\nremax: equal\n")


def test_a_missing_recipe_is_a_difference(compared):
    after = copy.deepcopy(BEFORE)
    after["recipes"]["new"] = after["recipes"].pop("kl")
    status, said = compared(after)
    assert status == 1 and said == (
        "kl: differs\n    it is in the first recording only\n"
        "remax: equal\n"
        "new: differs\n    it is in the second recording only\n"
    )


def test_another_version_of_jax_is_noted(compared):
    after = copy.deepcopy(BEFORE)
    after["made"]["jax"] = "0.11"
    status, said = compared(after)
    assert status == 0 and said.startswith("note: numbers depend on jax, which is 0.10 and 0.11\n")


@pytest.mark.parametrize("content", [None, "{", "[]", '{"recipes": {}}'])
def test_what_is_no_recording_is_a_mistake(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "a.json").write_text(content)
    with pytest.raises(SystemExit, match="2"):
        recorded.main(["compare", str(tmp_path / "a.json"), str(tmp_path / "a.json")])
    assert "not two recordings" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--only=kl,none"], ["--tree=nowhere"], ["--to=nowhere/a.json"]])
def test_nothing_is_run_for_a_mistake(tmp_path, monkeypatch, given):
    monkeypatch.setattr(recorded, "record", lambda *_: pytest.fail("it runs"))
    with pytest.raises(SystemExit, match="2"):
        recorded.main(["record", "--to", str(tmp_path / "a.json"), *given])


@pytest.mark.parametrize("name", recorded.RECIPES)
def test_its_recipes_are_read(name):
    recipe = recorded.RECIPES[name]
    base = Path(recorded.__file__).parents[1] / "configs" / recipe.base
    kind = sampled_recipe if recipe.command == "train" else extension.load("recipes", recipe.command, recipe.command)
    kind.load(base, [*recipe.common, *recipe.overrides, "run.dir=runs/none"])
