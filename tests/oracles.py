"""What the oracles share: equality to rounding, and who counts in rewards ``[P, G]``, where NaN is a missing sample."""

import math

import numpy as np


def close(got, want, atol=1e-6, rtol=1e-5):
    """Asserts that two arrays are equal to float32 rounding, NaN nowhere."""
    got = np.asarray(got, np.float64)
    assert np.isfinite(got).all(), got
    np.testing.assert_allclose(got, np.broadcast_to(want, got.shape), rtol=rtol, atol=atol)


def std(numbers, ddof):
    if len(numbers) <= ddof:
        return 0.0
    mean = sum(numbers) / len(numbers)
    return math.sqrt(sum((x - mean) ** 2 for x in numbers) / (len(numbers) - ddof))


def valid_of(rewards, p):
    """The valid samples of a group."""
    return [g for g in range(len(rewards[p])) if np.isfinite(rewards[p][g])]


def live(rewards, p):
    return len({float(rewards[p][g]) for g in valid_of(rewards, p)}) > 1


def tokens_of(mask, p, g):
    return [t for t in range(len(mask[p][g])) if mask[p][g][t]]


def sample_means(x, mask):
    out = np.zeros(np.shape(mask)[:2])
    for p, g in np.ndindex(out.shape):
        numbers = [float(x[p][g][t]) for t in tokens_of(mask, p, g)]
        out[p, g] = sum(numbers) / max(len(numbers), 1)
    return out
