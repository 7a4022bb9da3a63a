"""A table of the weights of a family of networks: their shapes, shardings, first values and names on disk.

Initialisation, sharding, weight decay, loading and export read it. A weight that is not in it is an error. Another kind
of network (a value head, an adapter) has its own table. If its weights are in one tree with a decoder's, the tables are
joined: ``{**DECODER, "value_head": Weight(("embed",), zeros)}``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from grpojax import extension
from grpojax.host.errors import UserError
from grpojax.models import matrix
from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.layer_kinds import Kind
from grpojax.models.weight import Weight, WeightTable, bias_row, matrix_row, norm_row, normal, unit_norm, zeros
from grpojax.sharding import TRAIN, Rules, check_divides, named
from grpojax.types import Array

_ATTENTION: WeightTable = {
    "attn_norm": norm_row("hidden", "input_layernorm", "norms_before"),
    "q": matrix_row("embed", "heads", "self_attn.q_proj", when="plain_queries", mixer="attention"),
    "q_gated": matrix_row("embed", "gated_heads", "self_attn.q_proj", when="output_gate", mixer="attention"),
    "q_bias": bias_row("heads", "self_attn.q_proj", "qkv_bias", mixer="attention"),
    "q_norm": norm_row("head_dim", "self_attn.q_norm", "qk_norm", mixer="attention"),
    "q_rotated_norm": norm_row("head_dim", "self_attn.query_layernorm", "qk_norm_rotated", mixer="attention"),
    "q_wide_norm": norm_row("heads", "self_attn.q_norm", "wide_qk_norm", mixer="attention"),
    "k": matrix_row("embed", "kv_heads", "self_attn.k_proj", mixer="attention"),
    "k_bias": bias_row("kv_heads", "self_attn.k_proj", "qkv_bias", mixer="attention"),
    "k_norm": norm_row("head_dim", "self_attn.k_norm", "qk_norm", mixer="attention"),
    "k_rotated_norm": norm_row("head_dim", "self_attn.key_layernorm", "qk_norm_rotated", mixer="attention"),
    "k_wide_norm": norm_row("kv_heads", "self_attn.k_norm", "wide_qk_norm", mixer="attention"),
    "v": matrix_row("embed", "kv_heads", "self_attn.v_proj", mixer="attention"),
    "v_bias": bias_row("kv_heads", "self_attn.v_proj", "qkv_bias", mixer="attention"),
    "sinks": Weight(
        ("layers", "head_count"),
        zeros,
        "model.layers.{}.self_attn.sinks",
        when="sinks",
        exact=True,
        mixer="attention",
    ),
    "o": matrix_row("heads", "embed", "self_attn.o_proj", residual=True, mixer="attention"),
    "o_bias": bias_row("hidden", "self_attn.o_proj", "out_bias", mixer="attention"),
    "attn_after_norm": norm_row("hidden", "post_self_attn_layernorm", "norms_after"),
}
_DENSE: WeightTable = {
    "mlp_norm": norm_row("hidden", "post_attention_layernorm", "norms_before"),
    "gate": matrix_row("embed", "mlp", "mlp.gate_proj", mlp="dense"),
    "gate_bias": bias_row("mlp", "mlp.gate_proj", "mlp_bias", mlp="dense"),
    "up": matrix_row("embed", "mlp", "mlp.up_proj", mlp="dense"),
    "up_bias": bias_row("mlp", "mlp.up_proj", "mlp_bias", mlp="dense"),
    "down": matrix_row("mlp", "embed", "mlp.down_proj", residual=True, mlp="dense"),
    "down_bias": bias_row("hidden", "mlp.down_proj", "mlp_bias", mlp="dense"),
    "mlp_after_norm": norm_row("hidden", "post_feedforward_layernorm", "norms_after"),
}


def _of_extensions() -> dict[str, Weight]:
    """The weights of layers that extensions bring (`grpojax.extension.Names.weights`)."""
    tables = [extension.imported(path) for _, path in sorted(extension.words("weights").items())]
    return {name: weight for table in tables for name, weight in table.items()}


_BROUGHT = _of_extensions()
# Names are mostly the same in all families (`grpojax.models.hf.weights` has the others). Random weights of a layer are
# drawn in this order.
DECODER: WeightTable = {
    "embed": Weight(("vocab", "embed"), normal("embed"), "model.embed_tokens.weight"),
    **_ATTENTION,
    **{name: weight for name, weight in _BROUGHT.items() if weight.mixer is not None},
    **_DENSE,
    **{name: weight for name, weight in _BROUGHT.items() if weight.mlp is not None},
    "norm": Weight(("hidden",), unit_norm, "model.norm.weight"),
    "head": Weight(("vocab", "embed"), normal("embed"), "lm_head.weight", when="own_head"),
}


def sizes(config: DecoderConfig) -> dict[str, int]:
    """The size of every logical axis."""
    return {
        "layers": config.num_layers,
        "vocab": config.vocab_size,
        "embed": config.hidden_size,
        "hidden": config.hidden_size,
        "heads": config.num_heads * config.head_dim,
        "gated_heads": 2 * config.num_heads * config.head_dim,
        "kv_heads": config.num_kv_heads * config.head_dim,
        "head_dim": config.head_dim,
        "head_count": config.num_heads,
        "mlp": config.intermediate_size,
        "one": 1,
        **({} if config.mixer is None else config.mixer.sizes()),
        **({} if config.mlp is None else config.mlp.sizes(config.hidden_size)),
    }


def present(table: WeightTable, config: DecoderConfig) -> dict[str, Weight]:
    """The weights of a table that a network with this config has."""
    return {name: weight for name, weight in table.items() if _has(config, weight)}


def _has(config: DecoderConfig, weight: Weight) -> bool:
    if not any(weight.of(kind) for kind in set(config.kinds)):
        return False
    core = Kind()
    owner: Any = config.mixer if weight.mixer not in (None, core.mixer) else config
    owner = config.mlp if weight.mlp not in (None, core.mlp) else owner
    return weight.when is None or bool(getattr(owner, weight.when))


def layers_with(weight: Weight, config: DecoderConfig) -> tuple[int, ...]:
    """The layers that a stacked weight has, in their order along its first axis."""
    return tuple(i for i, kind in enumerate(config.kinds) if weight.of(kind))


def by_layer(weights: Mapping[str, Sequence[Any]], kinds: Sequence[Kind]) -> list[dict[str, Any]]:
    """The weights of each layer by name.

    Args:
      weights: for each name the values of all layers that have the weight.
      kinds: the kinds of the layers.

    Example:
      >>> norms, kind = {"attn_norm": [1, 2, 3]}, Kind()
      >>> by_layer({**norms, "q": [4, 5]}, (kind, Kind(mixer="another"), kind))
      [{'attn_norm': 1, 'q': 4}, {'attn_norm': 2}, {'attn_norm': 3, 'q': 5}]
    """
    left = {name: iter(values) for name, values in weights.items()}
    return [{name: next(left[name]) for name in left if DECODER[name].of(kind)} for kind in kinds]


def initial(weight: Weight, config: DecoderConfig, rngs: nnx.Rngs) -> Array:
    """First values of a weight, or of one layer of a stacked weight.

    Example:
      >>> config = DecoderConfig(family="qwen2", vocab_size=7, hidden_size=5, intermediate_size=3, num_layers=2,
      ...                        num_heads=1, num_kv_heads=1, head_dim=4, rope_theta=1e4)
      >>> [initial(w, config, nnx.Rngs(0)).shape for w in (DECODER["o"], Weight(("embed",), zeros))]
      [(4, 5), (5,)]
    """
    of_axis = sizes(config)
    init = zeros if weight.init is unit_norm and config.norms_add_one else weight.init
    return init(rngs, tuple(of_axis[a] for a in weight.axes[weight.stacked :]), of_axis)


def axes_of(path: tuple[Any, ...], leaf: Any, table: WeightTable = DECODER) -> tuple[str, ...]:
    """Logical axes of a leaf in a tree of weights or of their moments. A scalar, such as a counter, has none.

    For ``jax.tree_util.tree_map_with_path``. The name of the leaf is the last dictionary key of its path.

    Raises:
      ValueError: the table has no weight of that name, or its number of axes is different.

    Example:
      >>> import jax.numpy as jnp
      >>> tree = {"layers": {"q": jnp.zeros((2, 5, 3))}, "count": jnp.zeros(())}
      >>> jax.tree_util.tree_map_with_path(axes_of, tree)
      {'count': (), 'layers': {'q': ('layers', 'embed', 'heads')}}
    """
    if leaf.ndim == 0:
        return ()
    name, what = leaf_name(path), f"{jax.tree_util.keystr(path)} {list(leaf.shape)}"
    if name not in table:
        raise ValueError(f"{what} is no weight that the table knows; give it a line there")
    axes = table[name].axes
    if len(axes) != leaf.ndim:
        raise ValueError(f"{what} is not the table's {name!r} with axes {axes}")
    return axes


def leaf_name(path: tuple[Any, ...]) -> str:
    """The name of a leaf in the table: the last dictionary key of its path, or "" if the path has none."""
    return next((p.key for p in reversed(path) if isinstance(p, jax.tree_util.DictKey)), "")


def multiplies(path: tuple[Any, ...], leaf: Any, table: WeightTable = DECODER) -> bool:
    """Whether a leaf is a matrix that multiplies activations. Such weights decay; norms and biases do not."""
    return len([a for a in axes_of(path, leaf, table) if a not in ("layers", "experts")]) >= 2


def shardings(tree: Any, mesh: Mesh | None, rules: Rules = TRAIN, table: WeightTable = DECODER) -> Any:
    """The sharding of every array in a tree of weights or of an optimiser's state; without a mesh each is None."""

    def one(path, leaf):
        return matrix.each(leaf, lambda _, axes, __: named(mesh, axes, rules), axes_of(path, leaf, table))

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=matrix.is_matrix)


def check_axis(config: DecoderConfig, shards: int) -> None:
    """Raises `UserError` if a decoder's MLPs do not divide over ``mesh.expert``, or if it has none to divide."""
    if config.mlp is not None:
        config.mlp.check_axis(shards)
    elif shards > 1:
        raise UserError(f"mesh.expert={shards}: {config.family} has no experts to divide over it\nset mesh.expert to 1")


def widths(config: DecoderConfig) -> dict[str, tuple[int, str]]:
    """The widths of mixers and MLPs that a mesh must divide, with their logical axes, by their names in config.json."""
    dense = {"intermediate_size": (config.intermediate_size, "mlp")} if config.dense else {}
    others = [part.cut() for part in (config.mlp, config.mixer) if part is not None]
    return {**dense, **{name: size for part in others for name, size in part.items()}}


def check_mesh(config: DecoderConfig, mesh: Mesh | None) -> None:
    """Raises `UserError` if a decoder's weights do not divide over the mesh. The mesh may not cut a head of the query;
    it may cut heads of keys and values (`grpojax.models.kv_heads`)."""
    check_axis(config, 1 if mesh is None else mesh.shape["expert"])
    for what, size, axis in (
        ("num_attention_heads", config.num_heads, "heads"),
        ("num_key_value_heads x head_dim", config.num_kv_heads * config.head_dim, "kv_heads"),
        *((name, size, axis) for name, (size, axis) in widths(config).items()),
        ("vocab_size", config.vocab_size, "vocab"),
        ("hidden_size", config.hidden_size, "embed"),
    ):
        check_divides(mesh, what, size, TRAIN[axis])
