"""Draws groups of samples in one jitted program: it reads the prompts, then a loop gives every sample its next token.

1. Prefill: each prompt runs once. The first token of all its samples is drawn from the logits after it.
2. Decode: every prompt has a row of slots, and each slot holds one sample. A step first gives each free slot the next
   waiting sample of its prompt. No memory moves for that, since the prompt's keys and values are read in place, once
   for the whole row. Then the newest tokens of all slots run through the layers, and the next tokens are drawn. A slot
   is free again when its sample ends.
3. The loop ends when no sample needs another token. With the ``partial`` argument of `sample_groups` it ends as soon as
   few enough samples do; these samples continue in the next rollout.

The random key of a draw is ``fold_in(key, uid, sample, position)``. It does not depend on the slots, the order of the
prompts or the mesh. `grpojax.programs.token_sampling` draws the tokens. `grpojax.programs.kv_cache` holds the keys and
values of the drawn tokens.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from grpojax.device import SHARD, Program, cut
from grpojax.host.errors import UserError
from grpojax.models import decoder as dec
from grpojax.models import matrix
from grpojax.models.attention import FAR
from grpojax.models.compute import Compute
from grpojax.models.decoder import Decoder
from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.layers import Difference, Layer, differences, final_norm, joined, rope_tables, tables_of_layer
from grpojax.models.number_formats import CacheFormat
from grpojax.models.weight_table import DECODER, by_layer, leaf_name
from grpojax.programs import kv_cache, slot_states
from grpojax.programs.sampler_config import SamplerConfig
from grpojax.programs.token_sampling import at_position, draw, keys_of_samples
from grpojax.sharding import TRAIN, constrain, spec
from grpojax.types import Array, PerPrompt, Prompts, Rollout, Samples, Scalar, Tokens, pytree


def sample_groups(
    graph: nnx.GraphDef,
    params: nnx.State,
    prompts: Prompts,
    key: Array,
    config: SamplerConfig,
    *,
    eos_ids: tuple[int, ...],
    compute: Compute,
    partial: Rollout | None = None,
    left: int = 0,
) -> Rollout:
    """Draws ``config.group`` samples of each prompt.

    Args:
      graph, params: the two halves of a `Decoder` (``nnx.split``).
      prompts: the prompts. On a mesh their number must be a multiple of the data-parallel shards' number
        (`grpojax.programs.batch_shards.spread`).
      key: a key that differs from rollout to rollout, such as ``fold_in(key(seed), step)``.
      config: group size, lengths, temperature, truncation, decode_slots.
      eos_ids: tokens that end a sample. If empty, every sample has ``max_tokens`` tokens.
      compute: how to run the decoder.
      partial: ``[P, G, ...]`` samples of an earlier rollout. Samples of length 0 are new. Unfinished samples continue;
        a shard may have at most ``left`` of them. Finished samples stay as they are. Every sample has its own slot.
      left: used with ``partial``. The rollout ends as soon as at most this many samples of each shard need another
        token and at least one group is complete.

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
    if partial is None:
        return rollout_program(graph, config, eos_ids=eos_ids, compute=compute)(params, prompts, key)
    goes_on = rollout_program(graph, config, eos_ids=eos_ids, compute=compute, left=left)
    return goes_on(params, prompts, key, partial)


def rollout_program(
    graph: nnx.GraphDef,
    config: SamplerConfig,
    *,
    eos_ids: tuple[int, ...],
    compute: Compute,
    left: int | None = None,
    name: str = "rollout",
) -> Program:
    """The program of `sample_groups`, with arguments as there: ``(params, prompts, key) -> Rollout``; if ``left`` is
    given, ``(params, prompts, key, partial) -> Rollout``. Equal arguments give the same program. The log calls it by
    its ``name``."""
    if not isinstance(eos_ids, tuple):
        raise TypeError(f"eos_ids must be a tuple of ints, got {eos_ids!r}")
    if left is not None and config.decode_slots not in (0, config.group):
        raise UserError(f"decode_slots={config.decode_slots}: partial samples need slots of their own; set 0")
    if left is not None and config.router_replay:
        raise UserError(
            "router_replay=true: partial samples are read again, perhaps by other experts than before; set it to false"
        )
    return _program(graph, config, eos_ids, compute, left, name)


@functools.cache  # a run asks for it at every step
def _program(
    graph: nnx.GraphDef, config: SamplerConfig, eos_ids: tuple[int, ...], compute: Compute, left: int | None, name: str
) -> Program:
    how = {"graph": graph, "config": config, "eos_ids": eos_ids, "compute": compute, "left": left}
    draws = Draws(config=config, compute=compute, tokens=config.max_tokens)
    return Program(name, functools.partial(_rollout, **how), out=cut(compute.mesh, SHARD), made_up=draws)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draws:
    """How a program draws samples. What it makes up for them (`grpojax.device.Program.made_up`) has ended by itself.

    Attributes:
      config: what it draws. With fewer prompts than batch shards, ``group`` is a part of a prompt's samples.
      compute: how the decoder runs.
      tokens: most tokens of a sample that it draws.
      turn: whether these are all of the sample, or those of its first turn, or of a later one.
    """

    config: SamplerConfig
    compute: Compute
    tokens: int
    turn: Literal["all", "first", "later"] = "all"

    def __call__(self, results: Any, longest: bool) -> Any:
        return samples_of(results, self.tokens if longest else 1)


def samples_of(shapes: Rollout, length: int) -> Rollout:
    """Made-up samples ``[P, G]`` of this length: their lengths and ends, beside shapes of all else."""
    each = shapes.lengths.shape
    return dataclasses.replace(shapes, lengths=np.full(each, length, np.int32), stopped=np.ones(each, bool))


def _rollout(
    params: nnx.State,
    prompts: Prompts,
    key: Array,
    partial: Rollout | None = None,
    *,
    graph: nnx.GraphDef,
    config: SamplerConfig,
    eos_ids: tuple[int, ...],
    compute: Compute,
    left: int | None,
) -> Rollout:
    constants, out = prefill(nnx.merge(graph, params), prompts, key, config, eos_ids, compute)
    if partial is None:
        state = _all_waiting(constants, out)
    else:
        constants = dataclasses.replace(constants, left=left)
        state = _going_on(constants, prompts, partial, out)
    return decode(constants, state).out


# ----------------------------------------------------------------------------------------- what the loop reads


@pytree
class SampleQueue:
    """What prefill knows about every sample before it is decoded.

    Attributes:
      keys: ``[P, G]`` random keys.
      first: ``[P, G]`` int32, the first token of each sample.
      ended: ``[P, G]`` bool, whether that token ends the sample.
      lengths: ``[P]`` int32, lengths of the prompts.
    """

    keys: Samples
    first: Samples
    ended: Samples
    lengths: PerPrompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConstants:
    """What every decode step reads and no step changes.

    Attributes:
      config: group size, lengths, temperature, truncation, slots.
      compute: how to run the decoder.
      ring: layout of the slots' caches.
      model: the decoder, used for its embeddings and its last norm.
      layers: weights of the decoder's layers by name, stacked, or as a list of layers (`kv_cache.Cache.listed`, or
        if not all layers are of one kind); transposed on a CPU.
      eos: ``[n]`` int32, tokens that end a sample.
      prompt_kv: keys and values of the prompts. Each layer that attends has ``[P, Hkv, d, L]`` and ``[P, Hkv, L, d]``;
        the layers are stacked or a list.
      prompt_states: states of the prompts ``[P, ...]`` for each layer that does not attend.
      known: what prefill knows about the samples.
      left: samples of a shard that may stay unfinished, if the rollout continues an earlier one; otherwise None.
      limits: ``[P, G]`` int32, the number of tokens at which each sample pauses, if every sample has its own slot and
        its cache is read again later, as that of an episode is. Then slots that are not active keep their caches. None
        draws samples to their ends.
    """

    config: SamplerConfig
    compute: Compute
    ring: kv_cache.Ring
    model: Decoder
    layers: Any
    eos: Array
    prompt_kv: tuple[Any, Any]
    prompt_states: list[Any]
    known: SampleQueue
    left: int | None = None
    limits: Samples | None = None

    @property
    def cache(self) -> kv_cache.Cache:
        """The platform's."""
        return kv_cache.of(self.compute)

    @property
    def cache_format(self) -> CacheFormat:
        """How keys and values are stored."""
        return kv_cache.format_of_cache(self.config.cache_dtype, self.compute)


def prefill(
    model: Decoder, prompts: Prompts, key: Array, config: SamplerConfig, eos_ids: tuple[int, ...], compute: Compute
) -> tuple[DecodeConstants, Rollout]:
    """Runs each prompt once and draws the first token of each of its samples. The returned rollout has these tokens."""
    mlp = model.config.mlp
    if config.router_replay and mlp is None:
        raise UserError("router_replay=true: the model has no experts to choose; set it to false")
    n_prompts, unroll = len(prompts.lengths), kv_cache.of(compute).listed or not model.config.uniform
    form, eos = kv_cache.format_of_cache(config.cache_dtype, compute), jnp.asarray(eos_ids, jnp.int32)

    def stored(x, axes):
        return form.stored(x[:, :, 0].transpose(axes), axes.index(4))

    with jax.named_scope("prefill"):
        tokens, lengths = prompts.tokens[:, None], prompts.lengths[:, None]
        observe = None if mlp is None or not config.router_replay else mlp.choices
        read, chosen = dec.run_prompts(model, tokens, lengths, compute, observe)
        hidden, kv = read.last, read.kv
        prompt_kv = stored(kv[0], (0, 1, 3, 4, 2)), stored(kv[1], (0, 1, 3, 2, 4))  # [n, P, Hkv, d, L], [.., L, d]
        keys = keys_of_samples(key, prompts, config.group)
        zero = jnp.zeros((n_prompts, config.group), jnp.int32)
        first, first_logp = draw(dec.logits(model, hidden, compute), at_position(keys, zero), config, compute.mesh)

    def start(x, dtype):
        empty = jnp.zeros((n_prompts, config.group, config.max_tokens), dtype)
        return constrain(empty.at[:, :, 0].set(x), compute.mesh, "shard", None, None)

    out = Rollout(
        tokens=start(first, jnp.int32),
        logps=start(first_logp, jnp.float32),
        lengths=zero + 1,
        stopped=_ends(first, eos),
        **({} if chosen is None else _no_choices(chosen, config, compute)),
    )
    ended = out.stopped | (config.max_tokens == 1)
    known = SampleQueue(keys=keys, first=first, ended=ended, lengths=prompts.lengths)
    prompt_kv, states = kv_cache.per_layer(prompt_kv, unroll), _states_by_layer(read.states)
    return constants_of(model, prompt_kv, states, known, config, eos_ids, compute), out


def constants_of(
    model: Decoder,
    prompt_kv: tuple[Any, Any],
    prompt_states: list[Any],
    known: SampleQueue,
    config: SamplerConfig,
    eos_ids: tuple[int, ...],
    compute: Compute,
) -> DecodeConstants:
    """What decode steps read, after the prefill of the prompts."""
    return DecodeConstants(
        config=config,
        compute=compute,
        ring=kv_cache.ring(config.max_tokens, compute),
        model=model,
        layers=_layers(nnx.to_pure_dict(nnx.state(model.layers)), model.config, compute),
        eos=jnp.asarray(eos_ids, jnp.int32),
        prompt_kv=prompt_kv,
        prompt_states=prompt_states,
        known=known,
    )


def _no_choices(of_prompts: Array, config: SamplerConfig, compute: Compute) -> dict[str, Array]:
    """The choices of a rollout before its first decode step: those for the prompts, ``[layers, P, 1, L, k]``."""
    prompts = _of_tokens(of_prompts)
    shape = len(prompts), config.group, config.max_tokens, prompts.shape[-1]
    nothing = jnp.full(shape, jnp.iinfo(prompts.dtype).max, prompts.dtype)
    return {
        "choices": constrain(nothing, compute.mesh, "shard", None, None, None),
        "prompt_choices": constrain(prompts, compute.mesh, "shard", None, None, None),
    }


def _of_tokens(choices: Array) -> Array:
    """Choices ``[layers, ..., k]`` as ``[..., C]``."""
    by_token = jnp.moveaxis(choices, 0, -2)
    return by_token.reshape(*by_token.shape[:-2], -1)


def _ends(token: Array, eos: Array) -> Array:
    return (token[..., None] == eos).any(-1)


def _states_by_layer(read: Any) -> list[Any]:
    """States ``[layers, P, 1, ...]`` of prompts that were read one by one, for each layer ``[P, ...]``."""
    return [] if read is None else kv_cache.per_layer(jax.tree.map(lambda x: x[:, :, 0], read), True)


def _layers(stacked: dict[str, Any], config: DecoderConfig, compute: Compute) -> Any:
    if not config.uniform:
        listed = {name: kv_cache.per_layer(w, True) for name, w in stacked.items()}
        layers = by_layer(listed, config.kinds)
    else:
        layers = kv_cache.per_layer(stacked, kv_cache.of(compute).listed)
    if compute.on_gpu:
        return [joined(layer, compute) for layer in layers]
    if kv_cache.platform(compute) != "cpu" or compute.mesh is not None:
        return layers

    def transposed(path: Any, w: Any) -> Any:
        weight = DECODER[leaf_name(path)]
        if matrix.is_matrix(w) or w.ndim != 2 or weight.exact or "experts" in weight.axes:
            return w
        return matrix.Transposed.of(w.astype(compute.dtype))

    return jax.tree_util.tree_map_with_path(transposed, layers, is_leaf=matrix.is_matrix)


# ---------------------------------------------------------------------------------------------------- the loop


@pytree
class Slots:
    """S slots for each prompt, and the samples that wait for them.

    Attributes:
      waiting: ``[P]`` int32, the next sample of each prompt to start.
      sample: ``[P, S]`` int32, the sample in the slot; G if the slot is empty.
      count: ``[P, S]`` int32, number of tokens drawn for that sample so far. The last one is not in the cache yet.
      token: ``[P, S]`` int32, the last token drawn.
      key: ``[P, S]`` random key of that sample.
      active: ``[P, S]`` bool, whether the sample needs another token.
    """

    waiting: PerPrompt
    sample: Array
    count: Array
    token: Array
    key: Array
    active: Array


@pytree
class DecodeState:
    """What one decode step passes to the next.

    Attributes:
      step: [] int32, number of decode steps done. All slots write their keys and values at this position of the ring.
      longest: [] int32, length of the longest sample that needs another token. It is at least 1 while any sample still
        waits for a slot, and 0 when nothing is left to draw.
      slots: one row for each prompt; data-parallel shards divide the rows.
      keys, values: the slots' caches (`kv_cache.Cache.empty`).
      states: those of the slots ``[P, S, ...]``, for each layer that does not attend.
      out: the rollout so far.
    """

    step: Scalar
    longest: Scalar
    slots: Slots
    keys: Any
    values: Any
    states: list[Any]
    out: Any


def _all_waiting(constants: DecodeConstants, out: Rollout) -> DecodeState:
    """The first state: all caches are empty and all slots are free."""
    config, known = constants.config, constants.known
    n_prompts, slots = known.lengths.shape[0], config.decode_slots or config.group
    nothing = jnp.zeros((n_prompts, slots), jnp.int32)
    free = Slots(
        waiting=jnp.zeros(n_prompts, jnp.int32),
        sample=nothing + config.group,
        count=nothing,
        token=nothing,
        key=jnp.broadcast_to(known.keys[:1, :1], nothing.shape),
        active=nothing > 0,
    )
    keys, values = constants.cache.empty(
        constants.model.config, n_prompts, slots, constants.ring, constants.cache_format
    )
    mixer, longest = constants.model.config.mixer, _longest(constants, free)
    states = slot_states.in_slots(mixer, constants.prompt_states, slots, constants.compute)
    return DecodeState(step=jnp.int32(0), longest=longest, slots=free, keys=keys, values=values, states=states, out=out)


def decode(constants: DecodeConstants, state: DecodeState) -> DecodeState:
    """Draws until no sample needs another token."""
    with jax.named_scope("decode"):
        return jax.lax.while_loop(lambda s: s.longest > 0, functools.partial(_decode_step, constants), state)


def _decode_step(constants: DecodeConstants, s: DecodeState) -> DecodeState:
    """Fills the free slots, then draws the next token of every slot."""
    config, compute, model, known = constants.config, constants.compute, constants.model, constants.known
    c, form, cache = model.config, constants.cache_format, constants.cache
    slots = _per_shard(_refill, compute.mesh)(known, s.slots)

    ring, position = constants.ring, s.step % constants.ring.size
    seen = kv_cache.Seen(
        mask=(position - jnp.arange(ring.size)) % ring.size < slots.count[..., None],
        live=ring.live(position, s.longest),
        counts=jnp.where(slots.active, slots.count, 0),
        position=position,
        ring=ring,
    )
    prompt_tokens = jax.tree.leaves(constants.prompt_kv[0])[0].shape[-1]
    prompt_mask = jnp.arange(prompt_tokens) < known.lengths[:, None]
    tables = rope_tables(c, known.lengths[:, None] + slots.count - 1)
    x = dec.embed_tokens(model, slots.token, compute, whole=True)

    def within(differs: Difference) -> kv_cache.Seen:
        """What a layer sees. Where layers are a list, it is known without computing whether one has a window."""
        if differs.windowed is None or (isinstance(differs.windowed, np.bool_) and not differs.windowed):
            return seen
        return seen.within(jnp.where(differs.windowed, c.window, FAR), known.lengths)

    def attends(layer, x, prompt, differs, write):
        def attend(q, k, v, logits):
            cached = write(form.stored(k), form.stored(v))
            grouped = q.reshape(*q.shape[:2], k.shape[2], -1, c.head_dim)
            o = cache.attend(grouped, cached, prompt, prompt_mask, within(differs), logits)
            return o.astype(x.dtype), None

        x, _ = layer.forward(x, tables_of_layer(tables, differs), attend)
        return x, None if keep is None or layer.seen is None else keep(layer.seen)

    def body(x, of_layer, write):
        weights, prompt, differs = of_layer
        return attends(layer_of(c.kinds[0], weights), x, prompt, differs, write)

    keep = None if c.mlp is None or not config.router_replay else c.mlp.choices
    layer_of = functools.partial(Layer, config=c, compute=compute, separately=compute.on_gpu)
    prompts, before, after = iter(constants.prompt_kv), iter(zip(s.states, constants.prompt_states, strict=True)), []

    def of_many_kinds(x, of_layer, write):
        kind, weights = of_layer
        layer = layer_of(kind, weights)
        if c.mixer is None or kind.mixer != c.mixer.name:
            return attends(layer, x, next(prompts), Difference(), write)
        states, mixer = slot_states.started(*next(before), slots.count == 1), c.mixer
        x, new = layer.mix(x, lambda projected: mixer.of_token(layer, projected, states))
        after.append(new)
        return x, None

    if not c.uniform:
        body, layers = of_many_kinds, list(zip(c.kinds, constants.layers, strict=True))
    else:
        kinds = differences(c)
        layers = constants.layers, constants.prompt_kv, kinds
        if cache.listed:
            of_layer = [jax.tree.map(lambda x, i=i: x[i], kinds) for i in range(c.num_layers)]
            layers = list(zip(constants.layers, constants.prompt_kv, of_layer, strict=True))
    writes = None if constants.limits is None else slots.active
    caches, put = (s.keys, s.values), cache.one_token(position, writes)
    x, (keys, values), chosen = kv_cache.over_layers(body, x, layers, caches, put, listed=cache.listed)

    with jax.named_scope("draw"):
        x = final_norm(x, model.norm[...], c)
        token, logp = draw(dec.logits(model, x, compute), at_position(slots.key, slots.count), config, compute.mesh)
    stop = _ends(token, constants.eos)
    chosen = None if chosen is None else _of_tokens(chosen)
    out = _per_shard(_recorded, compute.mesh)(slots, s.out, token, logp, stop, chosen)

    most = config.max_tokens if constants.limits is None else constants.limits
    active = slots.active & ~stop & (slots.count + 1 < most)
    slots = dataclasses.replace(slots, count=slots.count + 1, token=token, active=active)
    longest = _longest(constants, slots)
    return DecodeState(step=s.step + 1, longest=longest, slots=slots, keys=keys, values=values, states=after, out=out)


def _refill(known: SampleQueue, s: Slots) -> Slots:
    """Gives each free slot the next waiting sample of its prompt. Prefill has drawn that sample's first token."""
    n_prompts, group = known.first.shape
    free = ~s.active
    take = s.waiting[:, None] + jnp.cumsum(free, 1, dtype=jnp.int32) - 1
    taken = free & (take < group)
    of = jnp.arange(n_prompts)[:, None], jnp.minimum(take, group - 1)
    return Slots(
        waiting=s.waiting + taken.sum(1, dtype=jnp.int32),
        sample=jnp.where(taken, take, jnp.where(s.active, s.sample, group)),
        count=jnp.where(taken, 1, s.count),
        token=jnp.where(taken, known.first[of], s.token),
        key=jnp.where(taken, known.keys[of], s.key),
        active=jnp.where(taken, ~known.ended[of], s.active),
    )


def _recorded(slots: Slots, out: Rollout, token: Array, logp: Array, stop: Array, chosen: Array | None) -> Rollout:
    """The rollout, with the new token added to every active sample, and the choices ``[P, S, C]`` for the token before
    it."""
    group = out.lengths.shape[1]
    prompt = jnp.broadcast_to(jnp.arange(len(out.lengths))[:, None], token.shape)
    sample = jnp.where(slots.active, slots.sample, group)  # out of range: not written

    def put(x: Array, value: Array, *at: Array) -> Array:
        return x.at[(prompt, sample, *at)].set(value, mode="drop")

    return dataclasses.replace(
        out,
        tokens=put(out.tokens, token, slots.count),
        logps=put(out.logps, logp, slots.count),
        lengths=put(out.lengths, slots.count + 1),
        stopped=put(out.stopped, stop),
        choices=None if chosen is None else put(out.choices, chosen, slots.count - 1),
    )


def _longest(constants: DecodeConstants, slots: Slots) -> Scalar:
    """`DecodeState.longest`. It is the only value that the shards of a mesh exchange for a decode step."""
    mesh, group = constants.compute.mesh, constants.config.group
    if constants.left is not None:
        return _longest_until(slots, constants.left, mesh)

    def of_shard(s: Slots) -> Array:
        return jnp.maximum(jnp.where(s.active, s.count, 0).max(), (s.waiting < group).any().astype(jnp.int32))[None]

    return _per_shard(of_shard, mesh)(slots).max()


def _per_shard(f: Callable[..., Any], mesh: Mesh | None) -> Callable[..., Any]:
    """``f``, run by every data-parallel shard on its own part of the first axis. A shard sees no other shard's data,
    and numbers its prompts from 0."""
    if mesh is None:
        return f
    shard = spec(("shard",), TRAIN)
    return jax.shard_map(f, mesh=mesh, in_specs=shard, out_specs=shard)


# -------------------------------------------------------------------------------------------- partial rollouts
#
# A rollout ends as soon as few enough samples need another token. The next rollout reads the tokens of these samples
# in one forward, like a prompt, and continues them under its own weights (partial rollouts of Kimi k1.5,
# arXiv:2501.12599; APRIL, arXiv:2509.18521). Every sample has its own slot, in the row of its prompt.


def _going_on(constants: DecodeConstants, prompts: Prompts, partial: Rollout, out: Rollout) -> DecodeState:
    """The first state of a rollout that continues ``partial``: every sample is in its slot, and unfinished samples keep
    their tokens. ``out`` holds the first tokens that prefill drew for all samples as if all were new."""
    compute, ring, form = constants.compute, constants.ring, constants.cache_format

    def older(old: Array, new: Array) -> Array:
        return jnp.where((partial.lengths > 0).reshape(*partial.lengths.shape, *(1,) * (new.ndim - 2)), old, new)

    out = jax.tree.map(older, partial, out)
    rows, slots = out.lengths.shape
    caches = constants.cache.empty(constants.model.config, rows, slots, ring, form)
    read, states = _read_partial(constants.model, prompts, partial, constants.left or 0, compute)
    caches = constants.cache.insert(read, caches, slots, ring, form)
    mixer = constants.model.config.mixer
    empty = slot_states.in_slots(mixer, constants.prompt_states, slots, compute)
    states = slot_states.inserted(mixer, empty, states, read.slots, read.used, compute)
    return in_own_slots(constants, caches, out, unfinished(out), states)


def in_own_slots(
    constants: DecodeConstants, caches: tuple[Any, Any], out: Rollout, active: Samples, states: list[Any]
) -> DecodeState:
    """The first state of a loop in which every sample has its own slot.

    Args:
      constants: the loop's.
      caches: keys and values of all tokens but each sample's newest, from the end of the ring backwards.
      out: the samples so far, with at least one token each.
      active: ``[P, G]`` bool, the samples that need another token.
      states: those of the slots, for each layer that does not attend.
    """
    slots = _per_shard(_own_slots, constants.compute.mesh)(constants.known, out, active)
    keys, values = caches
    longest = _longest(constants, slots)
    return DecodeState(
        step=jnp.int32(0), longest=longest, slots=slots, keys=keys, values=values, states=states, out=out
    )


def _read_partial(
    model: Decoder, prompts: Prompts, partial: Rollout, most: int, compute: Compute
) -> tuple[kv_cache.ReadSamples, list[Any]]:
    """Runs the prompts and tokens of the unfinished samples of each shard; there are at most ``most`` in a shard. Also
    returns the states after them for each layer that does not attend."""
    longest = partial.tokens.shape[-1]

    def of_shard(prompts: Prompts, partial: Rollout):
        here = unfinished(partial).reshape(-1)
        slots = jnp.nonzero(here, size=most, fill_value=0)[0].astype(jnp.int32)
        used = jnp.minimum(here.sum(dtype=jnp.int32), most)
        prompt, there = slots // partial.lengths.shape[1], jnp.arange(most) < used
        first, counts = prompts.lengths[prompt], partial.lengths.reshape(-1)[slots]
        own = partial.tokens.reshape(-1, longest)[slots]
        at = jnp.arange(prompts.tokens.shape[1] + longest) - first[:, None]
        drawn = jnp.take_along_axis(own, jnp.clip(at, 0, longest - 1), 1)
        asked = jnp.pad(prompts.tokens[prompt], ((0, 0), (0, longest)))
        lengths = jnp.where(there, first + counts - 1, 1)
        return jnp.where(at < 0, asked, drawn), lengths, first, counts, slots, used[None]

    with jax.named_scope("read_partial"):
        tokens, lengths, *where = _per_shard(of_shard, compute.mesh)(prompts, partial)
        read, _ = dec.run_prompts(model, tokens[:, None], lengths[:, None], compute)
    keys, values = read.kv
    return kv_cache.ReadSamples((keys[:, :, 0], values[:, :, 0]), *where), _states_by_layer(read.states)


def _own_slots(known: SampleQueue, out: Rollout, active: Samples) -> Slots:
    """Puts every sample into its own slot. The next step reads its last token, so each must have one in ``out``."""
    n_prompts, group = out.lengths.shape
    return Slots(
        waiting=jnp.full(n_prompts, group, jnp.int32),
        sample=jnp.broadcast_to(jnp.arange(group, dtype=jnp.int32), (n_prompts, group)),
        count=out.lengths,
        token=jnp.take_along_axis(out.tokens, (out.lengths - 1)[..., None], 2)[..., 0],
        key=known.keys,
        active=active,
    )


def _longest_until(slots: Slots, left: int, mesh: Mesh | None) -> Scalar:
    """`DecodeState.longest`, but 0 as soon as at most ``left`` samples of each shard need another token and all samples
    of some prompt are finished. So each rollout completes at least one group."""

    def of_shard(s: Slots) -> Array:
        found = jnp.where(s.active, s.count, 0).max(), s.active.sum() > left, ~s.active.any(1).all()
        return jnp.stack([x.astype(jnp.int32) for x in found])[None]

    tokens, many, whole = _per_shard(of_shard, mesh)(slots).max(0)
    return jnp.where((many > 0) | (whole == 0), tokens, 0)


def unfinished(samples: Rollout) -> Samples:
    """``[P, G]`` bool: which samples have tokens and need another. Takes jax and numpy arrays.

    Example:
      >>> import numpy as np
      >>> zero = np.zeros((1, 4, 3))
      >>> lengths, stopped = np.array([[0, 2, 2, 3]]), np.array([[False, False, True, False]])
      >>> unfinished(Rollout(tokens=zero, logps=zero, lengths=lengths, stopped=stopped)).tolist()
      [[False, True, False, False]]
    """
    return (samples.lengths > 0) & ~samples.stopped & (samples.lengths < samples.tokens.shape[-1])


def sampled_tokens(samples: Rollout) -> Tokens:
    """``[P, G, T]`` bool in numpy: the policy's own tokens, without padding and without what environments answered."""
    if samples.sampled is not None:
        return np.asarray(samples.sampled)
    return np.arange(samples.tokens.shape[-1]) < np.asarray(samples.lengths)[..., None]


def own_tokens(samples: Rollout) -> Rollout:
    """The samples without what environments answered, as numpy arrays: the policy's own tokens, one after the other.
    Samples without such answers stay as they are.

    Example:
      >>> given = Rollout(tokens=np.array([[[7, 8, 9, 0]]]), logps=np.array([[[-1.0, 0, -3, 0]]]),
      ...     lengths=np.array([[3]]), stopped=np.array([[True]]), sampled=np.array([[[True, False, True, False]]]))
      >>> own = own_tokens(given)
      >>> own.tokens.tolist(), own.logps.tolist(), own.lengths.tolist()
      ([[[7, 9, 0, 0]]], [[[-1.0, -3.0, 0.0, 0.0]]], [[2]])
    """
    if samples.sampled is None:
        return samples
    order = np.argsort(~np.asarray(samples.sampled), -1, kind="stable")
    lengths = np.asarray(samples.sampled).sum(-1, dtype=np.int32)
    there = np.arange(order.shape[-1]) < lengths[..., None]

    def own(x: Array) -> np.ndarray:
        return np.where(there, np.take_along_axis(np.asarray(x), order, -1), np.zeros((), x.dtype))

    return Rollout(tokens=own(samples.tokens), logps=own(samples.logps), lengths=lengths, stopped=samples.stopped)


def own_turns(samples: Rollout) -> list[list[list[int]]]:
    """The policy's own tokens of each sample, turn by turn: ``[P * G][turns]`` lists of token ids. A sample that is no
    episode has one turn.

    Example:
      >>> given = Rollout(tokens=np.array([[[7, 8, 9, 0]]]), logps=np.zeros((1, 1, 4)), lengths=np.array([[3]]),
      ...     stopped=np.array([[True]]), sampled=np.array([[[True, False, True, False]]]))
      >>> own_turns(given), own_turns(dataclasses.replace(given, sampled=None))
      ([[[7], [9]]], [[[7, 8, 9]]])
    """
    width = samples.tokens.shape[-1]
    found = []
    for ids, own in zip(
        np.asarray(samples.tokens).reshape(-1, width), sampled_tokens(samples).reshape(-1, width), strict=True
    ):
        bounds = np.flatnonzero(np.diff(own, prepend=False, append=False)).reshape(-1, 2).tolist()
        found.append([ids[start:end].tolist() for start, end in bounds] or [[]])
    return found


def no_samples(prompts: int, group: int, tokens: int) -> Rollout:
    """Numpy arrays ``[P, G, ...]`` in which every sample is new."""
    shape = prompts, group, tokens
    return Rollout(
        tokens=np.zeros(shape, np.int32),
        logps=np.zeros(shape, np.float32),
        lengths=np.zeros(shape[:2], np.int32),
        stopped=np.zeros(shape[:2], bool),
    )
