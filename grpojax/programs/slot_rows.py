"""Which sample a slot draws: every prompt has a row of slots, and samples that wait for one of them.

All functions are of one lane: prompts and samples are counted inside of it, and nothing of another lane is known.
`by_lane` has all lanes of a mesh run one.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from grpojax.models.sharding import TRAIN, spec
from grpojax.types import Array, PerPrompt, Samples, pytree


@pytree
class Waiting:
    """What is known of every sample before it is decoded.

    Attributes:
      keys: ``[P, G]`` random keys.
      first: ``[P, G]`` int32, its first token.
      ended: ``[P, G]`` bool, whether that token ends it.
      lengths: ``[P]`` int32, of the prompts.
    """

    keys: Samples
    first: Samples
    ended: Samples
    lengths: PerPrompt


@pytree
class Slots:
    """S slots for each prompt, and the samples that wait for them.

    Attributes:
      waiting: ``[P]`` int32, the next sample of each prompt to start.
      sample: ``[P, S]`` int32, sample in the slot; G when none is.
      count: ``[P, S]`` int32, tokens drawn so far of that sample; the last of them is not yet in the cache.
      token: ``[P, S]`` int32, the last of them.
      key: ``[P, S]`` key of that sample.
      active: ``[P, S]`` bool, the sample wants another token.
    """

    waiting: PerPrompt
    sample: Array
    count: Array
    token: Array
    key: Array
    active: Array


def by_lane(f: Callable[..., Any], mesh: Mesh | None) -> Callable[..., Any]:
    """``f`` of arrays that all have a lane's part in front, run by every lane for itself."""
    if mesh is None:
        return f
    lane = spec(("lane",), TRAIN)
    return jax.shard_map(f, mesh=mesh, in_specs=lane, out_specs=lane)


def refill(known: Waiting, s: Slots) -> Slots:
    """Gives each free slot the next waiting sample of its prompt, whose first token is known."""
    n_prompts, group = known.first.shape
    free = ~s.active
    take = s.waiting[:, None] + jnp.cumsum(free, 1, dtype=jnp.int32) - 1
    taken = free & (take < group)
    of = jnp.arange(n_prompts)[:, None], jnp.minimum(take, group - 1)
    return dataclasses.replace(
        s,
        waiting=s.waiting + taken.sum(1, dtype=jnp.int32),
        sample=jnp.where(taken, take, jnp.where(s.active, s.sample, group)),
        count=jnp.where(taken, 1, s.count),
        token=jnp.where(taken, known.first[of], s.token),
        key=jnp.where(taken, known.keys[of], s.key),
        active=jnp.where(taken, ~known.ended[of], s.active),
    )


def longest(s: Slots, group: int) -> Array:
    """``[1]`` int32: tokens of the longest sample that wants another, at least 1 while any is left to draw, else 0."""
    return jnp.maximum(jnp.where(s.active, s.count, 0).max(), (s.waiting < group).any().astype(jnp.int32))[None]


def record(out: Array, value: Array, *at: Array) -> Array:
    """Writes ``value [P, S]`` into ``out [P, ...]`` at indices ``[P, S]``; what is out of range is left out."""
    prompt = jnp.arange(len(out))[:, None]
    return out.at[(jnp.broadcast_to(prompt, value.shape), *at)].set(value, mode="drop")
