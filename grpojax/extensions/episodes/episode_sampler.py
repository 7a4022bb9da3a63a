"""Draws episodes of several turns: the caches of all samples stay on the devices while an environment answers.

Every sample has its own slot. A round is one program:

1. The tokens that an environment answered are read by the slots that wait for them, in chunks of `CHUNK` tokens. All
   slots read their chunks at the same time. Nothing is drawn from these tokens.
2. The same loop as in `grpojax.programs.sampler` draws the next turns, until each of them ends: by an end-of-sequence
   token, by the most tokens of a turn, or by the most tokens of an episode.

A slot that gets no answer in a round waits: the loop neither draws for it nor writes into its cache. A turn always
begins with a round, and it is over when the round is. So a token's place in the ring follows from the tokens of its own
sample, and it makes no difference to a sample in which rounds its turns are drawn, bit for bit. The random key of a
draw is that of `grpojax.programs.sampler`, with the position in the whole episode. A sample may be cut back to its
first tokens between two rounds: the cache still has them.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from grpojax import sharding
from grpojax.device import Program, places
from grpojax.host.errors import UserError
from grpojax.models import decoder as dec
from grpojax.models.attention import FAR, Logits, capped
from grpojax.models.compute import Compute
from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.layers import Difference, Layer, differences, rope_tables, tables_of_layer
from grpojax.programs import kv_cache, sampler
from grpojax.programs.policy import Policy
from grpojax.programs.sampler import DecodeConstants, SampleQueue, unfinished
from grpojax.programs.sampler_config import SamplerConfig
from grpojax.sharding import constrain
from grpojax.types import Array, PerPrompt, Prompts, Rollout, Samples, Scalar, Tokens, pytree

CHUNK = 32  # tokens of an answer that a slot reads at a time; short enough that few of them are padding


@pytree
class Paused:
    """The samples between two rounds. A round consumes it.

    Attributes:
      out: the samples so far, with `grpojax.types.Rollout.sampled`.
      begins: ``[P, G]`` int32, number of tokens that a sample had when its newest turn began.
      keys, values: the slots' caches (`grpojax.programs.kv_cache.Cache`), with all tokens but each sample's newest.
      prompt_kv: keys and values of the prompts, as in `grpojax.programs.sampler.DecodeConstants`.
      draw_keys: ``[P, G]`` random keys of the samples.
      prompt_lengths: ``[P]`` int32.
    """

    out: Any
    begins: Samples
    keys: Any
    values: Any
    prompt_kv: Any
    draw_keys: Samples
    prompt_lengths: PerPrompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class _How:
    """What the programs of a run's episodes follow from, besides shapes."""

    config: SamplerConfig
    eos_ids: tuple[int, ...]
    compute: Compute
    turn_tokens: int


def _begin(params: Any, prompts: Prompts, key: Array, *, graph: Any, how: _How) -> Paused:
    """Reads the prompts, and draws the first turn of every sample."""
    config = how.config
    constants, out = sampler.prefill(nnx.merge(graph, params), prompts, key, config, how.eos_ids, how.compute)
    rows, slots = out.lengths.shape
    caches = constants.cache.empty(constants.model.config, rows, slots, constants.ring, constants.cache_format)
    zero = jnp.zeros((rows, slots), jnp.int32)
    return _draw(constants, caches, out, zero, unfinished(out), nothing_but(out, zero), how)


def _go_on(params: Any, paused: Paused, answers: Tokens, counts: Samples, *, graph: Any, how: _How) -> Paused:
    """Reads ``counts [P, G]`` tokens of ``answers [P, G, T]``, and draws the next turn of the samples that got any."""
    out, model = paused.out, nnx.merge(graph, params)
    zero = jnp.zeros(counts.shape, jnp.int32)
    known = SampleQueue(keys=paused.draw_keys, first=zero, ended=zero > 0, lengths=paused.prompt_lengths)
    constants = sampler.constants_of(model, paused.prompt_kv, [], known, how.config, how.eos_ids, how.compute)
    at = jnp.arange(out.tokens.shape[-1]) - out.lengths[..., None]
    new = (at >= 0) & (at < counts[..., None])
    read = jnp.take_along_axis(answers, jnp.maximum(at, 0), -1)
    longer = Rollout(
        tokens=jnp.where(new, read, out.tokens),
        logps=out.logps,
        lengths=out.lengths + counts,
        stopped=out.stopped & (counts == 0),
    )
    with jax.named_scope("read_answers"):
        caches = _read(constants, paused, longer, counts)
    goes_on = counts > 0
    begins = jnp.where(goes_on, longer.lengths, paused.begins)
    return _draw(constants, caches, longer, begins, goes_on, out.sampled, how)


def nothing_but(out: Rollout, begins: Samples) -> Tokens:
    """``[P, G, T]`` bool: the tokens of each sample from ``begins [P, G]`` on."""
    at = jnp.arange(out.tokens.shape[-1])
    return (at >= begins[..., None]) & (at < out.lengths[..., None])


def _draw(
    constants: DecodeConstants,
    caches: tuple[Any, Any],
    out: Rollout,
    begins: Samples,
    active: Samples,
    sampled: Tokens,
    how: _How,
) -> Paused:
    """Draws the turns of the ``active [P, G]`` samples, which begin after ``begins [P, G]`` tokens."""
    limits = jnp.minimum(begins + how.turn_tokens, how.config.max_tokens)
    constants = dataclasses.replace(constants, limits=limits)
    state = sampler.in_own_slots(constants, caches, out, active & (out.lengths < limits), [])
    state = sampler.decode(constants, state)
    drawn = nothing_but(state.out, begins) & active[..., None]
    paused = Paused(
        out=dataclasses.replace(state.out, sampled=sampled | drawn),
        # The first token of a first turn comes from the prompt, so that the loop begins one token later.
        begins=jnp.maximum(begins, 1),
        keys=state.keys,
        values=state.values,
        prompt_kv=constants.prompt_kv,
        draw_keys=constants.known.keys,
        prompt_lengths=constants.known.lengths,
    )
    mesh = how.compute.mesh
    return jax.tree_util.tree_map_with_path(lambda path, x: constrain(x, mesh, *_axes(path, x)), paused)


# ------------------------------------------------------------------------------------------- reading of answers


class _Chunk(NamedTuple):
    """The tokens that slots read at a time, C each. All arrays are ``[P, G, C]``, if not said otherwise.

    Attributes:
      tokens: int32.
      at: int32, number of a token in its sample.
      places: ``[P, G, T]`` int32, number in the chunk of the token at each place of the cache; outside of ``[0, C)``
        where the place has another.
      age: ``[P, G, C, T]`` int32, how many tokens before the token the one at each place of the cache stands; negative
        where there is none that it attends to.
    """

    tokens: Array
    at: Array
    places: Array
    age: Array


def _read(constants: DecodeConstants, paused: Paused, out: Rollout, counts: Samples) -> tuple[Any, Any]:
    """The caches with the keys and values of all tokens of ``out`` but each sample's newest.

    In a slot that gets tokens the older ones move, so that all stand at the end of the ring, and the loop's first step
    writes the newest token at position 0. The slots that wait stay as they are.
    """
    ring, compute, slots = constants.ring, constants.compute, out.lengths.shape[1]
    old = out.lengths - counts
    moved = counts > 0
    # The token that stands at each place of a slot once it is read: the last one has number lengths - 2.
    number = jnp.arange(ring.size) - ring.size + out.lengths[..., None] - 1
    came_from = jnp.where(moved[..., None], number - (paused.begins[..., None] - 1), jnp.arange(ring.size)) % ring.size

    def move(x: Array) -> Array:
        """One layer ``[P, G, Hkv, T, d]``."""
        return _pinned(jnp.take_along_axis(x, came_from[:, :, None, :, None], 3), compute)

    def chunk_at(n: Scalar) -> _Chunk:
        first = old - 1 + n * CHUNK
        at = first[..., None] + jnp.arange(CHUNK)
        tokens = jnp.take_along_axis(out.tokens, jnp.clip(at, 0, out.tokens.shape[-1] - 1), -1)
        new = moved[..., None] & (number < out.lengths[..., None] - 1)
        places = jnp.where(new, number - first[..., None], -1)
        age = jnp.where((number >= 0)[:, :, None], at[..., None] - number[:, :, None], -1)
        return _Chunk(tokens, at, places, age)

    def more(n: Scalar, caches: tuple[Any, Any]) -> tuple[Any, Any]:
        return _read_chunk(constants, chunk_at(n), caches)

    def move_layer(x: Any, _: Any, write: Any) -> tuple[Any, None]:
        write(lambda *kv: tuple(map(move, kv)))
        return x, None

    cache, caches = constants.cache, (paused.keys, paused.values)
    layers, put = [None] * len(paused.keys) if cache.listed else None, cache.whole_layer(slots, ring)
    _, caches, _ = kv_cache.over_layers(move_layer, (), layers, caches, put, listed=cache.listed)
    return jax.lax.fori_loop(0, -(-counts.max() // CHUNK), more, tuple(caches))


def _read_chunk(constants: DecodeConstants, chunk: _Chunk, caches: tuple[Any, Any]) -> tuple[Any, Any]:
    """Runs a chunk through all layers, whose caches get its keys and values."""
    compute, model, known, form = constants.compute, constants.model, constants.known, constants.cache_format
    c, (rows, slots, size) = model.config, chunk.tokens.shape
    x = dec.embed_tokens(model, chunk.tokens.reshape(rows, -1), compute, whole=True)
    tables = rope_tables(c, (known.lengths[:, None, None] + chunk.at).reshape(rows, -1))
    prompt_tokens = jax.tree.leaves(constants.prompt_kv[0])[0].shape[-1]
    in_prompt = jnp.arange(prompt_tokens) < known.lengths[:, None]
    prompt_age = known.lengths[:, None, None, None] + chunk.at[..., None] - jnp.arange(prompt_tokens)
    here, source = ((chunk.places >= 0) & (chunk.places < size)), jnp.clip(chunk.places, 0, size - 1)

    def put(cache: Array, new: Array) -> Array:
        new = new.reshape(rows, slots, size, *new.shape[2:]).swapaxes(2, 3)
        new = cast(Array, form.stored(new))  # floats (`check`)
        new = jnp.take_along_axis(new, source[:, :, None, :, None], 3)
        return _pinned(jnp.where(here[:, :, None, :, None], new, cache), compute)

    def masks(kind: Difference) -> tuple[Array, Array]:
        """The tokens of the prompt ``[P, G, C, L]``, or ``[P, 1, 1, L]``, and of the cache ``[P, G, C, T]`` that each
        token of the chunk attends to."""
        seen = chunk.age >= 0
        if kind.windowed is None:
            return in_prompt[:, None, None], seen
        window = jnp.where(kind.windowed, c.window, FAR)
        return in_prompt[:, None, None] & (prompt_age < window), seen & (chunk.age < window)

    def layer(x: Array, of_layer: Any, write: Any) -> tuple[Array, None]:
        weights, prompt, kind = of_layer
        one = Layer(c.kinds[0], weights, c, compute, separately=compute.on_gpu)

        def attend(q, k, v, logits):
            cache = write(lambda keys, values: (put(keys, k), put(values, v)))
            grouped = q.reshape(rows, slots, size, k.shape[2], -1, c.head_dim)
            o = _attend(grouped, prompt, cache, masks(kind), logits or Logits(), compute.mesh)
            return o.reshape(*x.shape[:-1], -1).astype(x.dtype), None

        return one.forward(x, tables_of_layer(tables, kind), attend)

    kinds = differences(c)
    layers: Any = constants.layers, constants.prompt_kv, kinds
    if constants.cache.listed:
        of_layer = [jax.tree.map(lambda x, i=i: x[i], kinds) for i in range(c.num_layers)]
        layers = list(zip(*layers[:2], of_layer, strict=True))
    whole = constants.cache.whole_layer(slots, constants.ring)
    return tuple(kv_cache.over_layers(layer, x, layers, caches, whole, listed=constants.cache.listed)[1])


def _attend(
    q: Array, prompt: Any, cache: tuple[Array, Array], masks: tuple[Array, Array], logits: Logits, mesh: Mesh | None
) -> Array:
    """Attention of queries ``[P, G, C, Hkv, r, d]`` over their prompt and their slot's cache ``[P, G, Hkv, T, d]``.

    One prompt after the other on each shard: the scores of all of them would be larger than their caches.

    Returns:
      float32, in the queries' shape.
    """
    sinks = None if logits.sinks is None else logits.sinks.reshape(q.shape[3:5])

    def of_shard(sinks: Array | None, *xs: Any) -> Array:
        return jax.lax.map(lambda x: _attend_one(*x, cap=logits.cap, sinks=sinks), xs)

    if mesh is not None:
        shard, heads, grouped = (
            sharding.spec(axes, sharding.TRAIN)
            for axes in (("shard",), ("shard", "kv_heads"), ("shard", None, "kv_heads"))
        )
        queries = sharding.spec(("shard", None, None, "kv_heads"), sharding.TRAIN)
        takes = sharding.spec(("kv_heads",), sharding.TRAIN), queries, heads, grouped, shard
        of_shard = jax.shard_map(of_shard, mesh=mesh, in_specs=takes, out_specs=queries, check_vma=False)
    return of_shard(sinks, q, prompt, cache, masks)


def _attend_one(
    q: Array,
    prompt: Any,
    cache: tuple[Array, Array],
    masks: tuple[Array, Array],
    *,
    cap: float,
    sinks: Array | None,
) -> Array:
    """`_attend` for one prompt, in one float32 softmax; ``sinks [Hkv, r]``."""
    q, (keys, values), (in_prompt, seen) = q * q.shape[-1] ** -0.5, cache, masks
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    of_prompt = capped(product("gchrd,hdl->gchrl", q.astype(prompt[0].dtype), prompt[0]), cap)
    of_prompt = jnp.where(in_prompt[:, :, None, None], of_prompt, -jnp.inf)
    own = capped(product("gchrd,ghtd->gchrt", q.astype(keys.dtype), keys), cap)
    own = jnp.where(seen[:, :, None, None], own, -jnp.inf)
    scores = [of_prompt, own]
    if sinks is not None:
        scores.append(jnp.broadcast_to(sinks[..., None], (*own.shape[:-1], 1)))
    weights = jax.nn.softmax(jnp.concatenate(scores, -1), -1)
    ends = [of_prompt.shape[-1], of_prompt.shape[-1] + own.shape[-1]]
    w_prompt, w_own, *_ = jnp.split(weights, ends[: len(scores) - 1], -1)
    mixed = product("gchrl,hld->gchrd", w_prompt.astype(prompt[1].dtype), prompt[1])
    return mixed + product("gchrt,ghtd->gchrd", w_own.astype(values.dtype), values)


def _pinned(x: Array, compute: Compute) -> Array:
    return constrain(x, compute.mesh, "shard", None, "kv_heads", None, None)


@functools.cache  # a run asks for them at every round
def programs(graph: Any, how: _How) -> tuple[Program, Program]:
    """``(params, prompts, key) -> Paused`` draws first turns. ``(params, paused, answers, counts) -> Paused`` draws
    those after ``counts [P, G]`` tokens of ``answers [P, G, T]``."""
    begin, go_on = (functools.partial(each, graph=graph, how=how) for each in (_begin, _go_on))
    mesh = how.compute.mesh
    draws = {"config": how.config, "compute": how.compute, "tokens": how.turn_tokens}
    first, later = (
        {"made_up": _Draws(**draws, turn="first")},
        {"made_up": _Draws(**draws, turn="later"), "donate": (1,)},
    )
    if mesh is None:
        return Program("rollout", begin, **first), Program("rollout turns", go_on, **later)

    def paused(*args: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, x: sharding.named(mesh, _axes(path, x)), jax.eval_shape(begin, *args)
        )

    return (
        Program("rollout", begin, out=paused, **first),
        Program("rollout turns", go_on, out=lambda params, paused, *given: places(paused), **later),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Draws(sampler.Draws):
    """As of a rollout, for what lies between two rounds. After a later one, samples have all their turns."""

    def __call__(self, results: Paused, longest: bool) -> Any:
        lengths = (self.tokens, 1) if self.turn == "first" else (self.config.max_tokens, 2)
        return dataclasses.replace(results, out=sampler.samples_of(results.out, lengths[not longest]))


# ----------------------------------------------------------------------------------------------------- the host


class EpisodeSampler:
    """Draws the samples of some prompts turn by turn. The first turns are dispatched at once.

    Args:
      policy: the model.
      params: its weights, as for `grpojax.programs.policy.Policy.sample`.
      prompts: on the host, ``[P, L]``.
      key: as in `grpojax.programs.sampler.sample_groups`.
      config: group size, longest episode, temperature. Every sample has its own slot.
      turn_tokens: most tokens of a turn; 0 for those of an episode.

    Raises:
      UserError: fewer slots than samples, caches in eight bits, choices of experts that are kept, or a model with delta
        nets.
    """

    def __init__(
        self, policy: Policy, params: Any, prompts: Prompts, key: Array, config: SamplerConfig, *, turn_tokens: int = 0
    ):
        check(config, policy.config)
        placed, split = policy.laid_out(prompts, config)
        self._policy, self._params, self._prompts, self._group = policy, params, len(prompts.lengths), split.group
        how = how_of(split, policy.eos_ids, policy.sampling.compute, turn_tokens)
        begins, self._goes_on = programs(policy.graph, how)
        self._paused = policy.sampling_device.call(begins, params, placed, key)

    def go_on(self, answers: Tokens, counts: Samples) -> None:
        """Dispatches the next turns of the samples that get ``counts [P, G]`` tokens of ``answers [P, G, T]``, on the
        host. A sample with 0 of them waits."""
        split = [np.asarray(x, np.int32).reshape(-1, self._group, *x.shape[2:]) for x in (answers, counts)]
        device = self._policy.sampling_device
        self._paused = device.call(self._goes_on, self._params, self._paused, *device.put(split))

    def cut_back(self, out: Rollout) -> None:
        """Replaces the samples on the devices by ``out``, as `fetch` gave them. Those of them that are shorter go on
        after the tokens that they still have."""
        split = jax.tree.map(lambda x: x.reshape(-1, self._group, *x.shape[2:]), out)
        self._paused = dataclasses.replace(self._paused, out=self._policy.sampling_device.put(split))

    @property
    def dispatched(self) -> Rollout:
        """The samples so far, on the devices."""
        return self._paused.out

    def fetch(self) -> Rollout:
        """Waits for the samples so far, ``[P, G, ...]`` on the host."""
        return jax.tree.map(np.array, self._policy.fetch(self._paused.out, self._prompts))


def _axes(path: Any, x: Any) -> tuple[str | None, ...]:
    """How the devices divide an array of `Paused`."""
    name = path[0].name
    if name == "prompt_kv":  # of a layer, or of all
        return (*(None,) * (x.ndim - 4), "shard", "kv_heads", None, None)
    if name not in ("keys", "values"):
        return ("shard", *(None,) * (x.ndim - 1))
    # A block of a layer, or the blocks of all layers.
    return ("shard", None, "kv_heads", None, None) if x.ndim == 5 else (None, None, "shard", "kv_heads", None, None)


def how_of(config: SamplerConfig, eos_ids: tuple[int, ...], compute: Compute, turn_tokens: int) -> _How:
    """The static argument of the programs."""
    most = min(turn_tokens or config.max_tokens, config.max_tokens)
    return _How(config=config, eos_ids=eos_ids, compute=compute, turn_tokens=most)


def check(config: SamplerConfig, model: DecoderConfig) -> None:
    """Raises `UserError` for settings that episodes do not support."""
    if config.decode_slots not in (0, config.group):
        raise UserError(f"decode_slots={config.decode_slots}: episodes need a slot for each of their samples; set 0")
    if config.cache_dtype == "int8":
        raise UserError("cache_dtype=int8: episodes read their caches again in full; set rollout.cache_dtype=compute")
    if config.router_replay:
        raise UserError("router_replay=true: choices for what environments answer are not kept; set it to false")
    if model.mixer is not None:
        raise UserError(f"family {model.family!r}: {model.mixer.name} layers have no cache to read answers on top of")
    if not model.uniform:
        raise UserError(f"family {model.family!r}: episodes need layers of one kind, all with experts or all without")
