"""Low-rank adapters: factors learn, and the base weights are frozen (LoRA, arXiv:2106.09685).

A linear layer with weight ``W [in, out]`` then computes ``x W + scale (x A) B`` with ``A [in, rank]`` and ``B [rank,
out]``. An `Adapted` replaces ``W`` in a tree of weights, so that a forward takes such a tree like any other. The
factors are a separate tree (`FACTORS`). Only this tree learns, and a checkpoint contains only this tree.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from grpojax.device import Program, places
from grpojax.extensions.adapters.adapter_config import LINEAR, AdapterConfig
from grpojax.host.errors import UserError
from grpojax.models import matrix
from grpojax.models.compute import Compute
from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.matrix import Kernel, Matrix, OfArray, Precision, Times
from grpojax.models.number_formats import FLOATS, format_of
from grpojax.models.weight import Initialiser, Weight, WeightTable, ones, zeros
from grpojax.models.weight_table import DECODER, layers_with, leaf_name, shardings, sizes
from grpojax.types import Array

# Three weights that are one layer in a checkpoint have one A, as that layer has in PEFT.
_ONE_A = dict.fromkeys(("delta_q", "delta_k", "delta_v"), "delta_qkv")


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

    def with_learned(self, name: str, learned: Mapping[str, Array]) -> "Adapted":
        """As of a `Matrix`, with factors by the names in `FACTORS`."""
        if f"{name}_b" not in learned:
            return self
        mine = Factors(learned[_a_of(name)], learned[f"{name}_b"], learned.get(f"{name}_magnitude"))
        return dataclasses.replace(self, factors=mine)

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
        if name not in DECODER:  # of layers that no extension brings
            continue
        weight = DECODER[name]
        *lead, rows, columns = weight.axes
        own = (weight.name or "").removesuffix(".weight")
        whole = f"{own.rpartition('.')[0]}.{layer}"
        of = {"mixer": weight.mixer, "mlp": weight.mlp}
        how = {"exact": weight.exact, **of}
        table[_a_of(name)] = Weight((*lead, rows, "rank"), _uniform(rows), f"{whole}.lora_A.weight", **how)
        table[f"{name}_b"] = Weight((*lead, "rank", columns), zeros, f"{own}.lora_B.weight", **how)
        table[f"{name}_magnitude"] = Weight((*lead, columns), ones, f"{own}.lora_magnitude_vector", **of)
    return table


# By PEFT's names. Magnitudes start as the norms of the base's columns (`fresh`), and do not decay.
FACTORS: WeightTable = _table()


def on_base(params: Any, config: AdapterConfig) -> Any:
    """A decoder's weights as the frozen base: every linear layer becomes an `Adapted` without factors."""
    rounds = None if config.base in FLOATS else _rounding(config.base)

    def place(path: Any, x: Any) -> Any:
        if (name := leaf_name(path)) not in LINEAR:
            return x
        stays = rounds is None or DECODER[name].exact
        return Adapted(base=x if stays else rounds(x), factors=None, scale=config.scale)

    return jax.tree_util.tree_map_with_path(place, params)


@functools.cache
def _rounding(base: str) -> Program:
    """Rounds the weights of all layers to a format, one layer after the other: all of them in float32 would take twice
    the memory of the weights."""
    form = format_of(base, "model.adapter.base")
    return Program("", lambda x: jax.lax.map(lambda w: form.matrix(w, -2, lambda values: values), x))


def factors_of(params: Any) -> dict[str, Array]:
    """The factors in a tree of weights, by the names in `FACTORS`."""
    found = {}
    for path, x in _adapted(params):
        if (f := x.factors) is not None:
            name = leaf_name(path)
            found |= {_a_of(name): f.a, f"{name}_b": f.b}
            found |= {} if f.magnitude is None else {f"{name}_magnitude": f.magnitude}
    return found


def make_cast(compute: Compute) -> Program:
    """Makes the factors that a rollout samples with if they are not merged: ``params -> factors`` in the compute dtype.
    The base is sampled with as it is, so that no axis of a mesh may cut it."""
    dtype = jnp.dtype(compute.dtype)

    def cast(params: Any) -> dict[str, Array]:
        return {name: x if FACTORS[name].exact else x.astype(dtype) for name, x in factors_of(params).items()}

    return Program("reshard", cast, out=None if compute.mesh is None else lambda params: places(factors_of(params)))


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


def fresh(config: AdapterConfig, decoder: DecoderConfig, base: Any, seed: int, mesh: Mesh | None) -> dict[str, Array]:
    """Factors that change nothing yet: random A, B = 0, and the norms of the base. They are the same on any mesh.

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
    leaves = jax.tree_util.tree_leaves_with_path(base, is_leaf=matrix.is_matrix)
    return [(path, x) for path, x in leaves if isinstance(x, Adapted)]
