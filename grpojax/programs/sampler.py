"""Groups of samples from one jitted program.

Prompts are prefilled once each. Every prompt has a row of *slots*; a decode step advances all slots by one
token, and a slot whose sample ended takes the next waiting sample of its prompt in the same program. Because
slots are laid out by prompt, the prompt's keys and values are read in place, once for its whole row of slots.
The loop ends when nothing is left to draw.

A draw's random key is ``fold_in(key, uid, sample, position)``: it depends neither on slots nor on the order of
prompts nor on the mesh.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from grpojax.host.errors import UserError
from grpojax.models import decoder as dec
from grpojax.models.decoder import Compute
from grpojax.models.sharding import constrain
from grpojax.types import Prompts, Rollout, pytree


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """What to draw, and how many samples at a time.

    Attributes:
      group: samples per prompt, G.
      max_tokens: longest completion, T.
      temperature: 0 is greedy.
      top_k: keep the k likeliest tokens (ties with the k-th stay); 0 keeps all.
      top_p: keep the smallest set of likeliest tokens with at least this mass (ties stay); 1 keeps all.
      min_p: keep tokens with at least this share of the likeliest one's probability; 0 keeps all.
      slots: samples of one prompt that are decoded at a time; 0 takes all of them. Fewer slots than samples
        pay when lengths differ much: a slot that ends early is used again.
      cache_dtype: of keys and values.
    """

    group: int = 8
    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    slots: int = 0
    cache_dtype: Literal["compute", "float32", "bfloat16"] = "compute"

    def __post_init__(self):
        def check(ok, name, what):
            if not ok:
                raise UserError(f"{name}={getattr(self, name)!r}: must be {what}")

        check(self.group >= 1, "group", "at least 1")
        check(self.max_tokens >= 1, "max_tokens", "at least 1")
        check(self.temperature >= 0, "temperature", "0 (greedy) or more")
        check(self.top_k >= 0, "top_k", "0 (off) or more")
        check(0 < self.top_p <= 1, "top_p", "over 0 and at most 1")
        check(0 <= self.min_p <= 1, "min_p", "between 0 and 1")
        check(0 <= self.slots <= self.group, "slots", f"between 0 (all) and group={self.group}")

    @property
    def truncates(self) -> bool:
        """Whether some tokens of the vocabulary are cut off before drawing."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


# ---------------------------------------------------------------------------------------------- drawing

_BLOCK = 128


def _keep(z, config: SamplerConfig):
    """``exp(z - max z)`` with the cut-off tokens at 0: unnormalised probabilities in [0, 1]."""
    e = jnp.exp(z - z.max(-1, keepdims=True))
    if 0 < config.top_k < z.shape[-1]:
        e = jnp.where(z >= jax.lax.top_k(z, config.top_k)[0][..., -1:], e, 0.0)
    if config.top_p < 1:
        e = jnp.where(e >= _nucleus_threshold(e, config.top_p), e, 0.0)
    if config.min_p > 0:
        e = jnp.where(e >= config.min_p, e, 0.0)
    return e


def _nucleus_threshold(e, top_p):
    """The largest t such that entries of ``e`` that are at least t hold ``top_p`` of its sum.

    Bisects the bit patterns of the floats, which are ordered as the floats are: exact, and no sort.
    """
    need = top_p * e.sum(-1, keepdims=True)
    as_float = lambda bits: jax.lax.bitcast_convert_type(bits, jnp.float32)  # noqa: E731

    def halve(_, bounds):
        low, high = bounds
        mid = low + (high - low) // 2
        enough = jnp.where(e >= as_float(mid), e, 0.0).sum(-1, keepdims=True) >= need
        return jnp.where(enough, mid, low), jnp.where(enough, high, mid)

    one = jax.lax.bitcast_convert_type(jnp.float32(1.0), jnp.int32)
    low = jnp.zeros(need.shape, jnp.int32)
    low, _ = jax.lax.fori_loop(0, 31, halve, (low, jnp.full_like(low, one + 1)))
    return as_float(low)


def _invert(e, u):
    """The index at which the running sum of ``e [V]`` passes ``u * sum(e)``: one uniform number a draw."""
    blocks = jnp.pad(e, (0, -e.shape[0] % _BLOCK)).reshape(-1, _BLOCK)
    mass = blocks.sum(-1)
    upto = jnp.cumsum(mass)
    target = u * upto[-1]
    last = lambda x: x.shape[0] - 1 - jnp.argmax(x[::-1] > 0)  # noqa: E731  rounding must not reach beyond it
    block = jnp.minimum((upto <= target).sum(), last(mass))
    inside = blocks[block]
    rest = jnp.maximum(target - (upto[block] - mass[block]), 0.0)
    token = jnp.minimum((jnp.cumsum(inside) <= rest).sum(), last(inside))
    return (block * _BLOCK + token).astype(jnp.int32)


def draw(logits, keys, config: SamplerConfig):
    """Draws a token a key.

    Args:
      logits: ``[P, n, V]`` float32; n is the number of keys, or 1 for all of a prompt's keys.
      keys: ``[P, n]`` keys.
      config: temperature and truncation.

    Returns:
      ``(tokens [P, n] int32, logps [P, n] float32)``. The log-probability is that of the distribution drawn
      from: tempered, cut off and renormalised. At temperature 0 it is that of the plain softmax.
    """
    if config.temperature == 0:
        tokens = jnp.argmax(logits, -1).astype(jnp.int32)
        tokens = jnp.broadcast_to(tokens, keys.shape)
        logps = jnp.max(logits, -1) - jax.nn.logsumexp(logits, -1)
        return tokens, jnp.broadcast_to(logps, keys.shape)
    z = logits / config.temperature
    e = _keep(z, config)
    u = jax.vmap(jax.vmap(jax.random.uniform))(keys)
    shared = logits.shape[1] == 1 and keys.shape[1] > 1
    pick = jax.vmap(_invert, in_axes=(None, 0)) if shared else jax.vmap(_invert)
    tokens = jax.vmap(pick)(e[:, 0] if shared else e, u)
    chosen = jnp.take_along_axis(jnp.broadcast_to(z, (*keys.shape, z.shape[-1])), tokens[..., None], -1)[..., 0]
    return tokens, chosen - z.max(-1) - jnp.log(e.sum(-1))


# --------------------------------------------------------------------------------------------- decoding


@pytree
class _Loop:
    """What a decode step carries; slots ``[P, g]``.

    Attributes:
      step: [] int32, decode steps done. All slots write their keys and values at ring position ``step % T``.
      sample: sample in the slot; G when none is.
      count: tokens drawn so far of that sample; the last of them is not yet in the cache.
      token: the last of them.
      active: the sample wants another token.
      waiting: ``[P]`` int32, the next sample of each prompt to start.
      keys, values: slot caches, per layer ``[P, g, Hkv, d, T]`` and ``[P, g, Hkv, T, d]``.
      out: the rollout so far.
    """

    step: Any
    sample: Any
    count: Any
    token: Any
    active: Any
    waiting: Any
    keys: Any
    values: Any
    out: Rollout


def _decode_attention(q, cache, prompt, prompt_mask, cache_mask):
    """One query a slot over its prompt and its cached tokens, merged in one float32 softmax.

    q ``[P, g, Hkv, r, d]``; cache k ``[P, g, Hkv, d, T]`` and v ``[P, g, Hkv, T, d]``, the query's own token
    included; prompt k ``[P, Hkv, d, L]`` and v ``[P, Hkv, L, d]``; masks ``[P, L]`` and ``[P, g, T]``.
    """
    f32, (p, g, k, r, d) = jnp.float32, q.shape
    q = q * d**-0.5
    by_prompt = q.swapaxes(1, 2).reshape(p, k, g * r, d)
    s_prompt = jnp.matmul(by_prompt, prompt[0], preferred_element_type=f32)
    s_prompt = jnp.where(prompt_mask[:, None, None], s_prompt, -jnp.inf)
    s_cache = jnp.matmul(q, cache[0], preferred_element_type=f32)
    s_cache = jnp.where(cache_mask[:, :, None, None], s_cache, -jnp.inf)
    back = lambda x: x.reshape(p, k, g, r, -1).swapaxes(1, 2)  # noqa: E731
    there = lambda x: x.swapaxes(1, 2).reshape(p, k, g * r, -1)  # noqa: E731
    top = jnp.maximum(back(s_prompt.max(-1, keepdims=True)), s_cache.max(-1, keepdims=True))
    w_prompt, w_cache = jnp.exp(s_prompt - there(top)), jnp.exp(s_cache - top)
    total = back(w_prompt.sum(-1, keepdims=True)) + w_cache.sum(-1, keepdims=True)
    out = back(jnp.matmul((w_prompt / there(total)).astype(prompt[1].dtype), prompt[1]))
    return out + jnp.matmul((w_cache / total).astype(cache[1].dtype), cache[1])


def _per_layer(stacked, unroll: bool):
    """A stacked tree as it is, or as a list of one tree a layer."""
    if not unroll:
        return stacked
    n = jax.tree.leaves(stacked)[0].shape[0]
    return [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(n)]


def _over_layers(body, x, layers, caches, position, unroll: bool):
    """Runs ``body(x, layer, write) -> x`` layer by layer; ``write(k, v)`` puts a token's keys and values into the
    layer's caches at ``position`` and returns these. Caches are updated in place, as reads come after the write.
    Returns ``(x, caches)``."""

    def put(caches, k, v, *layer):
        """Of keys a column, of values a row."""
        out = []
        for cache, new, axis in zip(caches, (k[..., None], v[..., None, :]), (-1, -2), strict=True):
            at: list[Any] = [*layer, *(0,) * new.ndim]
            at[axis] = position
            out.append(jax.lax.dynamic_update_slice(cache, new[(None,) * len(layer)], at))
        return out

    if unroll:
        updated = []
        for layer, *own in zip(layers, *caches, strict=True):

            def write(k, v, own=own):
                updated.append(put(own, k, v))
                return updated[-1]

            x = body(x, layer, write)
        return x, [list(column) for column in zip(*updated, strict=True)]

    def step(carry, i_layer):
        (x, caches), (i, layer) = carry, i_layer

        def write(k, v):
            nonlocal caches
            caches = put(caches, k, v, i)
            return [jax.lax.dynamic_index_in_dim(cache, i, keepdims=False) for cache in caches]

        x = body(x, layer, write)
        return (x, caches), None

    return jax.lax.scan(step, (x, list(caches)), (jnp.arange(caches[0].shape[0]), layers))[0]


@functools.partial(jax.jit, static_argnames=("graph", "config", "eos_ids", "compute"))
def _sample(graph, params, prompts: Prompts, key, config: SamplerConfig, eos_ids: tuple[int, ...], compute: Compute):
    model = nnx.merge(graph, params)
    c, mesh = model.config, compute.mesh
    n_prompts, length = prompts.tokens.shape
    group, slots, most = config.group, config.slots or config.group, config.max_tokens
    cache_dtype = jnp.dtype(compute.dtype if config.cache_dtype == "compute" else config.cache_dtype)
    eos = jnp.asarray(eos_ids, jnp.int32)
    is_eos = lambda token: (token[..., None] == eos).any(-1)  # noqa: E731
    # A CPU copies each layer's slice of a stacked array before it multiplies; separate arrays are read in place.
    unroll = (compute.platform or jax.default_backend()) == "cpu"
    shard = lambda x, *axes: constrain(x, mesh, "lane", *axes)  # noqa: E731

    with jax.named_scope("prefill"):
        hidden, kv = dec.run_prompts(model, prompts.tokens[:, None], prompts.lengths[:, None], compute)
        turn = lambda x, axes: x[:, :, 0].transpose(axes).astype(cache_dtype)  # noqa: E731
        prompt_kv = (
            turn(kv[0], (0, 1, 3, 4, 2)),
            turn(kv[1], (0, 1, 3, 2, 4)),
        )  # [n, P, Hkv, d, L], [.., L, d]
        sample_keys = jax.vmap(lambda uid, first: jax.vmap(
            lambda i: jax.random.fold_in(jax.random.fold_in(key, uid), first + i))(jnp.arange(group))
        )(prompts.uids, prompts.first_sample)  # fmt: skip
        at = jax.vmap(jax.vmap(jax.random.fold_in))
        zero = jnp.zeros((n_prompts, group), jnp.int32)
        first, first_logp = draw(dec.logits(model, hidden, compute), at(sample_keys, zero), config)

    def start(x, dtype):
        return shard(jnp.zeros((n_prompts, group, most), dtype).at[:, :, 0].set(x), None, None)

    out = Rollout(
        tokens=start(first, jnp.int32),
        logps=start(first_logp, jnp.float32),
        lengths=zero + 1,
        stopped=is_eos(first),
    )

    def empty(*last):
        x = jnp.zeros((c.num_layers, n_prompts, slots, c.num_kv_heads, *last), cache_dtype)
        return _per_layer(constrain(x, mesh, None, "lane", None, "kv_heads", None, None), unroll)

    idle = jnp.zeros((n_prompts, slots), jnp.int32)
    blocks_graph, blocks = nnx.split(model.layers)
    blocks = _per_layer(blocks, unroll)
    prompt_kv = _per_layer(prompt_kv, unroll)
    prompt_mask = jnp.arange(length) < prompts.lengths[:, None]
    state = _Loop(
        step=jnp.int32(0), sample=idle + group, count=idle, token=idle, active=idle > 0,
        waiting=jnp.zeros(n_prompts, jnp.int32), keys=empty(c.head_dim, most), values=empty(most, c.head_dim), out=out,
    )  # fmt: skip

    def refill(s: _Loop) -> _Loop:
        free = ~s.active
        take = s.waiting[:, None] + jnp.cumsum(free, 1) - 1
        taken = free & (take < group)
        clipped = jnp.minimum(take, group - 1)
        done = jnp.take_along_axis(out.stopped, clipped, 1) | (most == 1)
        return dataclasses.replace(
            s,
            sample=jnp.where(taken, take, jnp.where(s.active, s.sample, group)),
            count=jnp.where(taken, 1, s.count),
            token=jnp.where(taken, jnp.take_along_axis(first, clipped, 1), s.token),
            active=jnp.where(taken, ~done, s.active),
            waiting=s.waiting + taken.sum(1, dtype=jnp.int32),
        )

    def step(s: _Loop) -> _Loop:
        s = refill(s)
        position = s.step % most
        cache_mask = (position - jnp.arange(most)) % most < s.count[..., None]
        tables = dec.rope_tables(c, prompts.lengths[:, None] + s.count - 1)
        x = dec.embed_tokens(model, s.token, compute, whole=True)

        def body(x, layer, write):
            block, prompt = layer
            one = dec.layer(nnx.merge(blocks_graph, block), c, compute)
            q, k, v = one.qkv(x, tables)
            cached = write(k.astype(cache_dtype), v.astype(cache_dtype))
            grouped = q.reshape(*q.shape[:2], c.num_kv_heads, -1, c.head_dim)
            o = _decode_attention(grouped, cached, prompt, prompt_mask, cache_mask)
            return one.finish(x, o.astype(x.dtype))

        layers = list(zip(blocks, prompt_kv, strict=True)) if unroll else (blocks, prompt_kv)
        x, (keys, values) = _over_layers(body, x, layers, (s.keys, s.values), position, unroll)

        with jax.named_scope("draw"):
            x = dec.rms_norm(x, model.norm[...], c.norm_eps)
            mine = jnp.take_along_axis(sample_keys, jnp.minimum(s.sample, group - 1), 1)
            token, logp = draw(dec.logits(model, x, compute), at(mine, s.count), config)
        stop = is_eos(token)
        sample = jnp.where(s.active, s.sample, group)  # out of range: not written
        put = jax.vmap(lambda array, value, *at: array.at[at].set(value, mode="drop"))
        return _Loop(
            step=s.step + 1, sample=s.sample, count=s.count + 1, token=token,
            active=s.active & ~stop & (s.count + 1 < most), waiting=s.waiting, keys=keys, values=values,
            out=Rollout(
                tokens=put(s.out.tokens, token, sample, s.count), logps=put(s.out.logps, logp, sample, s.count),
                lengths=put(s.out.lengths, s.count + 1, sample), stopped=put(s.out.stopped, stop, sample),
            ),
        )  # fmt: skip

    def unfinished(s: _Loop):
        return s.active.any() | (s.waiting < group).any()

    with jax.named_scope("decode"):
        return jax.lax.while_loop(unfinished, step, state).out


def sample_groups(
    graph, params, prompts: Prompts, key, config: SamplerConfig, *, eos_ids: tuple[int, ...], compute: Compute
) -> Rollout:
    """Draws ``config.group`` samples of each prompt.

    Args:
      graph, params: the two halves of a `Decoder` (``nnx.split``).
      prompts: the prompts; on a mesh their number must divide over its lanes (`spread`).
      key: a key that differs from rollout to rollout, such as ``fold_in(key(seed), step)``.
      config: group size, lengths, temperature, truncation, slots.
      eos_ids: tokens that end a sample; none means that every sample has ``max_tokens``.
      compute: how to run the decoder.

    Returns:
      `Rollout`, ``[P, G, T]``.

    Example:
      >>> import jax, numpy as np
      >>> from flax import nnx
      >>> from grpojax.models import Compute, Decoder, DecoderConfig
      >>> from grpojax.types import Prompts
      >>> model = Decoder(DecoderConfig(family="qwen2", vocab_size=50, hidden_size=16, intermediate_size=32,
      ...     num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, rope_theta=1e4, qkv_bias=True), rngs=nnx.Rngs(0))
      >>> prompts = Prompts(tokens=np.array([[5, 6, 7], [8, 9, 0]], np.int32), lengths=np.array([3, 2], np.int32),
      ...     uids=np.array([0, 1], np.uint32), first_sample=np.zeros(2, np.int32))
      >>> rollout = sample_groups(*nnx.split(model), prompts, jax.random.key(0), SamplerConfig(group=4, max_tokens=5),
      ...     eos_ids=(1,), compute=Compute())
      >>> rollout.tokens.shape
      (2, 4, 5)
    """
    if not isinstance(eos_ids, tuple):
        raise TypeError(f"eos_ids must be a tuple of ints, got {eos_ids!r}")
    return _sample(graph, params, prompts, key, config, eos_ids, compute)
