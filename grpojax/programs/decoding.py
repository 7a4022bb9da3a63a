"""A rollout while it is drawn: prompts are read, then a loop gives every slot its next token.

Prompts are prefilled once each. Every prompt has a row of slots; a decode step advances all slots by one token, and a
slot whose sample ended takes the next waiting sample of its prompt in the same program. Because slots are laid out by
prompt, the prompt's keys and values are read in place, once for its whole row of slots. The loop ends when nothing is
left to draw, or what is left is for the next rollout (`grpojax.programs.begun`).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from grpojax.models import decoder as dec
from grpojax.models import quantised
from grpojax.models.compute import Compute
from grpojax.models.decoder import Decoder
from grpojax.models.layers import Turned
from grpojax.models.sharding import constrain
from grpojax.programs import begun as partial
from grpojax.programs import slot_cache
from grpojax.programs.drawing import at_position, draw, keys_of_samples
from grpojax.programs.sampler_config import SamplerConfig
from grpojax.programs.slot_rows import Slots, Waiting, by_lane, longest, record, refill
from grpojax.types import Array, Prompts, Rollout, Scalar, pytree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fixed:
    """What every step of a rollout reads and none changes.

    Attributes:
      config: group size, lengths, temperature, truncation, slots.
      compute: how to run the decoder.
      ring: of the slots' caches.
      model: the decoder, for its embeddings and its last norm.
      graph: structure of one of its blocks.
      blocks: weights of its blocks, stacked or a list (`slot_cache.unrolls`), on a CPU turned.
      eos: ``[n]`` int32, tokens that end a sample.
      prompt_tokens: L.
      prompt_kv: keys and values of the prompts, per layer ``[P, Hkv, d, L]`` and ``[P, Hkv, L, d]``; each stacked
        or a list.
      known: what is known of the samples.
      left: samples of a lane that may be left unfinished, where the rollout goes on from another; else None.
    """

    config: SamplerConfig
    compute: Compute
    ring: slot_cache.Ring
    model: Decoder
    graph: nnx.GraphDef
    blocks: Any
    eos: Array
    prompt_tokens: int
    prompt_kv: tuple[Any, Any]
    known: Waiting
    left: int | None = None


@pytree
class Loop:
    """What a decode step carries.

    Attributes:
      step: [] int32, decode steps done. All slots write their keys and values at this position of the ring.
      longest: [] int32, tokens of the longest sample that wants another, at least 1 while any is left to draw; 0 when
        none is.
      slots: a row for each prompt, lanes in front.
      keys, values: the slots' caches (`slot_cache.empty`).
      out: the rollout so far.
    """

    step: Scalar
    longest: Scalar
    slots: Slots
    keys: Any
    values: Any
    out: Any


def _ends(token: Array, eos: Array) -> Array:
    return (token[..., None] == eos).any(-1)


def prefill(
    model: Decoder, prompts: Prompts, key: Array, config: SamplerConfig, eos_ids: tuple[int, ...], compute: Compute
) -> tuple[Fixed, Rollout]:
    """Runs each prompt once and draws the first token of all of its samples; the rollout has these tokens."""
    n_prompts = len(prompts.lengths)
    dtype, unroll = slot_cache.dtype_of(config.cache_dtype, compute), slot_cache.unrolls(compute)

    def stored(x, axes):
        return quantised.stored(x[:, :, 0].transpose(axes), dtype, axes.index(4))

    with jax.named_scope("prefill"):
        hidden, kv = dec.run_prompts(model, prompts.tokens[:, None], prompts.lengths[:, None], compute)
        prompt_kv = stored(kv[0], (0, 1, 3, 4, 2)), stored(kv[1], (0, 1, 3, 2, 4))  # [n, P, Hkv, d, L], [.., L, d]
        keys = keys_of_samples(key, prompts, config.group)
        zero = jnp.zeros((n_prompts, config.group), jnp.int32)
        first, first_logp = draw(dec.logits(model, hidden, compute), at_position(keys, zero), config, compute.mesh)

    def start(x, dtype):
        empty = jnp.zeros((n_prompts, config.group, config.max_tokens), dtype)
        return constrain(empty.at[:, :, 0].set(x), compute.mesh, "lane", None, None)

    out = Rollout(
        tokens=start(first, jnp.int32),
        logps=start(first_logp, jnp.float32),
        lengths=zero + 1,
        stopped=_ends(first, jnp.asarray(eos_ids, jnp.int32)),
    )
    ended = out.stopped | (config.max_tokens == 1)
    known = Waiting(keys=keys, first=first, ended=ended, lengths=prompts.lengths)
    prompt_kv = slot_cache.per_layer(prompt_kv, unroll)
    graph, blocks = nnx.split(model.layers)
    fixed = Fixed(
        config=config,
        compute=compute,
        ring=slot_cache.ring(config.max_tokens, compute),
        model=model,
        graph=graph,
        blocks=_blocks(blocks, compute),
        eos=jnp.asarray(eos_ids, jnp.int32),
        prompt_tokens=jax.tree.leaves(prompt_kv[0])[0].shape[-1],
        prompt_kv=prompt_kv,
        known=known,
    )
    return fixed, out


def _blocks(stacked: Any, compute: Compute) -> Any:
    layers = slot_cache.per_layer(stacked, slot_cache.unrolls(compute))
    if slot_cache.platform(compute) != "cpu" or compute.mesh is not None:
        return layers

    def turned(w: Any) -> Any:
        return Turned.of(w.astype(compute.dtype)) if isinstance(w, jax.Array) and w.ndim == 2 else w

    return jax.tree.map(turned, layers, is_leaf=lambda w: isinstance(w, quantised.Int8))


def before_decoding(fixed: Fixed, out: Rollout) -> Loop:
    """Caches empty, all samples waiting."""
    config, known = fixed.config, fixed.known
    n_prompts, slots = known.lengths.shape[0], config.decode_slots or config.group
    idle = jnp.zeros((n_prompts, slots), jnp.int32)
    start = Slots(
        waiting=jnp.zeros(n_prompts, jnp.int32),
        sample=idle + config.group,
        count=idle,
        token=idle,
        key=jnp.broadcast_to(known.keys[:1, :1], idle.shape),
        active=idle > 0,
    )
    dtype = slot_cache.dtype_of(config.cache_dtype, fixed.compute)
    keys, values = slot_cache.empty(fixed.model.config, n_prompts, slots, fixed.ring, dtype, fixed.compute)
    return Loop(
        step=jnp.int32(0),
        longest=_longest(fixed, start),
        slots=start,
        keys=keys,
        values=values,
        out=out,
    )


def going_on(fixed: Fixed, prompts: Prompts, begun: Rollout, out: Rollout) -> Loop:
    """All samples in their slots; those that were begun before stand where they stood."""
    given = fixed.model, prompts, begun, fixed.known, out, fixed.left or 0
    dtype = slot_cache.dtype_of(fixed.config.cache_dtype, fixed.compute)
    slots, keys, values, out = partial.take_up(*given, fixed.ring, dtype, fixed.compute)
    return Loop(step=jnp.int32(0), longest=_longest(fixed, slots), slots=slots, keys=keys, values=values, out=out)


def _longest(fixed: Fixed, slots: Slots) -> Scalar:
    """`Loop.longest`: all that the lanes of a mesh tell each other for a token."""
    mesh = fixed.compute.mesh
    if fixed.left is not None:
        return partial.longest(slots, fixed.left, mesh)
    return by_lane(functools.partial(longest, group=fixed.config.group), mesh)(slots).max()


def decode_token(fixed: Fixed, s: Loop) -> Loop:
    """Fills the free slots, then draws the next token of every slot."""
    config, compute, model, c = fixed.config, fixed.compute, fixed.model, fixed.model.config
    most, dtype = config.max_tokens, slot_cache.dtype_of(config.cache_dtype, compute)
    slots = by_lane(refill, compute.mesh)(fixed.known, s.slots)
    ring, position, lengths = fixed.ring, s.step % fixed.ring.size, fixed.known.lengths
    cache_mask = (position - jnp.arange(ring.size)) % ring.size < slots.count[..., None]
    prompt_mask = jnp.arange(fixed.prompt_tokens) < lengths[:, None]
    seen = slot_cache.Seen(
        mask=cache_mask,
        live=ring.live(position, s.longest),
        counts=jnp.where(slots.active, slots.count, 0),
        position=position,
        ring=ring,
    )
    tables = dec.rope_tables(c, lengths[:, None] + slots.count - 1)
    x = dec.embed_tokens(model, slots.token, compute, whole=True)

    def body(x, layer, write):
        block, prompt = layer
        one = dec.layer(nnx.merge(fixed.graph, block), c, compute, apart=slot_cache.on_gpu(compute))
        q, k, v = one.qkv(x, tables)
        cached = write(quantised.stored(k, dtype), quantised.stored(v, dtype))
        grouped = q.reshape(*q.shape[:2], k.shape[2], -1, c.head_dim)
        o = slot_cache.decode_attention(grouped, cached, prompt, prompt_mask, seen, compute)
        return one.finish(x, o.astype(x.dtype))

    layers = fixed.blocks, fixed.prompt_kv
    layers = list(zip(*layers, strict=True)) if slot_cache.unrolls(compute) else layers
    x, (keys, values) = slot_cache.over_layers(body, x, layers, (s.keys, s.values), position, compute)

    with jax.named_scope("draw"):
        x = dec.rms_norm(x, model.norm[...], c.norm_eps)
        token, logp = draw(dec.logits(model, x, compute), at_position(slots.key, slots.count), config, compute.mesh)
    stop = _ends(token, fixed.eos)

    def write(slots, out, token, logp, stop):
        at = jnp.where(slots.active, slots.sample, config.group)  # out of range: not written
        return Rollout(
            tokens=record(out.tokens, token, at, slots.count),
            logps=record(out.logps, logp, at, slots.count),
            lengths=record(out.lengths, slots.count + 1, at),
            stopped=record(out.stopped, stop, at),
        )

    out = by_lane(write, compute.mesh)(slots, s.out, token, logp, stop)
    active = slots.active & ~stop & (slots.count + 1 < most)
    slots = dataclasses.replace(slots, count=slots.count + 1, token=token, active=active)
    step, longest = s.step + 1, _longest(fixed, slots)
    return dataclasses.replace(s, step=step, longest=longest, slots=slots, keys=keys, values=values, out=out)


def decode(fixed: Fixed, s: Loop) -> Loop:
    """Goes on until nothing is left to draw, or as much as `Fixed` has it leave."""
    with jax.named_scope("decode"):
        return jax.lax.while_loop(lambda s: s.longest > 0, functools.partial(decode_token, fixed), s)
