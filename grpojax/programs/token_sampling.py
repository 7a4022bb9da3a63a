"""Draws a token: truncates the distribution as configured, and picks the token at a uniform random number."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from grpojax.programs.sampler_config import DrawConfig
from grpojax.sharding import ROLLOUT, spec
from grpojax.types import Array, Prompts, Samples, Scalar

_BLOCK = 128


class _Shards(NamedTuple):
    """The number of shards of the vocabulary, one for each device along ``tensor``, and the shard of this device."""

    count: int = 1
    here: Scalar | int = 0

    def total(self, x: Array) -> Array:
        """The sum over the shards."""
        return jax.lax.psum(x, "tensor") if self.count > 1 else x

    def each(self, x: Array) -> Array:
        """``[..., count]``: the values of all shards."""
        return jax.lax.all_gather(x, "tensor", axis=x.ndim) if self.count > 1 else x[..., None]


def keys_of_samples(key: Array, prompts: Prompts, group: int) -> Samples:
    """``[P, G]`` keys. Each follows from its prompt's uid and its sample's number."""

    def of_prompt(uid, first):
        def of_sample(i):
            return jax.random.fold_in(jax.random.fold_in(key, uid), first + i)

        return jax.vmap(of_sample)(jnp.arange(group))

    return jax.vmap(of_prompt)(prompts.uids, prompts.first_sample)


at_position = jax.vmap(jax.vmap(jax.random.fold_in))  # keys and positions [P, n]


def draw(logits: Array, keys: Array, config: DrawConfig, mesh: Mesh | None = None) -> tuple[Array, Array]:
    """Draws one token for each key.

    Args:
      logits: ``[P, n, V]`` float32; n is the number of keys, or 1 if all keys of a prompt use the same logits.
      keys: ``[P, n]`` keys.
      config: temperature and truncation.
      mesh: the devices. If the vocabulary is cut over ``tensor``, each device draws from its own shard. Maxima, sums
        and the likeliest k move between devices; logits do not.

    Returns:
      ``(tokens [P, n] int32, logps [P, n] float32)``. The log-probability is that under the distribution drawn from:
      tempered, cut off and renormalised. At temperature 0 it is that under the plain softmax.

    Example:
      >>> logits = jnp.log(jnp.array([[[0.5, 0.3, 0.2]]]))
      >>> keys = jax.random.split(jax.random.key(0), 1000)[None]
      >>> tokens, logps = draw(logits, keys, DrawConfig(top_k=2))
      >>> {int(t): round(float(jnp.exp(p)), 3) for t, p in zip(tokens[0, :20], logps[0, :20])} == {0: 0.625, 1: 0.375}
      True
    """
    greedy = config.temperature == 0
    u = jnp.zeros(keys.shape) if greedy else jax.vmap(jax.vmap(jax.random.uniform))(keys)
    choose = functools.partial(_greedy if greedy else _sampled, config)
    count = 1 if mesh is None else mesh.shape["tensor"]
    if mesh is None or count == 1:
        return choose(logits, u, _Shards())

    def on_shard(logits: Array, u: Array) -> tuple[Array, Array]:
        return choose(logits, u, _Shards(count, jax.lax.axis_index("tensor")))

    rows, cut = spec(("shard", None), ROLLOUT), spec(("shard", None, "vocab"), ROLLOUT)
    return jax.shard_map(on_shard, mesh=mesh, in_specs=(cut, rows), out_specs=(rows, rows), check_vma=False)(logits, u)


def _greedy(config: DrawConfig, logits: Array, u: Array, shards: _Shards) -> tuple[Array, Array]:
    """The likeliest token; the first one if several are equally likely."""
    tops = shards.each(logits.max(-1))
    tokens = shards.each(shards.here * logits.shape[-1] + jnp.argmax(logits, -1).astype(jnp.int32))
    tokens = jnp.take_along_axis(tokens, tops.argmax(-1, keepdims=True), -1)[..., 0]
    top = tops.max(-1)
    logps = top - (jnp.log(shards.total(jnp.exp(logits - top[..., None]).sum(-1))) + top)
    return jnp.broadcast_to(tokens, u.shape), jnp.broadcast_to(logps, u.shape)


def _sampled(config: DrawConfig, logits: Array, u: Array, shards: _Shards) -> tuple[Array, Array]:
    """A token for each uniform number ``u [P, n]``: the one at which the running sum passes ``u`` of the total."""
    z = logits / config.temperature
    top = shards.each(z.max(-1)).max(-1)
    e = _keep(z, top[..., None], config, shards)
    blocks = jnp.pad(e, ((0, 0), (0, 0), (0, -e.shape[-1] % _BLOCK))).reshape(*e.shape[:2], -1, _BLOCK)
    mass = blocks.sum(-1)
    upto = jnp.cumsum(mass, -1)
    masses = shards.each(upto[..., -1])
    ends = jnp.cumsum(masses, -1)
    target = u * ends[..., -1]
    shard = jnp.minimum((ends <= target[..., None]).sum(-1), jax.vmap(jax.vmap(_last))(masses))
    starts = jnp.broadcast_to(ends - masses, (*u.shape, shards.count))
    before = jnp.take_along_axis(starts, shard[..., None], -1)[..., 0]
    shared = z.shape[1] == 1 and u.shape[1] > 1
    invert = jax.vmap(_invert, in_axes=(None, None, None, 0) if shared else 0)
    if shared:
        blocks, mass, upto = blocks[:, 0], mass[:, 0], upto[:, 0]
    tokens = jax.vmap(invert)(blocks, mass, upto, jnp.maximum(target - before, 0.0))
    chosen = jnp.take_along_axis(jnp.broadcast_to(z, (*u.shape, z.shape[-1])), tokens[..., None], -1)[..., 0]
    if shards.count > 1:
        mine = shard == shards.here
        tokens = shards.total(jnp.where(mine, tokens + shards.here * z.shape[-1], 0))
        chosen = shards.total(jnp.where(mine, chosen, 0.0))
    return tokens, chosen - top - jnp.log(ends[..., -1])


def _keep(z: Array, top: Array, config: DrawConfig, shards: _Shards) -> Array:
    """``exp(z - top)``, with 0 for tokens that are cut off: unnormalised probabilities in [0, 1]."""
    e = jnp.exp(z - top)
    if 0 < config.top_k < z.shape[-1] * shards.count:
        likeliest = jax.lax.top_k(z, min(config.top_k, z.shape[-1]))[0]
        if shards.count > 1:
            likeliest = jax.lax.top_k(shards.each(likeliest).reshape(*z.shape[:-1], -1), config.top_k)[0]
        e = jnp.where(z >= likeliest[..., -1:], e, 0.0)
    if config.top_p < 1:
        e = jnp.where(e >= _nucleus_threshold(e, config.top_p, shards), e, 0.0)
    if config.min_p > 0:
        e = jnp.where(e >= config.min_p, e, 0.0)
    return e


def _nucleus_threshold(e: Array, top_p: float, shards: _Shards) -> Array:
    """The largest t for which the entries of ``e`` that are at least t have ``top_p`` of the sum of ``e``.

    Bisects the bit patterns of the floats, which have the same order as the floats. This is exact and needs no sort.
    """
    need = top_p * shards.total(e.sum(-1, keepdims=True))

    def halve(_, bounds):
        low, high = bounds
        mid = low + (high - low) // 2
        enough = shards.total(jnp.where(e >= _as_float(mid), e, 0.0).sum(-1, keepdims=True)) >= need
        return jnp.where(enough, mid, low), jnp.where(enough, high, mid)

    one = jax.lax.bitcast_convert_type(jnp.float32(1.0), jnp.int32)
    low = jnp.zeros(need.shape, jnp.int32)
    low, _ = jax.lax.fori_loop(0, 31, halve, (low, jnp.full_like(low, one + 1)))
    return _as_float(low)


def _as_float(bits: Array) -> Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _invert(blocks: Array, mass: Array, upto: Array, target: Scalar) -> Scalar:
    """The index at which the running sum of ``blocks [B, 128]`` passes ``target``.

    ``mass [B]`` has the sums of the blocks, and ``upto [B]`` the running sum of ``mass``.
    """
    block = jnp.minimum((upto <= target).sum(), _last(mass))
    inside = blocks[block]
    rest = jnp.maximum(target - (upto[block] - mass[block]), 0.0)
    token = jnp.minimum((jnp.cumsum(inside) <= rest).sum(), _last(inside))
    return (block * _BLOCK + token).astype(jnp.int32)


def _last(x: Array) -> Scalar:
    """The last index at which ``x`` is over 0. It bounds an index that rounding could move too far."""
    return x.shape[0] - 1 - jnp.argmax(x[::-1] > 0)
