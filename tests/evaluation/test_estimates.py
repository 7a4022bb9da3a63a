"""Estimates against enumeration, and paired tests against every sign."""

import itertools
import math

import numpy as np
import pytest

from grpojax.evaluation import Comparison, bootstrap, majority_at_k, paired_test, pass_at_k


@pytest.mark.parametrize(("n", "c"), [(1, 0), (1, 1), (7, 0), (7, 1), (7, 3), (7, 5), (7, 7)])
def test_pass_at_k_is_the_mean_over_all_subsets(n, c):
    """Resampling with replacement would give 1 - (1 - c/n)^k: 0.367 in place of 3/7 for n=7, c=1, k=3."""
    right = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
        want = np.mean([any(s) for s in itertools.combinations(right, k)])
        assert float(pass_at_k(n, c, k)) == pytest.approx(want, abs=1e-12), k
        if k > 1 and 0 < c < n:
            assert 1 - (1 - c / n) ** k < want  # biased low


def test_pass_at_k_over_many_samples_and_arrays():
    n, c, k = 1000, np.array([0, 1, 3, 400, 999, 1000]), 500
    want = [1 - math.comb(n - int(x), k) / math.comb(n, k) for x in c]
    np.testing.assert_allclose(pass_at_k(n, c, k), want, rtol=1e-12)
    np.testing.assert_allclose(pass_at_k(np.array([3, 5]), np.array([1, 1]), 2), [2 / 3, 2 / 5])
    for bad in [(3, 1, 4), (3, 1, 0), (3, 4, 1), (3, -1, 1)]:
        with pytest.raises(ValueError, match="needs 1 <= k <= n"):
            pass_at_k(*bad)


def vote_in_loops(votes, correct, k):
    """Every k-subset holds a vote; the answers that tie share it."""
    shares = []
    for subset in itertools.combinations(range(len(votes)), k):
        counts = {}
        for i in subset:
            if votes[i] is not None:
                counts[votes[i]] = counts.get(votes[i], 0) + 1
        winners = [a for a, m in counts.items() if m == max(counts.values())]
        verdicts = [np.mean([c for v, c in zip(votes, correct, strict=True) if v == w]) for w in winners]
        shares.append(np.mean(verdicts) if winners else 0.0)
    return np.mean(shares)


@pytest.mark.parametrize("seed", range(12))
def test_a_majority_is_the_mean_over_all_subsets(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 10))
    votes = [None if v == 4 else f"a{v}" for v in rng.integers(0, 5, n)]
    correct = [v in ("a0", "a3") for v in votes]
    if seed == 11:
        correct = rng.integers(0, 2, n).astype(bool).tolist()  # one vote, two verdicts
    for k in range(1, n + 1):
        want = vote_in_loops(votes, correct, k)
        assert majority_at_k(votes, correct, k) == pytest.approx(want, abs=1e-12), (n, k)


def test_a_majority_of_very_many():
    """550 of 1000 agree on the right answer: a vote of 999 is right for sure, one of 101 in about 84.9 %."""
    votes, correct = ["x"] * 550 + ["y"] * 450, [True] * 550 + [False] * 450
    assert majority_at_k(votes, correct, 999) == pytest.approx(1.0, abs=1e-12)
    want = sum(math.comb(550, i) * math.comb(450, 101 - i) for i in range(51, 102)) / math.comb(1000, 101)
    assert majority_at_k(votes, correct, 101) == pytest.approx(want, rel=1e-10)
    assert majority_at_k([*range(300)], [i < 3 for i in range(300)], 100) == pytest.approx(0.01, rel=1e-10)  # all tie
    assert majority_at_k(votes, [False] * 1000, 999) == 0
    with pytest.raises(ValueError, match="maj@2 of 1 votes"):
        majority_at_k(["x"], [True], 2)


def test_bootstrap_intervals_cover_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(1)
    covered = 0
    for i in range(400):
        low, high = bootstrap(rng.random(100) < 0.3, resamples=400, seed=i)
        covered += low <= 0.3 <= high
    assert 0.91 < covered / 400 < 0.98
    x = rng.random(50)
    assert bootstrap(x, seed=3) == bootstrap(x, seed=3) != bootstrap(x, seed=4)
    low, high = bootstrap(x)
    assert high - low == pytest.approx(2 * 1.96 * x.std() / 50**0.5, rel=0.1)
    assert bootstrap([1.0] * 9) == (1.0, 1.0)


def test_the_paired_test_counts_every_sign():
    rng = np.random.default_rng(0)
    for n_samples in (1, 4, 6):
        for _ in range(8):
            a, b = rng.integers(0, n_samples + 1, (2, 11)) / n_samples
            signs = np.array(list(itertools.product([-1, 1], repeat=11)))
            sums = np.rint(np.abs(signs @ (b - a)) * 60)
            want = np.mean(sums >= np.rint(abs((b - a).sum()) * 60))
            got = paired_test(a, b)
            assert got.p == pytest.approx(want, abs=1e-12)
            assert got.better == (b > a).sum() and got.worse == (b < a).sum()
            assert got.low <= got.difference <= got.high


def test_with_one_sample_the_paired_test_is_mcnemars_and_beats_an_unpaired_one():
    """18 problems won and 5 lost of 500: p = 0.0106. Without the pairs, 0.4 would hide it."""
    a = np.array([0] * 18 + [1] * 5 + [1] * 300 + [0] * 177)
    b = np.array([1] * 18 + [0] * 5 + [1] * 300 + [0] * 177)
    got = paired_test(a, b)
    assert got.p == pytest.approx(2 * sum(math.comb(23, i) for i in range(6)) / 2**23, rel=1e-9)
    assert got.p < 0.011 and (got.better, got.worse) == (18, 5) and 0 < got.low < 13 / 500 < got.high
    unpaired = (2 * 0.63 * 0.37 / 500) ** 0.5
    assert got.high - got.low < 0.4 * 2 * 1.96 * unpaired
    assert paired_test(a, a) == Comparison(difference=0, low=0, high=0, p=1, better=0, worse=0)
    assert paired_test(b, a).p == got.p
    assert 0 < paired_test(np.zeros(400), np.ones(400)).p < 1e-12
    with pytest.raises(ValueError, match="not finite"):
        paired_test([float("nan")], [0.0])


def test_values_of_many_denominators_are_compared_by_random_signs():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 1000, 300) / 999, rng.integers(0, 998, 300) / 997
    c = paired_test(a, b)
    assert 0.01 < c.p <= 1
    assert paired_test(a, np.minimum(b + 0.5, 1.0).round(3)).p < 0.01


def test_graded_rewards_are_compared_whatever_numbers_they_are():
    """Steps of 0.05 as float32 are fractions, and all signs are counted; others take random signs, to the same p."""
    rng = np.random.default_rng(3)
    a, b = rng.integers(-20, 21, (2, 13)) * 0.05
    exact = paired_test(a, b)
    assert paired_test(np.float32(a), np.float32(b)).p == exact.p
    signs = np.array(list(itertools.product([-1, 1], repeat=13)))
    assert exact.p == pytest.approx(np.mean(np.abs(signs @ (b - a)) > abs((b - a).sum()) - 1e-9), abs=1e-12)
    scaled = paired_test(a * math.pi, b * math.pi)  # the same differences in another unit
    assert scaled.p == pytest.approx(exact.p, abs=0.01) and scaled.p != exact.p
    assert (scaled.better, scaled.worse) == (exact.better, exact.worse)
    assert scaled.difference == pytest.approx(exact.difference * math.pi)
    assert paired_test([1e-30, math.pi], [1e-30, math.pi]).p == 1.0
    one_way = paired_test(np.zeros(5), np.full(5, math.e))  # as far as any: a tie counts
    assert one_way.p == pytest.approx(2 / 2**5, abs=0.01)
    huge = paired_test([1e300, 0.1, 0.1], [1e300, 0.2, 0.2])
    assert huge.better == 2 and huge.worse == 0
