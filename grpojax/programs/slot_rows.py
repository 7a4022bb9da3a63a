"""Which sample a slot draws: rows of slots, each with the prompt that it reads, and the samples that wait.

All functions are of one lane: prompts, rows and samples are counted inside of it, and nothing of another lane is known.
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
    """R rows of S slots each, and what is left for them.

    Attributes:
      prompt: ``[R]`` int32, the prompt of a row; P where it has had none.
      length: ``[R]`` int32, of that prompt.
      waiting: ``[P]`` int32, the next sample of each prompt to start.
      sample: ``[R, S]`` int32, sample in the slot; G when none is.
      count: ``[R, S]`` int32, tokens drawn so far of that sample; the last of them is not yet in the cache.
      token: ``[R, S]`` int32, the last of them.
      key: ``[R, S]`` key of that sample.
      active: ``[R, S]`` bool, the sample wants another token.
    """

    prompt: Array
    length: Array
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
    """Gives each free slot the next waiting sample of its row's prompt, whose first token is known.

    Rows that read the same prompt share its samples, the first row first.
    """
    n_prompts, group = known.first.shape
    free = ~s.active
    mine = s.prompt < n_prompts
    prompt = jnp.minimum(s.prompt, n_prompts - 1)
    rows = jnp.arange(len(prompt))
    shared = (prompt[:, None] == prompt) & (rows < rows[:, None])
    before = jnp.where(shared, free.sum(1, dtype=jnp.int32), 0).sum(1, dtype=jnp.int32)
    take = (s.waiting[prompt] + before)[:, None] + jnp.cumsum(free, 1, dtype=jnp.int32) - 1
    taken = free & (take < group) & mine[:, None]
    of = prompt[:, None], jnp.minimum(take, group - 1)
    return dataclasses.replace(
        s,
        waiting=s.waiting.at[prompt].add(taken.sum(1, dtype=jnp.int32)),
        sample=jnp.where(taken, take, jnp.where(s.active, s.sample, group)),
        count=jnp.where(taken, 1, s.count),
        token=jnp.where(taken, known.first[of], s.token),
        key=jnp.where(taken, known.keys[of], s.key),
        active=jnp.where(taken, ~known.ended[of], s.active),
    )


def wants(s: Slots, group: int, most: int, *, shared: bool) -> Array:
    """``[R]`` int32, what each row is to do next: tokens of its longest sample that wants another, at least 1 while
    its prompt has samples left; 0 when it has nothing to do; ``most + 1`` when it is to take over another prompt, which
    only rows of ``shared`` prompts do."""
    n_prompts = len(s.waiting)
    left = jnp.append(s.waiting < group, False)
    longest = jnp.where(s.active, s.count, 0).max(1)
    idle = jnp.where(left.any(), most + 1, 0) if shared else 0
    return jnp.where(longest > 0, longest, jnp.where(left[jnp.minimum(s.prompt, n_prompts)], 1, idle))


def take_prompt(known: Waiting, s: Slots, most: int, held: Any, prompts: Any) -> tuple[Slots, Any]:
    """Has one row that `wants` it take over the prompt with most samples left: its keys and values are moved in.

    Args:
      known, s: the samples.
      most: longest completion.
      held: trees of arrays ``[R, ...]``, what rows have of their prompts.
      prompts: the same of all prompts, ``[P, ...]``.

    Returns:
      ``(slots, held)``; as they were where no row wants one.
    """
    group = known.first.shape[1]
    idle = wants(s, group, most, shared=True) > most
    row, prompt = jnp.argmax(idle), jnp.argmin(s.waiting).astype(jnp.int32)
    row = jnp.where(idle[row], row, len(idle))  # out of range: nothing is written

    def move(into, of):
        one = jax.lax.dynamic_index_in_dim(of, prompt, keepdims=True)
        at = jnp.minimum(row, len(idle) - 1)
        kept = jax.lax.dynamic_index_in_dim(into, at, keepdims=True)
        return jax.lax.dynamic_update_index_in_dim(into, jnp.where(row < len(idle), one, kept), at, 0)

    s = dataclasses.replace(
        s,
        prompt=s.prompt.at[row].set(prompt, mode="drop"),
        length=s.length.at[row].set(known.lengths[prompt], mode="drop"),
    )
    return refill(known, s), jax.tree.map(move, held, prompts)


def record(out: Array, value: Array, prompt: Array, *at: Array) -> Array:
    """Writes ``value [R, S]`` into ``out [P, ...]`` at ``prompt [R]`` and indices ``[R, S]``; what is out of range is
    left out."""
    return out.at[(jnp.broadcast_to(prompt[:, None], value.shape), *at)].set(value, mode="drop")
