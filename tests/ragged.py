"""Random ragged input: samples missing (NaN), alone, without a token or in a group of equals; masks with holes."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

P, G, T, D, W, V = 3, 5, 7, 2, 11, 13

NAN = float("nan")

SEEDS = st.integers(0, 99999)

many = settings(max_examples=25)


def scores(rng):
    """``[P, G]`` quarters, with groups of equal ones, of fails, of one sample and of none; seldom a batch of one."""
    out = rng.integers(0, 6, (P, G)).astype(np.float32) / 4
    out[rng.random((P, G)) < 0.15] = NAN
    for p in range(P):
        match rng.integers(0, 8):
            case 0:
                out[p] = np.where(np.isfinite(out[p]), np.float32(0.1), np.float32(NAN))
            case 1:
                out[p] = np.minimum(out[p], 0.25)
            case 2:
                out[p, np.arange(G) != rng.integers(G)] = NAN
            case 3:
                out[p] = NAN
    if rng.random() < 0.1:
        out[np.arange(P * G).reshape(P, G) != rng.integers(P * G)] = NAN
    return out


def prefix(lengths, size=T):
    """``lengths`` tokens on the left of ``size`` places."""
    return np.arange(size) < np.asarray(lengths)[..., None]


def masks(rng, holes=True):
    mask = prefix(rng.integers(0, T + 1, (P, G)))
    return mask & (rng.random(mask.shape) < 0.75) if holes else mask


def on(mask, x):
    """Float32, NaN where there is no token."""
    return np.where(mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), x, NAN).astype(np.float32)
