"""The order of problems: a function of the seed, the step and what is retired."""

import dataclasses
import json
from collections import Counter

import allocation_oracles
import numpy as np
import pytest
from data_files import jsonl, load

from grpojax import data
from grpojax.data import SourceConfig


def test_sources_are_drawn_by_weight(write):
    big = write("big.jsonl", jsonl([{"question": f"b{i}", "answer": i} for i in range(40)]))
    small = write("small.jsonl", jsonl([{"question": f"s{i}", "answer": i} for i in range(5)]))
    problems = load((SourceConfig(path=big, weight=3.0), small))
    assert problems.weights == (3.0, 1.0) and sorted(p.uid for p in problems) == list(range(45))
    batches = data.Batches(problems, 8, 3, problems.weights)
    drawn = [p for step in range(20) for p in batches[step]]
    assert Counter(p.source for p in drawn) == {0: 120, 1: 40}
    assert Counter(p.uid for p in drawn if p.source == 1) == dict.fromkeys(range(40, 45), 8)
    again = data.Batches(problems, 8, 3, problems.weights)
    assert again[17] == batches[17] and batches[17] != batches[18]
    twin = data.Batches(load((small, small)), 10, 3, (1.0, 1.0))[0]
    assert [p.uid for p in twin if p.source == 0] != [p.uid - 5 for p in twin if p.source == 1]
    alone = load(big)
    with_weights, without = data.Batches(alone, 8, 3, alone.weights), data.Batches(alone, 8, 3)
    assert all(with_weights[i] == without[i] for i in range(9))


def test_prompts_are_padded_on_the_right():
    got = data.to_prompts([data.Problem(i + 4, (5,) * n, "", None, {}) for i, n in enumerate((2, 3))], 3)
    np.testing.assert_array_equal(got.tokens, [[5, 5, 0], [5, 5, 5]])
    assert got.lengths.tolist() == [2, 3] and got.uids.tolist() == [4, 5]


def test_a_problem_twice_in_a_batch_goes_on_with_other_samples():
    one, other = (data.Problem(uid, (1, 2), "q", None, {}) for uid in (3, 4))
    prompts = data.to_prompts([one, other, one, one], 2, group=8)
    assert prompts.first_sample.tolist() == [0, 0, 8, 16]


@pytest.mark.parametrize(("count", "size"), [(3, 8), (1, 5), (5, 6)])
def test_passes_follow_one_another_within_a_batch(count, size):
    """The problems in a row do not depend on the size of a batch, and no pass begins before all have had their turn."""
    one, many = data.Batches(problems(count), 1, 5), data.Batches(problems(count), size, 5)
    stream = [p.uid for n in range(count) for p in many[n]]
    assert stream == [one[n][0].uid for n in range(count * size)]
    for start in range(0, len(stream), count):
        assert sorted(stream[start : start + count]) == list(range(3, 3 + count))
    got, numbers, _ = drawn(data.RetiringBatches(problems(count), size, 5), count)
    assert sum(got, []) == stream and sum(numbers, []) == [at // count for at in range(len(stream))]


@pytest.mark.parametrize("group", [1, 4])
def test_no_two_samples_of_a_batch_have_the_same_draws(group):
    for n in range(4):
        prompts = data.to_prompts(data.Batches(problems(3), 8, 0)[n], 1, group)
        each = [(u, s + g) for u, s in zip(prompts.uids, prompts.first_sample, strict=True) for g in range(group)]
        assert len(set(each)) == 8 * group


def test_of_few_problems_those_solved_are_left_out_of_the_passes_that_begin_later():
    """One of three, in a batch of eight, which has begun three passes."""
    batches = data.RetiringBatches(problems(3), 8, 0)
    whole, numbers, passes = drawn(batches, 5, solved={0: [4]})
    assert set(whole[0]) == {3, 4, 5} and max(numbers[0]) == 2
    assert 4 in whole[0] and [4 in batch for batch in whole[2:]] == [False] * 3
    assert all(abs(batch.count(3) - batch.count(5)) <= 2 for batch in whole[2:])
    known = {4: max(n for uid, n in zip(whole[0], numbers[0], strict=True) if uid == 4)}
    for n in range(1, 5):
        saved = [data.Pass(**p) for p in json.loads(json.dumps([dataclasses.asdict(p) for p in passes[n - 1]]))]
        again, _, _ = data.RetiringBatches(problems(3), 8, 0).draw(n, saved, known)
        assert [p.uid for p in again] == whole[n]


def problems(count):
    return [data.Problem(uid, (1,), "q", None, {}) for uid in range(3, 3 + count)]


def drawn(batches, count, solved=None):
    """Of each batch its uids and its passes, and the passes after it; ``solved[n]`` are the uids solved in batch n."""
    now, known, got, numbers, passes = batches.begin(), {}, [], [], []
    for n in range(count):
        batch, each, now = batches.draw(n, now, known)
        got.append([p.uid for p in batch])
        numbers.append(each)
        passes.append(now)
        for uid, number in zip(got[-1], each, strict=True):
            if uid in (solved or {}).get(n, ()):
                known[uid] = number
    return got, numbers, passes


@pytest.mark.parametrize(("count", "size", "seed"), [(11, 4, 0), (7, 7, 3), (13, 5, 2**31), (5, 1, 9)])
def test_nothing_retired_is_the_plain_order(count, size, seed):
    plain, retiring = data.Batches(problems(count), size, seed), data.RetiringBatches(problems(count), size, seed)
    got, numbers, passes = drawn(retiring, 3 * count)
    assert got == [[p.uid for p in plain[n]] for n in range(3 * count)]
    assert sum(numbers, []) == [at // count for at in range(3 * count * size)]
    assert [now.number for (now,) in passes] == [((n + 1) * size - 1) // count for n in range(3 * count)]
    assert retiring.draw(2 * count, retiring.begin(), {})[0] == plain[2 * count]  # passes may be skipped


def test_the_order_without_retirement_is_the_one_of_older_runs():
    batches = data.Batches([data.Problem(i, (1,), "q", None, {}) for i in range(11)], 4, 0)
    assert [[p.uid for p in batches[n]] for n in range(4)] == [[1, 2, 4, 5], [9, 7, 10, 6], [0, 3, 8, 9], [10, 1, 8, 2]]


def test_a_solved_problem_ends_its_pass_and_is_not_drawn_again():
    batches = data.RetiringBatches(problems(11), 4, 0)
    plain, _, _ = drawn(batches, 3)
    gone = plain[0][0], plain[1][3]
    got, numbers, passes = drawn(batches, 14, solved={0: gone, 1: gone, 5: [plain[1][0]]})
    stream, of = sum(got, []), sum(numbers, [])
    assert got[:2] == plain[:2] and sorted(stream[:11]) == list(range(3, 14))
    assert passes[1][0].number == 0 and passes[2] == (data.Pass(number=1, start=11, left_out=gone),)
    second, third, fourth = stream[11:20], stream[20:29], stream[29:37]
    assert sorted(second) == sorted(third) == sorted(set(range(3, 14)) - set(gone)) and second != third
    assert of[:37] == [0] * 11 + [1] * 9 + [2] * 9 + [3] * 8
    assert sorted(fourth) == sorted(set(third) - {plain[1][0]})  # the third began with the batch that solved it
    assert passes[7] == (data.Pass(number=3, start=29, left_out=(*gone, plain[1][0])),)


@pytest.mark.parametrize("readmit_after", [None, 1, 2, 3])
def test_what_is_left_out_is_what_plain_loops_say(readmit_after):
    """Passes of whole batches. Every pass takes some of the problems."""
    rng, history, known, now = np.random.default_rng(3), [], {}, None
    batches = data.RetiringBatches(problems(7), 1, 5, readmit_after=readmit_after)
    now, at = batches.begin(), 0
    for epoch in range(9):
        want = np.flatnonzero(allocation_oracles.active(7, history, epoch, readmit_after)) + 3
        seen = []
        for _ in want:
            (problem,), (number,), now = batches.draw(at, now, known)
            at += 1
            seen.append(problem.uid)
            assert number == epoch
            over = rng.random() < 0.3 and problem.uid != 3  # one is never solved
            history.append((epoch, problem.uid - 3, [float(over)] * 2))
            known |= {problem.uid: epoch} if over else {}
        assert sorted(seen) == want.tolist()


@pytest.mark.slow
def test_sources_have_passes_of_their_own():
    """Weights 3 and 1: where a prompt is drawn from does not depend on what is solved."""
    of = [data.Problem(uid, (1,), "q", None, {}, int(uid >= 7)) for uid in range(12)]
    plain, retiring = data.Batches(of, 5, 3, (3.0, 1.0)), data.RetiringBatches(of, 5, 3, (3.0, 1.0))
    assert drawn(retiring, 9)[0] == [[p.uid for p in plain[n]] for n in range(9)]
    got, numbers, passes = drawn(retiring, 30, solved=dict.fromkeys(range(30), (0, 2, 3, 8)))
    want = [[int(p.uid >= 7) for p in plain[n]] for n in range(30)]
    assert [[int(uid >= 7) for uid in batch] for batch in got] == want
    assert passes[-1][0].left_out == (0, 2, 3) and passes[-1][1].left_out == (8,)
    for source, begin, count in ((0, 0, 7), (1, 7, 5)):
        stream = [(uid, n) for uids, of in zip(got, numbers, strict=True) for uid, n in zip(uids, of, strict=True)]
        mine = [(uid, n) for uid, n in stream if int(uid >= 7) == source]
        whole = sorted(uid for uid, n in mine if n == 0)
        assert whole == list(range(begin, begin + count))
        later = sorted(uid for uid, n in mine if n == 2)
        assert later == sorted(set(whole) - {0, 2, 3, 8})
    assert passes[-1][0].number != passes[-1][1].number


def test_a_run_goes_on_from_what_was_saved():
    solved = {0: [4], 1: [4], 3: [9, 10], 4: [9, 10], 6: [12], 7: [12]}
    batches = data.RetiringBatches(problems(11), 4, 0, readmit_after=2)
    whole, numbers, passes = drawn(batches, 12, solved)
    for stop in range(1, 12):
        saved = json.loads(json.dumps([dataclasses.asdict(p) for p in passes[stop - 1]]))
        now, known = tuple(data.Pass(**p) for p in saved), {}
        for n in range(stop):
            known |= {uid: of for uid, of in zip(whole[n], numbers[n], strict=True) if uid in solved.get(n, ())}
        assert now == passes[stop - 1]
        again = data.RetiringBatches(problems(11), 4, 0, readmit_after=2)
        batch, each, _ = again.draw(stop, now, known)
        assert [p.uid for p in batch] == whole[stop] and each == numbers[stop]


def test_fewer_than_a_batch_stand_in_it_again_and_none_is_all():
    batches = data.RetiringBatches(problems(5), 4, 0)
    every = dict.fromkeys(range(3, 8), 0)
    _, _, now = batches.draw(0, batches.begin(), {})
    few, numbers, later = batches.draw(1, now, {uid: 0 for uid in (3, 4, 6)})
    assert numbers == [0, 1, 1, 2] and {p.uid for p in few[1:]} == {5, 7} and later[0].left_out == (3, 4, 6)
    again, numbers, later = batches.draw(1, now, every)
    assert numbers == [0, 1, 1, 1] and later == (data.Pass(number=1, start=5, since=1),)
    rest, numbers, last = batches.draw(2, later, every | {4: 1})  # of the verdicts before, none counts
    assert sorted(p.uid for p in (*again[1:], *rest[:2])) == [3, 4, 5, 6, 7] and last[0].left_out == (4,)
    with pytest.raises(ValueError, match="batch 0 begins before its pass does, at prompt 5 of source 0"):
        batches.draw(0, later, {})
