"""Which prompts are guided, and how long their prefixes are."""

import numpy as np
import pytest

from grpojax.data import Problem
from grpojax.extensions.guidance.guidance_config import GuidanceConfig
from grpojax.extensions.guidance.guide import Guide
from grpojax.host.errors import UserError

SOLUTION = "aaaabbbb = 7"  # eight tokens before the answer


def encode(text):
    return [ord(letter) for letter in text]


def problem(uid, solution=SOLUTION, gold="7"):
    return Problem(uid=uid, ids=(1, 2, 3), prompt="?", gold=gold, columns={"solution": solution})


PROBLEMS = [problem(uid) for uid in range(4)]


def guide(problems=PROBLEMS, longest=100, state=None, kept=1024, **config):
    return Guide(GuidanceConfig(**config), problems, encode, longest=longest, kept=kept, state=state)


def prefixes(found, most=9):
    return {p.uid: "".join(map(chr, p.ids[3:])) for p in found.take(most)}


def test_a_prompt_that_failed_gets_a_prefix_until_it_passes_without():
    found = guide()
    found.note(PROBLEMS[2], [False, False])
    found.note(PROBLEMS[1], [False, True])
    found.note(PROBLEMS[0], [])  # no sample has a reward
    assert prefixes(found) == {2: "aaaab"} and len(found) == 1  # half of nine letters and a blank, rounded up
    (guided,) = found.take(1)
    found.note(guided, [True, True])  # with a prefix is not without
    assert len(found) == 1 and found.prefix_of(guided) == guided.ids[3:] and found.prefix_of(PROBLEMS[2]) == ()
    found.note(PROBLEMS[2], [True, False])
    assert not found.take(9) and not len(found)


@pytest.mark.parametrize(("passed", "want"), [([0, 0, 0, 0], 0.75), ([1, 1, 1, 1], 0.25), ([1, 0, 0, 1], 0.5)])
def test_the_length_follows_the_share_that_passes(passed, want):
    found = guide()
    found.note(PROBLEMS[0], [False])
    (guided,) = found.take(1)
    found.note(guided, [bool(x) for x in passed])
    assert found.mean_length == want
    for _ in range(9):
        found.note(guided, [bool(x) for x in passed])
    assert found.mean_length == {0.75: 1.0, 0.25: 0.0, 0.5: 0.5}[want]
    assert len(prefixes(found)[0]) == {0.75: 10, 0.25: 1, 0.5: 5}[want]  # at least a token, never the answer


def test_a_later_prompt_begins_where_others_are():
    found = guide()
    found.note(PROBLEMS[0], [False])
    for _ in range(3):  # 0.75, 1, 1: the mean goes a tenth of the way each time
        found.note(found.take(1)[0], [False])
    found.note(PROBLEMS[1], [False])
    assert found.saved()["lengths"] == [(0, 1.0), (1, pytest.approx(0.5 + 0.025 + 0.0475 + 0.04275))]


def test_those_that_were_guided_longest_ago_come_first():
    found = guide()
    for each in PROBLEMS[:3]:
        found.note(each, [False])
    assert [p.uid for p in found.take(2)] == [0, 1] and [p.uid for p in found.take(2)] == [2, 0]


def test_a_prefix_fits_and_does_not_say_the_answer():
    whole = "3 + 4 = 7\n## Answer: 7"
    told = [problem(0, "7 and 7 are 14, less 7 is 7"), problem(1, "no number\nat all"), problem(2, None), problem(3),
            problem(4, whole, whole), problem(5, "8")]  # fmt: skip
    found = guide(told, start=1.0)
    for each in told:
        found.note(each, [False])
    assert prefixes(found) == {0: "7 and 7 are 14, less 7 is", 1: "no number", 3: "aaaabbbb =", 4: "3 + 4 = 7"}
    assert len(found) == 6  # what has no solution waits without one
    small = guide(longest=5, start=1.0)
    small.note(PROBLEMS[0], [False])
    assert prefixes(small) == {0: "aa"} and not guide(longest=3).take(9)


def test_a_prefix_may_be_of_a_sample_that_was_right():
    found = guide(prefix="own", kept=2, start=1.0)
    for each in PROBLEMS:
        found.note(each, [False])
    assert not found.take(9)
    for each in (*PROBLEMS[:3], PROBLEMS[1]):
        found.note(each, [True], f"own {each.uid}: 7!")
        found.note(each, [False])
    assert prefixes(found) == {2: "own 2:", 1: "own 1:"}  # the newest two


def test_what_is_saved_goes_on():
    found = guide(prefix="own")
    for each in PROBLEMS:
        found.note(each, [True], f"{each.uid} is 7")
        found.note(each, [False])
    found.take(3)
    again = guide(prefix="own", state=found.saved())
    assert again.saved() == found.saved() and prefixes(again) == prefixes(found)


@pytest.mark.parametrize("given", [{"share": 0.0}, {"share": 1.0}, {"target": 1.0}, {"start": 0.0}, {"step": np.nan},
                                   {"prefix": "own", "column": "answer"}])  # fmt: skip
def test_values_out_of_range_are_refused(given):
    with pytest.raises(UserError, match=next(reversed(given))):
        GuidanceConfig(**given)
