"""The slots' caches as the sampler has them on a TPU."""

import jax.numpy as jnp


def second_of_two(blocks):
    """Blocks ``[blocks, R, S, Hkv, ...]`` as those of the second of two layers; the first is full of NaN, or of 127."""
    heads_first = blocks.swapaxes(2, 3).reshape(*blocks.shape[:2], -1, *blocks.shape[4:])
    nothing = 127 if blocks.dtype == jnp.int8 else jnp.nan
    return jnp.stack([jnp.full_like(heads_first, nothing), heads_first])
