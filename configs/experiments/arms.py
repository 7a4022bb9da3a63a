"""Placebos of the experiments, as variants of one's own: what they do to groups that fail has no direction.

In a recipe or a sweep, from the folder of the checkout: ``configs.experiments.arms:placebo``.
"""

import dataclasses
import zlib

import jax.numpy as jnp
import numpy as np

from grpojax import advantages as A
from grpojax import losses as L
from grpojax import masked
from grpojax.run.parts.part import Declared, Part
from grpojax.variants import GroupNormalised, group_normalised, published

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


@published(needs=(CHANCE,), equal_groups=True, control={"name": "negative_advantage", "c": 0.0})
class placebo(GroupNormalised):
    """`negative_advantage` with random signs: advantages of the same size, whose mean in a group is 0.

    Attributes:
      c: size of the advantages.
      fail_reward: a sample fails if its outcome is at most this.
    """

    c: float = 1.0
    fail_reward: float = 0.0
    aggregate: L.Aggregation = "sequence_sum"

    def chain(self):
        signs = random_signs(self.c, self.fail_reward)
        return A.chain(*group_normalised(self.ddof, self.eps), signs, A.to_tokens())


@published(needs=("ground_truth", CHANCE), equal_groups=True, control={"name": "gt_likelihood"})
class permuted_likelihood(GroupNormalised):
    """`gt_likelihood` whose likelihoods are permuted in their group: the same rewards, each at a random sample.

    Attributes:
      groups, likelihood, relative_to, marker, include_marker, missing, fail_reward: as in `gt_likelihood`.
    """

    groups: str = "all_fail"
    likelihood: str = "per_token"
    relative_to: str = "none"
    marker: str | None = None
    include_marker: bool = False
    missing: str = "append"
    fail_reward: float = 0.0
    aggregate: L.Aggregation = "sequence_sum"

    def chain(self):
        everywhere, relative = self.groups == "all", self.likelihood == "joint"
        own = A.likelihood_of_all_fail(self.fail_reward, everywhere=everywhere, relative=relative)

        @A.described
        def permuted_likelihood(reward):
            def shuffled(values, signals):
                mixed = permuted(signals.extra["chance"], jnp.asarray(signals.likelihood, jnp.float32))
                return reward(values, dataclasses.replace(signals, likelihood=mixed))

            return shuffled

        return A.chain(*self.steps(), reward=permuted_likelihood(own))
