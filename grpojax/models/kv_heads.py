"""More devices along ``tensor`` than a model has heads of keys and values: each head is then there several times.

Training keeps the weights as they are on disk, cut wherever the axis falls, and repeats heads where a layer uses them
(their gradient is the sum over the copies); a rollout's weights have them repeated. Keys and values follow.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from grpojax.models.decoder_config import DecoderConfig


def on_mesh(config: DecoderConfig, mesh: Mesh | None) -> int:
    """How many heads keys and values have there: the least multiple of the model's that divides over ``tensor``.

    It divides the query's heads wherever these divide over ``tensor``.

    Example:
      >>> config = DecoderConfig(family="qwen2", vocab_size=7, hidden_size=8, intermediate_size=3, num_layers=2,
      ...                        num_heads=12, num_kv_heads=2, head_dim=4, rope_theta=1e4)
      >>> on_mesh(config, None), [over(config, tensor) for tensor in (1, 2, 3, 4, 12)]
      (2, [2, 2, 6, 4, 12])
    """
    return over(config, 1 if mesh is None else mesh.shape["tensor"])


def over(config: DecoderConfig, tensor: int) -> int:
    """As `on_mesh`, of so many devices along ``tensor``."""
    return math.lcm(config.num_kv_heads, tensor)


def repeated(w: Any, config: DecoderConfig, mesh: Mesh | None) -> Any:
    """A weight ``[..., heads * head_dim]`` of keys or values with every head repeated in place; those that have been
    are handed through. Of an `grpojax.models.quantised.Int8` both arrays."""
    heads = on_mesh(config, mesh)

    def one(x: Any) -> Any:
        if x.shape[-1] == heads * config.head_dim:
            return x
        x = x.reshape(*x.shape[:-1], config.num_kv_heads, config.head_dim)
        x = jnp.repeat(x, heads // config.num_kv_heads, axis=-2)
        return x.reshape(*x.shape[:-2], -1)

    return jax.tree.map(one, w)
