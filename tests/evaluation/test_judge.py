"""Which reward says what is right, what it makes of a value, and how samples vote."""

import math

import pytest

from grpojax.evaluation import judge as judging
from grpojax.evaluation import judge_of
from grpojax.host.errors import UserError
from grpojax.rewards import RewardConfig, RewardsConfig


def rewards(*terms):
    return RewardsConfig(terms=tuple(RewardConfig(**t) for t in terms))


def judge(*terms, named=None):
    return judge_of(rewards(*terms), named)


FORM, MATHS, ANSWER, CHOICE = ({"name": name} for name in ("answer_format", "math_answer", "answer", "choice"))
MINE = {"name": "tiny_run:parity", "label": "mine"}
SHORT = {"name": "soft_overlong", "options": {"max_tokens": 9, "buffer": 3}}


@pytest.mark.parametrize(("terms", "named", "metric"), [
    ([FORM, ANSWER, MATHS], None, "answer"),
    ([FORM, {"name": "math_answer", "weight": 0.0, "label": "right"}], None, "right"),
    ([CHOICE], None, "choice"),
    ([MINE, ANSWER], "mine", "mine"),
    ([FORM, ANSWER], "answer_format", "answer_format"),
    ([ANSWER, MATHS], "math_answer", "math_answer"),
])  # fmt: skip
def test_the_judge_is_the_one_named_or_the_first_that_compares(terms, named, metric):
    assert judge(*terms, named=named).metric == metric


@pytest.mark.parametrize(
    "terms", [[FORM], [MINE], [SHORT, MINE, FORM], [{"name": "format", "options": {"pattern": "x"}}]]
)
def test_nothing_else_is_taken_for_a_judge(terms):
    """A form and a function of the user's may be 0 or 1, and say nothing about right and wrong unless named."""
    assert judge(*terms) is None


@pytest.mark.parametrize(("terms", "named", "message"), [
    ([MINE, ANSWER], "parity", "evaluate.judge='parity' is not a reward of the run, which has mine, answer"),
    ([MINE], "math_answer", "has weight 0, as in {name: math_answer, weight: 0}"),
    ([ANSWER, SHORT], "soft_overlong", "that reward is never 1"),
    ([ANSWER, {"name": "repetition"}], "repetition", "that reward is never 1"),
])  # fmt: skip
def test_what_cannot_judge_is_refused(terms, named, message):
    with pytest.raises(UserError) as error:
        judge(*terms, named=named)
    assert message in str(error.value) and str(error.value).count("\n") <= 1


def test_a_verdict_is_one_or_zero_or_none():
    mine = judge(MINE, named="mine")
    assert (mine.verdict(1.0), mine.verdict(0.0), mine.verdict(math.nan)) == (True, False, None)
    for value in (0.5, 2.0, -1.0):
        with pytest.raises(UserError, match=rf"'mine' gave {value:g}, but a judge gives 1 for right.*\n.*eval/reward"):
            mine.verdict(value)


def test_votes_have_one_spelling_without_a_look_at_the_gold_answer():
    plain = judge(MATHS)
    votes = [plain.vote(f"#### {x}") for x in ("1/2", r"\frac{1}{2}", "0.50", "$.5$")]
    assert votes == ["1/2"] * 4
    votes = [plain.vote(x) for x in ("#### 1,234.0", "#### New  York", "nothing", "#### ")]
    assert votes == ["1234", "new york", None, None]
    same = ["72", "$72", "72 dollars", "x=72", "x = \\$72.00", "**72**", "144/2"]
    assert {plain.vote(f"#### {x}") for x in same} == {"72"}
    votes = [plain.vote(f"#### {x}") for x in ("12.5", "25/2", "12.5%", "12.50 percent")]
    assert votes == ["25/2"] * 2 + ["25/2%"] * 2
    votes = [plain.vote(f"#### {x}") for x in ("y = 2x+1", "2x + 1", "6=7", "5 squared")]
    assert votes == ["2x+1", "2x+1", "6=7", "5 squared"]
    exact = judge(ANSWER)
    assert [exact.vote(f"#### {x}") for x in ("$72", "72.0", "72 dollars")] == ["72", "72", "72 dollars"]
    choice = judge(CHOICE)
    assert [choice.vote(f"#### {x}") for x in ("B", "(b)", "B) a dog", "dog")] == ["B", "B", "B", None]
    other = judge(MINE, named="mine")
    assert plain.votes and exact.votes and choice.votes and not other.votes and other.vote("#### 7") is None


def test_answers_are_looked_for_where_the_run_looks():
    marked = {"name": "answer_format", "options": {"marker": "Result:"}}
    box = {"name": "answer", "options": {"marker": r"\boxed{}"}}
    for terms, named, marker in [
        ([MINE], None, None), ([MINE, marked], None, "Result:"), ([marked, box], None, r"\boxed{}"),
        ([MINE, ANSWER], None, None),
        ([MINE, marked], "mine", "Result:"),
    ]:  # fmt: skip
        config = rewards(*terms)
        assert judging.marker_of(config, judge_of(config, named)) == marker
