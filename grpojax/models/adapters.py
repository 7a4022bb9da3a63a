"""Low-rank adapters: factors learn, and the base weights are frozen (LoRA, arXiv:2106.09685).

A linear layer with weight ``W [in, out]`` then computes ``x W + scale (x A) B`` with ``A [in, rank]`` and ``B [rank,
out]``. An `Adapted` replaces ``W`` in a tree of weights, so that a forward takes such a tree like any other. The
factors are a separate tree (`FACTORS`). Only this tree learns, and a checkpoint contains only this tree.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from grpojax.device import Program, cut
from grpojax.host.errors import UserError, require
from grpojax.models import matrix
from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.matrix import Kernel, Matrix, OfArray, Precision, Times
from grpojax.models.quantised import Int8Matrix
from grpojax.models.weight_table import (
    DECODER,
    Initialiser,
    Weight,
    WeightTable,
    layers_with,
    leaf_name,
    ones,
    present,
    shardings,
    sizes,
    zeros,
)
from grpojax.types import Array

Target = Literal[
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_b",
    "in_proj_a",
    "out_proj",
]

# Our weights that are linear layers, with the name that Hugging Face and PEFT have for the layer. A seed's random
# numbers follow this order, so a new weight comes last.
LINEAR: Mapping[str, Target] = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
    "q_gated": "q_proj",
    "delta_q": "in_proj_qkv",
    "delta_k": "in_proj_qkv",
    "delta_v": "in_proj_qkv",
    "delta_gate": "in_proj_z",
    "delta_rate": "in_proj_b",
    "delta_decay": "in_proj_a",
    "delta_out": "out_proj",
    "expert_gate": "gate_proj",
    "expert_up": "up_proj",
    "expert_down": "down_proj",
    "shared_gate": "gate_proj",
    "shared_up": "up_proj",
    "shared_down": "down_proj",
}
# Three weights that are one layer in a checkpoint have one A, as that layer has in PEFT.
_ONE_A = dict.fromkeys(("delta_q", "delta_k", "delta_v"), "delta_qkv")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Trains low-rank adapters instead of every weight. They need a learning rate about ten times as high as that of
    training every weight (arXiv:2106.09685 and "LoRA without regret", Schulman et al. 2025).

    Attributes:
      rank: number of columns of A and of rows of B.
      alpha: the factors' product is multiplied by ``alpha / rank``.
      target: the linear layers that have factors. None is all that the model has: if only attention has factors, a
        policy learns worse.
      rslora: multiply the product by ``alpha / sqrt(rank)`` (rsLoRA, arXiv:2312.03732), for ranks over 64.
      dora: learn a norm for each column of the sum of base and product (DoRA, arXiv:2402.09353).
      base: format of the frozen weights. "compute" keeps them in ``model.dtype``. "int8" keeps the linear layers in
        eight bits, with a scale for each column.
      merged: merge the factors into the weights that a rollout samples with. False samples with base and factors in two
        products, as an update computes them, and needs no second copy of the weights. It needs ``mesh.fsdp`` 1.
      path: a PEFT folder whose factors the run starts from; it must have been made with these settings. The reference
        of a KL or of DPO is this start, the base with these factors. With None, A is random and B is 0, so that start
        and reference are the base.
    """

    rank: int
    alpha: float = 32.0
    target: tuple[Target, ...] | None = None
    rslora: bool = False
    dora: bool = False
    base: Literal["compute", "int8"] = "compute"
    merged: bool = True
    path: str | None = None

    def __post_init__(self) -> None:
        require(self, rank="[1, inf)", alpha="(0, inf)")
        if self.target is not None and (not self.target or len(set(self.target)) < len(self.target)):
            raise UserError(f"target={list(self.target)}: name at least one linear layer, and none twice")
        if self.dora and not self.merged:
            raise UserError("merged=false, dora=true: norms would need all weights for each token; set merged to true")

    @property
    def scale(self) -> float:
        """The number that the product of the factors is multiplied by.

        Example:
          >>> AdapterConfig(rank=8).scale, AdapterConfig(rank=64, rslora=True).scale
          (4.0, 4.0)
        """
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def weights(self, decoder: DecoderConfig) -> tuple[str, ...]:
        """The weights of a decoder that have factors, by our names."""
        there = present(DECODER, decoder)
        return tuple(n for n, layer in LINEAR.items() if n in there and (self.target is None or layer in self.target))

    def layers(self, decoder: DecoderConfig) -> tuple[Target, ...]:
        """The linear layers of a decoder that have factors, by their names in ``target``."""
        found = {LINEAR[name] for name in self.weights(decoder)}
        return tuple(layer for layer in get_args(Target) if layer in found)


class Factors(NamedTuple):
    """The factors of a linear layer, or of several stacked: of all layers, or of all experts; float32.

    Attributes:
      a: ``[in, rank]``.
      b: ``[rank, out]``.
      magnitude: ``[out]``, the norm of each column; None without DoRA.
    """

    a: Array
    b: Array
    magnitude: Array | None = None


@functools.partial(jax.tree_util.register_dataclass, data_fields=("base", "factors"), meta_fields=("scale",))
@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapted(Matrix):
    """A frozen weight ``[in, out]`` with its factors, or several stacked.

    Attributes:
      base: the weight, which gets no gradient.
      factors: the factors; None if the weight is only the base.
      scale: multiplies the factors' product.
    """

    base: Kernel
    factors: Factors | None
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        """As of a `Matrix`."""
        return self.base.shape

    def matmul(self, x: Array, precision: Precision) -> Array:
        """As of a `Matrix`. The base has no gradient."""
        y, f = matrix.frozen_matmul(x, self.base, precision), self.factors
        if f is None:
            return y
        multiply = functools.partial(jnp.matmul, precision=precision)
        y = y + multiply(multiply(x, f.a) * self.scale, f.b)
        if f.magnitude is None:
            return y
        return (y * (f.magnitude / self._norms()).astype(jnp.float32)).astype(x.dtype)

    def stacked(self, x: Array, times: Times) -> Array:
        """As of a `Matrix`."""
        y, f = matrix.stacked(x, self.base, times), self.factors
        return y if f is None else y + times.array((times.first or times).array(x, f.a) * self.scale, f.b)

    def merged(self) -> Array:
        """The weight as one array: in float32 if there are factors, otherwise in the base's dtype (int8 as float32)."""
        f = self.factors
        if f is None:
            return matrix.merged(self.base)
        w = _plain(self.base) + self.scale * jnp.matmul(f.a, f.b, precision="highest")
        return w if f.magnitude is None else w * (f.magnitude / self._norms())

    def map(self, f: OfArray, axes: tuple[str, ...], dtype: Any) -> "Adapted":
        """Applies ``f`` to base and factors; norms are float32."""
        *lead, rows, columns = axes
        base, factors = matrix.each(self.base, f, axes, dtype), self.factors
        if factors is not None:
            m = factors.magnitude
            factors = Factors(
                f(factors.a, (*lead, rows, "rank"), dtype),
                f(factors.b, (*lead, "rank", columns), dtype),
                None if m is None else f(m, (*lead, columns), jnp.float32),
            )
        return dataclasses.replace(self, base=base, factors=factors)

    def _norms(self) -> Array:
        """Norms ``[out]`` of the columns of base plus product; float32, without gradient as in DoRA's section 4.3. The
        sum is never computed: ``|w + s A b|² = |w|² + 2 s b·(Aᵀw) + s² b·(AᵀA b)``."""
        f = jax.tree.map(lambda x: jax.lax.stop_gradient(x).astype(jnp.float32), self.factors)
        multiply = functools.partial(jnp.matmul, precision="highest")
        w, s = _plain(self.base), self.scale
        crossed = 2 * s * multiply(f.a.T, w) + s**2 * multiply(multiply(f.a.T, f.a), f.b)
        return jnp.sqrt(jnp.maximum(jnp.square(w).sum(0) + (f.b * crossed).sum(0), jnp.finfo(jnp.float32).tiny))


def _plain(base: Kernel) -> Array:
    """A weight, or those of all layers stacked, in float32."""
    return matrix.merged(base).astype(jnp.float32)


# ------------------------------------------------------------------------------------------------ trees


def _uniform(rows: str) -> Initialiser:
    """Uniform within ``1 / sqrt(rows)``, as PEFT draws A (Kaiming's with a = sqrt 5)."""

    def init(rngs: Any, shape: tuple[int, ...], of_axis: Mapping[str, int]) -> Array:
        limit = of_axis[rows] ** -0.5
        return jax.random.uniform(rngs.params(), shape, minval=-limit, maxval=limit)

    return init


def _a_of(name: str) -> str:
    """The name in `FACTORS` of the A of one of our weights."""
    return f"{_ONE_A.get(name, name)}_a"


def _table() -> dict[str, Weight]:
    table = dict[str, Weight]()
    for name, layer in LINEAR.items():
        *lead, rows, columns = DECODER[name].axes
        own = (DECODER[name].name or "").removesuffix(".weight")
        whole = f"{own.rpartition('.')[0]}.{layer}"
        exact = DECODER[name].exact
        table[_a_of(name)] = Weight((*lead, rows, "rank"), _uniform(rows), f"{whole}.lora_A.weight", exact=exact)
        table[f"{name}_b"] = Weight((*lead, "rank", columns), zeros, f"{own}.lora_B.weight", exact=exact)
        table[f"{name}_magnitude"] = Weight((*lead, columns), ones, f"{own}.lora_magnitude_vector")
    return table


# By PEFT's names. Magnitudes start as the norms of the base's columns (`first`), and do not decay.
FACTORS: WeightTable = _table()


def is_adapted(x: Any) -> bool:
    """Whether ``x`` is an `Adapted`; for the ``is_leaf`` of jax's tree functions."""
    return isinstance(x, Adapted)


def on_base(params: Any, config: AdapterConfig) -> Any:
    """A decoder's weights as the frozen base: every linear layer becomes an `Adapted` without factors."""
    eight = config.base == "int8"

    def place(path: Any, x: Any) -> Any:
        if (name := leaf_name(path)) not in LINEAR:
            return x
        rounded = eight and not DECODER[name].exact
        return Adapted(base=_eight_bits(x) if rounded else x, factors=None, scale=config.scale)

    return jax.tree_util.tree_map_with_path(place, params)


# One layer after the other: all layers in float32 would take twice the memory of the weights.
_eight_bits = Program("", lambda x: jax.lax.map(lambda w: Int8Matrix.of(w, -2), x))


def joined(base: Any, factors: Mapping[str, Array]) -> Any:
    """The weights that a forward takes: the tree of `on_base` with the factors in it. Copies nothing."""

    def place(path: Any, x: Any) -> Any:
        name = leaf_name(path)
        if not isinstance(x, Adapted) or f"{name}_b" not in factors:
            return x
        mine = Factors(factors[_a_of(name)], factors[f"{name}_b"], factors.get(f"{name}_magnitude"))
        return dataclasses.replace(x, factors=mine)

    return jax.tree_util.tree_map_with_path(place, base, is_leaf=is_adapted)


def factors_of(params: Any) -> dict[str, Array]:
    """The factors in a tree from `joined`, by the names in `FACTORS`."""
    found = {}
    for path, x in _adapted(params):
        if (f := x.factors) is not None:
            name = leaf_name(path)
            found |= {_a_of(name): f.a, f"{name}_b": f.b}
            found |= {} if f.magnitude is None else {f"{name}_magnitude": f.magnitude}
    return found


def without_factors(params: Any) -> Any:
    """A tree from `joined` with the base only."""
    return jax.tree.map(
        lambda x: dataclasses.replace(x, factors=None) if is_adapted(x) else x, params, is_leaf=is_adapted
    )


def unmerged(config: AdapterConfig | None) -> bool:
    """Whether rollouts sample with base and factors in two products."""
    return config is not None and not config.merged


def check_axes(config: AdapterConfig | None, *, fsdp: int, expert: int) -> None:
    """Raises `UserError` if a mesh with axes of these sizes cannot run adapters."""
    if config is None:
        return
    if expert > 1:
        raise UserError(
            f"model.adapter with mesh.expert={expert}: experts on shards of their own cannot be frozen; set "
            "mesh.expert=1, with the devices in mesh.fsdp"
        )
    if unmerged(config) and fsdp > 1:
        raise UserError(
            f"model.adapter.merged=false with mesh.fsdp={fsdp} would gather the base for each token; set mesh.fsdp=1, "
            "with the devices in mesh.tensor or mesh.data"
        )


def abstract(config: AdapterConfig, decoder: DecoderConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the factors, by the names in `FACTORS`.

    Raises:
      UserError: the decoder has not all of the layers that are to have factors, or experts that are to have norms.

    Example:
      >>> decoder = DecoderConfig(family="qwen2", vocab_size=7, hidden_size=5, intermediate_size=3, num_layers=2,
      ...                         num_heads=1, num_kv_heads=1, head_dim=4, rope_theta=1e4)
      >>> made = abstract(AdapterConfig(rank=6, target=("q_proj",), dora=True), decoder)
      >>> {name: x.shape for name, x in made.items()}
      {'q_a': (2, 5, 6), 'q_b': (2, 6, 4), 'q_magnitude': (2, 4)}
    """
    if decoder.dense_layers:
        raise UserError(
            f"model.adapter: the first layers of a {decoder.family} model have no experts, and only layers that are "
            "alike, or delta nets beside attention, can have factors; leave it out"
        )
    possible = dataclasses.replace(config, target=None).layers(decoder)
    if missing := [layer for layer in config.target or () if layer not in possible]:
        raise UserError(
            f"model.adapter: {', '.join(missing)} of a {decoder.family} model cannot have factors\n"
            f"set model.adapter.target=[{','.join(possible)}]"
        )
    if config.dora and any(name.startswith("expert_") for name in config.weights(decoder)):
        attention = ",".join(LINEAR[name] for name in "qkvo")
        raise UserError(
            "model.adapter.dora=true: experts cannot have norms\n"
            f"set it to false, or model.adapter.target=[{attention}]"
        )
    made = dict[str, jax.ShapeDtypeStruct]()
    for name in config.weights(decoder):
        norms = (f"{name}_magnitude",) if config.dora else ()
        for n in (_a_of(name), f"{name}_b", *norms):
            of_axis = sizes(decoder) | {"rank": config.rank, "layers": len(layers_with(FACTORS[n], decoder))}
            made[n] = jax.ShapeDtypeStruct(tuple(of_axis[a] for a in FACTORS[n].axes), jnp.float32)
    return made


def merged(params: Any, dtype: DTypeLike, mesh: Mesh | None = None) -> Any:
    """Merges all factors of a tree of weights into their base. The result has ``dtype`` and the training shardings."""

    def one(x: Any) -> Any:
        return matrix.merged(x).astype(dtype)

    def whole(path: Any, x: Any) -> Any:
        # One layer after the other: all layers in float32 would take twice the memory of the weights.
        each = (lambda x: jax.lax.map(one, x)) if is_adapted(x) else one
        return Program("", each, out=cut(mesh, DECODER[leaf_name(path)].axes))(x)

    return jax.tree_util.tree_map_with_path(whole, params, is_leaf=is_adapted)


def first(config: AdapterConfig, decoder: DecoderConfig, base: Any, seed: int, mesh: Mesh | None) -> dict[str, Array]:
    """The factors that a run starts with: random A, B = 0, and the norms of the base. They are the same on any mesh.

    Args:
      config: config of the adapters.
      decoder: config of the model.
      base: the tree from `on_base`.
      seed: seed of A.
      mesh: the mesh to cut them over.
    """
    shapes, of_axis = abstract(config, decoder), sizes(decoder)
    numbers = {name: n for n, name in enumerate(FACTORS)}
    frozen = {leaf_name(path): x.base for path, x in _adapted(base)}

    class Keys(NamedTuple):
        key: Any

        def params(self) -> Any:
            return self.key

    def make(frozen: Mapping[str, Kernel]) -> dict[str, Array]:
        made = {}
        for name, x in shapes.items():
            keys = Keys(jax.random.fold_in(jax.random.key(seed), numbers[name]))
            made[name] = FACTORS[name].init(keys, x.shape, of_axis)  # pyrefly: ignore
            if name.endswith("_magnitude"):
                made[name] = jax.lax.map(_column_norms, frozen[name.removesuffix("_magnitude")])
        return made

    placed = None if mesh is None else lambda frozen: shardings(shapes, mesh, table=FACTORS)
    return Program("", make, out=placed)(frozen)


def _column_norms(w: Kernel) -> Array:
    return jnp.sqrt(jnp.square(_plain(w)).sum(0))


def _adapted(base: Any) -> list[tuple[Any, Adapted]]:
    leaves = jax.tree_util.tree_leaves_with_path(base, is_leaf=is_adapted)
    return [(path, x) for path, x in leaves if isinstance(x, Adapted)]
