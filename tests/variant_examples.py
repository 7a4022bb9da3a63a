"""Any variant by its name, its advantages on tokens, and inputs for all of them."""

import jax
import numpy as np

from grpojax import advantages as A
from grpojax import variants
from grpojax.types import pytree

P, G, T, D, W = 8, 5, 7, 2, 11
NAN = float("nan")

REQUIRED = {"distill": {"teacher": "folder"}, "dr_grpo": {"constant": 8.0}}


def built(name, **options):
    """The variant, with what it must be given."""
    return variants.get(name, **REQUIRED.get(name, {}), **options)


def in_core(name):
    """Whether a run needs no extension for this variant: its own filter and the entropy are in the core."""
    return set(built(name).needs) <= {"culling", "entropy"}


def on_tokens(name, rewards, size=1, options=None, **signals):
    """Advantages of a batch whose samples all have ``size`` tokens (or those of ``mask``)."""
    rewards = np.asarray(rewards, np.float32)
    signals = {"mask": np.ones((*rewards.shape, size), bool)} | signals
    return jax.jit(variants.get(name, **(options or {})).advantage)(rewards, A.Signals(**signals))


@pytree
class Inputs:
    """All that any variant reads: rewards ``[P, G]``, signals, and the policy's and the sampler's log-probs."""

    rewards: jax.Array
    signals: A.Signals
    logps: jax.Array
    sampler_logps: jax.Array


def example(seed=0, prompts=P, size=T):
    """Ragged samples, some empty, some without a reward; groups that are mixed, all right, all wrong."""
    rng = np.random.default_rng(seed)
    rewards = rng.integers(0, 2, (prompts, G)).astype(np.float32)
    rewards[0], rewards[1], rewards[2] = [1, 0, 0, 1, 0], 1.0, 0.0
    rewards[4, 2] = NAN
    rewards[5] = [0.3, 0.4, 0.3, 0.4, 0.6]  # two at the mean: rounding must not give them a sign
    lengths = rng.integers(1, T + 1, (prompts, G)).astype(np.int32)
    lengths[3, 1] = 0
    shape = (prompts, G, T)
    mask = np.arange(size) < lengths[..., None]

    def wide(x):
        out = np.zeros((prompts, G, size, *x.shape[3:]), x.dtype)
        out[:, :, :T] = x
        return out

    def normal(*tail):
        return rng.normal(size=(*shape, *tail)).astype(np.float32)

    behavior = -np.abs(normal())
    probs = rng.dirichlet(np.ones(W + 1), shape)[..., :W].astype(np.float32)
    steps = np.where(rng.random(shape) < 0.3, rng.random(shape), NAN).astype(np.float32)
    logps = behavior + 0.3 * normal()
    signals = A.Signals(
        lengths=lengths, mask=mask, behavior_logps=wide(behavior), entropy=wide(np.abs(normal())),
        tokens=wide(rng.integers(0, 3, shape).astype(np.int32)), token_bias=wide(normal()), step_rewards=wide(steps),
        ref_logps=wide(behavior + 0.2 * normal()), max_logps=wide(-0.1 * np.abs(normal())), values=wide(normal()),
        proxy_ratios=wide(1 + 0.1 * normal()),
        greedy_rewards=rng.integers(0, 2, prompts).astype(np.float32),
        likelihood=rng.random((prompts, G)).astype(np.float32), hidden=wide(normal(D)), probs=wide(probs),
        columns=wide(rng.integers(0, W, shape).astype(np.int32)),
    )  # fmt: skip
    return Inputs(rewards=rewards, signals=signals, logps=wide(logps), sampler_logps=wide(behavior + 0.1 * normal()))
