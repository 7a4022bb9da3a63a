"""Placebos of the experiments, as variants of one's own: what they do to groups that fail has no direction.

In a recipe or a sweep, from the folder of the checkout: ``configs.experiments.arms:placebo``.
"""

import dataclasses
import zlib

import jax.numpy as jnp
import numpy as np

from grpojax import advantages as A
from grpojax import masked, variants
from grpojax.run.parts.part import Declared, Part
from grpojax.variants.registry import group_normalised

CHANCE = f"{__name__}:Chance"


class Chance(Part):
    """A random number for each sample."""

    signals = {"chance": Declared("P G", "a random number for each sample")}

    def after(self, networks, batch, counted):
        # It depends only on the step's samples, so that a resumed run, or one on other devices, draws the same.
        seed = zlib.crc32(np.ascontiguousarray(batch.rollout.tokens).tobytes())
        return {"chance": np.random.default_rng(seed).random(counted.shape, np.float32)}, {}


def rank(chance, counts):
    """``[P, G]``: how many samples of the group that count have a smaller number."""
    others = jnp.where(counts, chance, jnp.inf)[:, None, :]
    return (others < chance[:, :, None]).sum(-1)


@A.described
def random_signs(c: float, fail_reward: float = 0.0):
    """Where all samples of a group fail, ``A = c`` for a random half of them, and ``-c`` for the others.

    Of an odd number of samples one has 0.
    """

    def transform(values, signals=None):
        values, signals = A.per_sample(values, signals, "random_signs")
        failed = masked.all_fail(A.need(signals, "outcome", "random_signs"), signals.valid, fail_reward)
        place = 2 * rank(signals.extra["chance"], signals.valid) + 1 - signals.valid.sum(1, keepdims=True)
        return jnp.where(failed[:, None] & signals.valid, c * jnp.sign(place).astype(jnp.float32), values)

    return transform


def permuted(chance, likelihood):
    """The likelihoods ``[P, G]`` that are finite, each at the place of a random one of its group."""
    known = jnp.isfinite(likelihood)
    drawn = jnp.argsort(jnp.where(known, chance, jnp.inf), axis=1)  # those that are known first
    places = jnp.argsort(jnp.argsort(~known, axis=1, stable=True), axis=1)
    return jnp.take_along_axis(jnp.take_along_axis(likelihood, drawn, 1), places, 1)


@variants.published(
    needs=(CHANCE,),
    equal_groups=True,
    aggregate="sequence_sum",
    control={"name": "negative_advantage", "c": 0.0},
)
def placebo(*, c: float = 1.0, fail_reward: float = 0.0, ddof: int = 1, eps: float = 1e-4):
    """`negative_advantage` with random signs: advantages of the same size, whose mean in a group is 0."""
    return A.chain(*group_normalised(ddof, eps), random_signs(c, fail_reward), A.to_tokens())


@variants.published(
    needs=("ground_truth", CHANCE),
    equal_groups=True,
    aggregate="sequence_sum",
    control={"name": "gt_likelihood"},
)
def permuted_likelihood(
    *,
    groups: str = "all_fail",
    likelihood: str = "per_token",
    marker: str | None = None,
    include_marker: bool = False,
    missing: str = "append",
    fail_reward: float = 0.0,
    ddof: int = 1,
    eps: float = 1e-4,
):
    """`gt_likelihood` whose likelihoods are permuted in their group: the same rewards, each at a random sample."""
    reward = A.likelihood_of_all_fail(fail_reward, everywhere=groups == "all", relative=likelihood == "joint")

    def shuffled(values, signals):
        mixed = permuted(signals.extra["chance"], jnp.asarray(signals.likelihood, jnp.float32))
        return reward(values, dataclasses.replace(signals, likelihood=mixed))

    return A.chain(*group_normalised(ddof, eps), A.to_tokens(), reward=shuffled)
