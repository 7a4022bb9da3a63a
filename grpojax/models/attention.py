"""Attention of rows over their prompt and themselves, behind one signature.

An implementation is a function ``(q, k, v, segments, prefix) -> out``:

  q: ``[B, R, S, H, d]``, k and v: ``[B, R, S, Hkv, d]``, segments: ``[B, R, S]``, 0 on padding.
  prefix: None or a `Prefix`: the keys and values of the prompts that the rows continue.

A query sees the keys of its own segment up to itself, and the whole prompt of its row.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Attend = Callable[..., Any]

# A finite stand-in for -inf: a row of padding softmaxes to something finite.
_MASKED = -1e30


class Prefix(NamedTuple):
    """Prompts' keys and values ``[B, K, L, Hkv, d]``, lengths ``[B, K]`` and the prompt of each row ``[B, R]``."""

    k: Any
    v: Any
    lengths: Any
    row_prompt: Any


def of_rows(x, row_prompt):
    """``x`` ``[B, K, ...]`` of each row's prompt: ``[B, R, ...]`` (``[B, 1, ...]`` where there is one prompt)."""
    if x.shape[1] == 1:
        return x
    return jax.vmap(lambda a, i: a[i])(x, row_prompt)


def _visible(segments):
    """``[B, R, S, S]``: query s sees key t of its own segment, t <= s."""
    s = segments.shape[-1]
    same = segments[..., :, None] == segments[..., None, :]
    return same & jnp.tri(s, dtype=bool)


def xla(q, k, v, segments, prefix: Prefix | None = None):
    """Plain jax. Scores of the prompt and of the row are two blocks of one float32 softmax, never concatenated."""
    b, r, s, h, d = q.shape
    kv = k.shape[-2]
    q = (q * d**-0.5).reshape(b, r, s, kv, h // kv, d)
    f32 = jnp.float32
    own = jnp.einsum("brskgd,brtkd->brkgst", q, k, preferred_element_type=f32)
    own = jnp.where(_visible(segments)[:, :, None, None], own, _MASKED)
    top = own.max(-1, keepdims=True)
    if prefix is not None:
        pk, pv = of_rows(prefix.k, prefix.row_prompt), of_rows(prefix.v, prefix.row_prompt)
        one = "blkd" if pk.shape[1] == 1 else "brlkd"
        if pk.shape[1] == 1:
            pk, pv = pk[:, 0], pv[:, 0]
        length = of_rows(prefix.lengths, prefix.row_prompt)[:, :, None, None, None, None]
        pre = jnp.einsum(f"brskgd,{one}->brkgsl", q, pk, preferred_element_type=f32)
        pre = jnp.where(jnp.arange(pre.shape[-1]) < length, pre, _MASKED)
        top = jnp.maximum(top, pre.max(-1, keepdims=True))
    top = jax.lax.stop_gradient(top)
    own = jnp.exp(own - top)
    total = own.sum(-1, keepdims=True)
    if prefix is not None:
        pre = jnp.exp(pre - top)
        total = total + pre.sum(-1, keepdims=True)
    out = jnp.einsum("brkgst,brtkd->brskgd", (own / total).astype(v.dtype), v)
    if prefix is not None:
        out = out + jnp.einsum(f"brkgsl,{one}->brskgd", (pre / total).astype(v.dtype), pv)
    return out.reshape(b, r, s, h, d)


def _joined(q, k, v, segments, prefix: Prefix | None):
    """Rows with their prompt in front, flattened to ``[B * R, ...]``; kv segments are 1 where visible."""
    b, r, s, h, d = q.shape
    kv_segments = segments
    if prefix is not None:
        def spread(x):
            x = of_rows(x, prefix.row_prompt)
            return jnp.broadcast_to(x, (b, r, *x.shape[2:]))

        pk, pv, length = spread(prefix.k), spread(prefix.v), spread(prefix.lengths)
        k, v = jnp.concatenate([pk, k], 2), jnp.concatenate([pv, v], 2)
        here = jnp.arange(pk.shape[2]) < length[..., None]
        kv_segments = jnp.concatenate([here.astype(segments.dtype), segments], 2)
    flat = lambda x: x.reshape(b * r, *x.shape[2:])  # noqa: E731
    return flat(q), flat(k), flat(v), flat(segments), flat(kv_segments)


def splash(q, k, v, segments, prefix: Prefix | None = None, *, mesh=None, interpret: bool = False):
    """TPU's splash kernel, forward and fused backward. Rows must hold one completion each (segment 1).

    A row with a second segment gives NaN: the kernel's segment mask cannot show a prompt to several of them.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as sa

    shape, packed = q.shape, (segments > 1).any(-1)
    q, k, v, q_seg, kv_seg = _joined(q * q.shape[-1] ** -0.5, k, v, segments, prefix)
    s, t = q.shape[1], k.shape[1]
    # The causal offset is the distance between the two ends, so padding must not move it: pad at the right.
    pad_s, pad_t = -s % 128, -t % 128
    widen = lambda x, n: jnp.pad(x, ((0, 0), (0, n)) + ((0, 0),) * (x.ndim - 2))  # noqa: E731
    q, q_seg = widen(q, pad_s), widen(q_seg, pad_s)
    k, v, kv_seg = widen(k, pad_t), widen(v, pad_t), widen(kv_seg, pad_t)
    block_q, block_kv = _block(s + pad_s), _block(t + pad_t)
    sizes = sa.BlockSizes(
        block_q=block_q, block_kv=block_kv, block_kv_compute=block_kv,
        block_q_dkv=block_q, block_kv_dkv=block_kv, block_kv_dkv_compute=block_kv, use_fused_bwd_kernel=True,
    )  # fmt: skip
    one = sa.CausalMask((s + pad_s, t + pad_t), offset=t - s)

    def run(q, k, v, q_seg, kv_seg):
        heads = q.shape[2]
        kernel = sa.make_splash_mha(
            sa.MultiHeadMask([one] * heads), block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret
        )
        swap = lambda x: x.swapaxes(1, 2)  # noqa: E731  [N, S, H, d] -> [N, H, S, d]
        call = jax.vmap(lambda q, k, v, a, b: kernel(q, k, v, segment_ids=sa.SegmentIds(q=a, kv=b)))
        return swap(call(swap(q), swap(k), swap(v), q_seg, kv_seg))

    if mesh is not None:
        lane = ("data", "fsdp")
        heads = jax.P(lane, None, "tensor", None)
        run = jax.shard_map(
            run, mesh=mesh, in_specs=(heads, heads, heads, jax.P(lane), jax.P(lane)), out_specs=heads, check_vma=False
        )
    out = run(q, k, v, q_seg, kv_seg)[:, :s].reshape(shape)
    return jnp.where(packed[:, :, None, None, None], jnp.nan, out)


def _block(n: int) -> int:
    return next(b for b in (512, 384, 256, 128) if n % b == 0)


def cudnn(q, k, v, segments, prefix: Prefix | None = None):
    """cuDNN's fused kernel (bfloat16 or float16, NVIDIA); the mask travels as a bias of one head."""
    shape, s = q.shape, q.shape[2]
    own = _visible(segments).reshape(-1, s, s)
    q, k, v, _, kv_seg = _joined(q, k, v, segments, prefix)
    t = k.shape[1]
    mask = own
    if prefix is not None:
        before = jnp.broadcast_to((kv_seg[:, None, : t - s] > 0), (q.shape[0], s, t - s))
        mask = jnp.concatenate([before, own], -1)
    out = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], implementation="cudnn")
    return out.reshape(shape)


def pick(name: str, *, dtype, mesh=None, platform: str | None = None) -> Attend:
    """The implementation called ``name``; ``"auto"``: splash on TPU, cuDNN on GPU in 16 bit, otherwise XLA."""
    platform = platform or jax.default_backend()
    half = jnp.dtype(dtype).itemsize == 2
    if name == "auto":
        name = {"tpu": "splash", "gpu": "cudnn" if half else "xla"}.get(platform, "xla")
    if name == "cudnn" and not half:
        raise ValueError(f"attention 'cudnn' needs bfloat16 or float16, not {jnp.dtype(dtype).name}")
    if name == "splash":
        return functools.partial(splash, mesh=mesh, interpret=platform == "cpu")
    return {"xla": xla, "cudnn": cudnn}[name]


def packs(name: str, platform: str | None = None) -> bool:
    """Whether the implementation takes several completions in a row."""
    platform = platform or jax.default_backend()
    return not (name == "splash" or (name == "auto" and platform == "tpu"))
