"""The decoder: training, scoring, prefill and decode use the same weights and the same block.

A forward takes `Rows`. Prompts run once per group; completions attend to the keys and values of their prompt and to
their own. Weights are stacked over layers and scanned.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from grpojax.models import attention as att
from grpojax.models import blocked_attention, matrix
from grpojax.models.compute import Compute
from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.layer_kinds import Kind, Mixer, Observe
from grpojax.models.layers import (
    HybridLayerWeights,
    Layer,
    LayerWeights,
    differences,
    final_norm,
    rope_tables,
    tables_of_layer,
)
from grpojax.models.logprobs import mask_unused, token_scores
from grpojax.models.weight_table import DECODER, by_layer, initial
from grpojax.sharding import ROLLOUT, TRAIN, constrain, gather_weight, spec
from grpojax.types import Array, Rows

Remat = Literal["layer", "matmuls", "none"]


class Scores(NamedTuple):
    """Results of a forward for each completion token, ``[B, R, S]`` float32 (``hidden``: ``[B, R, S, D]``).

    Values on padding are finite and mean nothing. ``entropy``, ``hidden`` and ``observed`` are None unless asked for.
    ``observed`` is ``[layers, ...]``: the result of `score`'s ``observe`` for each layer with an MLP that tells it.
    """

    logps: Array
    entropy: Array | None = None
    hidden: Array | None = None
    observed: Any = None


class PromptStates(NamedTuple):
    """The results of a forward over prompts that rows need to continue them.

    Attributes:
      last: ``[B, K, D]``, normed hidden states after each prompt's last token.
      kv: keys and values of all layers that attend ``[layers, B, K, L, Hkv, d]``, already rotated.
      states: those of all layers with another mixer, ``[layers, B, K, ...]``; None if there are none.
    """

    last: Array
    kv: tuple[Array, Array]
    states: Any = None


class Decoder(nnx.Module):
    """A decoder-only language model. ``nnx.split`` it and pass both halves to `score` or to the sampler.

    Example:
      >>> from flax import nnx
      >>> from grpojax.models import Decoder, DecoderConfig
      >>> config = DecoderConfig(family="qwen3", vocab_size=64, hidden_size=16, intermediate_size=32, num_layers=2,
      ...                        num_heads=4, num_kv_heads=2, head_dim=4, rope_theta=1e4, qk_norm=True)
      >>> graph, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
      >>> params["layers"]["q"].shape
      (2, 16, 16)
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Param(initial(DECODER["embed"], config, rngs))

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs):
            return LayerWeights(config, rngs=rngs)

        self.layers = stack(rngs) if config.uniform else HybridLayerWeights(config, rngs=rngs)
        self.norm = nnx.Param(initial(DECODER["norm"], config, rngs))
        if config.own_head:
            self.head = nnx.Param(initial(DECODER["head"], config, rngs))

    @property
    def unembed(self) -> Any:
        """The output projection ``[V, D]``."""
        return (self.head if self.config.own_head else self.embed).get_value()


def abstract(config: DecoderConfig) -> tuple[nnx.GraphDef[Decoder], nnx.State]:
    """``(graphdef, params)`` of a decoder with shapes in place of weights."""
    graph, params = _abstract(config)
    return graph, jax.tree.map(lambda x: x, params)


@functools.lru_cache(maxsize=8)  # every step needs these shapes for its checkpoint, and a trace would be too slow
def _abstract(config: DecoderConfig) -> tuple[nnx.GraphDef[Decoder], nnx.State]:
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))


def embed_tokens(model: Decoder, tokens: Array, compute: Compute, *, whole: bool = False) -> Array:
    """Embeds ids ``[B, ...]`` as ``[B, ..., D]`` in the compute dtype; shards cut the first axis.

    On a mesh the tokens move and the table does not: each fsdp shard looks up its columns for all shards of its group.
    ``whole`` says that every fsdp shard has the whole table, as in a rollout; then nothing moves.
    """
    x, multiplier = _embedded(model, tokens, compute, whole=whole), model.config.embedding_multiplier
    return x if multiplier == 1 else x * multiplier


def _embedded(model: Decoder, tokens: Array, compute: Compute, *, whole: bool) -> Array:
    table, mesh, dtype = model.embed.get_value(), compute.mesh, jnp.dtype(compute.dtype)
    if mesh is None:
        return matrix.take(table, tokens, dtype)

    def look_up(table, tokens):
        return rows_of_shards(table, tokens, dtype, whole=whole)

    rules = ROLLOUT if whole else TRAIN
    shards = spec(("shard",), rules)
    cut = matrix.each(table, lambda _, axes, __: spec(axes, rules), DECODER["embed"].axes)
    return jax.shard_map(look_up, mesh=mesh, in_specs=(cut, shards), out_specs=shards)(table, tokens)


def rows_of_shards(table: Any, tokens: Array, dtype: Any, *, whole: bool = False) -> Array:
    """The rows of a table for tokens, inside of a shard_map: takes a device's part of both."""
    if not whole:
        tokens = jax.lax.all_gather(tokens, TRAIN["embed"], tiled=True)
    count = jax.tree.leaves(table)[0].shape[0]
    row = tokens - jax.lax.axis_index("tensor") * count
    here = (row >= 0) & (row < count)
    x = jnp.where(here[..., None], matrix.take(table, row, dtype, mode="clip"), jnp.zeros((), dtype))
    x = jax.lax.psum(x, "tensor")
    return x if whole else jax.lax.all_to_all(x, TRAIN["embed"], 0, x.ndim - 1, tiled=True)


_PRODUCTS = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(blocked_attention.SAVED),
)


def _keeps(primitive: Any, *args: Any, **params: Any) -> Any:
    """Whether a checkpointed layer keeps a result if `Compute.remat` is "matmuls"."""
    return primitive.name == att.CUDNN_FORWARD or _PRODUCTS(primitive, *args, **params)


def scan_layers(
    model: Decoder,
    bodies: Mapping[Kind, Callable[[Any, tuple[Any, Any]], tuple[Any, Any]]],
    carry: Any,
    xs: Mapping[Kind, Any],
    *,
    remat: Remat = "none",
    unroll: bool = False,
) -> tuple[Any, dict[Kind, Any]]:
    """``lax.scan`` over the stacked layers. A step of the scan runs one `DecoderConfig.period`, which is one layer if
    all are of one kind. In it, neighbours of one kind are a scan of their own, so that each kind is compiled once. The
    first layers of another kind (`DecoderConfig.dense_layers`) run before it.

    Args:
      model: the decoder.
      bodies: ``body(carry, (weights, x)) -> (carry, y)`` of each kind of layer, with the layer's weights by name.
      carry: what the first layer is given.
      xs: for each kind a tree ``[layers of that kind, ...]``. Results ``y`` have the same form.
      remat: see `Compute`.
      unroll: compile the layers one by one, without a loop (`Compute.unrolls`).
    """
    config, weights = model.config, nnx.to_pure_dict(nnx.state(model.layers))
    if unroll:
        return _one_by_one(config, bodies, carry, weights, xs, remat)
    ys, first, period = dict[Kind, Any](), config.dense_layers, config.period
    steps = {kind: _checkpointed(bodies[kind], remat) for kind in dict.fromkeys(period)}
    if first:
        kind = config.kinds[0]
        one = _checkpointed(bodies[kind], remat, in_loop=False)
        carry, ys[kind] = _first_layers(one, carry, weights, xs[kind], kind, first)
        rest = {name: w for name, w in weights.items() if DECODER[name].of(period[0])}
        both = [name for name in rest if DECODER[name].of(kind)]
        weights = rest | {name: jax.tree.map(lambda x: x[first:], rest[name]) for name in both}
    if len(period) == 1:
        carry, y = jax.lax.scan(steps[period[0]], carry, (weights, xs[period[0]]))
        return carry, ys | {period[0]: y}
    count = config.num_layers // len(period)

    def step(carry: Any, weights_xs: Any) -> tuple[Any, dict[Kind, Any]]:
        ys: dict[Kind, list[Any]] = {kind: [] for kind in steps}
        for kind, weights, x in _runs(period, *weights_xs):
            carry, y = jax.lax.scan(steps[kind], carry, (weights, x))
            ys[kind].append(y)
        return carry, {kind: jax.tree.map(lambda *runs: jnp.concatenate(runs), *made) for kind, made in ys.items()}

    in_periods = jax.tree.map(
        lambda x: x.reshape(count, -1, *x.shape[1:]), (weights, {kind: xs[kind] for kind in steps})
    )
    carry, ys = jax.lax.scan(step, carry, in_periods)
    return carry, jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), ys)


def _runs(
    period: Sequence[Kind], weights: Mapping[str, Any], xs: Mapping[Kind, Any]
) -> list[tuple[Kind, dict[str, Any], Any]]:
    """The runs of neighbours of one kind in a period: the kind, and the weights and ``xs`` of the run's layers."""
    runs = [(kind, len(list(layers))) for kind, layers in itertools.groupby(period)]

    def cut(tree: Any, there: Callable[[Kind], bool]) -> list[Any]:
        """``tree [layers, ...]``, which the layers of some kinds have, as one tree for each of their runs."""
        ends = np.cumsum([size for kind, size in runs if there(kind)])
        leaves, structure = jax.tree.flatten(tree)
        cuts = [jnp.split(x, ends[:-1]) for x in leaves]
        return [jax.tree.unflatten(structure, [x[i] for x in cuts]) for i in range(len(ends))]

    by_run = by_layer({name: cut(w, DECODER[name].of) for name, w in weights.items()}, [kind for kind, _ in runs])
    given = {kind: iter(cut(x, kind.__eq__)) for kind, x in xs.items()}
    return [(kind, mine, next(given[kind])) for (kind, _), mine in zip(runs, by_run, strict=True)]


def _first_layers(
    step: Callable[..., Any], carry: Any, weights: Mapping[str, Any], xs: Any, kind: Kind, count: int
) -> Any:
    """Runs the first ``count`` layers, of one kind; ``xs [count, ...]``."""
    those = {name: jax.tree.map(lambda x: x[:count], w) for name, w in weights.items() if DECODER[name].of(kind)}
    listed, ys = {name: _unstacked(w, count) for name, w in those.items()}, []
    for given in zip(by_layer(listed, (kind,) * count), _unstacked(xs, count), strict=True):
        carry, y = step(carry, given)
        ys.append(y)
    return carry, _stacked(ys)


def _checkpointed(step: Callable[..., Any], remat: Remat, *, in_loop: bool = True) -> Callable[..., Any]:
    if remat == "none":
        return step
    # Without a loop XLA would merge the recomputed layer with that of the forward pass, and keep its activations.
    return jax.checkpoint(step, prevent_cse=not in_loop, policy=_keeps if remat == "matmuls" else None)


def _one_by_one(
    config: DecoderConfig,
    bodies: Mapping[Kind, Callable[[Any, tuple[Any, Any]], tuple[Any, Any]]],
    carry: Any,
    weights: Mapping[str, Any],
    xs: Mapping[Kind, Any],
    remat: Remat,
) -> tuple[Any, dict[Kind, Any]]:
    """`scan_layers` without a loop. Layers of one kind have the same kernels, so that each kernel is compiled once.

    For that the compiler must not know a layer's number: where it does, it writes other kernels for each layer's slices
    of the weights. For 24 layers of Qwen2.5-0.5B on an H100 an update has 133 different kernels this way and 561 with
    known numbers; the compiler is busy for 27 s and for 71 s. The number also waits for what the layer is given. Else
    the slices of all layers would be made at once, and kept.
    """
    count = {name: len(jax.tree.leaves(w)[0]) for name, w in weights.items()}
    slices = by_layer({name: _unstacked(w, count[name]) for name, w in weights.items()}, config.kinds)
    numbers = by_layer({name: [jnp.int32(i) for i in range(n)] for name, n in count.items()}, config.kinds)
    given = {kind: iter(_unstacked(x, config.kinds.count(kind))) for kind, x in xs.items()}
    stacks, ys = jax.lax.stop_gradient(weights), {kind: list[Any]() for kind in bodies}

    def step(carry: Any, slices_x: tuple[Any, Any], *, kind: Kind, numbers: Mapping[str, Array]) -> tuple[Any, Any]:
        slices, x = slices_x
        carry, numbers = jax.lax.optimization_barrier((carry, numbers))
        reads = {name: functools.partial(_read, number=number) for name, number in numbers.items()}
        return bodies[kind](carry, ({name: jax.tree.map(reads[name], stacks[name], slices[name]) for name in reads}, x))

    for kind, mine, places in zip(config.kinds, slices, numbers, strict=True):
        one = _checkpointed(functools.partial(step, kind=kind, numbers=places), remat, in_loop=False)
        carry, y = one(carry, (mine, next(given[kind])))
        ys[kind].append(y)
    return carry, {kind: _stacked(y) for kind, y in ys.items()}


@jax.custom_vjp
def _read(stack: Array, mine: Array, number: Array) -> Array:
    """``stack[number]``. Its gradient is that of ``mine``, which has the same values."""
    return jax.lax.dynamic_index_in_dim(stack, number, keepdims=False)


_read.defvjp(lambda stack, mine, number: (_read(stack, mine, number), None), lambda _, grad: (None, grad, None))


def _stacked(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def _unstacked(tree: Any, count: int) -> list[Any]:
    """Undoes `_stacked` of ``count`` trees."""
    leaves, structure = jax.tree.flatten(tree)
    slices = [_slices(x) for x in leaves]
    return [jax.tree.unflatten(structure, [x[i] for x in slices]) for i in range(count)]


@jax.custom_vjp
def _slices(x: Array) -> list[Array]:
    """All ``x[i]``. Its gradient stacks theirs. jax would make an array of the size of ``x`` for each and add them."""
    return [x[i] for i in range(len(x))]


_slices.defvjp(lambda x: (_slices(x), None), lambda _, grads: (jnp.stack(grads),))


def run_prompts(
    model: Decoder, prompts: Array, lengths: Array, compute: Compute, observe: Observe | None = None
) -> tuple[PromptStates, Any]:
    """Prefill of ``prompts [B, K, L]``. Also returns what ``observe`` makes of what each layer's MLP tells,
    ``[layers, B, K, L, ...]``."""
    x = embed_tokens(model, prompts, compute, whole=True)
    return _prompts(model, x, lengths, compute, remat="none", observe=observe)


def read_prompts(model: Decoder, rows: Rows, compute: Compute) -> PromptStates:
    """Runs the prompts of ``rows`` for `grpojax.types.Rows.read`, which `token_states` uses; has a gradient."""
    x = embed_tokens(model, rows.prompts, compute)
    how = {"remat": compute.remat, "choices": _of_layers(rows.prompt_choices, model)}
    return _prompts(model, x, rows.prompt_lengths, compute, **how)[0]


def _of_layers(choices: Array | None, model: Decoder) -> Array | None:
    """Choices ``[..., C]`` of all layers with an MLP that chooses as ``[layers, ..., k]``."""
    if choices is None:
        return None
    if not (layers := len(model.config.mlp_layers)):
        raise ValueError("choices of experts for a decoder without experts")
    return jnp.moveaxis(choices.reshape(*choices.shape[:-1], layers, -1), -2, 0)


def _run_layers(
    model: Decoder,
    x: Array,
    positions: Array,
    attend: Callable[..., tuple[Array, Any]],
    mix: Callable[[Mixer, Layer, Any, Any], tuple[Array, Any]],
    compute: Compute,
    *,
    remat: Remat,
    one: Array | None = None,
    read: PromptStates | None = None,
    pinned: bool = True,
    observe: Observe | None = None,
    choices: Array | None = None,
) -> tuple[Array, Any, Any, Any]:
    """Runs tokens through all layers. Prompts, rows, and both as one stream use this same loop.

    Args:
      model: the decoder.
      x: ``[B, ..., D]``, embedded tokens.
      positions: positions of the tokens; the axes of ``x`` before D, or those of them that positions vary over.
      attend: one layer's attention ``(q, k, v, read, window, logits) -> (attended, kept)``.
      mix: the same for one layer with another mixer, ``(mixer, layer, projected, read) -> (mixed, kept)``.
      compute, remat: how to run the layers.
      one: see `Layer`.
      read: the prompts as they were read before. Keys and values are passed to ``attend`` layer by layer, states to
        ``mix``.
      pinned: keep each layer's output whole on every device of a data-parallel shard.
      observe: function of what each layer's MLP tells.
      choices: ``[layers, ..., k]``, what the MLPs are to choose (`Layer`).

    Returns:
      ``(x, attended, mixed, observed)``: hidden states that are not normed yet, what the layers kept that attend and
      those with another mixer, ``[layers of that mixer, ...]``, and a tree of ``[layers, ...]``.
    """
    config, tables = model.config, rope_tables(model.config, positions)

    def placed(x: Array) -> Array:
        return constrain(x, compute.mesh, "shard", None, None) if pinned else x

    def body(kind: Kind):
        def attention_layer(x, weights_given):
            weights, (read, differs, chosen) = weights_given
            layer = Layer(kind, weights, config, compute, one, choices=chosen)
            window = None if differs.windowed is None else att.Window(config.window, differs.windowed)

            def of_layer(q, k, v, logits):
                return attend(q, k, v, read, window, logits)

            x, kept = layer.forward(x, tables_of_layer(tables, differs), of_layer)
            return placed(x), (kept, None if observe is None or layer.seen is None else observe(layer.seen))

        def mixer_layer(x, weights_read):
            layer, mixer = Layer(kind, weights_read[0], config, compute, one), cast(Mixer, config.mixer)
            x, kept = layer.mix(x, lambda projected: mix(mixer, layer, projected, weights_read[1]))
            return placed(x), kept

        return attention_layer if kind.mixer == Kind().mixer else mixer_layer

    kinds, first = dict.fromkeys(config.kinds), config.dense_layers
    given = None if read is None else read.kv, differences(config)
    xs: dict[Kind, Any] = {}
    for kind in kinds:
        if kind.mixer != Kind().mixer:
            xs[kind] = None if read is None else read.states
        elif not first:
            xs[kind] = (*given, choices)
        elif kind == config.kinds[0]:
            xs[kind] = (*jax.tree.map(lambda y: y[:first], given), None)
        else:
            xs[kind] = (*jax.tree.map(lambda y: y[first:], given), choices)
    x, made = scan_layers(model, {kind: body(kind) for kind in kinds}, x, xs, remat=remat, unroll=compute.unrolls)
    attending = [made[kind] for kind in kinds if kind.mixer == Kind().mixer]
    mixed = next((made[kind] for kind in kinds if kind.mixer != Kind().mixer), None)
    kept, observed = attending[-1]
    if first:
        kept = jax.tree.map(lambda *parts: jnp.concatenate(parts), attending[0][0], kept)
    return x, kept, mixed, observed


def _prompts(
    model: Decoder, x: Array, lengths: Array, compute: Compute, *, remat: Remat, **more: Any
) -> tuple[PromptStates, Any]:
    """`run_prompts` for embedded prompts ``[B, K, L, D]``; ``more`` is for `_run_layers`."""
    size, (attend_prompts, _) = x.shape[2], _attends(model, None, compute)
    here = (jnp.arange(size) < lengths[..., None]).astype(jnp.int32)

    def attend(q, k, v, _, window, logits):
        return attend_prompts(q, k, v, here, None, window, logits), (k, v)

    def mix(mixer, layer, x, _):
        return mixer.of_prompts(layer, x, lengths)

    one = None if remat == "none" else _one(lengths)
    how: dict[str, Any] = {"remat": remat, "one": one, "pinned": False, **more}
    x, kv, states, observed = _run_layers(model, x, jnp.arange(size), attend, mix, compute, **how)
    return PromptStates(_after_last(model, x, lengths), kv, states), observed


def _after_last(model: Decoder, x: Array, lengths: Array) -> Array:
    """Normed states after the last token of each prompt ``[B, K, D]``."""
    last = jnp.take_along_axis(x, (lengths - 1)[..., None, None], axis=2)[:, :, 0]
    return final_norm(last, model.norm[...], model.config)


def _one(lengths: Array) -> Array:
    """The number 1, computed so that the compiler cannot fold it. No prompt is empty."""
    return jnp.where(lengths.max() > 0, 1, 2)


def token_states(model: Decoder, rows: Rows, compute: Compute, *, at: Literal["before", "after"] = "before") -> Array:
    """Normed hidden states ``[B, R, S, D]`` of each completion token.

    Args:
      model, rows, compute: as in `score`.
      at: "before" returns the state that predicts the token. That is the state after the token before it; for a
        completion's first token, after the prompt's last token. "after" returns the state that has read the token.
    """
    run = _with_prompts if rows.read is None else _after_prompts
    last, x, _ = run(model, rows, compute)
    return x if at == "after" else _before(rows, last, x)


def _before(rows: Rows, last: Array, x: Array) -> Array:
    """The states that predict the tokens, given the states after each prompt and after each token."""
    first = jnp.einsum("brsk,bkd->brsd", _own_prompt(rows).astype(last.dtype), last, precision="highest")
    before = jnp.pad(x[:, :, :-1], ((0, 0), (0, 0), (1, 0), (0, 0)))
    return jnp.where(rows.offsets[..., None] == 0, first, before)


def _attends(model: Decoder, rows: Rows | None, compute: Compute) -> tuple[att.Attend, att.Attend]:
    """The attention of prompts and that of rows."""
    plain, where = model.config.plain_logits, {"mesh": compute.mesh, "platform": compute.platform}
    attend = att.pick(compute.attention, dtype=compute.dtype, plain=plain, **where)
    if rows is None or rows.gather is None:
        return attend, attend
    return attend, att.by_completion(attend, rows.gather, rows.token_prompt)


def _of_rows(window: att.Window | None, rows: Rows) -> att.Window | None:
    """The window of the rows' tokens."""
    return None if window is None else window._replace(offsets=rows.offsets)


def _own_prompt(rows: Rows) -> Array:
    """``[B, R, S, K]`` bool: which of the prompts a token's completion continues."""
    return rows.token_prompt[..., None] == jnp.arange(rows.prompt_lengths.shape[1], dtype=jnp.int32)


def _positions(rows: Rows) -> Array:
    """Positions ``[B, R, S]`` of the completions' tokens. They continue those of the prompts."""
    return jnp.where(_own_prompt(rows), rows.prompt_lengths[:, None, None], 0).sum(-1) + rows.offsets


def _after_prompts(
    model: Decoder, rows: Rows, compute: Compute, observe: Observe | None = None
) -> tuple[Array, Array, Any]:
    """Runs rows whose prompts were read before. Returns the normed states after each prompt ``[B, K, D]`` and after
    each token of the rows, and what ``observe`` makes of what MLPs tell of these tokens."""
    _, attend_rows = _attends(model, rows, compute)

    def attend(q, k, v, prompt, window, logits):
        pk, pv = prompt
        with jax.named_scope("row_attention"):
            prefix = att.Prefix(pk, pv, rows.prompt_lengths, rows.token_prompt[..., 0])
            return attend_rows(q, k, v, rows.segments, prefix, _of_rows(window, rows), logits), None

    def mix(mixer, layer, x, states):
        return mixer.of_rows(layer, x, rows, states), None

    x, one = embed_tokens(model, rows.tokens, compute), _one(rows.prompt_lengths)
    how = {"remat": compute.remat, "one": one, "read": rows.read, "observe": observe}
    how["choices"] = _of_layers(rows.choices, model)
    x, _, _, observed = _run_layers(model, x, _positions(rows), attend, mix, compute, **how)
    return rows.read.last, final_norm(x, model.norm[...], model.config), observed


def _with_prompts(
    model: Decoder, rows: Rows, compute: Compute, observe: Observe | None = None
) -> tuple[Array, Array, Any]:
    """`_after_prompts` for prompts that were not read. Prompts and rows are one stream of tokens, so that each weight
    has one matmul, and one for its gradient."""
    attend_prompts, attend_rows = _attends(model, rows, compute)
    length, (b, k, l), (r, s) = rows.prompt_lengths, rows.prompts.shape, rows.tokens.shape[1:]
    here = (jnp.arange(l) < length[..., None]).astype(jnp.int32)

    def join(prompts, rows):
        return jnp.concatenate(
            [prompts.reshape(b, k * l, *prompts.shape[3:]), rows.reshape(b, r * s, *rows.shape[3:])], 1
        )

    def part(x):
        return x[:, : k * l].reshape(b, k, l, *x.shape[2:]), x[:, k * l :].reshape(b, r, s, *x.shape[2:])

    def attend(q, k, v, _, window, logits):
        (qp, qc), (kp, kc), (vp, vc) = part(q), part(k), part(v)
        with jax.named_scope("prompt_attention"):
            op = attend_prompts(qp, kp, vp, here, None, window, logits)
        with jax.named_scope("row_attention"):
            prefix = att.Prefix(kp, vp, length, rows.token_prompt[..., 0])
            oc = attend_rows(qc, kc, vc, rows.segments, prefix, _of_rows(window, rows), logits)
        return join(op, oc), None

    def mix(mixer, layer, x, _):
        of_prompts, of_rows = (jax.tree.map(lambda x, i=i: part(x)[i], x) for i in range(2))
        out, states = mixer.of_prompts(layer, of_prompts, length)
        return join(out, mixer.of_rows(layer, of_rows, rows, states)), None

    positions = join(jnp.broadcast_to(jnp.arange(l), (b, k, l)), _positions(rows))
    x, one = embed_tokens(model, join(rows.prompts, rows.tokens), compute), _one(length)
    of_rows = None if observe is None else lambda seen: observe(jax.tree.map(lambda x: part(x)[1], seen))
    how = {"remat": compute.remat, "one": one, "observe": of_rows}
    if rows.choices is not None:
        how["choices"] = _of_layers(join(rows.prompt_choices, rows.choices), model)
    x, _, _, observed = _run_layers(model, x, positions, attend, mix, compute, **how)
    xp, xc = part(x)
    return _after_last(model, xp, length), final_norm(xc, model.norm[...], model.config), observed


@functools.partial(jax.named_call, name="score")
def score(
    graph: nnx.GraphDef[Decoder],
    params: Any,
    rows: Rows,
    compute: Compute,
    *,
    temperature: float = 1.0,
    entropy: bool | Literal["value"] = False,
    hidden: bool = False,
    observe: Observe | None = None,
) -> Scores:
    """Log-probabilities of completion tokens: ``log softmax(logits / temperature)[token]``.

    Args:
      graph, params: the two halves of a `Decoder` (``nnx.split``).
      rows: prompts and completions.
      temperature: temperature of the distribution that the tokens were drawn from, over 0.
      entropy: also return the entropy of each of these distributions, in nats; "value" gives it no gradient.
      hidden: also return the normed hidden states that the tokens are predicted from.
      observe: a function of what each layer's MLP tells of the tokens, ``[B, R, S, ...]``, if it tells anything. Its
        results are returned too.
    """
    if not temperature > 0:
        raise ValueError(f"temperature {temperature}: a log-probability needs a temperature over 0")
    model = nnx.merge(graph, params)
    last, after, observed = (_with_prompts if rows.read is None else _after_prompts)(model, rows, compute, observe)
    states = _before(rows, last, after)
    b, r, s, d = states.shape
    logps, entropies = token_scores(
        states.reshape(b, r * s, d),
        model.unembed,
        rows.tokens.reshape(b, r * s),
        inverse_temperature=1.0 / temperature,
        chunk=compute.vocab_chunk,
        logits_bytes=compute.logits_bytes,
        with_entropy=entropy,
        unused=model.config.unused_rows,
        cap=model.config.logits_cap,
        mesh=compute.mesh,
    )
    logps = logps.reshape(b, r, s)
    entropies = None if entropies is None else entropies.reshape(b, r, s)
    return Scores(logps, entropies, states if hidden else None, observed)


def logits(model: Decoder, hidden: Array, compute: Compute) -> Array:
    """Float32 logits ``[..., V]`` of normed hidden states, for the sampler. The logits of unused rows are masked."""
    w = model.unembed
    if not matrix.is_ready(w):
        w = gather_weight(w, compute.mesh, jnp.dtype(compute.dtype), *DECODER["embed"].axes)
    return mask_unused(att.capped(matrix.unembed(hidden, w), model.config.logits_cap), model.config.unused_rows)
