"""Attention of rows over their prompt and themselves, behind one signature.

An implementation is a function ``(q, k, v, segments, prefix, window, logits) -> out``:

  q: ``[B, R, S, H, d]``, k and v: ``[B, R, S, Hkv, d]``, segments: ``[B, R, S]``, 0 on padding.
  prefix: None or a `Prefix`: the keys and values of the prompts that the rows continue.
  window: None or a `Window`: how far back the queries see. A window reaches from a completion into its prompt.
  logits: None or `Logits`: what is done to logits before the softmax.

A query attends to the keys of its own segment up to itself, and to the whole prompt of its row, within the window.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from grpojax.host.errors import UserError
from grpojax.models.blocked_attention import blocked
from grpojax.sharding import TRAIN
from grpojax.types import Array

Attend = Callable[..., Array]

CUDNN_FORWARD = "dot_product_attention_fwd_wrapper"  # jax's name of cuDNN's kernel in a traced program

# A finite number in place of -inf, so that the softmax of a row of padding is finite.
_MASKED = -1e30


class Prefix(NamedTuple):
    """Prompts' keys and values ``[B, K, L, Hkv, d]``, lengths ``[B, K]`` and the prompt of each row ``[B, R]``."""

    k: Array
    v: Array
    lengths: Array
    row_prompt: Array


class Window(NamedTuple):
    """How far back the queries of a layer see, in a decoder in which some layers have a window.

    Attributes:
      size: the newest tokens, itself included, that a query sees if the layer has a window.
      here: [] bool, whether this layer has one.
      offsets: ``[B, R, S]`` int32, the place of each query in its completion; None if there are no prompts before.
    """

    size: int
    here: Array
    offsets: Any = None

    @property
    def reach(self) -> Array:
        """[] int32, how many tokens a query of this layer sees."""
        return jnp.where(self.here, self.size, FAR).astype(jnp.int32)


FAR = 2**30  # tokens; more than any text has


class Logits(NamedTuple):
    """What is done to a query's products with keys before the softmax.

    Attributes:
      cap: they become ``cap * tanh(logits / cap)``; 0 leaves them as they are.
      sinks: ``[H]`` float32, one more logit of each head, which takes part in the softmax and gives no value; or None.
    """

    cap: float = 0.0
    sinks: Array | None = None


def capped(logits: Array, cap: float) -> Array:
    """``cap * tanh(logits / cap)``, or the logits if ``cap`` is 0.

    Example:
      >>> capped(jnp.array([0.0, 2.0, 1e6]), 2.0).round(2).tolist()
      [0.0, 1.5199999809265137, 2.0]
    """
    return cap * jnp.tanh(logits / cap) if cap else logits


def of_rows(x: Array, row_prompt: Array) -> Array:
    """Picks each row's prompt from ``x [B, K, ...]``: ``[B, R, ...]``, or ``[B, 1, ...]`` if there is one prompt."""
    if x.shape[1] == 1:
        return x
    return jax.vmap(lambda a, i: a[i])(x, row_prompt)


def _visible(segments, window: Window | None = None):
    """``[B, R, S, S]`` bool: query s attends to key t of its own segment, t <= s, within the window."""
    s = segments.shape[-1]
    same = segments[..., :, None] == segments[..., None, :]
    if window is None:
        return same & jnp.tri(s, dtype=bool)
    age = jnp.arange(s)[:, None] - jnp.arange(s)
    return same & (age >= 0) & (age < window.reach)


def _recent(lengths: Array, size: int, window: Window) -> Array:
    """``[B, R, S, size]`` bool: which positions of its prompt a query has in its window; ``lengths`` are the prompts'
    tokens, ``[B, R]`` or ``[B, 1]`` and axes of 1."""
    at = lengths.reshape(*lengths.shape[:2], 1, 1) + window.offsets[..., None]
    return at - jnp.arange(size) < window.reach


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(formula, q, k):
    """Float32 scores. Their gradient multiplies in the dtype of q and k instead of float32, as the kernels do."""
    return jnp.einsum(formula, q, k, preferred_element_type=jnp.float32)


def _scores_backward(formula, saved, g):
    _, back = jax.vjp(functools.partial(jnp.einsum, formula), *saved)
    return back(g.astype(saved[0].dtype))


_scores.defvjp(lambda formula, q, k: (_scores(formula, q, k), (q, k)), _scores_backward)


def xla(
    q: Array,
    k: Array,
    v: Array,
    segments: Array,
    prefix: Prefix | None = None,
    window: Window | None = None,
    logits: Logits | None = None,
) -> Array:
    """Plain jax. The scores of the prompt and of the row are two parts of one float32 softmax, never concatenated."""
    b, r, s, h, d = q.shape
    kv = k.shape[-2]
    q = (q * d**-0.5).reshape(b, r, s, kv, h // kv, d)
    cap, sinks = logits or Logits()
    own = capped(_scores("brskgd,brtkd->brkgst", q, k), cap)
    own = jnp.where(_visible(segments, window)[:, :, None, None], own, _MASKED)
    if prefix is None:
        shares = jax.nn.softmax(own, -1) if sinks is None else _softmax_with(own, sinks)
        out = jnp.einsum("brkgst,brtkd->brskgd", shares.astype(v.dtype), v)
        return out.reshape(b, r, s, h, d)
    pk, pv = of_rows(prefix.k, prefix.row_prompt), of_rows(prefix.v, prefix.row_prompt)
    one = "brlkd"
    if pk.shape[1] == 1:
        one, pk, pv = "blkd", pk[:, 0], pv[:, 0]
    length = of_rows(prefix.lengths, prefix.row_prompt)[:, :, None, None, None, None]
    pre = capped(_scores(f"brskgd,{one}->brkgsl", q, pk), cap)
    here = jnp.arange(pre.shape[-1]) < length
    if window is not None:
        here &= _recent(length, pre.shape[-1], window)[:, :, None, None]
    pre = jnp.where(here, pre, _MASKED)
    top = jnp.maximum(own.max(-1, keepdims=True), pre.max(-1, keepdims=True))
    if sinks is not None:
        sinks = _by_kv_head(sinks, kv)
        top = jnp.maximum(top, sinks)
    top = jax.lax.stop_gradient(top)
    own, pre = jnp.exp(own - top), jnp.exp(pre - top)
    total = own.sum(-1, keepdims=True) + pre.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    out = jnp.einsum("brkgst,brtkd->brskgd", (own / total).astype(v.dtype), v)
    out = out + jnp.einsum(f"brkgsl,{one}->brskgd", (pre / total).astype(v.dtype), pv)
    return out.reshape(b, r, s, h, d)


def _by_kv_head(sinks: Array, kv: int) -> Array:
    """Sinks ``[H]`` as ``[Hkv, H / Hkv, 1, 1]``."""
    return sinks.reshape(kv, -1, 1, 1)


def _softmax_with(scores: Array, sinks: Array) -> Array:
    """Softmax of ``scores [B, R, Hkv, g, S, T]`` over the last axis, in which ``sinks [H]`` take part."""
    sinks = _by_kv_head(sinks, scores.shape[2])
    top = jax.lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), sinks))
    weights = jnp.exp(scores - top)
    return weights / (weights.sum(-1, keepdims=True) + jnp.exp(sinks - top))


def _joined(q, k, v, segments, prefix: Prefix | None, *, adjacent: bool = False):
    """Rows with their prompt before them, flattened to ``[B * R, ...]``; the segments of keys are 1 if visible. With
    ``adjacent`` the padding of prompts is before them, so that a row's first token follows its prompt's last one."""
    b, r, s, h, d = q.shape
    kv_segments = segments
    if prefix is not None:

        def spread(x):
            n = x.shape[1]
            return jnp.broadcast_to(x, (b, r, *x.shape[2:])) if n == 1 else _spread(n, x, prefix.row_prompt)

        pk, pv, length = spread(prefix.k), spread(prefix.v), spread(prefix.lengths)
        size = pk.shape[2]
        if adjacent:
            pk, pv = _shifted(pk, size - length), _shifted(pv, size - length)
        k, v = jnp.concatenate([pk, k], 2), jnp.concatenate([pv, v], 2)
        at = jnp.arange(size)
        here = at >= size - length[..., None] if adjacent else at < length[..., None]
        kv_segments = jnp.concatenate([here.astype(segments.dtype), segments], 2)
    return tuple(x.reshape(b * r, *x.shape[2:]) for x in (q, k, v, segments, kv_segments))


def _shifted(x: Array, by: Array) -> Array:
    """``x [B, R, L, ...]`` with a row's positions moved by ``by [B, R]`` to the right, the last ones to the front."""
    return jax.vmap(jax.vmap(lambda x, n: jnp.roll(x, n, 0)))(x, by)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread(prompts, x, row_prompt):
    """`of_rows` with a gradient that sums over a prompt's rows by a matmul. XLA's own scatters row after row."""
    return of_rows(x, row_prompt)


def _spread_backward(prompts, row_prompt, g):
    own = (row_prompt[..., None] == jnp.arange(prompts, dtype=row_prompt.dtype)).astype(g.dtype)
    total = jnp.einsum("brk,br...->bk...", own, g, preferred_element_type=jnp.float32)
    return total.astype(g.dtype), None


_spread.defvjp(lambda n, x, row_prompt: (_spread(n, x, row_prompt), row_prompt), _spread_backward)


def _widen(x, multiple: int):
    """Pads S of ``x [N, S, ...]`` at the right to a multiple of ``multiple``."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % multiple)) + ((0, 0),) * (x.ndim - 2))


def splash(
    q: Array,
    k: Array,
    v: Array,
    segments: Array,
    prefix: Prefix | None = None,
    window: Window | None = None,
    logits: Logits | None = None,
    *,
    mesh: Mesh | None = None,
    interpret: bool = False,
) -> Array:
    """TPU's splash kernel, forward and fused backward. Rows must hold one completion each (segment 1).

    A row with a second segment gives NaN, because the kernel's segment mask cannot make a prompt visible to several
    segments. `by_completion` splits rows for this kernel.

    The kernel measures windows between places of queries and keys. So where layers have windows, the padding of prompts
    stands before them. A program holds two kernels, with and without a window, and each layer runs one of them.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as sa

    shape, packed = q.shape, (segments > 1).any(-1)
    cap, sinks = logits or Logits()
    how: dict[str, Any] = {"attn_logits_soft_cap": cap} if cap else {}
    q = q * q.shape[-1] ** -0.5
    q, k, v, q_seg, kv_seg = _joined(q, k, v, segments, prefix, adjacent=window is not None)
    s, t = q.shape[1], k.shape[1]
    block_q, block_kv = _block(s), _block(t)
    q, q_seg = (_widen(x, block_q) for x in (q, q_seg))
    k, v, kv_seg = (_widen(x, block_kv) for x in (k, v, kv_seg))
    forward = {"block_q": block_q, "block_kv": block_kv, "block_kv_compute": block_kv}
    backward = {"block_q_dkv": block_q, "block_kv_dkv": block_kv, "block_kv_dkv_compute": block_kv}
    sizes = sa.BlockSizes(**forward, **backward, use_fused_bwd_kernel=True)
    places = q.shape[1], k.shape[1]
    causal = sa.CausalMask(places, offset=t - s)

    def masked(mask, q, k, v, q_seg, kv_seg, *sinks):
        mask = sa.MultiHeadMask([mask] * q.shape[2])
        kernel = sa.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret, **how)

        def one(q, k, v, a, b):
            return kernel(q, k, v, segment_ids=sa.SegmentIds(q=a, kv=b), **({"sinks": sinks[0]} if sinks else {}))

        heads_first = [x.swapaxes(1, 2) for x in (q, k, v)]
        out: Any = jax.vmap(one)(*heads_first, q_seg, kv_seg)  # pyrefly: ignore
        return out.swapaxes(1, 2)

    def run(*args):
        if window is None:
            return masked(causal, *args)
        *args, here = args
        local = sa.LocalMask(places, window_size=(window.size - 1, 0), offset=t - s)
        return jax.lax.cond(here, functools.partial(masked, local), functools.partial(masked, causal), *args)

    given = [q, k, v, q_seg, kv_seg]
    if sinks is not None:
        given.append(sinks)
    if window is not None:
        given.append(window.here)
    if mesh is not None:
        rows, heads = jax.P(TRAIN["shard"]), jax.P(TRAIN["shard"], None, "tensor")
        takes = [heads, heads, heads, rows, rows]
        takes += [jax.P("tensor")] if sinks is not None else []
        takes += [jax.P()] if window is not None else []
        takes = tuple(takes)
        run = jax.shard_map(run, mesh=mesh, in_specs=takes, out_specs=heads, check_vma=False)
    out = run(*given)[:, :s].reshape(shape)
    return jnp.where(packed[:, :, None, None, None], jnp.nan, out)


def _block(n: int) -> int:
    """The kernel's block size for ``n`` positions. Large blocks have less overhead, small ones less padding."""
    return min((512, 384, 256, 128), key=lambda b: -(-n // b) * (b + 64))


def cudnn(
    q: Array,
    k: Array,
    v: Array,
    segments: Array,
    prefix: Prefix | None = None,
    window: Window | None = None,
    logits: Logits | None = None,
) -> Array:
    """cuDNN's fused kernel (bfloat16 or float16, NVIDIA). It takes the mask as a bias of one head, and no `Logits`."""
    if logits is not None:
        raise ValueError("cuDNN's attention takes no sinks and no soft cap")
    shape, s = q.shape, q.shape[2]
    mask = _visible(segments, window).reshape(-1, s, s)
    q, k, v, _, kv_seg = _joined(q, k, v, segments, prefix)
    if prefix is not None:
        before = kv_seg[:, None, : k.shape[1] - s] > 0
        if window is not None:
            recent = _recent(of_rows(prefix.lengths, prefix.row_prompt), before.shape[2], window)
            before = before & recent.reshape(len(q), s, -1)
        mask = jnp.concatenate([jnp.broadcast_to(before, (*mask.shape[:2], before.shape[2])), mask], -1)
    # With a bias the backward pass takes only even lengths.
    q, k, v = (_widen(x, 2) for x in (q, k, v))
    mask = jnp.pad(mask, ((0, 0), (0, s % 2), (0, k.shape[1] - mask.shape[2])))
    out = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], implementation="cudnn")
    return out[:, :s].reshape(shape)


def pick(
    name: str, *, dtype: DTypeLike, mesh: Mesh | None = None, platform: str | None = None, plain: bool = True
) -> Attend:
    """The implementation called ``name``. "auto" is splash on TPU, cuDNN on GPU in 16 bit, and otherwise "xla".

    "xla" is `blocked` on a CPU and `xla` elsewhere, since a loop over blocks leaves much of an accelerator idle.
    cuDNN's kernel takes no `Logits`; ``plain`` says that there are none, and without it "auto" is "xla" on a GPU.

    Raises:
      UserError: the kernel is of another platform, or does not take the decoder's `Logits`. (Splash also runs on a
        CPU, interpreted.)
      ValueError: cuDNN does not take the dtype.
    """
    platform = platform or jax.default_backend()
    half = jnp.dtype(dtype).itemsize == 2
    if name == "auto":
        name = {"tpu": "splash", "gpu": "cudnn" if half and plain else "xla"}.get(platform, "xla")
    if name == "cudnn" and not plain:
        raise UserError("model.attention=cudnn: its kernel has no attention sinks and no soft caps: take auto, or xla")
    if name == "cudnn" and not half:
        raise ValueError(f"attention 'cudnn' needs bfloat16 or float16, not {jnp.dtype(dtype).name}")
    if platform not in {"splash": ("tpu", "cpu"), "cudnn": ("gpu",)}.get(name, (platform,)):
        raise UserError(f"model.attention={name} does not run on a {platform}: take auto, or xla")
    if name == "splash":
        return functools.partial(splash, mesh=mesh, interpret=platform == "cpu")
    return {"xla": blocked if platform == "cpu" else xla, "cudnn": cudnn}[name]


def needs_gather(name: str, platform: str | None = None) -> bool:
    """Whether the implementation takes only one completion in each row (`by_completion`)."""
    platform = platform or jax.default_backend()
    return name == "splash" or (name == "auto" and platform == "tpu")


def by_completion(attend: Attend, gather: Sequence[Array], token_prompt: Array) -> Attend:
    """Runs ``attend`` with one row for each completion, for rows that hold several.

    Everything else uses the packed rows, so only attention pays for the longest completion of a class.

    Args:
      attend: an implementation.
      gather: indices ``[B, C, n]`` of each class, see `grpojax.types.Rows`.
      token_prompt: ``[B, R, S]`` of the packed rows. Their completions may continue any of the prompts.
    """
    classes = [_of_class(attend, of_class, token_prompt) for of_class in gather]
    return lambda *args: functools.reduce(jnp.add, (run(*args) for run in classes))


def _of_class(attend: Attend, gather: Array, token_prompt: Array) -> Attend:
    """`by_completion` for the completions in ``gather [B, C, T]``; 0 at the tokens of all other completions."""
    apart = CompletionRows(gather, token_prompt)

    def run(q, k, v, segments, prefix: Prefix, window: Window | None = None, logits: Logits | None = None):
        prefix = prefix._replace(row_prompt=apart.prompt)
        if window is not None:
            offsets = jnp.arange(apart.segments.shape[-1])
            window = window._replace(offsets=jnp.broadcast_to(offsets, apart.segments.shape))
        out = attend(apart.take(q), apart.take(k), apart.take(v), apart.segments, prefix, window, logits)
        return apart.put(out)

    return run


class CompletionRows:
    """Moves tokens of packed rows to one row for each completion of a class, and back.

    Args:
      gather: ``[B, C, T]`` indices of the class, see `grpojax.types.Rows`.
      token_prompt: ``[B, R, S]`` of the packed rows.

    Attributes:
      segments: ``[B, C, T]`` int32, 1 where a completion has a token, 0 on padding.
      prompt: ``[B, C]`` int32, the prompt that each completion continues.
    """

    def __init__(self, gather: Array, token_prompt: Array):
        self._packed, self._apart = token_prompt.shape, gather.shape
        (b, r, s), (c, t) = self._packed, self._apart[1:]
        self._there = gather.reshape(b, c * t)

        def put(x, at):
            return x.at[jnp.where(at < 0, r * s, at)].set(jnp.arange(c * t), mode="drop")

        self._back = jax.vmap(put)(jnp.full((b, r * s), -1), self._there)
        self.segments = (gather >= 0).astype(jnp.int32)
        self.prompt = jnp.take_along_axis(token_prompt.reshape(b, r * s), jnp.maximum(gather[..., 0], 0), axis=1)

    def take(self, x: Array) -> Array:
        """Tokens ``[B, R, S, ...]`` as ``[B, C, T, ...]``, 0 on padding."""
        (b, r, s), (c, t) = self._packed, self._apart[1:]
        return _move(x.reshape(b, r * s, *x.shape[3:]), self._there, self._back).reshape(b, c, t, *x.shape[3:])

    def put(self, x: Array) -> Array:
        """Undoes `take`; 0 at the tokens of all other completions."""
        (b, r, s), (c, t) = self._packed, self._apart[1:]
        return _move(x.reshape(b, c * t, *x.shape[3:]), self._back, self._there).reshape(b, r, s, *x.shape[3:])


@jax.custom_vjp
def _move(x, source, target):
    """``x[b, source[b, i]]``, or 0 where ``source`` is -1. With its inverse ``target`` the gradient is a gather too."""
    return jax.vmap(lambda x, i: jnp.take(x, jnp.where(i < 0, x.shape[0], i), axis=0, mode="fill", fill_value=0))(
        x, source
    )


_move.defvjp(
    lambda x, source, target: (_move(x, source, target), (source, target)),
    lambda saved, g: (_move(g, saved[1], saved[0]), None, None),
)
