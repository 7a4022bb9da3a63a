"""The decoder: one set of weights and one block, read by training, scoring, prefill and decode alike.

A forward takes `Rows`: prompts run once per group, completions attend to the prompt's keys and values and to
their own. Weights are stacked over layers and scanned.
"""

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from grpojax.models import attention as att
from grpojax.models.decoder_config import DecoderConfig, RopeScaling
from grpojax.models.logprobs import token_scores
from grpojax.models.sharding import ROLLOUT, TRAIN, constrain, gather_weight, spec
from grpojax.types import Rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compute:
    """How to run a decoder; nothing here changes what it computes beyond rounding.

    Attributes:
      dtype: of activations and of the weights while they multiply; norms, softmax and log-probs are float32.
      remat: what a layer keeps for the backward pass: "layer" its input only, "matmuls" also what its weights gave,
        so that only attention and element-wise work are done again, "none" everything.
      attention: "auto" (by platform), "xla", "splash" (TPU) or "cudnn" (NVIDIA).
      vocab_chunk: entries of the vocabulary that tokens are scored against at once; 0 takes about 32 MiB of logits.
      mesh: None on one device.
      platform: the one compiled for; None is jax's default.
    """

    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["layer", "matmuls", "none"] = "layer"
    attention: Literal["auto", "xla", "splash", "cudnn"] = "auto"
    vocab_chunk: int = 0
    mesh: Mesh | None = None
    platform: Literal["cpu", "gpu", "tpu"] | None = None

    @property
    def needs_seats(self) -> bool:
        """Whether rows that hold several completions must come with `Rows.seats`."""
        return att.needs_seats(self.attention, self.platform)


class Block(nnx.Module):
    """One layer: attention and MLP, each behind an RMS norm. Kernels are ``[in, out]``."""

    def __init__(self, c: DecoderConfig, *, rngs: nnx.Rngs):
        def kernel(*shape, fan_in):
            return nnx.Param(jax.random.normal(rngs.params(), shape) * fan_in**-0.5)

        d, f, q, kv = (
            c.hidden_size,
            c.intermediate_size,
            c.num_heads * c.head_dim,
            c.num_kv_heads * c.head_dim,
        )
        ones, zeros = (lambda n: nnx.Param(jnp.ones(n))), (lambda n: nnx.Param(jnp.zeros(n)))
        self.attn_norm, self.mlp_norm = ones(d), ones(d)
        self.q, self.k, self.v = kernel(d, q, fan_in=d), kernel(d, kv, fan_in=d), kernel(d, kv, fan_in=d)
        self.o = kernel(q, d, fan_in=q * 2 * c.num_layers)
        self.gate, self.up = kernel(d, f, fan_in=d), kernel(d, f, fan_in=d)
        self.down = kernel(f, d, fan_in=f * 2 * c.num_layers)
        if c.qkv_bias:
            self.q_bias, self.k_bias, self.v_bias = zeros(q), zeros(kv), zeros(kv)
        if c.out_bias:
            self.o_bias = zeros(d)
        if c.mlp_bias:
            self.gate_bias, self.up_bias, self.down_bias = zeros(f), zeros(f), zeros(d)
        if c.qk_norm:
            self.q_norm, self.k_norm = ones(c.head_dim), ones(c.head_dim)


# Logical axes of every weight; a layer's weights have one more in front, the layer.
LOGICAL_AXES: dict[str, tuple[str | None, ...]] = {
    "embed": ("vocab", "embed"),
    "head": ("vocab", "embed"),
    "norm": (None,),
    "attn_norm": (None,),
    "mlp_norm": (None,),
    "q_norm": (None,),
    "k_norm": (None,),
    "q": ("embed", "heads"),
    "k": ("embed", "kv_heads"),
    "v": ("embed", "kv_heads"),
    "o": ("heads", "embed"),
    "gate": ("embed", "mlp"),
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
    "q_bias": ("heads",),
    "k_bias": ("kv_heads",),
    "v_bias": ("kv_heads",),
    "o_bias": (None,),
    "gate_bias": ("mlp",),
    "up_bias": ("mlp",),
    "down_bias": (None,),
}


class Scores(NamedTuple):
    """What a forward gives per completion token, ``[B, R, S]`` float32 (``hidden``: ``[B, R, S, D]``).

    Values on padding are finite and mean nothing. ``entropy`` and ``hidden`` are None unless asked for.
    """

    logps: Any
    entropy: Any = None
    hidden: Any = None


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
        v, d = config.vocab_size, config.hidden_size
        self.embed = nnx.Param(jax.random.normal(rngs.params(), (v, d)) * d**-0.5)

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs):
            return Block(config, rngs=rngs)

        self.layers = stack(rngs)
        self.norm = nnx.Param(jnp.ones(d))
        if not config.tie_embeddings:
            self.head = nnx.Param(jax.random.normal(rngs.params(), (v, d)) * d**-0.5)

    @property
    def unembed(self):
        """The output projection ``[V, D]``."""
        return (self.embed if self.config.tie_embeddings else self.head)[...]


def abstract(config: DecoderConfig):
    """``(graphdef, params)`` of a decoder with shapes in place of weights."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))


def axes_of(path, leaf) -> tuple[str | None, ...]:
    """Logical axes of a leaf of a tree of decoder weights, or of their moments, by its path.

    For ``jax.tree_util.tree_map_with_path``. A leaf that is none of these, such as a step counter, is replicated.
    """
    names = [str(getattr(p, "key", getattr(p, "name", p))) for p in path]
    own = next((n for n in reversed(names) if n in LOGICAL_AXES), None)
    if own is None:
        return (None,) * leaf.ndim
    return ("layers", *LOGICAL_AXES[own]) if "layers" in names else LOGICAL_AXES[own]


# ---------------------------------------------------------------------------------------------- pieces


def rms_norm(x, scale, eps):
    """``x / sqrt(mean(x²) + eps) * scale`` over the last axis, in float32, returned in ``x``'s dtype."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + eps)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None):
    """Rotary frequencies ``[head_dim / 2]`` in float32, Llama 3 scaling applied."""
    freq = theta ** -(jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is None:
        return freq
    wavelength = 2 * math.pi / freq
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = jnp.clip((scaling.original_positions / wavelength - low) / (high - low), 0.0, 1.0)
    return freq * (smooth + (1 - smooth) / scaling.factor)


def rope_tables(config: DecoderConfig, positions):
    """Cosine and sine ``[..., 1, head_dim / 2]`` of positions ``[...]``."""
    freq = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    angle = positions[..., None, None].astype(jnp.float32) * freq
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x, tables):
    """Rotary embedding of ``x [..., heads, head_dim]``; the two halves of a head form the pairs."""
    cos, sin = tables
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


class _Layer:
    """A block's weights in the compute dtype, gathered once and applied to as many streams as there are."""

    def __init__(self, block: Block, config: DecoderConfig, compute: Compute):
        self.config = config
        self.mesh = compute.mesh
        self.w = {
            name: gather_weight(w, compute.mesh, jnp.dtype(compute.dtype), *LOGICAL_AXES[name])
            for name, w in nnx.to_pure_dict(nnx.state(block)).items()
        }

    def _linear(self, x, name):
        # Two-dimensional, so that the weight's gradient contracts one axis: over several, XLA:CPU copies transposes.
        y = x.reshape(-1, x.shape[-1]) @ self.w[name]
        y = y + self.w[f"{name}_bias"] if f"{name}_bias" in self.w else y
        return y.reshape(*x.shape[:-1], -1)

    def qkv(self, x, tables):
        """``x [..., D]`` to rotated q ``[..., H, d]`` and k, v ``[..., Hkv, d]``."""
        c, w = self.config, self.w
        with jax.named_scope("qkv"):
            h = rms_norm(x, w["attn_norm"], c.norm_eps)
            split = lambda y: y.reshape(*y.shape[:-1], -1, c.head_dim)  # noqa: E731
            q, k, v = (split(self._linear(h, n)) for n in "qkv")
            if c.qk_norm:
                q, k = rms_norm(q, w["q_norm"], c.norm_eps), rms_norm(k, w["k_norm"], c.norm_eps)
            return rotate(q, tables), rotate(k, tables), v

    def finish(self, x, attended):
        """Adds the attention's output and the MLP to ``x``."""
        with jax.named_scope("out"):
            x = x + self._linear(attended.reshape(*x.shape[:-1], -1), "o")
        with jax.named_scope("mlp"):
            h = rms_norm(x, self.w["mlp_norm"], self.config.norm_eps)
            h = jax.nn.silu(self._linear(h, "gate")) * self._linear(h, "up")
            return x + self._linear(h, "down")


def layer(block: Block, config: DecoderConfig, compute: Compute) -> _Layer:
    return _Layer(block, config, compute)


def embed_tokens(model: Decoder, tokens, compute: Compute, *, whole: bool = False):
    """``[B, ...]`` ids to ``[B, ..., D]`` in the compute dtype, lanes in front.

    On a mesh the tokens travel, not the table: each fsdp shard looks up its columns for all lanes of its group.
    ``whole`` says that the table lies whole on every fsdp shard, as in a rollout; then nothing moves.
    """
    table, mesh, dtype = model.embed[...], compute.mesh, jnp.dtype(compute.dtype)
    if mesh is None:
        return jnp.take(table, tokens, axis=0).astype(dtype)

    def look_up(table, tokens):
        if not whole:
            tokens = jax.lax.all_gather(tokens, "fsdp", tiled=True)
        row = tokens - jax.lax.axis_index("tensor") * table.shape[0]
        here = (row >= 0) & (row < table.shape[0])
        x = jnp.where(here[..., None], jnp.take(table, row, axis=0, mode="clip").astype(dtype), jnp.zeros((), dtype))
        x = jax.lax.psum(x, "tensor")
        return x if whole else jax.lax.all_to_all(x, "fsdp", 0, x.ndim - 1, tiled=True)

    rules = ROLLOUT if whole else TRAIN
    lanes = spec(("lane",), rules)
    return jax.shard_map(look_up, mesh=mesh, in_specs=(spec(LOGICAL_AXES["embed"], rules), lanes), out_specs=lanes)(
        table, tokens
    )


def scan_layers(model: Decoder, body, carry, xs=None, *, remat: Literal["layer", "matmuls", "none"] = "none"):
    """``lax.scan`` of ``body(carry, (block, x)) -> (carry, y)`` over the stacked layers (`Compute` for ``remat``)."""
    graph, state = nnx.split(model.layers)

    def step(carry, state_x):
        state, x = state_x
        return body(carry, (nnx.merge(graph, state), x))

    if remat != "none":
        keep = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if remat == "matmuls" else None
        step = jax.checkpoint(step, prevent_cse=False, policy=keep)
    return jax.lax.scan(step, carry, (state, xs))


# --------------------------------------------------------------------------------------------- forward


def run_prompts(model: Decoder, prompts, lengths, compute: Compute):
    """Prefill: ``prompts [B, K, L]`` to the hidden states after each prompt's last token ``[B, K, D]`` and the
    keys and values of all layers ``[layers, B, K, L, Hkv, d]``, already rotated."""
    c = model.config
    attend = att.pick(compute.attention, dtype=compute.dtype, mesh=compute.mesh, platform=compute.platform)
    here = (jnp.arange(prompts.shape[-1]) < lengths[..., None]).astype(jnp.int32)
    tables = rope_tables(c, jnp.arange(prompts.shape[-1]))
    x = embed_tokens(model, prompts, compute, whole=True)

    def body(x, block_x):
        block = layer(block_x[0], c, compute)
        q, k, v = block.qkv(x, tables)
        return block.finish(x, attend(q, k, v, here)), (k, v)

    x, kv = scan_layers(model, body, x)
    last = jnp.take_along_axis(x, (lengths - 1)[..., None, None], axis=2)[:, :, 0]
    return rms_norm(last, model.norm[...], c.norm_eps), kv


def predicting_states(model: Decoder, rows: Rows, compute: Compute):
    """Normed hidden states ``[B, R, S, D]`` from which each completion token is predicted.

    Of a completion's first token that is the state of the prompt's last token, of the others the one before.
    """
    c, mesh = model.config, compute.mesh
    attend = att.pick(compute.attention, dtype=compute.dtype, mesh=mesh, platform=compute.platform)
    attend_rows = attend if rows.seats is None else att.by_completion(attend, rows.seats, rows.segments)
    length, (b, k, l), (r, s) = rows.prompt_lengths, rows.prompts.shape, rows.tokens.shape[1:]
    here = (jnp.arange(l) < length[..., None]).astype(jnp.int32)
    start = jnp.take_along_axis(length, rows.row_prompt, axis=1)

    # Prompts and rows are one stream of tokens, so that a weight is one matmul and its gradient one sum.
    def join(prompts, rows):
        return jnp.concatenate(
            [prompts.reshape(b, k * l, *prompts.shape[3:]), rows.reshape(b, r * s, *rows.shape[3:])], 1
        )

    def part(x):
        return x[:, : k * l].reshape(b, k, l, *x.shape[2:]), x[:, k * l :].reshape(b, r, s, *x.shape[2:])

    positions = join(jnp.broadcast_to(jnp.arange(l), (b, k, l)), start[..., None] + rows.offsets)
    tables = rope_tables(c, positions)
    x = embed_tokens(model, join(rows.prompts, rows.tokens), compute)

    def body(x, block_x):
        block = layer(block_x[0], c, compute)
        (qp, qc), (kp, kc), (vp, vc) = (part(y) for y in block.qkv(x, tables))
        with jax.named_scope("prompt_attention"):
            op = attend(qp, kp, vp, here)
        with jax.named_scope("row_attention"):
            oc = attend_rows(qc, kc, vc, rows.segments, att.Prefix(kp, vp, length, rows.row_prompt))
        return constrain(block.finish(x, join(op, oc)), mesh, "lane", None, None), None

    x, _ = scan_layers(model, body, x, remat=compute.remat)
    xp, xc = part(x)
    last = jnp.take_along_axis(xp, (length - 1)[..., None, None], axis=2)[:, :, 0]
    first = att.of_rows(last, rows.row_prompt)[:, :, None]
    before = jnp.pad(xc[:, :, :-1], ((0, 0), (0, 0), (1, 0), (0, 0)))
    states = jnp.where(rows.offsets[..., None] == 0, first, before)
    return rms_norm(states, model.norm[...], c.norm_eps)


@functools.partial(jax.named_call, name="score")
def score(
    graph,
    params,
    rows: Rows,
    compute: Compute,
    *,
    temperature: float = 1.0,
    entropy: bool | Literal["value"] = False,
    hidden: bool = False,
) -> Scores:
    """Log-probabilities of completion tokens: ``log softmax(logits / temperature)[token]``.

    Args:
      graph, params: the two halves of a `Decoder` (``nnx.split``).
      rows: prompts and completions.
      temperature: of the distribution that the tokens were drawn from, over 0.
      entropy: also the entropy of each of these distributions, in nats; "value" gives it no gradient.
      hidden: also the normed hidden states that the tokens are predicted from.
    """
    if not temperature > 0:
        raise ValueError(f"temperature {temperature}: a log-probability needs a temperature over 0")
    model = nnx.merge(graph, params)
    states = predicting_states(model, rows, compute)
    b, r, s, d = states.shape
    logps, entropies = token_scores(
        states.reshape(b, r * s, d), model.unembed, rows.tokens.reshape(b, r * s),
        inverse_temperature=1.0 / temperature, chunk=compute.vocab_chunk, with_entropy=entropy, mesh=compute.mesh,
    )  # fmt: skip
    back = lambda x: None if x is None else x.reshape(b, r, s)  # noqa: E731
    return Scores(back(logps), back(entropies), states if hidden else None)


def logits(model: Decoder, hidden, compute: Compute):
    """Float32 logits ``[..., V]`` of normed hidden states, for the sampler."""
    w = gather_weight(model.unembed, compute.mesh, jnp.dtype(compute.dtype), "vocab", "embed")
    return jnp.einsum("...d,vd->...v", hidden, w, preferred_element_type=jnp.float32)
