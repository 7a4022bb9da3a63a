"""Rewards of steps: what a function may return for them, where steps end, and sums that must hold."""

import math

import numpy as np
import pytest
from reward_examples import score

from grpojax.host.errors import UserError
from grpojax.rewards import RewardConfig, Rewards, RewardsConfig, split_steps
from grpojax.rewards.builtin import Equations, Follows
from grpojax.rewards.steps import chain_results, check_equations

NAN = float("nan")


def test_a_step_ends_with_the_token_that_has_the_separator():
    assert split_steps(["\n", "a", "b\nc", "d", "\n", " ", "e"]) == [(3, "\nab\nc"), (5, "d\n"), (7, " e")]
    assert split_steps([]) == split_steps(["\n", " "]) == [] and split_steps(["x", ""]) == [(2, "x")]
    assert split_steps(["a", ";", ";", "b;"], ";") == [(3, "a;;"), (4, "b;")]


@pytest.mark.parametrize(("text", "holds"), [
    ("48/2 = <<48/2=24>>24 clips", True), ("- 5 + 3 = 8", True), ("1. 5+3=8", True), ("-5+3=-2", True),
    ("$1,200 * 2 = $2,400.", True), ("2×(3+4)=14 and 7÷2=3.5", True), ("10/3=3.33", True), ("10/3=3.34", False),
    ("10/4=2", False), ("1/0=5", False), ("1+1=2, 2+2=5", False), ("05+03=8", True), ("1.05*2=2.1", True),
    ("x = 3", None), ("a+b=c", None), ("3=3", None), ("(1+2=3", None), ("2**3=8", None), ("=", None), ("1+1", None),
    ("(" * 9000 + "1+1=2", None), ("9" * 9000 + "+1=2", None), ("1+1=" + "9" * 320, False),
    # Of these only a part could be read.
    (r"2 \times 3 + 1 = 7", True), (r"\frac{1}{2} + 2*3 = 6.5", None), ("3^2 + 4*1 = 13", None),
    ("x - 5 + 3 = 10", None),
    ("2x + 3 + 4 = 15", None), ("12 hours + 3 + 4 = 19", None), ("20% * 50 + 10 = 20", None), ("f(3) + 2 = 9", None),
    ("5/10 = 50%", None), ("2/4 = 1/2", None), ("10/4 = 2 1/2", None), ("so 12 + 3 = 15", True), ("1+1=2*7", None),
])  # fmt: skip
def test_equations(text, holds):
    assert check_equations(text) is holds


def test_equations_are_rewards_of_their_steps():
    pieces = ["2+2=4", "\n", "then", "\n", "3*3=", "8"]
    assert Equations()([""], [""], [range(6)], pieces=[pieces]) == [[(2, 1.0), (6, 0.0)]]
    assert Equations(separator="=")([""], [""], [range(2)], pieces=[["no", "sum"]]) == [[]]
    assert (
        Rewards([RewardConfig(name="equations")]).needs_pieces
        and not Rewards([RewardConfig(name="answer")]).needs_pieces
    )
    with pytest.raises(UserError, match="separator=''"):
        RewardConfig(name="equations", options={"separator": ""})


@pytest.mark.parametrize(("text", "results", "right"), [
    ("7 + 2 = 9\n9 - 4 = 5", [9, 5], True), ("7 + 2 = 8\n8 - 4 = 4", [8, 4], False),
    ("2 * 3 = 6\n\n 6+1=7 \n", [6, 7], True),
    ("3 - 5 = -2\n-2 + 1 = -1", [-2, -1], True), ("7 + 2 = 9\n8 - 4 = 4", [], True), ("", [], True), ("\n", [], True),
    ("so 1 + 1 = 2", [], True), ("1 + 1 = 2\nit is 2", [], True), ("1 + 1 = 2.5", [], True), ("1 + 1 =", [], True),
    ("1 + 1 = " + "9" * 9000, [], True), ("1 + 1 = 2 = 2", [], True),
])  # fmt: skip
def test_steps_are_a_chain(text, results, right):
    assert chain_results(text) == results
    assert chain_results(text, arithmetic=True) == (results if right else [])


def test_an_answer_follows_from_its_steps_or_does_not():
    steps = "7 + 2 = 8\n8 - 4 = 4\n"
    texts = [f"{steps}## Answer: {x}" for x in ("4", "8, 4", "5", "", "4, 8")]
    texts += ["## Answer: 4", steps, "so\n## Answer: 4"]
    assert Follows()([""] * 8, texts, [[]] * 8) == [1, 1, 0, 0, 0, 0, 0, 0]
    assert Follows(arithmetic=True)([""], texts[:1], [[]]) == [0]
    assert Follows(marker="####")([""], [f"{steps}#### 4"], [[]]) == [1]
    got = score([RewardConfig(name="follows", weight=0.0), RewardConfig(name="answer")], texts[:3], ["5"] * 3)
    assert got.by_name["follows"].tolist() == [1, 1, 0] and got.total.tolist() == [0, 0, 1]
    with pytest.raises(UserError, match="marker=' '"):
        RewardConfig(name="follows", options={"marker": " "})


def test_what_is_wrong_with_steps_costs_the_sample():
    name = "reward_functions:bad_steps"
    got = score([RewardConfig(name=name)], [""] * 10, tokens=[[1] * 5] * 10, k=range(10))
    assert got.by_name[name][0] == 0.75 and np.isnan(got.total[1:]).all() and got.total[0] == 0
    assert got.invalid == {f"{name}/steps": 4, f"{name}/nan": 1, f"{name}/type": 4}
    want = np.full((10, 5), NAN)
    want[0, [1, 4]] = 0.5, 1
    np.testing.assert_array_equal(got.step_rewards, want)


def test_steps_and_whole_samples_are_apart():
    """Steps of two rewards that end at one token add up; a number counts in the total."""
    terms = (
        RewardConfig(name="reward_functions:steps_or_not", weight=2.0),
        RewardConfig(name="equations", weight=0.5, options={"separator": ";"}),
        RewardConfig(name="answer", weight=3.0),
        RewardConfig(name="equations", label="measured", weight=0.0),
    )
    pieces = [["1+1=2", "+", ";"], ["1+1=3", "", ""]]
    got = score(RewardsConfig(terms=terms), ["#### 7"] * 2, ["7"] * 2, [[1] * 3] * 2, k=[3, 5], pieces=pieces)
    assert got.total.tolist() == [3.0, 13.0] and got.stepped == ("reward_functions:steps_or_not", "equations")
    np.testing.assert_array_equal(got.step_rewards, np.float32([[4.0, NAN, -1.5], [NAN, NAN, 0.0]]))
    assert got.by_name["reward_functions:steps_or_not"].tolist() == [0.5, 5.0]
    assert got.by_name["measured"].tolist() == [1.0, 0.0]


def test_rewards_of_whole_samples_have_no_steps():
    got = score(
        [RewardConfig(name="equations", weight=0.0), RewardConfig(name="answer")],
        ["#### 7"],
        ["7"],
        [[1]],
        pieces=[["1"]],
    )
    assert got.step_rewards is None and got.stepped == () and not math.isnan(got.total[0])
