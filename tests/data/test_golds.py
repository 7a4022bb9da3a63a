"""Reference answers as people's files have them: an answer, or a refusal with row and cause."""

import json
import random

import pytest
from data_files import jsonl, load

from grpojax import data
from grpojax.host.errors import UserError
from grpojax.rewards import RewardConfig, Rewards


@pytest.fixture(scope="module")
def check():
    """The gold answers that `math_answer` takes."""
    with Rewards([RewardConfig(name="math_answer")]) as rewards:
        yield rewards.check_gold


@pytest.mark.parametrize(("gold", "want"), [
    ("['12']", "12"), ('["12"]', "12"), (["12"], "12"), ("'12'", "12"), ("<answer>12</answer>", "12"),
    ("<answer>1</answer> no: <answer> 12 </answer>", "12"), ("The answer is 12", "12"), ("Answer: 12.", "12"),
    ("6 + 6 = 12.\nSo the final answer is: 12", "12"), ("12 is the answer.", "12"), ("\ufeff12", "12"),
    ("1\u200b2\u2060", "12"), ("１２", "12"), ("－１２．５", "-12.5"), ("Ⅻ", "XII"), ("3;4", "3;4"), ("y", "y"),
    ("2e300", "2e300"), ("undefined", "undefined"), ("ℚ", "ℚ"), (r"\text{None}", r"\text{None}"), ("none", "none"),
    (2**80, str(2**80)), (12.0, "12.0"), ("so #### 12", "12"),
    (r"[1, \\frac{1}{2})", r"[1, \frac{1}{2})"),
    ("[12]", "[12]"), ("北京，上海", "北京，上海"), ("No solution", "No solution"),
])  # fmt: skip
def test_an_answer_is_taken_out_of_what_is_around_it(gold, want):
    assert data.read_gold(gold) == want


@pytest.mark.parametrize(("gold", "why"), [
    ("", "has an empty answer"), ("  \u200b", "has an empty answer"), ("#### ", "has an empty answer"),
    *((x, "is no answer") for x in ("nan", "NaN", "None", "null", "N/A", "n/a", "#N/A", "<NA>", "NaT", "[]")),
    *((x, "is no answer") for x in ("?", "-", "…")),
    *((x, "is no answer") for x in ("See solution.", "see the figure below", "Refer to the proof above.", "TBD")),
    *((x, "is no answer") for x in ("(see solution for details)", "(nan)")),
    *((x, "is no answer") for x in ("Not available", "No answer provided", "Answers may vary.", "proof", "notfound")),
    *((x, "is no answer") for x in ("['nan']", "[None]", "The answer is nan.", "<answer>N/A</answer>", '"None"')),
    ("['3', '4']", "2 answers"), (["3", "4"], "a list of 2 answers"), (True, "but True; write the answer in words"),
    ({"value": 3}, "name its part, answer.value"), ("{'value': 3}", "name the part of it"), (None, "but None"),
    (float("inf"), "but inf"), (r"\frac{7}{50", "cannot be read"), (r"\sqrt{2}}", "cannot be read"),
    (r"\boxed{}", "is empty"), (r"\text{}", "is empty"), ("so " * 200, "a text of 599 characters"),
])  # fmt: skip
def test_what_is_no_answer_is_refused_with_its_row(write, check, gold, why):
    rows = [{"question": "a", "answer": "3"}, {"question": "b", "answer": gold}]
    path = write("d.jsonl", jsonl(rows))
    with pytest.raises(UserError) as e:
        load(path, check)
    assert f"{path}:2: " in str(e.value) and why in str(e.value) and len(str(e.value).splitlines()) == 1
    got = load(path, check, on_bad_row="skip")
    assert [p.gold for p in got] == ["3"] and len(got.skipped) == 1


def test_functions_of_a_user_get_the_text_as_it_is(write):
    """What a program prints, or a list that the function reads: only rewards that compare need an answer."""
    golds = ["None", "['3', '4']", "nan", "def f():\n\treturn 1\n" * 50]
    path = write("d.jsonl", jsonl([{"question": "a", "answer": gold} for gold in golds]))
    got = data.load_problems(path, lambda q: (1,), data.DataConfig(train=""), compared=False)
    assert [p.gold for p in got] == [gold.strip() for gold in golds]
    with (
        Rewards([RewardConfig(name="reward_functions:tokens")]) as plain,
        Rewards([RewardConfig(name="choice")]) as both,
    ):
        assert not plain.compares and both.compares


@pytest.mark.parametrize(("marker", "gold", "matched"), [
    ("####", "one\ntwo", False), (None, "one\ntwo", True), ("=", "x = 5", False), ("=", "5", True),
    (r"\boxed{}", "}", False),
])  # fmt: skip
def test_a_gold_that_no_completion_can_match_is_refused(marker, gold, matched):
    with Rewards([RewardConfig(name="answer", options={"marker": marker})]) as rewards:
        if matched:
            return rewards.check_gold(gold)
        with pytest.raises(UserError, match="no completion that marks it is right by the reward 'answer'"):
            rewards.check_gold(gold)


AROUND = ("{}", "<answer>{}</answer>", "The answer is {}.", "Final answer: {}", " \ufeff{}")
NONE = (
    "nan",
    "NaN",
    "None",
    "null",
    "N/A",
    "n/a",
    "<NA>",
    "TBD",
    "see solution",
    "See the graph above",
    "not provided",
)


def test_any_answer_in_any_wrapper(check):
    draw = random.Random(0)
    for _ in range(300):
        n = draw.randrange(-999, 999)
        gold = draw.choice(
            [str(n), f"{n / 8}", rf"\frac{{{abs(n)}}}{{7}}", f"({n}, {n + 1})", "y^2", "Rome", "New York"]
        )
        wrapped = draw.choice(["{}", "['{}']", '["{}"]']).replace("{}", gold)
        for around in draw.sample(AROUND, 2):
            wrapped = around.replace("{}", wrapped)
        if "\\" in gold and "[" in wrapped:  # in a list that Python wrote, the backslash is doubled
            continue
        assert data.read_gold(wrapped) == data.read_gold(f"So 3 + 4 = 7.\n#### {wrapped}") == gold, wrapped
        wrapped = draw.choice(AROUND).replace("{}", draw.choice(NONE))
        with pytest.raises(UserError, match="no answer"):
            data.read_gold(wrapped)
    assert json.dumps(data.read_gold("".join(chr(0xFF10 + int(c)) for c in "9087"))) == '"9087"'
