"""Problems by their levels: a function of the shares and of what was drawn so far."""

import dataclasses
import json
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from data_files import load, refusal

from grpojax import data
from grpojax.data import Problem, SourceConfig
from grpojax.extensions.methods import levels
from grpojax.extensions.methods.levels import Level, LevelBatches, check_levels, shares
from grpojax.host.errors import UserError


def problems(**counts):
    """So many of each level, one level after the other."""
    names = [level.lstrip("_") for level, n in counts.items() for _ in range(n)]
    return [Problem(uid, (1,), "q", None, {}, level=level) for uid, level in enumerate(names, 3)]


def test_golden_shares():
    """By hand; with a target in place of the variance, 0.9 would get as much as 0.1 and 0 still something."""
    np.testing.assert_allclose(shares([0.5, 0.9, 0.0], 0.3), [0.1 + 0.7 * 25 / 34, 0.1 + 0.7 * 9 / 34, 0.1])
    assert shares([0.0, 1.0], 0.2) == [0.5, 0.5] and shares([0.3, 0.8, 0.5], 1.0) == [1 / 3] * 3
    assert shares([0.2, 0.8], 0.1) == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("seed", range(4))
def test_each_prompt_is_of_the_level_that_is_owed_most(seed):
    """In exact fractions, with shares that change between batches."""
    rng = np.random.default_rng(seed)
    of = problems(_2=3, _10=7, hard=2)
    batches = LevelBatches(of, 5, seed)
    assert batches.levels == ("2", "10", "hard")
    now, owed, given = batches.begin(), dict.fromkeys(batches.levels, Fraction(0)), []
    for _ in range(23):
        parts = rng.integers(1, 9, 3).tolist()
        share = {x: Fraction(p, sum(parts)) for x, p in zip(batches.levels, parts, strict=True)}
        batch, now = batches.draw({x: float(s) for x, s in share.items()}, now)
        for problem in batch:
            owed = {x: o + share[x] for x, o in owed.items()}
            assert owed[problem.level] >= max(owed.values()) - Fraction(1, 10**9)
            owed[problem.level] -= 1
            given.append(problem)
        assert max(map(abs, owed.values())) < 3
        for x, state in now.items():
            assert state.drawn == sum(p.level == x for p in given) and state.due == pytest.approx(float(owed[x]))
    for x in batches.levels:  # every pass over a level has all of it
        mine = [p.uid for p in given if p.level == x]
        every = sorted(p.uid for p in of if p.level == x)
        for start in range(0, len(mine) - len(every) + 1, len(every)):
            assert sorted(mine[start : start + len(every)]) == every


def test_the_order_by_enumeration():
    """Shares of 1/2, 1/4 and 1/4: of four prompts each gets its own, ties to the first."""
    batches = LevelBatches(problems(a=2, b=2, c=2), 4, 0)
    now, seen = batches.begin(), []
    for _ in range(3):
        batch, now = batches.draw({"a": 0.5, "b": 0.25, "c": 0.25}, now)
        seen.append([p.level for p in batch])
        assert all(x.due == 0 for x in now.values())
    assert seen == [["a", "b", "c", "a"]] * 3 and [x.drawn for x in now.values()] == [6, 3, 3]


def test_it_goes_on_from_what_was_saved_and_leaves_what_it_was_given():
    of = problems(a=5, b=3, c=7)
    share = {"a": 0.55, "b": 0.15, "c": 0.3}
    batches, now, whole, saved = LevelBatches(of, 4, 9), None, [], []
    now = batches.begin()
    for _ in range(9):
        saved.append(json.dumps({x: dataclasses.asdict(level) for x, level in now.items()}))
        batch, now = batches.draw(share, now)
        whole.append([p.uid for p in batch])
    for n, text in enumerate(saved):
        state = {x: Level(**level) for x, level in json.loads(text).items()}
        batch, _ = LevelBatches(of, 4, 9).draw(share, state)
        assert [p.uid for p in batch] == whole[n]
    assert whole != [[p.uid for p in batch] for batch in _other_seed(of, share)]


def _other_seed(of, share):
    batches = LevelBatches(of, 4, 10)
    now = batches.begin()
    for _ in range(9):
        batch, now = batches.draw(share, now)
        yield batch


def test_levels_are_read_from_a_column_or_given_to_a_source(write):
    rows = [{"question": f"{x!r}?", "answer": "1", "level": x} for x in (2, 2.0, "Level 5", True, "", None, [1], 0.5)]
    path = write("d.jsonl", "".join(json.dumps(r) + "\n" for r in rows))
    want = ["2", "2", "Level 5", None, None, None, None, "0.5"]
    assert [p.level for p in load(path, columns={})] == want
    assert [p.level for p in load(path, level="answer")] == ["1"] * 8
    assert [p.level for p in load(path, level="other")] == [None] * 8
    got = load((SourceConfig(path=path, level=3), SourceConfig(path=path, level="easy")))
    assert [p.level for p in got] == ["3"] * 8 + ["easy"] * 8
    assert {p.level for p in load(SourceConfig(path="reasoning:stories", options={"levels": [1, 4], "size": 6}))} == {
        "1",
        "4",
    }
    with pytest.raises(UserError, match="validation: .* levels are for train"):
        data.DataConfig(train="x", validation=SourceConfig(path="x", level=1))
    assert "level" not in refusal(SourceConfig(path="nothing.jsonl", level=1))


def test_problems_that_cannot_be_drawn_by_level(write):
    def rows(name, given):
        return write(name, "".join(json.dumps({"question": f"q{n}", "answer": "1"} | r) + "\n" for n, r in given))

    good = rows("good.jsonl", enumerate([{"level": 1}, {"level": 2}]))
    check_levels(load((good, good)))
    check_levels(load((SourceConfig(path=good, weight=2.0), SourceConfig(path=good, weight=2.0))))
    cases = (
        (load(rows("some.jsonl", enumerate([{"level": 1}, {}, {}]))), "2 of 3 problems have no level, such as 'q1'"),
        (load(SourceConfig(path=good, level=1)), "the problems have 1 levels, such as '1'"),
        (load(rows("many.jsonl", enumerate({"level": n} for n in range(33)))), "the problems have 33 levels"),
        (load((SourceConfig(path=good, weight=3.0), good)), "leave the sources' weights out"),
    )
    for found, message in cases:
        with pytest.raises(UserError, match=message):
            check_levels(found)


def test_of_few_problems_a_level_begins_again_within_a_batch():
    batches, now, of = LevelBatches(problems(a=2, b=3), 12, 0), None, {"a": 0.5, "b": 0.5}
    now = batches.begin()
    for _ in range(3):
        batch, now = batches.draw(of, now)
        assert Counter(p.level for p in batch) == {"a": 6, "b": 6}
        assert set(Counter(p.uid for p in batch).values()) == {2, 3}


def test_a_level_called_nan_has_its_place():
    found = [Problem(i, (1,), "", None, {}, level=x) for i, x in enumerate(("3", "nan", "1", "inf", "2", "b"))]
    assert levels.levels_of(found) == levels.levels_of(found[::-1]) == ("1", "2", "3", "b", "inf", "nan")
    assert levels._place("nan") == levels._place("nan") > levels._place("9")  # NaN would be like nothing, not itself
