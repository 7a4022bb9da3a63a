"""Log-probabilities of given tokens from hidden states, without ever holding ``[tokens, V]`` logits.

A loop takes the vocabulary block by block, each block against all tokens of a shard. The running sums then have one
number for each token. The loop gathers the weights of a block just before it needs them. It completes the gradient of a
block, and sends it to the device that owns it, before the next block starts.
"""

import dataclasses
import functools
import operator
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from grpojax import sharding
from grpojax.sharding import TRAIN
from grpojax.types import Array

_LOGITS_BYTES = 32 * 2**20
_LEAST_BLOCK = 1024  # with many tokens, smaller blocks would cost less than updating the running sums
_MASKED = -1e30  # not -inf, which makes an entropy NaN; no token's logit is this low

UnusedRows = tuple[tuple[int, int], ...]  # `grpojax.models.DecoderConfig.unused_rows`


def mask_unused(logits: Array, unused: UnusedRows, ids: Array | None = None) -> Array:
    """Sets logits to -1e30 where the vocabulary has no token, so that the probability there is exactly 0.

    All code that turns logits into probabilities calls this first: the sampler, the scores of policy, reference and
    teacher, their entropies, and the influence of tokens on each other.

    Args:
      logits: ``[..., n]`` float32, already divided by the temperature if there is one.
      unused: half-open ranges of rows without a token. If there are none, the call adds nothing to the traced program.
      ids: ``[n]`` int32, the rows of the embedding that the logits belong to; None for the first n.

    Example:
      >>> jax.nn.softmax(mask_unused(jnp.array([0.0, 0.0, 9.0, 9.0]), ((2, 4),))).tolist()
      [0.5, 0.5, 0.0, 0.0]
    """
    if not unused:
        return logits
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32) if ids is None else ids
    without = functools.reduce(operator.or_, [(start <= ids) & (ids < stop) for start, stop in unused])
    return jnp.where(without, _MASKED, logits)


def token_scores(
    hidden: Array,
    weight: Array,
    targets: Array,
    *,
    inverse_temperature: float = 1.0,
    chunk: int = 0,
    logits_bytes: int = _LOGITS_BYTES,
    with_entropy: bool | Literal["value"] = False,
    unused: UnusedRows = (),
    cap: float = 0.0,
    mesh: Mesh | None = None,
) -> tuple[Array, Array | None]:
    """Log-probability of each target under ``softmax(inverse_temperature * hidden @ weight.T)``.

    Rows of ``unused`` have probability 0, and the gradient of their weights is exactly 0 (`mask_unused`). A target
    among them gets about -1e30.

    Logits are computed for ``chunk`` entries of the vocabulary at a time, and recomputed in the backward pass.

    Args:
      hidden: ``[B, N, D]``; its dtype is the matmul's, sums are float32.
      weight: ``[V, D]``.
      targets: ``[B, N]`` int32.
      inverse_temperature: float.
      chunk: entries of the vocabulary at a time; 0 takes as many as make about ``logits_bytes`` of logits on a device.
      logits_bytes: bytes of float32 logits.
      with_entropy: also return the entropy in nats; "value" returns it without a gradient, which is cheaper.
      unused: ranges of rows without a token.
      cap: before the temperature, logits become ``cap * tanh(logit / cap)``; 0 leaves them as they are.
      mesh: shards are cut over ``data`` and ``fsdp``, and the vocabulary over ``tensor``.

    Returns:
      ``(logps, entropy)``, ``[B, N]`` float32; entropy is None unless asked for.
    """
    chunk = _chunk(hidden, weight, chunk, logits_bytes, mesh)
    how = _How(
        inverse_temperature=inverse_temperature,
        chunk=chunk,
        unused=unused,
        mesh=mesh,
        with_entropy=with_entropy,
        cap=cap,
    )
    with jax.named_scope("vocab"):
        logps, entropy = _scores(hidden, weight, targets, how)
    return logps, jax.lax.stop_gradient(entropy) if with_entropy == "value" else entropy


def log_normalisers(
    hidden: Array,
    weight: Array,
    *,
    inverse_temperature: float = 1.0,
    chunk: int = 0,
    logits_bytes: int = _LOGITS_BYTES,
    unused: UnusedRows = (),
    mesh: Mesh | None = None,
) -> Array:
    """``log Σ exp(inverse_temperature * hidden @ weight.T)`` over the vocabulary, ``[B, N]`` float32; no gradient.

    Arguments as in `token_scores`.
    """
    b, n, _ = hidden.shape
    targets = jnp.zeros((b, n), jnp.int32)
    with jax.named_scope("vocab"):
        chunk = _chunk(hidden, weight, chunk, logits_bytes, mesh)
        how = _How(inverse_temperature=inverse_temperature, chunk=chunk, unused=unused, mesh=mesh)
        return _scores_fwd(hidden, weight, targets, how)[1][3]


def _chunk(hidden: Array, weight: Array, chunk: int, logits_bytes: int, mesh: Mesh | None) -> int:
    """Entries of the vocabulary at a time: ``chunk``, or as many as make ``logits_bytes`` of logits on a device."""
    (b, n, _), v, shards = hidden.shape, weight.shape[0], 1
    if mesh is not None:
        v, shards = v // mesh.shape["tensor"], sharding.shards(mesh)
    if not chunk:
        blocks = -(-v // max(_LEAST_BLOCK, logits_bytes // (4 * n * max(b // shards, 1))))
        chunk = -(-v // (blocks * 128)) * 128
    return min(chunk, v)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _How:
    """The arguments of `token_scores` other than its arrays; ``chunk`` is never 0."""

    inverse_temperature: float
    chunk: int
    unused: UnusedRows
    mesh: Mesh | None
    with_entropy: bool | Literal["value"] = False
    cap: float = 0.0


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _scores(hidden, weight, targets, how):
    return _scores_fwd(hidden, weight, targets, how)[0]


def _on_shards(f, mesh, in_axes, out_axes):
    """``f`` on each device's part: "t" is an array of tokens, "w" the weight."""
    if mesh is None:
        return f
    spec = {"t": jax.P(TRAIN["shard"]), "w": jax.P("tensor", TRAIN["embed"])}
    before, after = (tuple(spec[a] for a in axes) for axes in (in_axes, out_axes))
    return jax.shard_map(f, mesh=mesh, in_specs=before, out_specs=after, check_vma=False)


def _blocks(weight, chunk, dtype):
    """``(start, block)`` of all blocks ``[V / chunk], [V / chunk, chunk, D]`` in the compute dtype, zero-padded."""
    w = weight.astype(dtype)
    w = jnp.pad(w, ((0, -w.shape[0] % chunk), (0, 0))).reshape(-1, chunk, w.shape[1])
    return jnp.arange(w.shape[0], dtype=jnp.int32) * chunk, w


def _logits(hidden, block, start, targets, v, how):
    """A block's weights, gathered; its logits; a mask of the logits that belong to targets; and the derivative of the
    logits by the products if there is a cap."""
    first, slope = 0, None
    if how.mesh is not None:
        block = jax.lax.all_gather(block, TRAIN["embed"], axis=1, tiled=True)
        first = jax.lax.axis_index("tensor") * v
        targets = targets - first
    z = jnp.einsum("bnd,vd->bnv", hidden, block, preferred_element_type=jnp.float32)
    if how.cap:
        tanh = jnp.tanh(z / how.cap)
        z, slope = how.cap * tanh, 1 - tanh * tanh
    z = z * how.inverse_temperature
    entry = start + jax.lax.broadcasted_iota(jnp.int32, z.shape, 2)
    hit = entry == targets[..., None]
    if v % block.shape[0]:
        z, hit = jnp.where(entry < v, z, _MASKED), hit & (entry < v)
    if how.unused:
        z = mask_unused(z, how.unused, first + start + jnp.arange(block.shape[0], dtype=jnp.int32))
    return block, z, hit, slope


def _scores_fwd(hidden, weight, targets, how):
    def forward(hidden, weight, targets):
        def add(carry, start_block):
            top, total, weighted, chosen = carry
            start, block = start_block
            _, z, hit, _ = _logits(hidden, block, start, targets, weight.shape[0], how)
            highest = jnp.maximum(top, z.max(-1))
            rescale, e = jnp.exp(top - highest), jnp.exp(z - highest[..., None])
            chosen += jnp.where(hit, z, 0.0).sum(-1)
            if how.with_entropy:
                weighted = weighted * rescale + (e * z).sum(-1)
            return (highest, total * rescale + e.sum(-1), weighted, chosen), None

        zero = jnp.zeros(targets.shape, jnp.float32)
        carry = (zero - jnp.inf, zero, zero, zero)
        (top, total, weighted, chosen), _ = jax.lax.scan(add, carry, _blocks(weight, how.chunk, hidden.dtype))
        if how.mesh is not None:
            highest = jax.lax.pmax(top, "tensor")
            rescale = jnp.exp(top - highest)
            total, weighted, chosen = jax.lax.psum((total * rescale, weighted * rescale, chosen), "tensor")
            top = highest
        lse = top + jnp.log(total)
        return chosen - lse, lse, lse - weighted / total

    logps, lse, entropy = _on_shards(forward, how.mesh, "twt", "ttt")(hidden, weight, targets)
    entropy = entropy if how.with_entropy else None
    return (logps, entropy), (hidden, weight, targets, lse, entropy)


def _scores_bwd(how, saved, cotangents):
    hidden, weight, targets, lse, entropy = saved

    def backward(hidden, weight, targets, lse, g_logp, *of_entropy):
        def add(dh, start_block):
            start, block = start_block
            w, z, hit, slope = _logits(hidden, block, start, targets, weight.shape[0], how)
            logp = z - lse[..., None]
            p = jnp.exp(logp)
            dz = g_logp[..., None] * (jnp.where(hit, 1.0, 0.0) - p)
            if how.with_entropy is True:
                # H = -sum p log p, so dH/dz_j = -p_j (log p_j + H)
                entropy, g_entropy = of_entropy
                dz = dz - g_entropy[..., None] * p * (logp + entropy[..., None])
            if how.unused:
                dz = jnp.where(z > _MASKED, dz, 0.0)  # a masked logit is constant, also where it is a target
            dz = dz if slope is None else dz * slope
            dz = (dz * how.inverse_temperature).astype(hidden.dtype)
            dh += jnp.einsum("bnv,vd->bnd", dz, w, preferred_element_type=jnp.float32)
            # Two-dimensional, like a layer's products (`grpojax.models.layers`); otherwise XLA:CPU transposes dz first.
            flat = [x.reshape(-1, x.shape[-1]) for x in (dz, hidden)]
            dw = jnp.einsum("nv,nd->vd", *flat, preferred_element_type=jnp.float32)
            if how.mesh is not None:
                dw = jax.lax.psum_scatter(dw, TRAIN["embed"], scatter_dimension=1, tiled=True)
                dw = jax.lax.psum(dw, "data")
            return dh, dw.astype(weight.dtype)

        dh, dw = jax.lax.scan(add, jnp.zeros(hidden.shape, jnp.float32), _blocks(weight, how.chunk, hidden.dtype))
        dh = dh if how.mesh is None else jax.lax.psum(dh, "tensor")
        return dh.astype(hidden.dtype), dw.reshape(-1, weight.shape[1])[: weight.shape[0]]

    g_logp, g_entropy = cotangents
    args = (hidden, weight, targets, lse, g_logp, *((entropy, g_entropy) if how.with_entropy is True else ()))
    dh, dw = _on_shards(backward, how.mesh, "tw" + "t" * (len(args) - 2), "tw")(*args)
    return dh, dw, None


_scores.defvjp(_scores_fwd, _scores_bwd)
