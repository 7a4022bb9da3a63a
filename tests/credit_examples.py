"""Signals for credit, with NaN on padding; and the worked example of NTHR."""

import numpy as np
from ragged import on, prefix

from grpojax import advantages as A

P, G, T, D, W = 3, 5, 7, 2, 11
NAN = float("nan")


def nthr_data():
    """The worked example: two right samples of two and one tokens, a wrong one of two."""
    probs = np.full((1, 3, 2, 4), NAN, np.float32)
    hidden = np.full((1, 3, 2, 2), NAN, np.float32)
    probs[0, 0], hidden[0, 0] = [[0.5, 0.2, 0.2, 0.1], [0.1, 0.6, 0.2, 0.1]], [[1, 0], [0, 1]]
    probs[0, 1, 0], hidden[0, 1, 0] = [0.4, 0.3, 0.2, 0.1], [1, 1]
    probs[0, 2], hidden[0, 2] = [[0.5, 0.2, 0.2, 0.1], [0.1, 0.4, 0.3, 0.2]], [[1, 0], [0, 1]]
    columns = np.array([[[0, 1], [0, -1], [0, 2]]], np.int32)
    return {"probs": probs, "hidden": hidden, "columns": columns, "mask": prefix([[2, 1, 2]], 2)}


def example(seed):
    rng = np.random.default_rng(seed)
    mask = prefix(rng.integers(0, T + 1, (P, G)))
    rewards = rng.integers(0, 2, (P, G)).astype(np.float32)
    rewards[rng.random((P, G)) < 0.15] = NAN
    probs = rng.dirichlet(np.ones(W + 1), (P, G, T))[..., :W]
    return rewards, A.Signals(
        mask=mask, behavior_logps=on(mask, -rng.exponential(size=mask.shape)),
        entropy=on(mask, rng.exponential(size=mask.shape)), max_logps=on(mask, -0.1 * rng.random(mask.shape)),
        token_bias=on(mask, rng.normal(size=mask.shape)),
        tokens=rng.integers(0, 2, mask.shape).astype(np.int32), probs=on(mask, probs),
        hidden=on(mask, rng.normal(size=(P, G, T, D))), columns=rng.integers(-1, W, mask.shape).astype(np.int32),
    )  # fmt: skip
