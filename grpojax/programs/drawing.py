"""Drawing a token: a distribution cut off as configured, one uniform number, and the token that it falls on."""

import dataclasses

import jax
import jax.numpy as jnp

from grpojax.host.errors import require
from grpojax.types import Array, Scalar

_BLOCK = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawConfig:
    """The distribution that tokens are drawn from. Cut off in this order, renormalised after each cut.

    Attributes:
      temperature: 0 is greedy.
      top_k: keep the k likeliest tokens (ties with the k-th stay; Fan et al., arXiv:1805.04833); 0 keeps all.
      top_p: keep the smallest set of likeliest tokens with at least this mass (ties stay; Holtzman et al.,
        arXiv:1904.09751); 1 keeps all.
      min_p: keep tokens with at least this share of the likeliest one's probability (Nguyen et al.,
        arXiv:2407.01082); 0 keeps all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self):
        require(self, temperature="[0, inf)", top_k="[0, inf)", top_p="(0, 1]", min_p="[0, 1]")

    @property
    def truncates(self) -> bool:
        """Whether some tokens of the vocabulary are cut off before drawing."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def draw(logits: Array, keys: Array, config: DrawConfig) -> tuple[Array, Array]:
    """Draws a token a key.

    Args:
      logits: ``[P, n, V]`` float32; n is the number of keys, or 1 for all of a prompt's keys.
      keys: ``[P, n]`` keys.
      config: temperature and truncation.

    Returns:
      ``(tokens [P, n] int32, logps [P, n] float32)``. The log-probability is that of the distribution drawn
      from: tempered, cut off and renormalised. At temperature 0 it is that of the plain softmax.

    Example:
      >>> logits = jnp.log(jnp.array([[[0.5, 0.3, 0.2]]]))
      >>> keys = jax.random.split(jax.random.key(0), 1000)[None]
      >>> tokens, logps = draw(logits, keys, DrawConfig(top_k=2))
      >>> {int(t): round(float(jnp.exp(p)), 3) for t, p in zip(tokens[0, :20], logps[0, :20])} == {0: 0.625, 1: 0.375}
      True
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


def _keep(z: Array, config: DrawConfig) -> Array:
    """``exp(z - max z)`` with the cut-off tokens at 0: unnormalised probabilities in [0, 1]."""
    e = jnp.exp(z - z.max(-1, keepdims=True))
    if 0 < config.top_k < z.shape[-1]:
        e = jnp.where(z >= jax.lax.top_k(z, config.top_k)[0][..., -1:], e, 0.0)
    if config.top_p < 1:
        e = jnp.where(e >= _nucleus_threshold(e, config.top_p), e, 0.0)
    if config.min_p > 0:
        e = jnp.where(e >= config.min_p, e, 0.0)
    return e


def _nucleus_threshold(e: Array, top_p: float) -> Array:
    """The largest t such that entries of ``e`` that are at least t hold ``top_p`` of its sum.

    Bisects the bit patterns of the floats, which are ordered as the floats are: exact, and no sort.
    """
    need = top_p * e.sum(-1, keepdims=True)

    def halve(_, bounds):
        low, high = bounds
        mid = low + (high - low) // 2
        enough = jnp.where(e >= _as_float(mid), e, 0.0).sum(-1, keepdims=True) >= need
        return jnp.where(enough, mid, low), jnp.where(enough, high, mid)

    one = jax.lax.bitcast_convert_type(jnp.float32(1.0), jnp.int32)
    low = jnp.zeros(need.shape, jnp.int32)
    low, _ = jax.lax.fori_loop(0, 31, halve, (low, jnp.full_like(low, one + 1)))
    return _as_float(low)


def _as_float(bits: Array) -> Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _invert(e: Array, u: Scalar) -> Scalar:
    """The index at which the running sum of ``e [V]`` passes ``u * sum(e)``: one uniform number a draw."""
    blocks = jnp.pad(e, (0, -e.shape[0] % _BLOCK)).reshape(-1, _BLOCK)
    mass = blocks.sum(-1)
    upto = jnp.cumsum(mass)
    target = u * upto[-1]
    block = jnp.minimum((upto <= target).sum(), _last(mass))
    inside = blocks[block]
    rest = jnp.maximum(target - (upto[block] - mass[block]), 0.0)
    token = jnp.minimum((jnp.cumsum(inside) <= rest).sum(), _last(inside))
    return (block * _BLOCK + token).astype(jnp.int32)


def _last(x: Array) -> Scalar:
    """The last index of ``x`` with something in it; rounding must not reach beyond it."""
    return x.shape[0] - 1 - jnp.argmax(x[::-1] > 0)
