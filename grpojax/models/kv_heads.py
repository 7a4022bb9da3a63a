"""Repeats heads of keys and values if a mesh has more devices along ``tensor`` than the model has such heads.

Training keeps the weights as they are on disk, and a cut may go through a head. A layer repeats the heads when it uses
them; their gradient is the sum over the copies. A rollout's weights have the heads repeated already. So keys and values
have the repeated heads in both.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from grpojax.models.decoder_config import DecoderConfig


def on_mesh(config: DecoderConfig, mesh: Mesh | None) -> int:
    """Number of heads of keys and values on a mesh: the least multiple of the model's number that divides over
    ``tensor``.

    It divides the number of query heads if that number divides over ``tensor``.

    Example:
      >>> config = DecoderConfig(family="qwen2", vocab_size=7, hidden_size=8, intermediate_size=3, num_layers=2,
      ...                        num_heads=12, num_kv_heads=2, head_dim=4, rope_theta=1e4)
      >>> on_mesh(config, None), [over(config, tensor) for tensor in (1, 2, 3, 4, 12)]
      (2, [2, 2, 6, 4, 12])
    """
    return over(config, 1 if mesh is None else mesh.shape["tensor"])


def over(config: DecoderConfig, tensor: int) -> int:
    """`on_mesh` for ``tensor`` devices along that axis."""
    return math.lcm(config.num_kv_heads, tensor)


def repeated(w: Any, config: DecoderConfig, mesh: Mesh | None) -> Any:
    """A weight ``[..., heads * head_dim]`` of keys or values, with the copies of each head next to each other. A weight
    that is repeated already is returned as it is. Each array of a `grpojax.models.matrix.Matrix` is repeated."""
    heads = on_mesh(config, mesh)

    def one(x: Any) -> Any:
        if x.shape[-1] == heads * config.head_dim:
            return x
        x = x.reshape(*x.shape[:-1], config.num_kv_heads, config.head_dim)
        x = jnp.repeat(x, heads // config.num_kv_heads, axis=-2)
        return x.reshape(*x.shape[:-2], -1)

    return jax.tree.map(one, w)
