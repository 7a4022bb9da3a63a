"""The weights of a gated delta net, as rows of the table of weights."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from grpojax.models.weight import Initialiser, Weight, WeightTable, matrix_row, normal, ones
from grpojax.types import Array


def _rates(rngs: nnx.Rngs, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Array:
    """Logarithms of rates of decay, which are uniform up to 16."""
    return jnp.log(jax.random.uniform(rngs.params(), shape, minval=0.01, maxval=16.0))


def _matrix(rows: str, columns: str, name: str, **more: Any) -> Weight:
    return matrix_row(rows, columns, f"linear_attn.{name}", mixer="delta", **more)


def _taps(channels: str, name: str) -> Weight:
    """The weights of a convolution, each channel by itself."""
    axes = ("layers", channels, "one", "taps")
    return Weight(axes, normal("taps"), f"model.layers.{{}}.linear_attn.{name}.weight", exact=True, mixer="delta")


def _per_head(init: Initialiser, name: str) -> Weight:
    return Weight(("layers", "delta_heads"), init, f"model.layers.{{}}.linear_attn.{name}", exact=True, mixer="delta")


# Queries, keys and values are one product and one convolution in a checkpoint.
WEIGHTS: WeightTable = {
    "delta_q": _matrix("embed", "delta_keys", "in_proj_q"),
    "delta_k": _matrix("embed", "delta_keys", "in_proj_k"),
    "delta_v": _matrix("embed", "delta_values", "in_proj_v"),
    "delta_gate": _matrix("embed", "delta_values", "in_proj_z"),
    "delta_rate": _matrix("embed", "delta_heads", "in_proj_b", exact=True),
    "delta_decay": _matrix("embed", "delta_heads", "in_proj_a", exact=True),
    "delta_decay_start": _per_head(ones, "dt_bias"),
    "delta_decay_log": _per_head(_rates, "A_log"),
    "delta_q_taps": _taps("delta_keys", "conv1d_q"),
    "delta_k_taps": _taps("delta_keys", "conv1d_k"),
    "delta_v_taps": _taps("delta_values", "conv1d_v"),
    "delta_norm": Weight(("layers", "value_size"), ones, "model.layers.{}.linear_attn.norm.weight", mixer="delta"),
    "delta_out": _matrix("delta_values", "embed", "out_proj", residual=True),
}
