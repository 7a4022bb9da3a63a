"""Gated delta nets: layers that keep a matrix for each head, in place of the keys and values of all tokens.

For a token with query q, key k, value v, decay a in (0, 1) and rate b in (0, 1), the state ``S [key_size, value_size]``
of a head and the output o are (Gated DeltaNet, arXiv:2412.06464)

    S ← a S;   S ← S + b k (v - Sᵀ k)ᵀ;   o = Sᵀ q

q, k and v come from a causal convolution of a few tokens, q and k have length 1, and o is normed and gated.

A prompt's state, and the last inputs of its convolution, are computed once. Every completion of its group starts from
them. `chunked` computes many tokens at once with matmuls, as the paper does; `advance` computes one. Both are in
float32, whatever the compute dtype is.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from grpojax.host.errors import UserError
from grpojax.models import attention as att
from grpojax.models.layer_kinds import LayerProducts, Mixer
from grpojax.models.layers import rms_norm
from grpojax.types import Array, Rows

CHUNK = 64  # most tokens that are computed at once, as in the paper; a power of two
_EPS = 1e-6  # under the root of the lengths of q and k

_matmul = functools.partial(jnp.matmul, precision="highest")
_einsum = functools.partial(jnp.einsum, precision="highest")


class Tokens(NamedTuple):
    """What the rule reads of each token, float32. H heads of keys serve r heads of values each.

    Attributes:
      q, k: ``[..., H, key_size]``; q is divided by the root of key_size.
      v: ``[..., H, r, value_size]``.
      decay: ``[..., H, r]``, the logarithm of the decay, at most 0.
      rate: ``[..., H, r]``, in (0, 1).
    """

    q: Array
    k: Array
    v: Array
    decay: Array
    rate: Array


def advance(x: Tokens, state: Array) -> tuple[Array, Array]:
    """One token ``[...]``: its output ``[..., H, r, value_size]`` and the next state.

    Args:
      x: the token.
      state: ``[..., H, r, key_size, value_size]`` float32.

    Example:
      >>> one = jnp.ones((1, 1, 1))
      >>> token = Tokens(q=jnp.ones((1, 2)), k=jnp.array([[1.0, 0.0]]), v=3 * one, decay=0 * one[0], rate=one[0] / 2)
      >>> out, state = advance(token, jnp.ones((1, 1, 2, 1)))
      >>> out.tolist(), state[0, 0, :, 0].tolist()  # a half of 3 - 1 is added where k is
      ([[[3.0]]], [2.0, 1.0])
    """
    decay = jnp.exp(x.decay)
    held = _einsum("...ihk,...hrkv->...ihrv", jnp.stack([x.k, x.q], -3), state) * decay[..., None, :, :, None]
    of_k, of_q = held[..., 0, :, :, :], held[..., 1, :, :, :]
    new = (x.v - of_k) * x.rate[..., None]
    out = of_q + (x.q * x.k).sum(-1)[..., None, None] * new
    return out, state * decay[..., None, None] + x.k[..., :, None, :, None] * new[..., None, :]


def chunked(x: Tokens, segments: Array, initial: Array | None = None) -> tuple[Array, Array]:
    """`advance` over tokens ``[..., T]``: outputs ``[..., T, H, r, value_size]`` and the state after the last one.

    A token that must not count needs a rate and a logarithm of decay of 0.

    Args:
      x: the tokens.
      segments: ``[..., T]`` int32. The state is ``initial`` before a token of another segment than the token before it.
      initial: ``[..., H, r, key_size, value_size]`` float32; None is zeros.
    """
    length, (key_size, value_size) = x.q.shape[-3], (x.q.shape[-1], x.v.shape[-1])
    size = min(CHUNK, 1 << (length - 1).bit_length())
    lead = x.q.ndim - 3

    def cut(y: Array, **how: Any) -> Array:
        """``[..., T, rest]`` as ``[chunks, ..., size, rest]``."""
        y = jnp.pad(y, ((0, 0),) * lead + ((0, -length % size),) + ((0, 0),) * (y.ndim - lead - 1), **how)
        return jnp.moveaxis(y.reshape(*y.shape[:lead], -1, size, *y.shape[lead + 1 :]), lead, 0)

    # Each head of values has its own copy of q and k, made before the cut: jaxlib 0.10.2 ends the process (SIGSEGV on a
    # CPU) in the gradient of chunks that two heads share. The copies cost r products of q and of k with k in place of
    # one, a tenth of the rule's multiplications at r = 2; other products are with keys of each head's own decay anyway.
    copies = (jnp.broadcast_to(y[..., None, :], (*x.v.shape[:-1], key_size)) for y in (x.q, x.k))
    joined = jnp.concatenate([*copies, x.v, x.decay[..., None], x.rate[..., None]], -1)
    ends = np.cumsum([key_size, key_size, value_size, 1])
    q, k, v, decay, rate = jnp.split(jnp.moveaxis(cut(joined), -4, -2), ends, -1)  # [n, ..., H, r, size, rest]
    segment = cut(segments, mode="edge")  # [n, ..., size]

    visible = (segment[..., :, None] == segment[..., None, :]) & jnp.tri(size, dtype=bool)
    visible = visible[..., None, None, :, :]
    since = _matmul(visible.astype(jnp.float32), decay)  # the start of the chunk or of the segment
    between = jnp.where(visible, since - since.swapaxes(-1, -2), 0.0)
    between = jnp.where(visible, jnp.exp(between), 0.0)  # [n, ..., H, r, size, size]
    since = jnp.exp(since)

    # Products that share a factor are one. It is less to compile, and wider.
    of_k, of_q = jnp.split(_matmul(jnp.concatenate([k, q], -2), k.swapaxes(-1, -2)), 2, -2)
    strict = jnp.tri(size, k=-1, dtype=bool)
    mixed = _inverse(jnp.where(strict, rate * of_k * between, 0.0))
    values, keys = jnp.split(_matmul(mixed, rate * jnp.concatenate([v, since * k], -1)), [value_size], -1)
    reads = jnp.concatenate([keys, since * q], -2)  # [n, ..., H, r, 2 size, key_size], of the state
    added = (k * between[..., -1, :, None]).swapaxes(-1, -2)
    writes = jnp.concatenate([of_q * between, added], -2)  # [n, ..., H, r, size + key_size, size], to output and state
    before = jnp.concatenate([segment[:1, ..., :1] * 0 - 1, segment[:-1, ..., -1:]])
    goes_on = jnp.tile(segment == before, 2)[..., None, None, :, None]  # from the chunk before
    fresh = jnp.zeros((*v.shape[1:-2], key_size, value_size), jnp.float32) if initial is None else initial

    def step(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        values, reads, writes, kept, goes_on = chunk
        held = _matmul(reads, state)
        if initial is not None:
            held = jnp.where(goes_on, held, _matmul(reads, initial))
            state = jnp.where(goes_on[..., -1:, :], state, initial)
        of_keys, of_queries = jnp.split(held, 2, -2)
        made, changes = jnp.split(_matmul(writes, values - of_keys), [size], -2)
        return kept * state + changes, of_queries + made

    state, out = jax.lax.scan(step, fresh, (values, reads, writes, since[..., -1:, :], goes_on))
    out = jnp.moveaxis(jnp.moveaxis(out, -2, -4), 0, lead)  # [..., n, size, H, r, value_size]
    return out.reshape(*out.shape[:lead], -1, *out.shape[lead + 2 :])[(*(slice(None),) * lead, slice(length))], state


@jax.custom_vjp
def _inverse(a: Array) -> Array:
    """``(I + a)⁻¹`` for ``a [..., n, n]`` that is zero on its diagonal and above it; n is a power of two."""
    return _by_halves(a)


def _by_halves(a: Array) -> Array:
    """`_inverse`. It takes few matmuls and no solver, which a mesh could not cut."""
    n = a.shape[-1]
    if n <= 16:
        return _by_masks(a)
    h = n // 2
    first, last = _by_halves(jnp.stack([a[..., :h, :h], a[..., h:, h:]]))
    corner = -_matmul(_matmul(last, a[..., h:, :h]), first)
    upper = jnp.pad(first, ((0, 0),) * (a.ndim - 1) + ((0, h),))
    return jnp.concatenate([upper, jnp.concatenate([corner, last], -1)], -2)


def _by_masks(a: Array) -> Array:
    """The same for all blocks of 2, then 4, ... at once, in matrices that are 0 elsewhere: more multiplications, which
    few rows have to spare, and nothing to cut and join, which takes long to compile."""
    at = np.arange(a.shape[-1])
    made = jnp.broadcast_to(jnp.eye(len(at), dtype=a.dtype), a.shape)
    for h in (1 << i for i in range((len(at) - 1).bit_length())):
        half = at // h
        corner = jnp.where((half[:, None] % 2 == 1) & (half == half[:, None] - 1), a, 0.0)
        made = made - (corner if h == 1 else _matmul(_matmul(made, corner), made))
    return made


def _inverse_forward(a: Array) -> tuple[Array, Array]:
    made = _by_halves(a)
    return made, made


def _inverse_backward(made: Array, g: Array) -> tuple[Array]:
    across = made.swapaxes(-1, -2)
    return (-_matmul(_matmul(across, g), across) * jnp.tri(made.shape[-1], k=-1, dtype=made.dtype),)


_inverse.defvjp(_inverse_forward, _inverse_backward)


# ------------------------------------------------------------------------------------------------- convolution


def convolved(x: Array, taps: Array, offsets: Array, before: Array | None = None) -> Array:
    """Causal convolution of each channel of ``x [..., T, C]``, with silu; float32.

    Args:
      x: inputs.
      taps: ``[C, 1, n]`` float32; the last one multiplies the newest input.
      offsets: ``[..., T]`` int32, position of a token in its completion; no input before the completion is read.
      before: ``[..., n - 1, C]``, the inputs before each completion; None is zeros.

    Example:
      >>> x, taps = jnp.array([[1.0], [2.0], [4.0]]), jnp.array([[[10.0, 1.0]]])
      >>> convolved(x, taps, jnp.array([0, 1, 0]), jnp.array([[3.0]])).round(1).tolist()  # silu of 31, 12, 34
      [[31.0], [12.0], [34.0]]
    """
    x, count = x.astype(jnp.float32), taps.shape[-1]
    taps = taps[:, 0].T
    y = x * taps[-1]
    for back in range(1, count):
        older = jnp.pad(x, ((0, 0),) * (x.ndim - 2) + ((back, 0), (0, 0)))[..., : x.shape[-2], :]
        y = y + jnp.where((offsets >= back)[..., None], older, 0.0) * taps[-1 - back]
    for offset in range(count - 1) if before is not None else ():
        reached = (cast(Array, before)[..., offset:, :].astype(jnp.float32) * taps[: count - 1 - offset]).sum(-2)
        y = y + jnp.where((offsets == offset)[..., None], reached[..., None, :], 0.0)
    return jax.nn.silu(y)


# ------------------------------------------------------------------------------------------------------- layers


class States(NamedTuple):
    """What a delta net keeps of the tokens so far.

    Attributes:
      matrices: ``[..., H, r, key_size, value_size]`` float32.
      inputs: the last inputs of the convolution, ``[..., taps - 1, channels]`` (`DeltaNet._joined`).
    """

    matrices: Array
    inputs: Array


class Projected(NamedTuple):
    """Products with tokens ``[...]``: inputs of the convolution ``[..., channels]`` (`DeltaNet._joined`), and
    decay and rate as in `Tokens`."""

    inputs: Array
    decay: Array
    rate: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaNet(Mixer):
    """Gated delta nets, which most layers have in place of attention. On a mesh heads are cut over ``tensor``.

    Attributes:
      key_heads: heads of queries and keys; each serves as many heads of values as the next.
      value_heads: heads of values, each with a state ``[key_size, value_size]``.
      key_size: numbers of a query or a key.
      value_size: numbers of a value.
      taps: how many tokens the convolution reads, the newest included.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    taps: int

    name = "delta"
    state_axes = States(("shard", None, "delta_heads"), ("shard", None, None, "delta_keys"))

    def __post_init__(self):
        if self.value_heads % self.key_heads:
            raise UserError(
                f"linear_num_key_heads {self.key_heads} does not divide linear_num_value_heads {self.value_heads}"
            )
        if self.taps < 2:
            raise UserError(f"linear_conv_kernel_dim {self.taps}: must be at least 2")

    @property
    def shared(self) -> int:
        """Heads of values that one head of keys serves."""
        return self.value_heads // self.key_heads

    def sizes(self) -> dict[str, int]:
        """As of a `Mixer`."""
        return {
            "delta_keys": self.key_heads * self.key_size,
            "delta_values": self.value_heads * self.value_size,
            "delta_heads": self.value_heads,
            "value_size": self.value_size,
            "taps": self.taps,
        }

    def cut(self) -> dict[str, tuple[int, str]]:
        """As of a `Mixer`."""
        return {"linear_num_key_heads": (self.key_heads, "delta_keys")}

    def matrices(self, hidden: int) -> int:
        """As of a `Mixer`."""
        keys, values = self.key_heads * self.key_size, self.value_heads * self.value_size
        return hidden * (2 * keys + 3 * values + 2 * self.value_heads)

    def products(self) -> int:
        """Multiply-adds of a token's key and query with the state, of what is added to the state, and of the
        convolution."""
        channels = 2 * self.key_heads * self.key_size + self.value_heads * self.value_size
        return 3 * self._state_numbers + channels * self.taps

    def state_bytes(self) -> int:
        """Bytes of the float32 state. The inputs of convolutions are ignored."""
        return 4 * self._state_numbers

    @property
    def _state_numbers(self) -> int:
        return self.value_heads * self.key_size * self.value_size

    def working_bytes(self) -> float:
        """Bytes in float32 of a token's products, of its rows of matrices of token by token, and of its share of a
        state."""
        numbers = 8 * self.value_heads * self.value_size + 4 * CHUNK * self.value_heads
        return 4 * (numbers + self.value_heads * self.key_size * self.value_size / CHUNK)

    def project(self, layer: LayerProducts, x: Array) -> tuple[Projected, Array]:
        """The layer's products with ``x [..., D]``, and the gate of the output. Those for decay and rate are float32,
        since errors of the decay add up over tokens."""
        w: Mapping[str, Any] = layer.w
        with jax.named_scope("delta_in"):
            h = layer.read(x, "attn_norm")
            q, k, v, gate = layer.linears(h, "delta_q", "delta_k", "delta_v", "delta_gate")
            decay, rate = layer.linear(h, "delta_decay"), layer.linear(h, "delta_rate")
            decay = -jnp.exp(w["delta_decay_log"]) * jax.nn.softplus(decay + w["delta_decay_start"])
            by_head = (*x.shape[:-1], -1, self.shared)
            inputs = self._joined(q, k, v, -1)
            return Projected(inputs, decay.reshape(by_head), jax.nn.sigmoid(rate).reshape(by_head)), gate

    def _joined(self, q: Array, k: Array, v: Array, axis: int) -> Array:
        """The channels of queries, keys and values on one axis, those of a head of keys next to each other, so that a
        mesh cuts them by heads. One convolution instead of three is less to compile."""
        axis %= q.ndim

        def by_head(y: Array) -> Array:
            return y.reshape(*y.shape[:axis], self.key_heads, -1, *y.shape[axis + 1 :])

        joined = jnp.concatenate([by_head(y) for y in (q, k, v)], axis + 1)
        return joined.reshape(*q.shape[:axis], -1, *q.shape[axis + 1 :])

    def _taps(self, layer: LayerProducts) -> Array:
        """The taps ``[channels, 1, taps]`` of `_joined` channels."""
        q, k, v = (cast(Array, layer.w[f"delta_{name}_taps"]) for name in "qkv")
        return self._joined(q, k, v, 0)

    def _tokens(self, convolved: Array, decay: Array, rate: Array) -> Tokens:
        size, lead = self.key_size, convolved.shape[:-1]
        by_head = convolved.reshape(*lead, self.key_heads, -1)
        both = by_head[..., : 2 * size].reshape(*by_head.shape[:-1], 2, size)  # q and k
        both = both * jax.lax.rsqrt(jnp.square(both).sum(-1, keepdims=True) + _EPS)
        v = by_head[..., 2 * size :].reshape(*by_head.shape[:-1], self.shared, self.value_size)
        return Tokens(both[..., 0, :] * size**-0.5, both[..., 1, :], v, decay, rate)

    def _mixed(
        self, layer: LayerProducts, x: Projected, there: Array, offsets: Array, segments: Array, before: States | None
    ) -> tuple[Array, Array]:
        """Outputs of tokens ``[..., T]`` that start from ``before [...]``, and the last matrices."""
        made = convolved(x.inputs, self._taps(layer), offsets, None if before is None else before.inputs)
        here = there[..., None, None]
        tokens = self._tokens(made, jnp.where(here, x.decay, 0.0), jnp.where(here, x.rate, 0.0))
        return chunked(tokens, segments, None if before is None else before.matrices)

    def of_prompts(self, layer: LayerProducts, projected: Projected, lengths: Array) -> tuple[Array, States]:
        """As of a `Mixer`."""
        x = projected
        size, count = x.rate.shape[2], self.taps - 1
        at, shape = jnp.arange(size, dtype=jnp.int32), x.rate.shape[:3]
        with jax.named_scope("delta_prompts"):
            there, offsets = at < lengths[..., None], jnp.broadcast_to(at, shape)
            out, matrices = self._mixed(layer, x, there, offsets, jnp.ones(shape, jnp.int32), None)
            last = lengths[..., None] - count + jnp.arange(count, dtype=jnp.int32)  # before the first they are zeros

            inputs = jnp.take_along_axis(x.inputs, jnp.maximum(last, 0)[..., None], 2)
            inputs = jnp.where((last >= 0)[..., None], inputs, jnp.zeros((), inputs.dtype))
            return out, States(matrices, inputs)

    def of_rows(self, layer: LayerProducts, projected: Projected, rows: Rows, states: States) -> Array:
        """As of a `Mixer`."""
        x = projected
        with jax.named_scope("delta_rows"):
            if rows.gather is None:
                before = jax.tree.map(lambda y: att.of_rows(y, rows.token_prompt[..., 0]), states)
                return self._mixed(layer, x, rows.segments > 0, rows.offsets, rows.segments, _for_all(before, x))[0]
            classes = [att.CompletionRows(gather, rows.token_prompt) for gather in rows.gather]
            return functools.reduce(jnp.add, (self._apart(layer, x, apart, states) for apart in classes))

    def _apart(self, layer: LayerProducts, x: Projected, apart: att.CompletionRows, prompts: States) -> Array:
        """`of_rows` for one class of completions, with a row for each; 0 at other tokens."""
        x, before = jax.tree.map(apart.take, x), jax.tree.map(lambda y: att.of_rows(y, apart.prompt), prompts)
        at = jnp.broadcast_to(jnp.arange(x.rate.shape[2], dtype=jnp.int32), x.rate.shape[:3])
        out, _ = self._mixed(layer, x, apart.segments > 0, at, jnp.ones_like(at), _for_all(before, x))
        return apart.put(out)

    def of_token(self, layer: LayerProducts, projected: Projected, states: States) -> tuple[Array, States]:
        """As of a `Mixer`."""
        x = projected
        with jax.named_scope("delta_step"):
            read = jnp.concatenate([states.inputs, x.inputs[..., None, :]], -2)
            mixed = jax.nn.silu((read.astype(jnp.float32) * self._taps(layer)[:, 0].T).sum(-2))
            out, matrices = advance(self._tokens(mixed, x.decay, x.rate), states.matrices)
        return out, States(matrices, read[..., 1:, :])

    def output(self, layer: LayerProducts, mixed: Array, kept: Array) -> Array:
        """The product with the outputs, which are normed, and multiplied by their gate."""
        gate, scale = kept, cast(Array, layer.w["delta_norm"])
        by_head = mixed.reshape(*gate.shape[:-1], -1, self.value_size)
        normed = rms_norm(by_head, scale, layer.config.norm_eps).reshape(gate.shape)
        return layer.linear((normed * jax.nn.silu(gate.astype(jnp.float32))).astype(gate.dtype), "delta_out")


def _for_all(states: States, x: Projected) -> States:
    """States ``[B, 1, ...]`` of the only prompt, or ``[B, R, ...]``, as ``[B, R, ...]``."""
    return jax.tree.map(lambda y: jnp.broadcast_to(y, (*x.rate.shape[:2], *y.shape[2:])), states)
