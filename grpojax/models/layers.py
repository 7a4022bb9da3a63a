"""One layer of a decoder and its parts: norm, rotary positions, the block's weights and their forward."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from grpojax.models import kv_heads, matrix
from grpojax.models.attention import Logits
from grpojax.models.compute import Compute
from grpojax.models.decoder_config import DecoderConfig, LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from grpojax.models.layer_kinds import Kind, Mixer, Mlp
from grpojax.models.weight_table import DECODER, initial, layers_with, present
from grpojax.sharding import ROLLOUT, constrain, gather_weight
from grpojax.types import Array


class LayerWeights(nnx.Module):
    """The weights of one layer: attention and MLP, each before or behind an RMS norm. Kernels are ``[in, out]``."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        for name, weight in present(DECODER, config).items():
            if weight.stacked:
                setattr(self, name, nnx.Param(initial(weight, config, rngs)))


class HybridLayerWeights(nnx.Module):
    """The weights of a decoder whose layers are not all alike: each is stacked over the layers that have it."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        for name, weight in present(DECODER, config).items():
            if weight.stacked:
                of_layers = [initial(weight, config, rngs) for _ in layers_with(weight, config)]
                setattr(self, name, nnx.Param(jnp.stack(of_layers)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """``x / sqrt(mean(x²) + eps) * scale`` over the last axis, in float32, returned in ``x``'s dtype.

    Its gradient is written out, because XLA:CPU computes jax's own gradient of ``scale`` in a slow loop.
    """
    return (_normed(x, eps)[0] * scale.astype(jnp.float32)).astype(x.dtype)


def norm(x: Array, weight: Array, config: DecoderConfig) -> Array:
    """`rms_norm` with a weight as the config's family has it."""
    return rms_norm(x, _norm_scale(weight, config), config.norm_eps)


def final_norm(x: Array, weight: Array, config: DecoderConfig) -> Array:
    """Applies the last norm, and divides by the config's divisor of logits. Logits are computed from the result."""
    scale = _norm_scale(weight, config)
    return rms_norm(x, scale if config.logits_divisor == 1 else scale / config.logits_divisor, config.norm_eps)


def _norm_scale(weight: Array, config: DecoderConfig) -> Array:
    """What a norm with this weight multiplies by."""
    return 1 + weight.astype(jnp.float32) if config.norms_add_one else weight


def _normed(x, eps):
    """``x`` in float32 divided by its root mean square, and the inverse of that root mean square."""
    y = x.astype(jnp.float32)
    over = jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + eps)
    return y * over, over


def _rms_norm_backward(eps, saved, g):
    x, scale = saved
    y, over = _normed(x, eps)
    g = g.astype(jnp.float32)
    dy = g * scale.astype(jnp.float32)
    dx = over * (dy - y * (dy * y).mean(-1, keepdims=True))
    return dx.astype(x.dtype), (g * y).sum(tuple(range(x.ndim - 1))).astype(scale.dtype)


rms_norm.defvjp(lambda x, scale, eps: (rms_norm(x, scale, eps), (x, scale)), _rms_norm_backward)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Array:
    """Rotary frequencies ``[head_dim / 2]`` in float32, with the scaling if given."""
    freq = theta ** -(jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    match scaling:
        case None:
            return freq
        case LinearScaling():
            return freq / scaling.factor
        case YarnScaling():
            kept = _kept_by_yarn(head_dim, theta, scaling)
            return freq * (kept + (1 - kept) / scaling.factor)
    wavelength = 2 * math.pi / freq
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = jnp.clip((scaling.original_positions / wavelength - low) / (high - low), 0.0, 1.0)
    return freq * (smooth + (1 - smooth) / scaling.factor)


def _kept_by_yarn(head_dim: int, theta: float, scaling: YarnScaling) -> Array:
    """How much of each frequency ``[head_dim / 2]`` YaRN keeps: 1 keeps it, 0 interpolates it."""

    def place(turns: float) -> float:
        """The place in a head of the frequency that makes ``turns`` turns over the original positions."""
        return head_dim * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = place(scaling.fast), place(scaling.slow)
    if scaling.whole:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    ramp = (jnp.arange(head_dim // 2, dtype=jnp.float32) - first) / ((last - first) or 0.001)
    return 1 - jnp.clip(ramp, 0.0, 1.0)


class RopeTables(NamedTuple):
    """Cosine and sine ``[..., 1, head_dim / 2]`` of positions ``[...]``, multiplied by YaRN's attention factor. The
    pairs that positions do not rotate come last, with 1 and 0.

    Attributes:
      usual: for all layers, or for those without a window.
      windowed: for layers with a window; None if they use the same.
      growth: ``[..., 1, 1]``, what queries are multiplied by; None if they do not grow with positions.
    """

    usual: tuple[Array, Array]
    windowed: tuple[Array, Array] | None = None
    growth: Array | None = None


def rope_tables(config: DecoderConfig, positions: Array) -> RopeTables:
    """The `RopeTables` of positions ``[...]``."""
    usual = _rope_table(config, config.rope_theta, config.rope_scaling, positions)
    windowed = None if config.window_theta is None else _rope_table(config, config.window_theta, None, positions)
    return RopeTables(usual, windowed, _growth(config, positions))


def _growth(config: DecoderConfig, positions: Array) -> Array | None:
    """`RopeTables.growth` of positions ``[...]``."""
    scaling = config.rope_scaling
    if not config.query_growth or not isinstance(scaling, Llama3Scaling | YarnScaling):
        return None
    times = jnp.floor(positions[..., None, None].astype(jnp.float32) / scaling.original_positions)
    return 1 + config.query_growth * jnp.log(1 + times)


def _rope_table(
    config: DecoderConfig, theta: float, scaling: RopeScaling | None, positions: Array
) -> tuple[Array, Array]:
    freq = rope_frequencies(config.rotary_dim or config.head_dim, theta, scaling)
    angle = positions[..., None, None].astype(jnp.float32) * freq
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if isinstance(scaling, YarnScaling):
        cos, sin = cos * scaling.attention_factor, sin * scaling.attention_factor
    if config.rotary_dim is None:
        return cos, sin
    still = ((0, 0),) * (cos.ndim - 1) + ((0, config.head_dim // 2 - freq.size),)
    return jnp.pad(cos, still, constant_values=1.0), jnp.pad(sin, still)


class Difference(NamedTuple):
    """In what a layer differs from the others, or ``[layers]`` of that; None where all layers are alike.

    Attributes:
      rotated: bool, whether queries and keys are rotated; None if all are.
      windowed: bool, whether the layer has a window; None if none has.
    """

    rotated: Any = None
    windowed: Any = None


def differences(config: DecoderConfig) -> Difference:
    """In what all layers differ, in numpy arrays.

    Example:
      >>> config = DecoderConfig(family="qwen2", vocab_size=7, hidden_size=5, intermediate_size=3, num_layers=3,
      ...                        num_heads=1, num_kv_heads=1, head_dim=4, rope_theta=1e4, window=2, windowed_layers=[1])
      >>> differences(config)
      Difference(rotated=None, windowed=array([False,  True, False]))
    """

    def among(which: tuple[int, ...]) -> np.ndarray:
        return np.isin(np.arange(config.num_layers), which)

    return Difference(
        rotated=~among(config.unrotated_layers) if config.unrotated_layers else None,
        windowed=among(config.windowed_layers) if config.windowed_layers else None,
    )


def tables_of_layer(tables: RopeTables, kind: Difference) -> tuple[Array, ...]:
    """The cosine and sine that a layer uses: those of angle 0 if it does not rotate. If queries grow with positions,
    their factor is the third."""
    grown = () if tables.growth is None else (tables.growth,)
    return (*_cos_sin(tables, kind), *grown)


def _cos_sin(tables: RopeTables, kind: Difference) -> tuple[Array, Array]:
    cos, sin = tables.usual
    if kind.windowed is not None and tables.windowed is not None:
        cos, sin = (jnp.where(kind.windowed, *both) for both in zip(tables.windowed, tables.usual, strict=True))
    if kind.rotated is None:
        return cos, sin
    return jnp.where(kind.rotated, cos, 1.0), jnp.where(kind.rotated, sin, 0.0)


def pairs_as_halves(x: Array, config: DecoderConfig) -> Array:
    """Reorders the numbers of a head, ``x [..., head_dim]``, so that its halves form the pairs that `rotate` rotates.

    Queries and keys are reordered in the same way, which leaves their products as they are.
    """
    if config.rotary_dim is None and not config.rotary_neighbours:
        return x
    size = config.rotary_dim or config.head_dim
    moving, still = x[..., :size], jnp.split(x[..., size:], 2, -1)
    one, two = (moving[..., ::2], moving[..., 1::2]) if config.rotary_neighbours else jnp.split(moving, 2, -1)
    return jnp.concatenate([one, still[0], two, still[1]], -1)


@jax.custom_vjp
def rotate(x: Array, tables: tuple[Array, Array]) -> Array:
    """Rotary embedding of ``x [..., heads, head_dim]``; the two halves of a head form the pairs.

    Its gradient rotates back, also if the tables are scaled. The tables have no gradient.
    """
    cos, sin = tables
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


rotate.defvjp(
    lambda x, tables: (rotate(x, tables), tables),
    lambda tables, g: (rotate(g, (tables[0], -tables[1])), None),
)


@jax.custom_vjp
def gated(gate: Array, up: Array) -> Array:
    """``silu(gate) * up``. Its gradient computes one sigmoid, and only the two arguments are kept for it."""
    return jax.nn.silu(gate) * up


def _gated_backward(saved, g):
    gate, up = saved
    s = jax.nn.sigmoid(gate)
    return g * up * (s * (1 + gate * (1 - s))), g * (gate * s)


gated.defvjp(lambda gate, up: (gated(gate, up), (gate, up)), _gated_backward)


def gelu_gated(gate: Array, up: Array) -> Array:
    """``gelu(gate) * up``, with the approximation of gelu by a tanh."""
    return jax.nn.gelu(gate, approximate=True) * up


_TOGETHER = ("q", "k", "v"), ("q_gated", "k", "v"), ("gate", "up")


def joined(weights: Mapping[str, Any], compute: Compute) -> dict[str, Any]:
    """One layer's weights by name, where those that multiply the same factor are one (`grpojax.models.matrix.Joined`).

    A weight that is no array, or is cut over devices, stays as it is.
    """
    made = dict(weights)
    if compute.mesh is not None and compute.mesh.shape["tensor"] > 1:
        return made
    for names in _TOGETHER:
        given = [made.get(name) for name in names]
        if all(w is not None and not matrix.is_matrix(w) and w.ndim == 2 for w in given):
            biases = [made.pop(f"{name}_bias", None) for name in names]
            made["+".join(names)] = matrix.Joined.of([made.pop(name) for name in names], biases, compute.dtype)
    return made


Attend = Callable[[Array, Array, Array, Logits | None], tuple[Array, Any]]
_GATES = {"silu": gated, "gelu_tanh": gelu_gated}
_MLP_TOKENS = 1024  # tokens of a shard that the MLP takes at once if memory is short (`Compute.lean`)


class Layer:
    """The weights of one layer in the compute dtype, gathered once and applied to any number of token streams.

    Args:
      kind: its mixer and its MLP.
      weights: its weights by name.
      config, compute: how to run the layer.
      one: the number 1, hidden from the compiler. Weights are multiplied by it, so that XLA casts the weights of a
        layer when it runs that layer, instead of all before the first layer. None if there is nothing to cast.
      separately: multiply with one weight after the other, where they are not `joined`. XLA:GPU joins two products that
        share a factor, and copies both weights into one array for that. In a decode step the copy moves more bytes than
        the products.
      choices: ``[..., k]``, what the MLP chose for the tokens in an earlier forward, if it is to choose the same
        (`grpojax.models.layer_kinds.Mlp`).

    Attributes:
      w: the weights by name.
      seen: what another MLP than the dense one tells of the tokens that it ran last.
    """

    seen: Any = None
    _gate: Array | None = None  # of the output of attention, made with the last queries

    def __init__(
        self,
        kind: Kind,
        weights: Mapping[str, Any],
        config: DecoderConfig,
        compute: Compute,
        one: Array | None = None,
        *,
        separately: bool = False,
        choices: Array | None = None,
    ):
        self.kind, self.config, self.compute = kind, config, compute
        self._separately, self._choices = separately, choices
        dtype = jnp.dtype(compute.dtype)

        def gather(name: str, w: matrix.Kernel) -> Any:
            if matrix.is_ready(w):
                return w
            return matrix.each(w, whole, DECODER[name].axes[1:], jnp.dtype("float32") if DECODER[name].exact else dtype)

        def whole(w: Array, axes: tuple[str, ...], dtype: Any) -> Array:
            if one is not None and w.ndim >= 2 and w.dtype != dtype:
                w = w * one.astype(w.dtype)
            w = gather_weight(w, compute.mesh, dtype, *axes)
            if axes[-1] == "kv_heads" and kv_heads.on_mesh(config, compute.mesh) > config.num_kv_heads:
                w = constrain(kv_heads.repeated(w, config, compute.mesh), compute.mesh, *axes, rules=ROLLOUT)
            return w

        self.w = {name: gather(name, w) for name, w in weights.items()}

    def linear(self, x: Array, name: str) -> Array:
        """``x [..., in]`` times the weight called ``name``, with its bias if it has one."""
        # Two-dimensional, so that the weight's gradient sums over one axis. Over several, XLA:CPU copies transposes.
        w, rows = self.w[name], x.reshape(-1, x.shape[-1])
        exact = DECODER[name].exact
        precision = "highest" if exact else None
        rows = rows.astype(jnp.float32) if exact else rows
        y = matrix.matmul(rows, w, precision)
        y = y + self.w[f"{name}_bias"] if f"{name}_bias" in self.w else y
        return y.reshape(*x.shape[:-1], -1)

    def linears(self, x: Array, *names: str) -> list[Array]:
        """`linear` by several weights, which may have been joined (`joined`)."""
        if (joined := self.w.get("+".join(names))) is not None:
            products = joined.products(x.reshape(-1, x.shape[-1]))
            return [y.reshape(*x.shape[:-1], -1) for y in products]
        made = []
        for name in names:
            if self._separately and made:
                x, made[-1] = jax.lax.optimization_barrier((x, made[-1]))
            made.append(self.linear(x, name))
        return made

    @property
    def logits(self) -> Logits | None:
        """What attention does to its logits; None if nothing."""
        if self.config.plain_logits:
            return None
        return Logits(self.config.attention_cap, cast(Array, self.w["sinks"]) if self.config.sinks else None)

    def forward(self, x: Array, tables: tuple[Array, ...], attend: Attend) -> tuple[Array, Any]:
        """The layer on tokens ``x [..., D]``. Prompts, rows, and tokens on a cache go through it; they differ in
        ``attend``.

        Args:
          x: the residual stream.
          tables: of the tokens' positions (`tables_of_layer`).
          attend: ``(q, k, v, logits) -> (attended, kept)``, with queries ``[..., H, d]``, keys and values
            ``[..., Hkv, d]``, and what happens to the logits.

        Returns:
          ``(x, kept)``: the stream after the layer, and what ``attend`` wants kept, such as keys and values.
        """
        attended, kept = attend(*self.qkv(x, tables), self.logits)
        return self._finish(x, attended, self._output), kept

    def mix(self, x: Array, mix: Callable[[Any], tuple[Array, Any]]) -> tuple[Array, Any]:
        """`forward` of a layer with another mixer: ``mix(projected) -> (mixed, kept)`` in place of ``attend``."""
        mixer = cast(Mixer, self.config.mixer)
        projected, more = mixer.project(self, x)
        mixed, kept = mix(projected)
        return self._finish(x, mixed, lambda mixed: mixer.output(self, mixed, more)), kept

    def qkv(self, x: Array, tables: tuple[Array, ...]) -> tuple[Array, Array, Array]:
        """Computes rotated q ``[..., H, d]`` and k, and v ``[..., Hkv, d]``, from ``x [..., D]``."""
        c, w = self.config, self.w
        with jax.named_scope("qkv"):
            made = self.linears(self.read(x, "attn_norm"), "q_gated" if c.output_gate else "q", "k", "v")
            if c.output_gate:
                by_head = made[0].reshape(*x.shape[:-1], -1, 2, c.head_dim)
                made[0], self._gate = (by_head[..., i, :].reshape(*x.shape[:-1], -1) for i in range(2))
            if c.wide_qk_norm:
                made[0], made[1] = norm(made[0], w["q_wide_norm"], c), norm(made[1], w["k_wide_norm"], c)
            q, k, v = (y.reshape(*x.shape[:-1], -1, c.head_dim) for y in made)
            if c.qk_norm:
                q, k = norm(q, w["q_norm"], c), norm(k, w["k_norm"], c)
            q, k = pairs_as_halves(q, c), pairs_as_halves(k, c)
            q, k = rotate(q, self._query_tables(tables)), rotate(k, (tables[0], tables[1]))
            if c.qk_norm_rotated:
                q, k = norm(q, w["q_rotated_norm"], c), norm(k, w["k_rotated_norm"], c)
            return q, k, v

    def _query_tables(self, tables: tuple[Array, ...]) -> tuple[Array, Array]:
        """The tables for queries. Attention divides by the root of head_dim; if the config has another multiplier, the
        tables correct for it. So they do if queries grow with positions."""
        cos, sin, *growth = tables
        if self.config.attention_multiplier is not None:
            factor = self.config.attention_multiplier * self.config.head_dim**0.5
            cos, sin = cos * factor, sin * factor
        return (cos * growth[0], sin * growth[0]) if growth else (cos, sin)

    def read(self, x: Array, name: str) -> Array:
        """The residual stream as attention or the MLP reads it; ``name`` is that of the norm before it."""
        return norm(x, self.w[name], self.config) if self.config.norms_before else x

    def _add(self, x: Array, y: Array, name: str) -> Array:
        """Adds the output of attention or of the MLP to the residual stream; ``name`` is that of the norm after it."""
        if self.config.norms_after:
            y = norm(y, self.w[name], self.config)
        scale = self.config.residual_multiplier
        return x + (y if scale == 1 else y * scale)

    def _finish(self, x: Array, mixed: Array, output: Callable[[Array], Array]) -> Array:
        """Adds the output of what the mixer made, and that of the MLP, to ``x``."""
        with jax.named_scope("out"):
            x = self._add(x, output(mixed.reshape(*x.shape[:-1], -1)), "attn_after_norm")
        with jax.named_scope("mlp"):
            if self.compute.lean and x.ndim == 3 and x.shape[1] > _MLP_TOKENS:
                return self._mlp_in_parts(x)
            return self._mlp(x)

    def _output(self, attended: Array) -> Array:
        """The product with attention's output ``[..., H * d]``, ``[..., D]``."""
        if self._gate is not None:
            attended = attended * jax.nn.sigmoid(self._gate)
        return self.linear(attended, "o")

    def _mlp(self, x: Array) -> Array:
        h = self.read(x, "mlp_norm")
        if self.kind.mlp == Kind().mlp:
            y = self.linear(_GATES[self.config.activation](*self.linears(h, "gate", "up")), "down")
        else:
            y, self.seen = cast(Mlp, self.config.mlp).run(self, h, self._choices)
        return self._add(x, y, "mlp_after_norm")

    def _mlp_in_parts(self, x: Array) -> Array:
        """The MLP of ``x [B, N, D]``, some tokens after the others. A loop instead of this would copy the weights."""
        parts = [x[:, at : at + _MLP_TOKENS] for at in range(0, x.shape[1], _MLP_TOKENS)]
        done = [self._mlp(parts[0])]
        for part in parts[1:]:
            part, done[-1] = jax.lax.optimization_barrier((part, done[-1]))
            done.append(self._mlp(part))
        return jnp.concatenate(done, 1)
