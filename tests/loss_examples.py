"""Ragged samples with log-probs and advantages for the loss, and objectives to try."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from ragged import prefix

from grpojax import losses as L
from grpojax.types import pytree

P, G, T = 3, 5, 7
NAN = float("nan")
HOW = {
    "token_mean": {},
    "sequence_mean": {},
    "prompt_mean": {},
    "sequence_sum": {},
    "constant": {"constant": 8.0},
}
OBJECTIVES = {
    "policy": L.Objective(),
    "k2": L.Objective(kl_coef=0.3, kl_kind="k2"),
    "k3": L.Objective(kl_coef=0.3),
    "unbiased": L.Objective(kl_coef=0.3, kl_kind="unbiased"),
    "k1 in the reward": L.Objective(kl_coef=0.3, kl_kind="k1", kl_in="reward"),
    "entropy": L.Objective(entropy_coef=0.2),
    "all": L.Objective(surrogate=L.clipped(low=0.1, high=0.3), kl_coef=0.3, kl_kind="k2", entropy_coef=-0.2),
}


@pytree
class Batch:
    """What `policy_loss` reads of a batch."""

    weights: jax.Array
    advantages: jax.Array
    old_logps: jax.Array | None = None
    ref_logps: jax.Array | None = None


READ = {
    "advantages",
    "weights",
    "old_logps",
    "ref_logps",
    "sampler_logps",
    "displacement_weights",
    "covariance_mask",
    "actions",
}


def arrays(batch, names=READ):
    """What a batch has of the arrays of `policy_loss`, by the names of its arguments."""
    return {name: getattr(batch, name) for name in {*names, "old_logps"} if hasattr(batch, name)}


def covariance_mask(key, logps, batch, objective):
    names = {"advantages", "weights", "sampler_logps"}
    return L.covariance_mask(key, logps, objective=objective, **arrays(batch, names))


@functools.cache
def weigh(how, count_empty=True):
    return jax.jit(lambda mask: L.loss_weights(mask, how, count_empty=count_empty, **HOW[how]))


def example(seed=0, how="sequence_mean", lengths=None):
    """Log-probs, batch and entropy of ragged samples, two of them empty; ratios beyond both bounds."""
    rng = np.random.default_rng(seed)
    if lengths is None:
        lengths = rng.integers(1, T + 1, (P, G))
        lengths[0, 1] = lengths[2, 4] = 0
    mask = prefix(lengths)

    def normal(scale):
        return rng.normal(size=mask.shape, scale=scale).astype(np.float32)

    logps = normal(0.5) - 2
    advantages = np.broadcast_to(rng.normal(size=(*mask.shape[:2], 1)), mask.shape).astype(np.float32)
    batch = Batch(
        weights=np.asarray(weigh(how)(mask)),
        advantages=advantages,
        old_logps=logps + normal(0.3),
        ref_logps=logps + normal(0.5),
    )
    return logps, batch, np.abs(normal(1.0))


@functools.cache
def compiled(objective):
    """``(logps, batch, entropy) -> (loss, metrics), (d loss/d logps, d loss/d entropy)``."""

    def loss(logps, batch, entropy):
        return L.policy_loss(logps, objective=objective, **arrays(batch), entropy=entropy)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 2), has_aux=True))


DELTA = np.array([0.3, -0.3, 0.1, -0.05], np.float32)
LENGTHS = st.lists(st.integers(0, T), min_size=P * G, max_size=P * G).map(lambda n: np.reshape(n, (P, G)))
LOGITS = jnp.array([0.2, -0.1, 0.4])
OLD = np.array([-1, -2, -0.5, -1.5], np.float32)
OTHER = jax.nn.log_softmax(jnp.array([0.5, 0.1, 0.0]))  # an older policy that drew the tokens
MASK4 = np.ones(4, bool)
SURROGATES = {
    "clipped": L.clipped(low=0.2, high=0.2),
    "dual": L.clipped(low=0.2, high=0.2, dual=1.2),
    "unclipped": L.unclipped(),
    "reinforce": L.reinforce(),
    "cispo": L.cispo(weight_max=1.28),
    "cispo capped": L.cispo(weight_max=5.0),
    "sapo": L.soft_adaptive(),
    "gmpo": L.geometric(low=0.2, high=0.2),
}
WIDE = L.clipped(low=1.0, high=9.0)
LEVELS = {
    "token": None,
    "sequence": None,
    "sequence_token": None,
    "trace": 0.9,
    "trace_both": 0.8,
    "own": None,
}


def four_tokens(advantage):
    """One sample of four tokens that `OLD` drew, all of the same weight."""
    return Batch(
        weights=L.loss_weights(MASK4[None, None], "token_mean"),
        advantages=jnp.full((1, 1, 4), float(advantage)),
        old_logps=OLD[None, None],
    )
