"""The order of problems: a function of the seed, the step and what is retired."""

import dataclasses
import doctest
import json
from collections import Counter

import numpy as np
import pytest
from data_files import jsonl, load

from grpojax import data
from grpojax.data import SourceConfig
from grpojax.data import batches as module
from grpojax.host.errors import UserError


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


def problems(count):
    return [data.Problem(uid, (1,), "q", None, {}) for uid in range(3, 3 + count)]


def drawn(batches, count, retire=None):
    """Uids of each batch, and the passes after them; ``retire[n]`` are the uids retired after batch n."""
    now, retired, got, passes = data.Pass(), set(), [], []
    for n in range(count):
        batch, now = batches.draw(n, now, retired)
        got.append([p.uid for p in batch])
        passes.append(now)
        retired |= set((retire or {}).get(n, ()))
    return got, passes


@pytest.mark.parametrize(("count", "size", "seed"), [(11, 4, 0), (7, 7, 3), (13, 5, 2**31), (5, 1, 9)])
def test_nothing_retired_is_the_plain_order(count, size, seed):
    plain, retiring = data.Batches(problems(count), size, seed), data.RetiringBatches(problems(count), size, seed)
    got, passes = drawn(retiring, 3 * count)
    assert got == [[p.uid for p in plain[n]] for n in range(3 * count)]
    assert [p.number for p in passes] == [((n + 1) * size - 1) // count for n in range(3 * count)]
    assert retiring.draw(2 * count, data.Pass(), ())[0] == plain[2 * count]  # passes may be skipped


def test_the_order_without_retirement_is_the_one_of_older_runs():
    batches = data.Batches([data.Problem(i, (1,), "q", None, {}) for i in range(11)], 4, 0)
    assert [[p.uid for p in batches[n]] for n in range(4)] == [[1, 2, 4, 5], [9, 7, 10, 6], [0, 3, 8, 9], [10, 1, 8, 2]]


def test_a_retired_problem_ends_its_pass_and_is_not_drawn_again():
    batches = data.RetiringBatches(problems(11), 4, 0)
    plain, _ = drawn(batches, 3)
    gone = plain[0][0], plain[2][2]  # the second is still to come in this pass when it is retired
    got, passes = drawn(batches, 14, retire={0: gone, 5: [plain[1][0]]})
    stream = sum(got, [])
    assert got[:2] == plain[:2] and sorted(stream[:11]) == list(range(3, 14))
    assert passes[1].number == 0 and passes[2] == data.Pass(number=1, start=11, retired=gone)
    second, third, fourth = stream[11:20], stream[20:29], stream[29:37]
    assert sorted(second) == sorted(third) == sorted(set(range(3, 14)) - set(gone)) and second != third
    assert sorted(fourth) == sorted(set(third) - {plain[1][0]})  # the third began with the batch that retired it
    assert passes[4].number == 1 and passes[5] == data.Pass(number=2, start=20, retired=gone)
    assert passes[7] == data.Pass(number=3, start=29, retired=(*gone, plain[1][0]))


def test_a_run_goes_on_from_what_was_saved():
    retire = {0: [4], 3: [9, 10], 6: [12]}
    whole, passes = drawn(data.RetiringBatches(problems(11), 4, 0), 12, retire)
    for stop in range(1, 12):
        saved = json.loads(json.dumps(dataclasses.asdict(passes[stop - 1])))
        now, retired = data.Pass(**saved), {uid for n in range(stop) for uid in retire.get(n, ())}
        assert now == passes[stop - 1]
        batch, _ = data.RetiringBatches(problems(11), 4, 0).draw(stop, now, retired)
        assert [p.uid for p in batch] == whole[stop]


def test_retirement_that_cannot_go_on_says_so():
    batches = data.RetiringBatches(problems(5), 4, 0)
    _, now = batches.draw(0, data.Pass(), {3, 4})  # within the pass all are drawn
    with pytest.raises(UserError, match="prompts=4 is more than the 3 problems left; 2 are retired. End the run"):
        batches.draw(1, now, {3, 4})
    _, later = batches.draw(1, now, {3})
    with pytest.raises(ValueError, match="batch 0 begins before its pass does, at prompt 5"):
        batches.draw(0, later, {3})
    with pytest.raises(UserError, match="rollout.prompts=6 is more than the 5 problems of the data"):
        data.RetiringBatches(problems(5), 6, 0)
    with pytest.raises(UserError, match="from one source only, and data.train has 2"):
        data.RetiringBatches(problems(5), 4, 0, (1.0, 2.0))


def test_examples():
    assert doctest.testmod(module).failed == 0
