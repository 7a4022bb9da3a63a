"""Groups of samples from one jitted program.

Prompts are prefilled once each. Every prompt has a row of *slots*; a decode step advances all slots by one
token, and a slot whose sample ended takes the next waiting sample of its prompt in the same program. Because
slots are laid out by prompt, the prompt's keys and values are read in place, once for its whole row of slots.
The loop ends when nothing is left to draw.

A draw's random key is ``fold_in(key, uid, sample, position)``: it depends neither on slots nor on the order of
prompts nor on the mesh.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from grpojax.host.errors import UserError, require
from grpojax.models import decoder as dec
from grpojax.models.compute import Compute
from grpojax.models.decoder import Decoder
from grpojax.models.sharding import constrain
from grpojax.programs import slot_cache
from grpojax.programs.drawing import DrawConfig, draw
from grpojax.types import Array, PerPrompt, Prompts, Rollout, Samples, Scalar, pytree


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerConfig(DrawConfig):
    """What to draw, and how many samples at a time (`DrawConfig` for temperature and truncation).

    Attributes:
      group: samples per prompt, G.
      max_tokens: longest completion, T.
      slots: samples of one prompt that are decoded at a time; 0 takes all of them. Fewer slots than samples
        pay when lengths differ much: a slot that ends early is used again.
      cache_dtype: of keys and values.
    """

    group: int = 8
    max_tokens: int = 256
    slots: int = 0
    cache_dtype: Literal["compute", "float32", "bfloat16"] = "compute"

    def __post_init__(self):
        super().__post_init__()
        require(self, group="[1, inf)", max_tokens="[1, inf)")
        if not 0 <= self.slots <= self.group:
            raise UserError(f"slots={self.slots!r}: must be between 0 (all) and group={self.group}")


# -------------------------------------------------------------------------------- what a rollout holds


def _cache_dtype(config: SamplerConfig, compute: Compute) -> jnp.dtype:
    return jnp.dtype(compute.dtype if config.cache_dtype == "compute" else config.cache_dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Fixed:
    """What every step of a rollout reads and none changes; made by `prefill`.

    Attributes:
      config: group size, lengths, temperature, truncation, slots.
      compute: how to run the decoder.
      model: the decoder, for its embeddings and its last norm.
      graph: structure of one of its blocks.
      blocks: weights of its blocks, stacked or a list (`slot_cache.unrolls`).
      eos: ``[n]`` int32, tokens that end a sample.
      lengths: ``[P]`` int32, of the prompts.
      prompt_mask: ``[P, L]`` bool, where a prompt has tokens.
      prompt_kv: keys and values of the prompts, per layer ``[P, Hkv, d, L]`` and ``[P, Hkv, L, d]``; each stacked
        or a list.
      keys: ``[P, G]`` random keys, one a sample.
      first: ``[P, G]`` int32, the first token of each sample.
      ended: ``[P, G]`` bool, whether that token ends it.
    """

    config: SamplerConfig
    compute: Compute
    model: Decoder
    graph: nnx.GraphDef
    blocks: Any
    eos: Array
    lengths: PerPrompt
    prompt_mask: Array
    prompt_kv: tuple[Any, Any]
    keys: Samples
    first: Samples
    ended: Samples


@pytree
class _Loop:
    """What a decode step carries; slots ``[P, g]``.

    Attributes:
      step: [] int32, decode steps done. All slots write their keys and values at ring position ``step % T``.
      sample: ``[P, g]`` int32, sample in the slot; G when none is.
      count: ``[P, g]`` int32, tokens drawn so far of that sample; the last of them is not yet in the cache.
      token: ``[P, g]`` int32, the last of them.
      active: ``[P, g]`` bool, the sample wants another token.
      waiting: ``[P]`` int32, the next sample of each prompt to start.
      keys, values: slot caches, per layer ``[P, g, Hkv, d, T]`` and ``[P, g, Hkv, T, d]``; stacked or a list.
      out: the rollout so far.
    """

    step: Scalar
    sample: Array
    count: Array
    token: Array
    active: Array
    waiting: PerPrompt
    keys: Any
    values: Any
    out: Rollout


# --------------------------------------------------------------------------------------------- decoding


def _keys_of_samples(key: Array, prompts: Prompts, group: int) -> Samples:
    """``[P, G]`` keys, each of its prompt's uid and its sample's number."""

    def of_prompt(uid, first):
        def of_sample(i):
            return jax.random.fold_in(jax.random.fold_in(key, uid), first + i)

        return jax.vmap(of_sample)(jnp.arange(group))

    return jax.vmap(of_prompt)(prompts.uids, prompts.first_sample)


_at_position = jax.vmap(jax.vmap(jax.random.fold_in))  # keys and positions [P, n]


def _ends(token: Array, eos: Array) -> Array:
    return (token[..., None] == eos).any(-1)


@jax.vmap
def _put(array: Array, value: Array, *at: Array) -> Array:
    """Writes ``value [n]`` into a prompt's ``array`` at indices ``[n]``; those out of range are left out."""
    return array.at[at].set(value, mode="drop")


def prefill(
    model: Decoder, prompts: Prompts, key: Array, config: SamplerConfig, eos_ids: tuple[int, ...], compute: Compute
) -> tuple[_Fixed, Rollout]:
    """Runs each prompt once and draws the first token of all of its samples; the rollout has these tokens."""
    n_prompts, length = prompts.tokens.shape
    cache_dtype, unroll = _cache_dtype(config, compute), slot_cache.unrolls(compute)
    eos = jnp.asarray(eos_ids, jnp.int32)

    def stored(x, axes):
        return x[:, :, 0].transpose(axes).astype(cache_dtype)

    with jax.named_scope("prefill"):
        hidden, kv = dec.run_prompts(model, prompts.tokens[:, None], prompts.lengths[:, None], compute)
        prompt_kv = stored(kv[0], (0, 1, 3, 4, 2)), stored(kv[1], (0, 1, 3, 2, 4))  # [n, P, Hkv, d, L], [.., L, d]
        keys = _keys_of_samples(key, prompts, config.group)
        zero = jnp.zeros((n_prompts, config.group), jnp.int32)
        first, first_logp = draw(dec.logits(model, hidden, compute), _at_position(keys, zero), config)

    def start(x, dtype):
        empty = jnp.zeros((n_prompts, config.group, config.max_tokens), dtype)
        return constrain(empty.at[:, :, 0].set(x), compute.mesh, "lane", None, None)

    out = Rollout(
        tokens=start(first, jnp.int32),
        logps=start(first_logp, jnp.float32),
        lengths=zero + 1,
        stopped=_ends(first, eos),
    )
    graph, blocks = nnx.split(model.layers)
    fixed = _Fixed(
        config=config,
        compute=compute,
        model=model,
        graph=graph,
        blocks=slot_cache.per_layer(blocks, unroll),
        eos=eos,
        lengths=prompts.lengths,
        prompt_kv=slot_cache.per_layer(prompt_kv, unroll),
        prompt_mask=jnp.arange(length) < prompts.lengths[:, None],
        keys=keys,
        first=first,
        ended=out.stopped,
    )
    return fixed, out


def _before_decoding(fixed: _Fixed, out: Rollout) -> _Loop:
    """All slots free, all samples waiting, caches empty."""
    config, c = fixed.config, fixed.model.config
    n_prompts, slots = fixed.lengths.shape[0], config.slots or config.group
    cache_dtype = _cache_dtype(config, fixed.compute)

    def empty(*last):
        x = jnp.zeros((c.num_layers, n_prompts, slots, c.num_kv_heads, *last), cache_dtype)
        x = constrain(x, fixed.compute.mesh, None, "lane", None, "kv_heads", None, None)
        return slot_cache.per_layer(x, slot_cache.unrolls(fixed.compute))

    idle = jnp.zeros((n_prompts, slots), jnp.int32)
    return _Loop(
        step=jnp.int32(0),
        sample=idle + config.group,
        count=idle,
        token=idle,
        active=idle > 0,
        waiting=jnp.zeros(n_prompts, jnp.int32),
        keys=empty(c.head_dim, config.max_tokens),
        values=empty(config.max_tokens, c.head_dim),
        out=out,
    )


def refill(fixed: _Fixed, s: _Loop) -> _Loop:
    """Gives each free slot the next waiting sample of its prompt, whose first token is known."""
    group = fixed.config.group
    free = ~s.active
    take = s.waiting[:, None] + jnp.cumsum(free, 1) - 1
    taken = free & (take < group)
    clipped = jnp.minimum(take, group - 1)
    done = jnp.take_along_axis(fixed.ended, clipped, 1) | (fixed.config.max_tokens == 1)
    return dataclasses.replace(
        s,
        sample=jnp.where(taken, take, jnp.where(s.active, s.sample, group)),
        count=jnp.where(taken, 1, s.count),
        token=jnp.where(taken, jnp.take_along_axis(fixed.first, clipped, 1), s.token),
        active=jnp.where(taken, ~done, s.active),
        waiting=s.waiting + taken.sum(1, dtype=jnp.int32),
    )


def decode_token(fixed: _Fixed, s: _Loop) -> _Loop:
    """Fills the free slots, then draws the next token of every slot."""
    config, compute, model, c = fixed.config, fixed.compute, fixed.model, fixed.model.config
    group, most, cache_dtype = config.group, config.max_tokens, _cache_dtype(config, compute)
    s = refill(fixed, s)
    position = s.step % most
    cache_mask = (position - jnp.arange(most)) % most < s.count[..., None]
    tables = dec.rope_tables(c, fixed.lengths[:, None] + s.count - 1)
    x = dec.embed_tokens(model, s.token, compute, whole=True)

    def body(x, layer, write):
        block, prompt = layer
        one = dec.layer(nnx.merge(fixed.graph, block), c, compute)
        q, k, v = one.qkv(x, tables)
        cached = write(k.astype(cache_dtype), v.astype(cache_dtype))
        grouped = q.reshape(*q.shape[:2], c.num_kv_heads, -1, c.head_dim)
        o = slot_cache.decode_attention(grouped, cached, prompt, fixed.prompt_mask, cache_mask)
        return one.finish(x, o.astype(x.dtype))

    unroll = slot_cache.unrolls(compute)
    layers = fixed.blocks, fixed.prompt_kv
    layers = list(zip(*layers, strict=True)) if unroll else layers
    x, (keys, values) = slot_cache.over_layers(body, x, layers, (s.keys, s.values), position, unroll)

    with jax.named_scope("draw"):
        x = dec.rms_norm(x, model.norm[...], c.norm_eps)
        mine = jnp.take_along_axis(fixed.keys, jnp.minimum(s.sample, group - 1), 1)
        token, logp = draw(dec.logits(model, x, compute), _at_position(mine, s.count), config)
    stop = _ends(token, fixed.eos)
    sample = jnp.where(s.active, s.sample, group)  # out of range: not written
    return _Loop(
        step=s.step + 1,
        sample=s.sample,
        count=s.count + 1,
        token=token,
        active=s.active & ~stop & (s.count + 1 < most),
        waiting=s.waiting,
        keys=keys,
        values=values,
        out=Rollout(
            tokens=_put(s.out.tokens, token, sample, s.count),
            logps=_put(s.out.logps, logp, sample, s.count),
            lengths=_put(s.out.lengths, s.count + 1, sample),
            stopped=_put(s.out.stopped, stop, sample),
        ),
    )


@functools.partial(jax.jit, static_argnames=("graph", "config", "eos_ids", "compute"))
def _sample(
    graph: nnx.GraphDef,
    params: nnx.State,
    prompts: Prompts,
    key: Array,
    config: SamplerConfig,
    eos_ids: tuple[int, ...],
    compute: Compute,
) -> Rollout:
    fixed, out = prefill(nnx.merge(graph, params), prompts, key, config, eos_ids, compute)

    def unfinished(s: _Loop):
        return s.active.any() | (s.waiting < config.group).any()

    start = _before_decoding(fixed, out)
    with jax.named_scope("decode"):
        return jax.lax.while_loop(unfinished, functools.partial(decode_token, fixed), start).out


def sample_groups(
    graph: nnx.GraphDef,
    params: nnx.State,
    prompts: Prompts,
    key: Array,
    config: SamplerConfig,
    *,
    eos_ids: tuple[int, ...],
    compute: Compute,
) -> Rollout:
    """Draws ``config.group`` samples of each prompt.

    Args:
      graph, params: the two halves of a `Decoder` (``nnx.split``).
      prompts: the prompts; on a mesh their number must divide over its lanes (`spread`).
      key: a key that differs from rollout to rollout, such as ``fold_in(key(seed), step)``.
      config: group size, lengths, temperature, truncation, slots.
      eos_ids: tokens that end a sample; none means that every sample has ``max_tokens``.
      compute: how to run the decoder.

    Returns:
      `Rollout`, ``[P, G, T]``.

    Example:
      >>> import jax, numpy as np
      >>> from flax import nnx
      >>> from grpojax.models import Compute, Decoder, DecoderConfig
      >>> from grpojax.types import Prompts
      >>> model = Decoder(DecoderConfig(family="qwen2", vocab_size=50, hidden_size=16, intermediate_size=32,
      ...     num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, rope_theta=1e4, qkv_bias=True), rngs=nnx.Rngs(0))
      >>> prompts = Prompts(tokens=np.array([[5, 6, 7], [8, 9, 0]], np.int32), lengths=np.array([3, 2], np.int32),
      ...     uids=np.array([0, 1], np.uint32), first_sample=np.zeros(2, np.int32))
      >>> rollout = sample_groups(*nnx.split(model), prompts, jax.random.key(0), SamplerConfig(group=4, max_tokens=5),
      ...     eos_ids=(1,), compute=Compute())
      >>> rollout.tokens.shape
      (2, 4, 5)
    """
    if not isinstance(eos_ids, tuple):
        raise TypeError(f"eos_ids must be a tuple of ints, got {eos_ids!r}")
    return _sample(graph, params, prompts, key, config, eos_ids, compute)
