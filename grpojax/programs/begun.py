"""Samples that a rollout leaves unfinished for the next one, and how that goes on with them: partial rollouts.

A rollout ends as soon as few enough samples want another token. The next one reads what these have so far at once, as a
prompt is read, and draws on under its own weights (partial rollouts of Kimi k1.5, arXiv:2501.12599; APRIL,
arXiv:2509.18521). Every sample has a slot of its own, in the row of its prompt.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from grpojax.host.errors import UserError
from grpojax.models import decoder as dec
from grpojax.models import quantised
from grpojax.models.compute import Compute
from grpojax.models.decoder import Decoder
from grpojax.models.sharding import TRAIN, spec
from grpojax.programs import slot_cache
from grpojax.programs.slot_cache import Ring
from grpojax.programs.slot_rows import Slots, Waiting, by_lane
from grpojax.types import Array, Prompts, Rollout, Samples, Scalar


def most_left(overlap: float, prompts: int, group: int, lanes: int) -> int:
    """Samples that a rollout leaves unfinished in a lane at most: a share of those that the lane has.

    Args:
      overlap: the share.
      prompts, group: of all lanes.
      lanes: batch shards.

    Raises:
      UserError: the prompts do not divide over the lanes, or the share is none of their samples.

    Example:
      >>> most_left(0.1, prompts=16, group=8, lanes=2), most_left(0.29, prompts=100, group=1, lanes=1)
      (6, 29)
    """
    if prompts % lanes:
        raise UserError(
            f"rollout.overlap={overlap:g} with rollout.prompts={prompts} over {lanes} batch shards: a group that goes "
            "on stays in its shard; make prompts a multiple of them, or set overlap=0"
        )
    samples = prompts * group // lanes
    if not (most := int(round(overlap * samples, 9))):
        raise UserError(
            f"rollout.overlap={overlap:g} of the {samples} samples of a batch shard is none: make it 1/{samples} or "
            "more, or 0"
        )
    return most


def unfinished(samples: Rollout) -> Samples:
    """``[P, G]`` bool: samples that were begun and want another token; of arrays of jax's or numpy's.

    Example:
      >>> import numpy as np
      >>> zero = np.zeros((1, 4, 3))
      >>> lengths, stopped = np.array([[0, 2, 2, 3]]), np.array([[False, False, True, False]])
      >>> unfinished(Rollout(tokens=zero, logps=zero, lengths=lengths, stopped=stopped)).tolist()
      [[False, True, False, False]]
    """
    return (samples.lengths > 0) & ~samples.stopped & (samples.lengths < samples.tokens.shape[-1])


def nothing_begun(prompts: int, group: int, tokens: int) -> Rollout:
    """Samples of which all are new, numpy ``[P, G, ...]``."""
    shape = prompts, group, tokens
    return Rollout(
        tokens=np.zeros(shape, np.int32),
        logps=np.zeros(shape, np.float32),
        lengths=np.zeros(shape[:2], np.int32),
        stopped=np.zeros(shape[:2], bool),
    )


class Tokens(NamedTuple):
    """Tokens that an earlier rollout drew, K samples of each lane.

    Attributes:
      kv: keys and values of their prompts and of what follows, ``[layers, K, N, Hkv, d]`` each.
      first: ``[K]`` int32, where in N a sample's own tokens begin.
      counts: ``[K]`` int32, how many it has; the last of them has no keys and values yet.
      slots: ``[K]`` int32, its slot of the lane, ``row * S + slot``.
      used: ``[1]`` int32, how many of the K there are.
    """

    kv: tuple[Array, Array]
    first: Array
    counts: Array
    slots: Array
    used: Array


def read(model: Decoder, prompts: Prompts, begun: Rollout, most: int, compute: Compute) -> Tokens:
    """Runs the unfinished samples of each lane, at most ``most`` of them, with their prompts in front."""
    longest = begun.tokens.shape[-1]

    def of_lane(prompts: Prompts, begun: Rollout):
        here = unfinished(begun).reshape(-1)
        slots = jnp.nonzero(here, size=most, fill_value=0)[0].astype(jnp.int32)
        used = jnp.minimum(here.sum(dtype=jnp.int32), most)
        prompt, there = slots // begun.lengths.shape[1], jnp.arange(most) < used
        first, counts = prompts.lengths[prompt], begun.lengths.reshape(-1)[slots]
        own = begun.tokens.reshape(-1, longest)[slots]
        at = jnp.arange(prompts.tokens.shape[1] + longest) - first[:, None]
        drawn = jnp.take_along_axis(own, jnp.clip(at, 0, longest - 1), 1)
        asked = jnp.pad(prompts.tokens[prompt], ((0, 0), (0, longest)))
        lengths = jnp.where(there, first + counts - 1, 1)
        return jnp.where(at < 0, asked, drawn), lengths, first, counts, slots, used[None]

    with jax.named_scope("read_begun"):
        tokens, lengths, *where = by_lane(of_lane, compute.mesh)(prompts, begun)
        _, kv = dec.run_prompts(model, tokens[:, None], lengths[:, None], compute)
    return Tokens((kv[0][:, :, 0], kv[1][:, :, 0]), *where)


def seated(known: Waiting, out: Rollout) -> Slots:
    """Every sample in its own slot, with its last token to be read next. Of one lane.

    Args:
      known: the samples' keys, and the prompts' lengths.
      out: what there is of them, at least a token each.
    """
    n_prompts, group = out.lengths.shape
    return Slots(
        waiting=jnp.full(n_prompts, group, jnp.int32),
        sample=jnp.broadcast_to(jnp.arange(group, dtype=jnp.int32), (n_prompts, group)),
        count=out.lengths,
        token=jnp.take_along_axis(out.tokens, (out.lengths - 1)[..., None], 2)[..., 0],
        key=known.keys,
        active=unfinished(out),
    )


def placed(
    tokens: Tokens, caches: Sequence[Any], group: int, ring: Ring, dtype: Any, compute: Compute
) -> tuple[Any, Any]:
    """The caches with which a loop begins at position 0: of a sample that was begun, the tokens before the newest one,
    which is yet to be written there, are the last positions of the ring.

    Args:
      tokens: what was `read`.
      caches: keys and values, empty (`grpojax.programs.slot_cache.empty`).
      group: slots of a row.
      ring, dtype: of the caches.
      compute: for the platform, and the mesh.
    """
    gpu, listed = slot_cache.on_gpu(compute), slot_cache.unrolls(compute)
    blocks, width = (1, ring.size) if gpu else ring

    def laid_out(x: Array, i: Scalar, tokens: Tokens, *, across: bool) -> Any:
        """One sample's ``[layers, blocks, Hkv, width, d]``, or with the last two axes in the other order, as stored."""
        at = jnp.arange(ring.size) - ring.size + tokens.counts[i] - 1  # which of its tokens each position has
        x = jax.lax.dynamic_index_in_dim(x, i, 1, keepdims=False)
        x = jnp.take(x, jnp.clip(tokens.first[i] + at, 0, x.shape[1] - 1), 1)
        x = jnp.where((at >= 0)[:, None, None], x, jnp.zeros((), x.dtype))
        x = x.reshape(x.shape[0], blocks, width, *x.shape[2:]).transpose((0, 1, 3, 4, 2) if across else (0, 1, 3, 2, 4))
        return quantised.stored(x, dtype, -2 if across else -1)

    def of_lane(tokens: Tokens, caches: tuple[Any, Any]) -> tuple[Any, Any]:
        def put(i: Scalar, caches: tuple[Any, Any]) -> tuple[Any, Any]:
            row, slot = jnp.divmod(tokens.slots[i], group)

            def into(cache: Array, new: Array) -> Array:
                at = (row, slot) if listed else (0, 0, row, 0, slot)
                new = jnp.expand_dims(new, (0, 1) if listed else (2, 4))
                return jax.lax.dynamic_update_slice(cache, new, (*at, *(0,) * (cache.ndim - len(at))))

            out = []
            for cache, x, across in zip(caches, tokens.kv, (not gpu, False), strict=True):
                new = laid_out(x, i, tokens, across=across)
                if listed:
                    new = [tuple(slot_cache.per_layer(layer, True)) for layer in slot_cache.per_layer(new, True)]
                out.append(jax.tree.map(into, cache, new))
            return out[0], out[1]

        if listed:
            return jax.lax.fori_loop(0, tokens.used[0], put, caches)
        apart = jax.tree.map(lambda x: x.reshape(*x.shape[:3], -1, group, *x.shape[4:]), caches)
        done = jax.lax.fori_loop(0, tokens.used[0], put, apart)
        return jax.tree.map(lambda x, like: x.reshape(like.shape), done, caches)

    if compute.mesh is not None:
        lane, of_kv = spec(("lane",), TRAIN), spec((None, "lane", None, "kv_heads"), TRAIN)
        held = spec(("lane", None, "kv_heads") if listed else (None, None, "lane", "kv_heads"), TRAIN)
        takes = Tokens((of_kv, of_kv), lane, lane, lane, lane), held
        of_lane = jax.shard_map(of_lane, mesh=compute.mesh, in_specs=takes, out_specs=held, check_vma=False)
    with jax.named_scope("place_begun"):
        return of_lane(tokens, (caches[0], caches[1]))


def take_up(
    model: Decoder,
    prompts: Prompts,
    begun: Rollout,
    known: Waiting,
    out: Rollout,
    most: int,
    ring: Ring,
    dtype: Any,
    compute: Compute,
) -> tuple[Slots, Any, Any, Rollout]:
    """A rollout as it starts: its slots, their keys and values, and what there is of all samples.

    Args:
      model, prompts: what draws, and for what.
      begun: ``[P, G, ...]`` samples of an earlier rollout; those of length 0 are new.
      known, out: of all samples as if they were new.
      most: unfinished ones of a lane.
      ring, dtype: of the caches.
      compute: how to run the decoder.
    """

    def older(old: Array, new: Array) -> Array:
        return jnp.where((begun.lengths > 0).reshape(*begun.lengths.shape, *(1,) * (new.ndim - 2)), old, new)

    out = jax.tree.map(older, begun, out)
    rows, slots = out.lengths.shape
    caches = slot_cache.empty(model.config, rows, slots, ring, dtype, compute)
    keys, values = placed(read(model, prompts, begun, most, compute), caches, slots, ring, dtype, compute)
    return by_lane(seated, compute.mesh)(known, out), keys, values, out


def longest(slots: Slots, most: int, mesh: Mesh | None) -> Scalar:
    """[] int32: tokens of the longest sample that wants another; 0 once a rollout may end. That is where at most
    ``most`` samples of each lane want one and some prompt has none such: each rollout makes a whole group at least."""

    def of_lane(s: Slots) -> Array:
        told = jnp.where(s.active, s.count, 0).max(), s.active.sum() > most, ~s.active.any(1).all()
        return jnp.stack([x.astype(jnp.int32) for x in told])[None]

    tokens, many, whole = by_lane(of_lane, mesh)(slots).max(0)
    return jnp.where((many > 0) | (whole == 0), tokens, 0)
