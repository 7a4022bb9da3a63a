"""Estimates from a few samples per problem: pass@k, majority votes, intervals, and paired tests of two models."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike

# Over this many samples the counts of subsets pass the largest float64.
MOST_SAMPLES = 1000


def pass_at_k(n: ArrayLike, c: ArrayLike, k: int) -> np.ndarray:
    """The chance that at least one of k samples is right, estimated from n samples of which c are right.

    ``1 - C(n-c, k) / C(n, k)``, the mean over all k-subsets of the n samples and unbiased (Chen et al.,
    arXiv:2107.03374, eq. 1), as the product ``1 - prod_j (n-c-j) / (n-j)`` over j < k, which cannot overflow.
    Drawing k of the n samples with replacement instead would give ``1 - (1 - c/n)^k``, which is biased low.

    Args:
      n, c: ``[...]`` counts, or numbers.
      k: at most every n.

    >>> float(pass_at_k(4, 1, 2)), pass_at_k(10, np.array([0, 5, 10]), 5).round(4).tolist()
    (0.5, [0.0, 0.996, 1.0])
    """
    n, c = np.broadcast_arrays(np.asarray(n, np.float64), np.asarray(c, np.float64))
    if k < 1 or (n < k).any() or (c < 0).any() or (c > n).any():
        raise ValueError(f"pass@{k} of n={n}, c={c}: needs 1 <= k <= n and 0 <= c <= n")
    j = np.arange(k)
    return 1.0 - np.prod(np.maximum(n[..., None] - c[..., None] - j, 0.0) / (n[..., None] - j), axis=-1)


def majority_at_k(votes: Sequence[Hashable | None], correct: Sequence[bool], k: int) -> float:
    """The chance that the most frequent answer of k samples is right, estimated from n samples.

    It is the exact mean over all k-subsets of the n samples: for each number of winning votes, a polynomial whose
    coefficient of ``x^i`` counts the subsets of i samples. Nothing is drawn at random. A sample without an answer has
    no vote; a subset without any vote is wrong. Answers that tie for the most votes share the verdict equally, as if
    one of them were drawn.

    Args:
      votes: ``[n]`` answers in one spelling, None for a sample without one.
      correct: ``[n]`` verdicts. Samples with the same vote usually have the same verdict; if not, their mean counts.
      k: at most n, which is at most 1000.

    >>> votes, correct = ["7", "7", "8", None], [True, True, False, False]
    >>> majority_at_k(votes, correct, 4), round(majority_at_k(votes, correct, 2), 4)  # of 6 pairs 3 are right, 2 tie
    (1.0, 0.6667)
    """
    n = len(votes)
    if not 1 <= k <= n <= MOST_SAMPLES or len(correct) != n:
        raise ValueError(f"maj@{k} of {n} votes, {len(correct)} verdicts: needs 1 <= k <= n <= {MOST_SAMPLES}")
    counts = Counter(v for v in votes if v is not None)
    right = {a: sum(c for v, c in zip(votes, correct, strict=True) if v == a) / m for a, m in counts.items()}
    if not any(right.values()):
        return 0.0
    most, none = max(counts.values()), n - counts.total()
    # No subset is won by fewer votes than the largest answer must have in it, or by so few that the answers with as
    # many at most do not fill it.
    wins = range(max(1, most - (n - k)), min(k, most) + 1)
    wins = [win for win in wins if none + sum(min(win, m) for m in counts.values()) >= k]
    return float(sum(_won_by(win, counts, right, n, k) for win in wins) / math.comb(n, k))


@functools.cache
def _choose(m: int) -> np.ndarray:
    """``C(m, i)`` for i up to m. It is kept, as each is needed for every number of winning votes."""
    return np.array([math.comb(m, i) for i in range(m + 1)], np.float64)


def _won_by(win: int, counts: Counter[Hashable], right: dict[Hashable, float], n: int, k: int) -> float:
    """The sum of the winners' mean verdicts over the subsets of k of n samples whose winners have ``win`` votes."""

    def times(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Each row of ``x``, a polynomial, times ``y``. It takes as few steps as there are rows, or terms of ``y``."""
        if len(y) == 1:
            return x * y
        if len(x) < len(y):
            return np.stack([np.convolve(row, y)[: k + 1] for row in x])
        product = np.zeros_like(x)
        for i, term in enumerate(y):
            product[:, i:] += term * x[:, : k + 1 - i]
        return product

    # Those that are right come last: until then nothing has credit.
    able = sorted((a for a, m in counts.items() if m >= win), key=lambda a: right[a] > 0)
    # subsets[t, i]: those of i samples in which t answers have ``win`` votes and no answer more;
    # credit[t, i]: the same, each times the sum of its winners' verdicts.
    most = min(len(able), k // win)
    subsets, credit = np.zeros((most + 1, k + 1)), np.zeros((most + 1, k + 1))
    free = n - sum(counts[a] for a in able)
    subsets[0, : free + 1] = _choose(free)[: k + 1]
    for done, a in enumerate(able):
        tied = min(done, most)  # answers that may have won so far
        more, before = min(tied + 1, most), slice(0, k + 1 - win)
        fewer, ways = _choose(counts[a])[:win], _choose(counts[a])[win]
        was = subsets[: tied + 1]
        if right[a]:
            had = credit[: tied + 1]
            now = times(had, fewer), ways * (had + right[a] * was)[:more, before]
            credit[: tied + 1] = now[0]
            credit[1 : more + 1, win:] += now[1]
        now = times(was, fewer), ways * was[:more, before]
        subsets[: tied + 1] = now[0]
        subsets[1 : more + 1, win:] += now[1]
    return float((credit[1:, k] / np.arange(1, most + 1)).sum())


def bootstrap(
    values: ArrayLike, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """A percentile bootstrap interval of the mean of ``values [N]``, one value a problem.

    Problems are drawn with replacement, so the interval is about other problems of the same kind; samples of one
    problem stay together. If all values are the same it has no width, which is too sure: ten of ten right does not show
    that all problems would be.

    >>> tuple(round(x, 2) for x in bootstrap([0.0] * 50 + [1.0] * 50))
    (0.4, 0.6)
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or not len(values) or not 0 < confidence < 1:
        raise ValueError(f"bootstrap of shape {values.shape} at confidence={confidence}: needs [N] and (0, 1)")
    rng = np.random.default_rng(seed)
    at_a_time = max(1, 4_000_000 // len(values))
    means = [
        values[rng.integers(len(values), size=(min(at_a_time, resamples - i), len(values)))].mean(1)
        for i in range(0, resamples, at_a_time)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two models on the same problems.

    Attributes:
      difference: mean of b less that of a.
      low, high: its interval, by a paired bootstrap.
      p: two-sided p-value of "the models do not differ".
      better, worse: number of problems on which b is higher, and lower.
    """

    difference: float
    low: float
    high: float
    p: float
    better: int
    worse: int


def paired_test(a: ArrayLike, b: ArrayLike, *, confidence: float = 0.95, seed: int = 0) -> Comparison:
    """Compares two models by one value a problem, ``a [N]`` and ``b [N]`` on the same N problems.

    The p-value is that of the sign-flip permutation test: if the models were the same, each problem's difference
    would be as likely with the other sign, so p is the share of the 2^N signs with a mean at least as far from 0.
    With one 0/1 value a problem this is the exact McNemar test; unlike that, it also takes shares of n samples and
    graded rewards, and it needs no table and no normal approximation.

    For fractions with denominators up to 1000 (shares of n samples, rewards in steps of 0.05) all signs are counted,
    by one Fourier transform of the product of cosines, the characteristic function of the sum; a p under 1e-12 is only
    known to be small, because of rounding. With too many denominators, or other values, p is the share of 20000 random
    signs instead.

    Args:
      a, b: shares of right samples, mean rewards, or any other finite numbers.
      confidence: confidence level of the interval (`bootstrap` of the differences).
      seed: seed of the interval and of random signs.

    >>> c = paired_test([0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 1])
    >>> c.p, c.better, c.worse, round(c.difference, 3)  # five of five one way: 2 / 2^5
    (0.0625, 5, 0, 0.833)
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise ValueError(f"values of shape {a.shape} and {b.shape}: needs the same [N]")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ValueError("values that are not finite: leave those problems out")
    low, high = bootstrap(b - a, confidence=confidence, seed=seed)
    steps = _whole_steps(a, b)
    if steps is None:
        steps = np.where(np.abs(b - a) > 1e-9 * (np.abs(a) + np.abs(b)), b - a, 0.0)
        p = _random_signs(steps, seed)
    else:
        p = _all_signs(steps)
    return Comparison(
        difference=float((b - a).mean()),
        low=low,
        high=high,
        p=p,
        better=int((steps > 0).sum()),
        worse=int((steps < 0).sum()),
    )


def _whole_steps(a: np.ndarray, b: np.ndarray) -> np.ndarray | None:
    """The differences as whole numbers of one unit; None where that unit is too small to count all signs."""
    units = 1
    for value in {*a.tolist(), *b.tolist()}:
        fraction = Fraction(value).limit_denominator(MOST_SAMPLES)
        if abs(float(fraction) - value) > 1e-7 * max(1.0, abs(value)):  # float32 rewards are as far off as that
            return None
        units = math.lcm(units, fraction.denominator)
        if units > 25_000_000:
            return None
    steps = np.rint(b * units) - np.rint(a * units)
    return steps.astype(np.int64) if np.abs(steps).sum() <= 25_000_000 else None


def _all_signs(steps: np.ndarray) -> float:
    """The share of all signs of the steps with a sum at least as far from 0."""
    sizes, times = np.unique(np.abs(steps[steps != 0]), return_counts=True)
    if not len(sizes):
        return 1.0
    reach = int(sizes @ times)
    seen = abs(int(steps.sum()))
    grid = 2 * reach + 1
    angles = 2 * np.pi * np.arange(reach + 1) / grid
    wave = np.ones(reach + 1)
    for size, m in zip(sizes, times, strict=True):
        wave *= np.cos(angles * size) ** m
    shares = np.fft.irfft(wave, grid)  # of the sum s at place s modulo grid
    tail = 2 * float(shares[seen : reach + 1].sum()) if seen else 1.0
    return min(1.0, max(tail, 2.0 ** (1 - int(times.sum()))))


def _random_signs(steps: np.ndarray, seed: int, draws: int = 20_000) -> float:
    """The same share of random signs, with the signs there are as one of them."""
    rng = np.random.default_rng(seed)
    sums = np.array([abs(steps @ rng.choice((-1, 1), len(steps))) for _ in range(draws)])
    seen = abs(steps.sum()) - 1e-9 * np.abs(steps).sum()  # ties are as far, whatever their rounding
    return float((1 + (sums >= seen).sum()) / (1 + draws))
