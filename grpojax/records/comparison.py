"""Statistics over few runs: paired tests over seeds, several comparisons at once, and what could have been seen."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

# Up to so many pairs every choice of signs is counted; beyond, so many random ones are.
_EXACT, _DRAWS = 16, 20_000


def _signs(n: int, seed: int = 0) -> np.ndarray:
    """Choices of signs of n differences, ``[choices, n]``: all of them or random ones, up to the sign of the whole.

    The first row has no sign changed.
    """
    if n <= _EXACT:
        rest = np.array(list(itertools.product((1.0, -1.0), repeat=n - 1))).reshape(2 ** (n - 1), n - 1)
        return np.concatenate([np.ones((len(rest), 1)), rest], 1)
    drawn = np.random.default_rng(seed).choice((1.0, -1.0), (_DRAWS, n))
    return np.concatenate([np.ones((1, n)), drawn * drawn[:, :1]])


def sign_flip(differences: ArrayLike) -> float:
    """The two-sided p-value of "these paired differences have either sign by chance alone".

    The share of all choices of signs with a mean at least as far from 0: exact up to 16 pairs, of 20000 random choices
    beyond. No normal limit is behind it, and n pairs never give less than ``2 / 2^n``.

    Args:
      differences: ``[n]``, such as one method less another, a seed each.

    Example:
      >>> sign_flip([0.1, 0.2, 0.1, 0.3, 0.2]), sign_flip([0.1, -0.1])
      (0.0625, 1.0)
    """
    d = np.asarray(differences, np.float64)
    if d.ndim != 1 or not len(d) or not np.isfinite(d).all():
        raise ValueError(f"differences of shape {d.shape}: needs [n] finite numbers")
    sums = np.abs(_signs(len(d)) @ d)
    return float(np.mean(sums >= sums[0] - 1e-9 * np.abs(d).sum()))  # ties are as far, whatever their rounding


def smallest_shown(differences: ArrayLike, level: float = 0.05) -> float | None:
    """The mean difference from which on `sign_flip` would have been at most ``level``, were the scatter the same.

    The differences less their mean are what the seeds scatter by; shifted by ``δ`` in the direction that was seen, a
    choice of signs s is as extreme as none as long as ``δ <= max(Σ s r / (n - Σ s), -Σ s r / (n + Σ s))``, so the
    answer is one of these bounds. A true difference of that size is still missed about every second time.

    Returns:
      The bound; None where no difference at all would do, since ``2 / 2^n`` is over ``level``.

    Example:
      >>> smallest_shown([0.1, 0.2, 0.3]) is None, round(smallest_shown([0.1, 0.2, 0.3], level=0.5), 3)
      (True, 0.05)
    """
    d = np.asarray(differences, np.float64)
    signs = _signs(len(d))
    residuals = (d - d.mean()) * (-1.0 if d.mean() < 0 else 1.0)
    moved = signs[np.abs(signs.sum(1)) < len(d)]
    same = len(signs) - len(moved)
    may_count = math.floor(level * len(signs) * (1 + 1e-12)) - same
    if may_count < 0:
        return None
    sums, total = moved @ residuals, moved.sum(1)
    bounds = np.sort(np.maximum(sums / (len(d) - total), -sums / (len(d) + total)))[::-1]
    return float(max(0.0, bounds[may_count])) if may_count < len(bounds) else 0.0


def seeds_needed(comparisons: int, level: float = 0.05) -> int:
    """The fewest common seeds with which one of so many comparisons can pass Holm's correction.

    Example:
      >>> seeds_needed(1), seeds_needed(3)
      (6, 7)
    """
    return math.ceil(1 + math.log2(max(1, comparisons) / level))


def holm(ps: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm 1979): the chance of any false one among them stays under the level.

    The i-th smallest of m is multiplied by ``m - i + 1``, and none is less than the one before it.

    Example:
      >>> [round(p, 3) for p in holm([0.04, 0.01, 0.03])]
      [0.06, 0.03, 0.06]
    """
    corrected, least = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        least = max(least, min(1.0, (len(ps) - rank) * ps[i]))
        corrected[i] = least
    return corrected
