"""One layer of a decoder and its pieces: norm, rotary positions, the block's weights and what they do."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from grpojax.models.compute import Compute
from grpojax.models.decoder_config import DecoderConfig, RopeScaling
from grpojax.models.sharding import gather_weight
from grpojax.models.weight_table import DECODER, initial, present
from grpojax.types import Array


class Block(nnx.Module):
    """The weights of one layer: attention and MLP, each behind an RMS norm. Kernels are ``[in, out]``."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        for name, weight in present(DECODER, config).items():
            if weight.stacked:
                setattr(self, name, nnx.Param(initial(weight, config, rngs)))


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """``x / sqrt(mean(x²) + eps) * scale`` over the last axis, in float32, returned in ``x``'s dtype."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + eps)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Array:
    """Rotary frequencies ``[head_dim / 2]`` in float32, Llama 3 scaling applied."""
    freq = theta ** -(jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is None:
        return freq
    wavelength = 2 * math.pi / freq
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = jnp.clip((scaling.original_positions / wavelength - low) / (high - low), 0.0, 1.0)
    return freq * (smooth + (1 - smooth) / scaling.factor)


def rope_tables(config: DecoderConfig, positions: Array) -> tuple[Array, Array]:
    """Cosine and sine ``[..., 1, head_dim / 2]`` of positions ``[...]``."""
    freq = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    angle = positions[..., None, None].astype(jnp.float32) * freq
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Array, tables: tuple[Array, Array]) -> Array:
    """Rotary embedding of ``x [..., heads, head_dim]``; the two halves of a head form the pairs."""
    cos, sin = tables
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


_MLP_TOKENS = 1024  # of a lane at once, where memory is short (`Compute.lean`)


class Layer:
    """A block's weights in the compute dtype, gathered once and applied to as many streams as there are.

    Args:
      block, config, compute: the layer, and how to run it.
      one: for `Compute.lean`, the number 1 as the compiler cannot know it: it casts what is multiplied with it when it
        is needed, and not the weights of all layers before the first.
    """

    def __init__(self, block: Block, config: DecoderConfig, compute: Compute, one: Array | None = None):
        self.config = config
        self.mesh, self.lean = compute.mesh, compute.lean
        dtype = jnp.dtype(compute.dtype)

        def gather(name: str, w: Array) -> Array:
            if compute.lean and w.ndim == 2 and w.dtype != dtype:
                assert one is not None
                w = w * one.astype(w.dtype)
            return gather_weight(w, compute.mesh, dtype, *DECODER[name].axes[1:])

        self.w = {name: gather(name, w) for name, w in nnx.to_pure_dict(nnx.state(block)).items()}

    def _linear(self, x: Array, name: str) -> Array:
        # Two-dimensional, so that the weight's gradient contracts one axis: over several, XLA:CPU copies transposes.
        y = x.reshape(-1, x.shape[-1]) @ self.w[name]
        y = y + self.w[f"{name}_bias"] if f"{name}_bias" in self.w else y
        return y.reshape(*x.shape[:-1], -1)

    def qkv(self, x: Array, tables: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """``x [..., D]`` to rotated q ``[..., H, d]`` and k, v ``[..., Hkv, d]``."""
        c, w = self.config, self.w
        with jax.named_scope("qkv"):
            h = rms_norm(x, w["attn_norm"], c.norm_eps)
            q, k, v = (self._linear(h, n).reshape(*h.shape[:-1], -1, c.head_dim) for n in "qkv")
            if c.qk_norm:
                q, k = rms_norm(q, w["q_norm"], c.norm_eps), rms_norm(k, w["k_norm"], c.norm_eps)
            return rotate(q, tables), rotate(k, tables), v

    def finish(self, x: Array, attended: Array) -> Array:
        """Adds the attention's output and the MLP to ``x``."""
        with jax.named_scope("out"):
            x = x + self._linear(attended.reshape(*x.shape[:-1], -1), "o")
        with jax.named_scope("mlp"):
            if self.lean and x.ndim == 3 and x.shape[1] > _MLP_TOKENS:
                return self._mlp_in_parts(x)
            return self._mlp(x)

    def _mlp(self, x: Array) -> Array:
        h = rms_norm(x, self.w["mlp_norm"], self.config.norm_eps)
        h = jax.nn.silu(self._linear(h, "gate")) * self._linear(h, "up")
        return x + self._linear(h, "down")

    def _mlp_in_parts(self, x: Array) -> Array:
        """Of ``x [B, N, D]`` some tokens after the others: a loop would copy the weights that it takes along."""
        parts = [x[:, at : at + _MLP_TOKENS] for at in range(0, x.shape[1], _MLP_TOKENS)]
        done = [self._mlp(parts[0])]
        for part in parts[1:]:
            part, done[-1] = jax.lax.optimization_barrier((part, done[-1]))
            done.append(self._mlp(part))
        return jnp.concatenate(done, 1)


def layer(block: Block, config: DecoderConfig, compute: Compute, one: Array | None = None) -> Layer:
    """The block's weights, gathered and cast: a `Layer`."""
    return Layer(block, config, compute, one)
