"""Gated delta nets: layers that keep a matrix for each head, in place of the keys and values of all tokens.

For a token with query q, key k, value v, decay a in (0, 1) and rate b in (0, 1), the state ``S [key_size, value_size]``
of a head and the output o are (Gated DeltaNet, arXiv:2412.06464)

    S ← a S;   S ← S + b k (v - Sᵀ k)ᵀ;   o = Sᵀ q

q, k and v come from a causal convolution of a few tokens, q and k have length 1, and o is normed and gated.

A prompt's state, and the last inputs of its convolution, are computed once. Every completion of its group starts from
them. `chunked` computes many tokens at once with matmuls, as the paper does; `advance` computes one. Both are in
float32, whatever the compute dtype is.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from grpojax.models import attention as att
from grpojax.models.compute import Compute
from grpojax.models.decoder_config import DeltaNet, Kind
from grpojax.models.layers import Layer, rms_norm
from grpojax.models.sharding import TRAIN, constrain, spec
from grpojax.models.weight_table import DECODER
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
    length = x.q.shape[-3]
    size = min(CHUNK, 1 << (length - 1).bit_length())
    lead = x.q.ndim - 3

    def cut(y: Array, **how: Any) -> Array:
        """``[..., T, rest]`` as ``[chunks, ..., size, rest]``."""
        y = jnp.pad(y, ((0, 0),) * lead + ((0, -length % size),) + ((0, 0),) * (y.ndim - lead - 1), **how)
        return jnp.moveaxis(y.reshape(*y.shape[:lead], -1, size, *y.shape[lead + 1 :]), lead, 0)

    # Each head of values has its own copy of q and k, made before the cut: jaxlib 0.10.2 ends the process (SIGSEGV on a
    # CPU) in the gradient of chunks that two heads share. The copies cost r products of q and of k with k in place of
    # one, a tenth of the rule's multiplications at r = 2; other products are with keys of each head's own decay anyway.
    every = (jnp.broadcast_to(y[..., None, :], (*x.v.shape[:-1], y.shape[-1])) for y in (x.q, x.k))
    q, k, v = (jnp.moveaxis(cut(y), -4, -2) for y in (*every, x.v))  # [n, ..., H, r, size, key_size or value_size]
    decay, rate = (jnp.moveaxis(cut(y), -3, -1) for y in (x.decay, x.rate))  # [n, ..., H, r, size]
    segment = cut(segments, mode="edge")  # [n, ..., size]

    visible = (segment[..., :, None] == segment[..., None, :]) & jnp.tri(size, dtype=bool)
    visible = visible[..., None, None, :, :]
    since = _einsum("...ij,...j->...i", visible.astype(jnp.float32), decay)  # the start of the chunk or of the segment
    between = jnp.where(visible, since[..., :, None] - since[..., None, :], 0.0)
    between = jnp.where(visible, jnp.exp(between), 0.0)  # [n, ..., H, r, size, size]
    since = jnp.exp(since)[..., None]
    rate = rate[..., None]

    strict = jnp.tri(size, k=-1, dtype=bool)
    mixed = _inverse(jnp.where(strict, rate * _matmul(k, k.swapaxes(-1, -2)) * between, 0.0))
    values, keys = _matmul(mixed, rate * v), _matmul(mixed, rate * since * k)
    inner = _matmul(q, k.swapaxes(-1, -2)) * between
    before = jnp.concatenate([segment[:1, ..., :1] * 0 - 1, segment[:-1, ..., -1:]])
    goes_on = (segment == before)[..., None, None, :, None]  # from the chunk before
    added = (k * between[..., -1, :, None]).swapaxes(-1, -2)
    fresh = jnp.zeros((*v.shape[1:-2], k.shape[-1], v.shape[-1]), jnp.float32) if initial is None else initial

    def step(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        values, keys, queries, inner, added, kept, goes_on = chunk

        def read(y: Array) -> Array:
            held = _matmul(y, state)
            return held if initial is None else jnp.where(goes_on, held, _matmul(y, initial))

        new = values - read(keys)
        out = read(queries) + _matmul(inner, new)
        state = state if initial is None else jnp.where(goes_on[..., -1:, :], state, initial)
        return kept * state + _matmul(added, new), out

    chunks = values, keys, q * since, inner, added, since[..., -1:, :], goes_on
    state, out = jax.lax.scan(step, fresh, chunks)
    out = jnp.moveaxis(jnp.moveaxis(out, -2, -4), 0, lead)  # [..., n, size, H, r, value_size]
    return out.reshape(*out.shape[:lead], -1, *out.shape[lead + 2 :])[(*(slice(None),) * lead, slice(length))], state


@jax.custom_vjp
def _inverse(a: Array) -> Array:
    """``(I + a)⁻¹`` for ``a [..., n, n]`` that is zero on its diagonal and above it; n is a power of two."""
    return _by_halves(a)


def _by_halves(a: Array) -> Array:
    """`_inverse`. It takes few matmuls and no solver, which a mesh could not cut."""
    n = a.shape[-1]
    if n == 1:
        return jnp.ones_like(a)
    h = n // 2
    first, last = _by_halves(jnp.stack([a[..., :h, :h], a[..., h:, h:]]))
    corner = -_matmul(_matmul(last, a[..., h:, :h]), first)
    upper = jnp.pad(first, ((0, 0),) * (a.ndim - 1) + ((0, h),))
    return jnp.concatenate([upper, jnp.concatenate([corner, last], -1)], -2)


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
    y = x * taps[:, 0, -1]
    for back in range(1, count):
        older = jnp.pad(x, ((0, 0),) * (x.ndim - 2) + ((back, 0), (0, 0)))[..., : x.shape[-2], :]
        older = jnp.where((offsets >= back)[..., None], older, 0.0)
        for offset in range(back if before is not None else 0):
            there = cast(Array, before)[..., count - 1 - back + offset, :][..., None, :].astype(jnp.float32)
            older = jnp.where((offsets == offset)[..., None], there, older)
        y = y + older * taps[:, 0, -1 - back]
    return jax.nn.silu(y)


# ------------------------------------------------------------------------------------------------------- layers


class States(NamedTuple):
    """What a delta net keeps of the tokens so far.

    Attributes:
      matrices: ``[..., H, r, key_size, value_size]`` float32.
      inputs: the last inputs of the convolution, ``[..., taps - 1, channels]``, of queries, keys and values.
    """

    matrices: Array
    inputs: tuple[Array, Array, Array]


class Projected(NamedTuple):
    """Products with tokens ``[...]``: inputs of the convolution ``[..., channels]`` of queries, keys and values, and
    decay and rate as in `Tokens`."""

    inputs: tuple[Array, Array, Array]
    decay: Array
    rate: Array


class DeltaLayer(Layer):
    """A `Layer` with a gated delta net in place of attention. On a mesh its heads are cut over ``tensor``."""

    @property
    def delta(self) -> DeltaNet:
        """The config's delta net."""
        return cast(DeltaNet, self.config.delta)

    def project(self, x: Array) -> Projected:
        """The layer's products with ``x [..., D]``. Those for decay and rate are float32, since errors of the decay add
        up over tokens."""
        w: Mapping[str, Any] = self.w
        with jax.named_scope("delta_in"):
            h = self._read(x, "attn_norm")
            q, k, v, self.gate = self._linears(h, "delta_q", "delta_k", "delta_v", "delta_gate")
            decay, rate = self._linear(h, "delta_decay"), self._linear(h, "delta_rate")
            decay = -jnp.exp(w["delta_decay_log"]) * jax.nn.softplus(decay + w["delta_decay_start"])
            by_head = (*x.shape[:-1], -1, self.delta.shared)
            return Projected((q, k, v), decay.reshape(by_head), jax.nn.sigmoid(rate).reshape(by_head))

    def _tokens(self, convolved: Sequence[Array], decay: Array, rate: Array) -> Tokens:
        q, k, v = convolved
        q, k = (y.reshape(*y.shape[:-1], -1, self.delta.key_size) for y in (q, k))
        q, k = (y * jax.lax.rsqrt(jnp.square(y).sum(-1, keepdims=True) + _EPS) for y in (q, k))
        v = v.reshape(*v.shape[:-1], -1, self.delta.shared, self.delta.value_size)
        return Tokens(q * self.delta.key_size**-0.5, k, v, decay, rate)

    def _mixed(
        self, x: Projected, there: Array, offsets: Array, segments: Array, before: States | None
    ) -> tuple[Array, Array]:
        """Outputs of tokens ``[..., T]`` that start from ``before [...]``, and the last matrices."""
        inputs = before.inputs if before is not None else (None,) * 3
        taps = (self.w[f"delta_{name}_taps"] for name in "qkv")
        made = [convolved(y, w, offsets, b) for y, w, b in zip(x.inputs, taps, inputs, strict=True)]
        here = there[..., None, None]
        tokens = self._tokens(made, jnp.where(here, x.decay, 0.0), jnp.where(here, x.rate, 0.0))
        return chunked(tokens, segments, None if before is None else before.matrices)

    def of_prompts(self, x: Projected, lengths: Array) -> tuple[Array, States]:
        """Outputs of prompts ``[B, K, L]``, and the states after them."""
        size, count = x.rate.shape[2], self.delta.taps - 1
        at, shape = jnp.arange(size, dtype=jnp.int32), x.rate.shape[:3]
        with jax.named_scope("delta_prompts"):
            there, offsets = at < lengths[..., None], jnp.broadcast_to(at, shape)
            out, matrices = self._mixed(x, there, offsets, jnp.ones(shape, jnp.int32), None)
            last = lengths[..., None] - count + jnp.arange(count, dtype=jnp.int32)  # before the first they are zeros

            def tail(y: Array) -> Array:
                y = jnp.take_along_axis(y, jnp.maximum(last, 0)[..., None], 2)
                return jnp.where((last >= 0)[..., None], y, jnp.zeros((), y.dtype))

            q, k, v = x.inputs
            return out, States(matrices, (tail(q), tail(k), tail(v)))

    def of_rows(self, x: Projected, rows: Rows, prompts: States) -> Array:
        """Outputs of ``rows``, whose completions start from the states of their ``prompts``."""
        with jax.named_scope("delta_rows"):
            if rows.gather is None:
                before = jax.tree.map(lambda y: att.of_rows(y, rows.token_prompt[..., 0]), prompts)
                return self._mixed(x, rows.segments > 0, rows.offsets, rows.segments, _for_all(before, x))[0]
            classes = [att.Completions(gather, rows.token_prompt) for gather in rows.gather]
            return functools.reduce(jnp.add, (self._apart(x, apart, prompts) for apart in classes))

    def _apart(self, x: Projected, apart: att.Completions, prompts: States) -> Array:
        """`of_rows` for one class of completions, with a row for each; 0 at other tokens."""
        x, before = jax.tree.map(apart.take, x), jax.tree.map(lambda y: att.of_rows(y, apart.prompt), prompts)
        at = jnp.broadcast_to(jnp.arange(x.rate.shape[2], dtype=jnp.int32), x.rate.shape[:3])
        out, _ = self._mixed(x, apart.segments > 0, at, jnp.ones_like(at), _for_all(before, x))
        return apart.put(out)

    def advance(self, x: Array, states: States) -> tuple[Array, States]:
        """`finish` for the newest token ``x [R, S, D]`` of each slot, and the slots' next states."""
        with jax.named_scope("delta_step"):
            made = self.project(x)
            read = [jnp.concatenate([b, y[..., None, :]], -2) for b, y in zip(states.inputs, made.inputs, strict=True)]
            taps = [cast(Array, self.w[f"delta_{name}_taps"])[:, 0].T for name in "qkv"]
            mixed = [jax.nn.silu((y.astype(jnp.float32) * w).sum(-2)) for y, w in zip(read, taps, strict=True)]
            out, matrices = advance(self._tokens(mixed, made.decay, made.rate), states.matrices)
            q, k, v = (y[..., 1:, :] for y in read)
        return self.finish(x, out), States(matrices, (q, k, v))

    def _output(self, attended: Array) -> Array:
        gate, scale = cast(Array, self.gate), cast(Array, self.w["delta_norm"])
        by_head = attended.reshape(*gate.shape[:-1], -1, self.delta.value_size)
        normed = rms_norm(by_head, scale, self.config.norm_eps).reshape(gate.shape)
        return self._linear((normed * jax.nn.silu(gate.astype(jnp.float32))).astype(gate.dtype), "delta_out")


def _for_all(states: States, x: Projected) -> States:
    """States ``[B, 1, ...]`` of the only prompt, or ``[B, R, ...]``, as ``[B, R, ...]``."""
    return jax.tree.map(lambda y: jnp.broadcast_to(y, (*x.rate.shape[:2], *y.shape[2:])), states)


def by_layer(weights: Mapping[str, Sequence[Any]], kinds: Sequence[Kind]) -> list[dict[str, Any]]:
    """The weights of each layer by name.

    Args:
      weights: for each name the values of all layers that have the weight.
      kinds: the kinds of the layers.

    Example:
      >>> by_layer({"attn_norm": [1, 2, 3], "q": [4], "delta_q": [5, 6]}, ("delta", "attention", "delta"))
      [{'attn_norm': 1, 'delta_q': 5}, {'attn_norm': 2, 'q': 4}, {'attn_norm': 3, 'delta_q': 6}]
    """
    left = {name: iter(values) for name, values in weights.items()}
    return [{name: next(left[name]) for name in left if DECODER[name].of(kind)} for kind in kinds]


# ------------------------------------------------------------------------------------------------------- slots


def in_slots(prompts: Sequence[States], slots: int, compute: Compute) -> list[States]:
    """States ``[P, S, ...]`` of ``slots`` slots for each prompt, all 0, for each delta net; its ``prompts`` are
    ``[P, ...]``."""

    def empty(x: Array) -> Array:
        return jnp.zeros((x.shape[0], slots, *x.shape[1:]), x.dtype)

    return [_placed(jax.tree.map(empty, net), compute) for net in prompts]


def started(states: States, prompts: States, fresh: Array) -> States:
    """The states ``[P, S, ...]``, with those of the prompt ``[P, ...]`` in slots where ``fresh [P, S]``."""

    def choose(x: Array, prompt: Array) -> Array:
        return jnp.where(fresh.reshape(*fresh.shape, *(1,) * (x.ndim - 2)), prompt[:, None], x)

    return jax.tree.map(choose, states, prompts)


def inserted(
    states: Sequence[States], read: Sequence[States], slots: Array, used: Array, compute: Compute
) -> list[States]:
    """The states of slots, with those of samples that were read put in.

    Args:
      states: ``[P, S, ...]`` for each delta net.
      read: ``[K, ...]`` for each delta net, K samples for each data-parallel shard.
      slots: ``[K]`` int32, the slot of each in its shard, ``row * S + slot``.
      used: ``[1]`` int32 for each shard, how many of the K are samples.
      compute: has the mesh.
    """

    def of_shard(x: Array, new: Array, slots: Array, used: Array) -> Array:
        flat = x.reshape(-1, *x.shape[2:])
        at = jnp.where(jnp.arange(len(slots)) < used, slots, len(flat))  # out of range: not written
        return flat.at[at].set(new, mode="drop").reshape(x.shape)

    def put(x: Array, new: Array, axes: tuple[str | None, ...]) -> Array:
        if compute.mesh is None:
            return of_shard(x, new, slots, used)
        shard, there, given = (spec(a, TRAIN) for a in (axes[:1], axes, (axes[0], *axes[2:])))
        of_mesh = jax.shard_map(of_shard, mesh=compute.mesh, in_specs=(there, given, shard, shard), out_specs=there)
        return of_mesh(x, new, slots, used)

    return [jax.tree.map(put, x, new, _AXES) for x, new in zip(states, read, strict=True)]


# Logical axes of states of slots.
_KEYS, _VALUES = ("shard", None, None, "delta_keys"), ("shard", None, None, "delta_values")
_AXES = States(("shard", None, "delta_heads"), (_KEYS, _KEYS, _VALUES))


def _placed(states: States, compute: Compute) -> States:
    def place(x: Array, axes: tuple[str | None, ...]) -> Array:
        return constrain(x, compute.mesh, *axes, *(None,) * (x.ndim - len(axes)))

    return jax.tree.map(place, states, _AXES)
