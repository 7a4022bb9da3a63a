"""Chains of `center` and `scale`, rewards with holes, and the masks that go with them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from grpojax import advantages as A

P, G, T = 3, 5, 7

NAN = float("nan")

# How a chain of `center` and `scale` is put together; what is left out is the oracle's default.
CASES = {
    "as it comes": {"center": "none"},
    "mean": {},
    "leave one out": {"leave_one_out": True},
    "std, ddof 0": {"scale": "group", "ddof": 0, "eps": 1e-6},
    "std, ddof 1": {"scale": "group"},
    "std of advantages": {"scale": "group", "of": "advantages"},
    "std without a mean": {"center": "none", "scale": "group"},
    "batch mean": {"center": "batch"},
    "batch std of rewards": {"scale": "batch", "ddof": 0},
    "batch std of advantages": {"scale": "batch", "of": "advantages"},
    "batch mean and std": {"center": "batch", "scale": "batch", "leave_one_out": True},
}


def build(center="group", leave_one_out=False, scale="none", of="rewards", ddof=1, eps=1e-4):
    return A.chain(A.center(center, leave_one_out=leave_one_out), A.scale(scale, of=of, ddof=ddof, eps=eps))


@functools.cache
def compiled(case):
    return jax.jit(build(**CASES[case]))


def rewards_and_holes(seed=0):
    """Rewards with a missing one, a group of equal ones and none that is missing whole."""
    rewards = np.random.default_rng(seed).integers(0, 5, (P, G)).astype(np.float32) / 4
    rewards[1] = 0.1
    rewards[2, 3] = NAN
    return rewards


def run(*transforms, rewards, reward=None, **signals):
    """A chain on rewards, compiled."""
    signals = A.Signals(**{name: jnp.asarray(x) for name, x in signals.items()})
    return jax.jit(A.chain(*transforms, reward=reward))(jnp.asarray(rewards, jnp.float32), signals)


REWARD = st.sampled_from([0.0, 0.1, 0.95, 1.0, NAN]) | st.integers(-200, 200).map(lambda n: n / 100)
