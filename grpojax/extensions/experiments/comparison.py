"""Statistics over few seeds: t intervals, paired tests of a difference and of equivalence, and verdicts.

Each seed has one value, such as a run's accuracy on the test set. ``docs/statistics.md`` says how often the intervals
hold and how often the verdicts are false.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

LEVEL = 0.05  # the chance that any verdict of a report is false
BETTER, WORSE, EQUIVALENT, OPEN = "better", "worse", "equivalent", "inconclusive"
DESCRIBED = "described, not tested"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of the paired differences of two methods, in units of the metric.

    Attributes:
      difference: the mean.
      low, high: the 95 % interval of the mean (`t_interval`), not corrected; None if there is none.
      p: p-value of "the mean difference is 0" (`p_difference`); None with fewer than two seeds.
      p_equivalent: p-value of "the mean difference is the margin or more" (`p_equivalent`); None also without a margin.
      p_corrected, p_equivalent_corrected: the same p-values, corrected over all comparisons (`holm`).
      shown: the smallest mean difference that would have been significant with this spread and this number of
        comparisons. About half of the time, a true difference of that size is missed. None without a spread.
      verdict: `BETTER`, `WORSE`, `EQUIVALENT` or `OPEN`. A difference that is significant and smaller than the margin
        is `EQUIVALENT`, since only a difference of at least the margin counts. `DESCRIBED` if the comparison is outside
        of the family.
    """

    difference: float
    low: float | None
    high: float | None
    p: float | None
    p_equivalent: float | None
    p_corrected: float | None = None
    p_equivalent_corrected: float | None = None
    shown: float | None = None
    verdict: str = OPEN


def t_interval(values: ArrayLike, confidence: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Student's interval of the mean of a few values: ``mean ± t(n - 1) sd / √n`` (Student 1908).

    Args:
      values: ``[..., n]``; in a comparison, these are the differences of two methods seed by seed.
      confidence: the share of such intervals that contain the true mean, if the values are normal.

    Returns:
      Lower and upper bounds, ``[...]``. NaN with fewer than two values, and if all values are the same: these say
      nothing about the spread.

    Example:
      >>> low, high = t_interval([0.40, 0.44, 0.42])
      >>> round(float(low), 3), round(float(high), 3)
      (0.37, 0.47)
    """
    x = np.asarray(values, np.float64)
    error = _standard_error(x)
    half = np.where(error > 0, special.stdtrit(max(1, x.shape[-1] - 1), (1 + confidence) / 2) * error, np.nan)
    return x.mean(-1) - half, x.mean(-1) + half


def p_difference(differences: ArrayLike) -> float:
    """Two-sided p-value of "the mean of these paired differences is 0", by the paired t test.

    Args:
      differences: ``[n]``, such as one method minus another for each seed; at least two.

    Example:
      >>> round(p_difference([0.1, 0.2, 0.3]), 4)
      0.0742
    """
    return min(1.0, 2 * min(_p_over(differences, 0.0), _p_over(-np.asarray(differences, np.float64), 0.0)))


def p_equivalent(differences: ArrayLike, margin: float) -> float:
    """p-value of "the mean difference is the margin or more, in either direction".

    Two one-sided t tests (TOST; Schuirmann 1987): the larger p-value of "it is at most -margin" and "it is at least
    margin". A small p-value shows that two methods are the same up to the margin. A large one shows nothing.

    Args:
      differences: ``[n]``, at least two.
      margin: the margin, over 0.

    Example:
      >>> round(p_equivalent([0.01, -0.01, 0.0], 0.05), 4)
      0.0065
    """
    if not margin > 0:
        raise ValueError(f"margin={margin}: must be over 0")
    d = np.asarray(differences, np.float64)
    return max(_p_over(d, -margin), _p_over(-d, -margin))


def _p_over(differences: ArrayLike, bound: float) -> float:
    """One-sided p-value of "the mean is at most the bound".

    The t test divides by the spread. If all n differences are the same, the spread is 0, and p is that of the sign test
    instead: ``2^-n`` if they lie over the bound. Otherwise two equal differences would prove anything.
    """
    d = np.asarray(differences, np.float64)
    if d.ndim != 1 or len(d) < 2 or not np.isfinite(d).all():
        raise ValueError(f"differences of shape {d.shape}: needs [n] finite numbers, at least two")
    error, over = float(_standard_error(d)), float(d.mean()) - bound
    if error == 0:
        return 2.0 ** -len(d) if over > 1e-12 else 1.0
    return float(special.stdtr(len(d) - 1, -over / error))


def _standard_error(x: np.ndarray) -> np.ndarray:
    """Standard error of the mean over the last axis; 0 if all values are equal up to rounding, NaN for one value."""
    n = x.shape[-1]
    if n < 2:
        return np.full(x.shape[:-1], np.nan)
    sd = x.std(-1, ddof=1)
    return np.where(sd <= 1e-12 + 1e-9 * np.abs(x).max(-1), 0.0, sd) / math.sqrt(n)


def holm(ps: Sequence[float], most_true: int | None = None) -> list[float]:
    """p-values corrected for their number (Holm 1979): the chance that any of them is falsely significant stays under
    the level.

    The i-th smallest of m p-values is multiplied by ``m - i + 1``, and no result is less than the one before it.

    Args:
      ps: the p-values.
      most_true: how many of the m hypotheses can be true at once, if that is fewer than m. Then no factor is larger
        than this number (Shaffer 1986).

    Example:
      >>> [round(p, 3) for p in holm([0.04, 0.01, 0.03])]
      [0.06, 0.03, 0.06]
    """
    corrected, least = [0.0] * len(ps), 0.0
    most = len(ps) if most_true is None else most_true
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        least = max(least, min(1.0, min(most, len(ps) - rank) * ps[i]))
        corrected[i] = least
    return corrected


def verdicts(
    differences: Sequence[ArrayLike], margin: float | None = None, family: Sequence[bool] | None = None
) -> list[Verdict]:
    """The verdicts of a report, corrected over all its comparisons, or over a family of them.

    The chance that any of them is false is at most `LEVEL`. A comparison has two hypotheses, "no difference" and "the
    margin or more". At most one of them is true, so they are corrected together, by the number of comparisons.

    Args:
      differences: ``[n]`` for each comparison: the method minus the other one, for each seed. n is at least one and may
        differ between comparisons.
      margin: differences within it count as none. Without one nothing is called equivalent.
      family: which comparisons were chosen for a test before the runs; None for all. The others have a difference and
        an interval, but no p-value and no verdict, and so do not count in the correction.

    Example:
      >>> found = verdicts([[0.11, 0.12, 0.10, 0.11], [0.001, -0.002, 0.0, 0.001], [0.1, -0.1]], margin=0.02)
      >>> [v.verdict for v in found]
      ['better', 'equivalent', 'inconclusive']
    """
    each = [np.asarray(d, np.float64) for d in differences]
    inside = [True] * len(each) if family is None else family
    found = [_uncorrected(d, margin) if i else _described(d) for d, i in zip(each, inside, strict=True)]
    tested = [i for i, v in enumerate(found) if v.p is not None]
    ps = [p for v in found for p in (v.p, v.p_equivalent) if p is not None]
    corrected = iter(holm(ps, len(tested)))
    for i in tested:
        v = dataclasses.replace(found[i], p_corrected=next(corrected))
        if v.p_equivalent is not None:
            v = dataclasses.replace(v, p_equivalent_corrected=next(corrected))
        error, n = float(_standard_error(each[i])), len(each[i])
        shown = special.stdtrit(n - 1, 1 - LEVEL / 2 / len(tested)) * error if error > 0 else None
        found[i] = dataclasses.replace(v, shown=shown and float(shown), verdict=_verdict(v))
    return found


def _described(d: np.ndarray) -> Verdict:
    low, high = (None if math.isnan(x) else float(x) for x in t_interval(d))
    return Verdict(difference=float(d.mean()), low=low, high=high, p=None, p_equivalent=None, verdict=DESCRIBED)


def _uncorrected(d: np.ndarray, margin: float | None) -> Verdict:
    several = len(d) > 1
    return dataclasses.replace(
        _described(d),
        p=p_difference(d) if several else None,
        p_equivalent=p_equivalent(d, margin) if several and margin is not None else None,
        verdict=OPEN,
    )


def _verdict(v: Verdict) -> str:
    if v.p_equivalent_corrected is not None and v.p_equivalent_corrected <= LEVEL:
        return EQUIVALENT
    if v.p_corrected is not None and v.p_corrected <= LEVEL:
        return BETTER if v.difference > 0 else WORSE
    return OPEN
