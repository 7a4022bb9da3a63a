"""A table of the weights of a family of networks: their shapes, shardings, first values and names on disk.

Initialisation, sharding, weight decay, loading and export read it. A weight that is not in it is an error. Another kind
of network (a value head, an adapter) has its own table. If its weights are in one tree with a decoder's, the tables are
joined: ``{**DECODER, "value_head": Weight(("embed",), zeros)}``.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from grpojax.host.errors import UserError
from grpojax.models import quantised
from grpojax.models.decoder_config import DecoderConfig, DeltaNet, Experts, Kind
from grpojax.sharding import TRAIN, Rules, check_divides, named
from grpojax.types import Array

# (source of keys, shape, size of every logical axis) -> a weight's first values, float32.
Initialiser = Callable[[nnx.Rngs, tuple[int, ...], Mapping[str, int]], Array]


class Weight(NamedTuple):
    """One weight, or those of all layers stacked.

    Attributes:
      axes: logical axes. Their `sizes` are the shape, and the sharding rules say how each axis is cut. The first axis
        of a stacked weight is "layers", and has the layers that `layers_with` names.
      init: makes its first values.
      name: name in a checkpoint, with ``{}`` for the layer and another ``{}`` for the expert. None if no checkpoint
        has the weight.
      transposed: whether the checkpoint stores it transposed, as ``[out, in]``.
      when: field of the decoder's config that says whether the decoder has the weight; None if all decoders have it.
      exact: whether it multiplies in float32 whatever the compute dtype is, and is never in eight bits.
    """

    axes: tuple[str, ...]
    init: Initialiser
    name: str | None = None
    transposed: bool = False
    when: str | None = None
    exact: bool = False

    @property
    def stacked(self) -> bool:
        """Whether one array has all layers, along its first axis."""
        return self.axes[0] == "layers"

    def of(self, kind: Kind) -> bool:
        """Whether layers of a kind have the weight, if the decoder has it."""
        name = self.name or ""
        if ".self_attn." in name:
            return kind != "delta"
        if ".linear_attn." in name:
            return kind == "delta"
        if ".mlp." in name:
            return kind != ("mixture" if self.when in ("dense", "mlp_bias") else "dense")
        return True

    @property
    def lead(self) -> int:
        """How many of the first axes are in a checkpoint's names. It has one tensor for each layer and expert."""
        return sum(axis in ("layers", "experts") for axis in self.axes[:2])

    @property
    def summed(self) -> int:
        """The number of the axis that products sum over; for a matrix."""
        return max(self.lead, 1)


WeightTable = Mapping[str, Weight]  # by the name that a weight has in a tree


def ones(rngs: nnx.Rngs, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Array:
    """Ones; draws nothing."""
    return jnp.ones(shape)


def zeros(rngs: nnx.Rngs, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Array:
    """Zeros; draws nothing."""
    return jnp.zeros(shape)


def unit_norm(rngs: nnx.Rngs, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Array:
    """Weights of a norm that leave normed values as they are: ones, or zeros if the norms add one (`initial`)."""
    return jnp.ones(shape)


def _rates(rngs: nnx.Rngs, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Array:
    """Logarithms of rates of decay, which are uniform up to 16."""
    return jnp.log(jax.random.uniform(rngs.params(), shape, minval=0.01, maxval=16.0))


def normal(fan_in: str, *, residual: bool = False) -> Initialiser:
    """Normal with variance 1 / size of the axis ``fan_in``. ``residual``, for outputs of blocks, also divides the
    variance by twice the number of layers."""

    def init(rngs: nnx.Rngs, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Array:
        fan = sizes[fan_in] * (2 * sizes["layers"] if residual else 1)
        return jax.random.normal(rngs.params(), shape) * fan**-0.5

    return init


def _norm(axis: str, name: str, when: str | None = None) -> Weight:
    return Weight(("layers", axis), unit_norm, f"model.layers.{{}}.{name}.weight", when=when)


def _kernel(rows: str, columns: str, name: str, *, residual: bool = False, **more: Any) -> Weight:
    init = normal(rows, residual=residual)
    return Weight(("layers", rows, columns), init, f"model.layers.{{}}.{name}.weight", transposed=True, **more)


def _expert_bias(axis: str, name: str) -> Weight:
    name = f"model.layers.{{}}.mlp.experts.{{}}.{name}.bias"
    return Weight(("layers", "experts", axis), zeros, name, when="biased_experts")


def _expert(rows: str, columns: str, name: str, *, residual: bool = False) -> Weight:
    init, name = normal(rows, residual=residual), f"model.layers.{{}}.mlp.experts.{{}}.{name}.weight"
    return Weight(("layers", "experts", rows, columns), init, name, transposed=True, when="mixture")


def _delta(rows: str, columns: str, name: str, **more: Any) -> Weight:
    return _kernel(rows, columns, f"linear_attn.{name}", when="hybrid", **more)


def _taps(channels: str, name: str) -> Weight:
    """The weights of a convolution, each channel by itself."""
    axes = ("layers", channels, "one", "taps")
    return Weight(axes, normal("taps"), f"model.layers.{{}}.linear_attn.{name}.weight", when="hybrid", exact=True)


def _per_head(init: Initialiser, name: str) -> Weight:
    name = f"model.layers.{{}}.linear_attn.{name}"
    return Weight(("layers", "delta_heads"), init, name, when="hybrid", exact=True)


def _bias(axis: str, name: str, when: str) -> Weight:
    return Weight(("layers", axis), zeros, f"model.layers.{{}}.{name}.bias", when=when)


# Names are mostly the same in all families (`grpojax.models.hf.weights` has the others). Random weights of a layer are
# drawn in this order.
DECODER: WeightTable = {
    "embed": Weight(("vocab", "embed"), normal("embed"), "model.embed_tokens.weight"),
    "attn_norm": _norm("hidden", "input_layernorm", "norms_before"),
    "q": _kernel("embed", "heads", "self_attn.q_proj", when="plain_queries"),
    "q_gated": _kernel("embed", "gated_heads", "self_attn.q_proj", when="output_gate"),
    "q_bias": _bias("heads", "self_attn.q_proj", "qkv_bias"),
    "q_norm": _norm("head_dim", "self_attn.q_norm", "qk_norm"),
    "q_rotated_norm": _norm("head_dim", "self_attn.query_layernorm", "qk_norm_rotated"),
    "q_wide_norm": _norm("heads", "self_attn.q_norm", "wide_qk_norm"),
    "k": _kernel("embed", "kv_heads", "self_attn.k_proj"),
    "k_bias": _bias("kv_heads", "self_attn.k_proj", "qkv_bias"),
    "k_norm": _norm("head_dim", "self_attn.k_norm", "qk_norm"),
    "k_rotated_norm": _norm("head_dim", "self_attn.key_layernorm", "qk_norm_rotated"),
    "k_wide_norm": _norm("kv_heads", "self_attn.k_norm", "wide_qk_norm"),
    "v": _kernel("embed", "kv_heads", "self_attn.v_proj"),
    "v_bias": _bias("kv_heads", "self_attn.v_proj", "qkv_bias"),
    "sinks": Weight(("layers", "head_count"), zeros, "model.layers.{}.self_attn.sinks", when="sinks", exact=True),
    "o": _kernel("heads", "embed", "self_attn.o_proj", residual=True),
    "o_bias": _bias("hidden", "self_attn.o_proj", "out_bias"),
    "attn_after_norm": _norm("hidden", "post_self_attn_layernorm", "norms_after"),
    # A delta net's queries, keys and values are one product and one convolution in a checkpoint.
    "delta_q": _delta("embed", "delta_keys", "in_proj_q"),
    "delta_k": _delta("embed", "delta_keys", "in_proj_k"),
    "delta_v": _delta("embed", "delta_values", "in_proj_v"),
    "delta_gate": _delta("embed", "delta_values", "in_proj_z"),
    "delta_rate": _delta("embed", "delta_heads", "in_proj_b", exact=True),
    "delta_decay": _delta("embed", "delta_heads", "in_proj_a", exact=True),
    "delta_decay_start": _per_head(ones, "dt_bias"),
    "delta_decay_log": _per_head(_rates, "A_log"),
    "delta_q_taps": _taps("delta_keys", "conv1d_q"),
    "delta_k_taps": _taps("delta_keys", "conv1d_k"),
    "delta_v_taps": _taps("delta_values", "conv1d_v"),
    "delta_norm": Weight(("layers", "value_size"), ones, "model.layers.{}.linear_attn.norm.weight", when="hybrid"),
    "delta_out": _delta("delta_values", "embed", "out_proj", residual=True),
    "mlp_norm": _norm("hidden", "post_attention_layernorm", "norms_before"),
    "gate": _kernel("embed", "mlp", "mlp.gate_proj", when="dense"),
    "gate_bias": _bias("mlp", "mlp.gate_proj", "mlp_bias"),
    "up": _kernel("embed", "mlp", "mlp.up_proj", when="dense"),
    "up_bias": _bias("mlp", "mlp.up_proj", "mlp_bias"),
    "down": _kernel("mlp", "embed", "mlp.down_proj", residual=True, when="dense"),
    "down_bias": _bias("hidden", "mlp.down_proj", "mlp_bias"),
    "mlp_after_norm": _norm("hidden", "post_feedforward_layernorm", "norms_after"),
    "router": _kernel("embed", "choices", "mlp.gate", when="mixture", exact=True),
    "router_bias": Weight(
        ("layers", "choices"), zeros, "model.layers.{}.mlp.gate.bias", when="biased_experts", exact=True
    ),
    "router_correction": Weight(
        ("layers", "choices"),
        zeros,
        "model.layers.{}.mlp.gate.e_score_correction_bias",
        when="corrected_choice",
        exact=True,
    ),
    "expert_gate": _expert("expert_embed", "expert_mlp", "gate_proj"),
    "expert_gate_bias": _expert_bias("expert_mlp", "gate_proj"),
    "expert_up": _expert("expert_embed", "expert_mlp", "up_proj"),
    "expert_up_bias": _expert_bias("expert_mlp", "up_proj"),
    "expert_down": _expert("expert_mlp", "expert_embed", "down_proj", residual=True),
    "expert_down_bias": _expert_bias("hidden", "down_proj"),
    "shared_gate": _kernel("embed", "shared_mlp", "mlp.shared_expert.gate_proj", when="shared_expert"),
    "shared_up": _kernel("embed", "shared_mlp", "mlp.shared_expert.up_proj", when="shared_expert"),
    "shared_down": _kernel("shared_mlp", "embed", "mlp.shared_expert.down_proj", residual=True, when="shared_expert"),
    "shared_router": _kernel("embed", "one", "mlp.shared_expert_gate", when="shared_gate", exact=True),
    "norm": Weight(("hidden",), unit_norm, "model.norm.weight"),
    "head": Weight(("vocab", "embed"), normal("embed"), "lm_head.weight", when="own_head"),
}


def sizes(config: DecoderConfig) -> dict[str, int]:
    """The size of every logical axis."""
    experts = config.experts or Experts(count=1, chosen=1, size=1)
    delta = config.delta or DeltaNet(key_heads=1, value_heads=1, key_size=1, value_size=1, taps=2, attention_layers=())
    return {
        "layers": config.num_layers,
        "vocab": config.vocab_size,
        "embed": config.hidden_size,
        "expert_embed": config.hidden_size,
        "hidden": config.hidden_size,
        "heads": config.num_heads * config.head_dim,
        "gated_heads": 2 * config.num_heads * config.head_dim,
        "kv_heads": config.num_kv_heads * config.head_dim,
        "head_dim": config.head_dim,
        "head_count": config.num_heads,
        "mlp": config.intermediate_size,
        "experts": experts.count,
        "choices": experts.count,
        "expert_mlp": experts.size,
        "shared_mlp": experts.shared,
        "one": 1,
        "delta_keys": delta.key_heads * delta.key_size,
        "delta_values": delta.value_heads * delta.value_size,
        "delta_heads": delta.value_heads,
        "value_size": delta.value_size,
        "taps": delta.taps,
    }


def present(table: WeightTable, config: DecoderConfig) -> dict[str, Weight]:
    """The weights of a table that a network with this config has."""
    return {name: weight for name, weight in table.items() if weight.when is None or getattr(config, weight.when)}


def layers_with(weight: Weight, config: DecoderConfig) -> tuple[int, ...]:
    """The layers that a stacked weight has, in their order along its first axis."""
    return tuple(i for i, kind in enumerate(config.kinds) if weight.of(kind))


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

    For ``jax.tree_util.tree_map_with_path``. The name of the leaf is the last dictionary key of its path. The scale of
    a matrix in eight bits does not have the axis that products sum over.

    Raises:
      ValueError: the table has no weight of that name, or its number of axes is different.

    Example:
      >>> tree = {"layers": {"q": jnp.zeros((2, 5, 3))}, "count": jnp.zeros(())}
      >>> jax.tree_util.tree_map_with_path(axes_of, tree)
      {'count': (), 'layers': {'q': ('layers', 'embed', 'heads')}}
    """
    if leaf.ndim == 0:
        return ()
    name, what = leaf_name(path), f"{jax.tree_util.keystr(path)} {list(leaf.shape)}"
    if name not in table:
        raise ValueError(f"{what} is no weight that the table knows; give it a line there")
    axes, summed = table[name].axes, table[name].summed
    if quantised.is_scale(path):
        axes = axes[:summed] + axes[summed + 1 :]
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
        return named(mesh, axes_of(path, leaf, table), rules)

    return jax.tree_util.tree_map_with_path(one, tree)


def check_experts(config: DecoderConfig, shards: int) -> None:
    """Raises `UserError` if a model's experts do not divide over ``mesh.expert``, or if it has none to divide."""
    count = 0 if config.experts is None else config.experts.count
    if shards > 1 and (not count or count % shards):
        fit = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0) or "1"
        raise UserError(
            f"mesh.expert={shards} does not divide the {count} experts of this model\nset mesh.expert to one of: {fit}"
        )


def check_mesh(config: DecoderConfig, mesh: Mesh | None) -> None:
    """Raises `UserError` if a decoder's weights do not divide over the mesh. The mesh may not cut a head of the query;
    it may cut heads of keys and values (`grpojax.models.kv_heads`)."""
    check_experts(config, 1 if mesh is None else mesh.shape["expert"])
    mlps = [("intermediate_size", config.intermediate_size, "mlp")]
    if config.experts is not None:
        mlps = mlps if config.dense else []
        mlps += [("moe_intermediate_size", config.experts.size, "expert_mlp")]
        mlps += [("shared_expert_intermediate_size", config.experts.shared, "shared_mlp")]
    if config.delta is not None:
        mlps += [("linear_num_key_heads", config.delta.key_heads, "delta_keys")]
    for what, size, axis in (
        ("num_attention_heads", config.num_heads, "heads"),
        ("num_key_value_heads x head_dim", config.num_kv_heads * config.head_dim, "kv_heads"),
        *mlps,
        ("vocab_size", config.vocab_size, "vocab"),
        ("hidden_size", config.hidden_size, "embed"),
    ):
        check_divides(mesh, what, size, TRAIN[axis])
