"""Per-problem files: read back, compared, and refused where they are something else."""

import dataclasses
import json

import numpy as np
import pytest

from grpojax.evaluation import Attempt, Sample
from grpojax.host.errors import UserError
from grpojax.records.evaluations import compare, read, write


def attempt(uid, *correct, rewards=None, names=("answer",)):
    given = [float(c) for c in correct] if rewards is None else rewards
    return Attempt(uid=uid, prompt=f"q{uid}", gold="7", samples=tuple(
        Sample(completion="#### 7", answer="7", vote="7", correct=c, tokens=5, stopped=True, reward=r,
               rewards=dict.fromkeys(names, r)) for c, r in zip(correct, given, strict=True)
    ))  # fmt: skip


def graded(uid, *rewards, names=("mine",)):
    return attempt(uid, *[None] * len(rewards), rewards=rewards, names=names)


@pytest.fixture
def files(tmp_path):
    return tmp_path / "a.jsonl", tmp_path / "b.jsonl"


def test_what_is_written_is_read(files):
    done = [attempt(0, True, False), graded(1, 0.25, None)]
    write(files[0], done)
    assert read(files[0]) == done
    with files[0].open("a") as file:
        file.write('{"uid": 3')  # torn
    assert read(files[0]) == done


def test_two_evaluations_are_compared_by_accuracy(files):
    a, b = files
    write(a, [attempt(i, i % 3 == 0, False) for i in range(12)])
    write(b, [attempt(i, True) for i in reversed(range(12))])
    out = compare(a, b)
    for text in ("12 problems in both", "accuracy, avg@2", "+83.3 points",
                 "better on 12 problems and worse on 0: p = 0.000488"):  # fmt: skip
        assert text in out, out
    assert "reward" not in out


def test_a_comparison_says_what_a_method_equals(tmp_path):
    """GSPO after one update a rollout is GRPO: a difference would be chance."""
    folders = tmp_path / "a", tmp_path / "b"
    said = "gspo has the gradient of GRPO's loss, on its own advantages"
    for folder, alike in zip(folders, (None, said), strict=True):
        write(folder / "problems.jsonl", [attempt(0, True), attempt(1, False)])
        (folder / "settings.json").write_text(json.dumps({"model": {"alike": alike}}))
    assert compare(*folders).splitlines()[-1] == f"B: {said}"
    assert "ratio" not in compare(folders[0], folders[0])


def test_without_verdicts_in_both_they_are_compared_by_reward(files):
    a, b = files
    rng = np.random.default_rng(0)
    low, high = rng.normal(0, 1, 40), rng.normal(1.5, 1, 40)
    write(a, [graded(i, x) for i, x in enumerate(low)])
    write(b, [graded(i, x) for i, x in enumerate(high)])
    out = compare(a, b)
    assert "compared by reward: not both have" in out and "accuracy" not in out and "%  " not in out
    assert f"A  {'reward':20}{low.mean():8.3f}" in out and f"B - A{'':18}{(high - low).mean():+8.3f}" in out
    assert "left out" not in out and "p = 5e-05" in out  # of 20000 random signs none is as far
    write(b, [attempt(i, True, rewards=[x], names=("mine",)) for i, x in enumerate(high)])
    assert compare(a, b) == out  # verdicts in one of them alone


def test_problems_without_a_reward_are_left_out_and_counted(files):
    a, b = files
    write(a, [graded(0, None), graded(1, 0.5, None), graded(2, 1.0)])
    write(b, [graded(0, 1.0), graded(1, 1.0), graded(2, None)])
    out = compare(a, b)
    assert "3 problems in both" in out and "2 problems without a valid reward in A or B are left out" in out
    assert "+0.500" in out
    write(b, [graded(0, 1.0), graded(1, None), graded(2, None)])
    with pytest.raises(UserError, match="no problem has a reward in both"):
        compare(a, b)


def test_rewards_of_another_kind_are_refused(files):
    a, b = files
    write(a, [graded(0, 1.0)])
    write(b, [graded(0, 1.0, names=("mine", "other"))])
    with pytest.raises(UserError, match=r"has the rewards mine, .* mine, other, and not both say what is right"):
        compare(a, b)


def test_other_problems_are_refused(files):
    a, b = files
    write(a, [attempt(i, True) for i in range(12)])
    write(b, [attempt(i, True) for i in range(11)])
    with pytest.raises(UserError, match="has 12 problems, .* 11, and 11 are in both"):
        compare(a, b)
    write(b, [attempt(i, True) for i in range(12)])
    a.write_text(a.read_text().replace('"q3"', '"other"'))
    with pytest.raises(UserError, match="problem 3 is not the same"):
        compare(a, b)
    write(a, [attempt(0, True)] * 2)
    with pytest.raises(UserError, match="a.jsonl: a problem occurs twice"):
        compare(a, b)
    a.write_text("")
    with pytest.raises(UserError, match="no problems"):
        compare(a, b)


def test_what_is_no_evaluation_is_refused(files):
    a, b = files
    a.write_text('{"uid": 3}\n')
    with pytest.raises(UserError, match="a.jsonl:1: no line of an evaluation"):
        read(a)
    write(a, [dataclasses.replace(attempt(0, True), samples=())])
    with pytest.raises(UserError, match="a.jsonl:1: no line of an evaluation"):
        read(a)
    with pytest.raises(UserError, match="No such file"):
        read(b)
