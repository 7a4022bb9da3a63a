"""Everything about a weight comes from its line in the table, and a weight without one is an error."""

import dataclasses
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from plain_decoder import FAMILIES

from grpojax import models
from grpojax.host.errors import UserError
from grpojax.models import Decoder, decoder
from grpojax.models.weight_table import (
    DECODER,
    Weight,
    axes_of,
    check_mesh,
    initial,
    layers_with,
    multiplies,
    normal,
    present,
    shardings,
    sizes,
    zeros,
)  # fmt: skip
from grpojax.sharding import MeshConfig, make_mesh, named

JOINED = {**DECODER, "value_head": Weight(("embed",), zeros)}


def names(tree):
    return {path[-1].key if hasattr(path[-1], "key") else path[-2].key: leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_has_the_weights_of_the_table(family):
    config = FAMILIES[family]
    _, params = decoder.abstract(config)
    of_axis, table = sizes(config), present(DECODER, config)

    def shape(weight):
        layers = {"layers": len(layers_with(weight, config))}
        return tuple((of_axis | layers)[axis] for axis in weight.axes)

    assert {n: x.shape for n, x in names(params).items()} == {n: shape(w) for n, w in table.items()}
    assert {n for n, w in table.items() if w.stacked} == set(params["layers"])


def test_random_weights_are_those_of_older_runs():
    """The order of draws is the table's: another one gives other weights, and other golden numbers."""
    config = dataclasses.replace(FAMILIES["qwen2_untied"], num_layers=3)
    params = nnx.state(Decoder(config, rngs=nnx.Rngs(3)))
    digest = hashlib.sha256()
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        digest.update(jax.tree_util.keystr(path).encode() + np.asarray(x).tobytes() + str(x.shape).encode())
    assert digest.hexdigest()[:16] == "dad15e557356bc2a"


def test_first_values():
    config, rngs = dataclasses.replace(FAMILIES["llama"], num_layers=3), nnx.Rngs(0)
    for name, scale in {"embed": 24, "q": 24, "gate": 24, "o": 24 * 6, "down": 40 * 6}.items():
        values = initial(DECODER[name], config, rngs)
        np.testing.assert_allclose(np.std(values) * scale**0.5, 1, atol=0.1, err_msg=name)
    assert initial(DECODER["down"], config, rngs).shape == (40, 24)
    assert (initial(DECODER["norm"], config, rngs) == 1).all() and (
        initial(DECODER["up_bias"], config, rngs) == 0
    ).all()


def test_matrices_decay_and_nothing_else_does():
    _, params = decoder.abstract(FAMILIES["llama"])
    decayed = names(jax.tree_util.tree_map_with_path(multiplies, params))
    assert {n for n, yes in decayed.items() if yes} == {"embed", "q", "k", "v", "o", "gate", "up", "down"}


@pytest.mark.parametrize(("tree", "said"), [
    ({"layers": {"adapter": jnp.zeros((3, 2))}}, r"\['layers'\]\['adapter'\] \[3, 2\] is no weight that"),
    ({"layers": {"q": {"lora": jnp.zeros((3, 2, 2))}}}, "is no weight that the table knows"),
    ({"q": jnp.zeros((3, 2))}, "not the table's 'q' with axes .'layers', 'embed', 'heads'"),
    ((jnp.zeros(3),), "is no weight that the table knows"),
    ({"value_head": jnp.zeros(3)}, "is no weight that the table knows"),
])  # fmt: skip
def test_an_unknown_weight_is_an_error(tree, said):
    for use in (axes_of, multiplies):
        with pytest.raises(ValueError, match=said):
            jax.tree_util.tree_map_with_path(use, tree)
    with pytest.raises(ValueError, match=said):
        shardings(tree, make_mesh(MeshConfig()))


def test_an_unknown_weight_is_not_left_out_of_an_export(tmp_path):
    model = Decoder(FAMILIES["qwen2"], rngs=nnx.Rngs(0))
    model.extra = nnx.Param(jnp.zeros(3))
    with pytest.raises(ValueError, match="'extra'.* is no weight that the table knows"):
        models.save(tmp_path / "out", model)
    assert not (tmp_path / "out").exists()


def test_another_network_brings_its_table():
    config, mesh = FAMILIES["qwen2"], make_mesh(MeshConfig(data=2, fsdp=4))
    rngs = nnx.Rngs(0)
    table = {"value_head": Weight(("embed",), zeros), "hidden_layer": Weight(("embed", "mlp"), normal("embed"))}
    params = {name: initial(weight, config, rngs) for name, weight in table.items()}
    assert params["value_head"].shape == (24,) and params["hidden_layer"].shape == (24, 40)
    with jax.numpy_dtype_promotion("standard"):
        state = optax.adamw(1e-3).init(params)
    got = shardings({"params": params, "optimizer": state}, mesh, table=table)
    assert got["params"] == {"value_head": named(mesh, ("embed",)), "hidden_layer": named(mesh, ("embed", "mlp"))}
    assert got["optimizer"][0].mu == got["params"] and got["optimizer"][0].count == named(mesh, ())
    _, trunk = decoder.abstract(config)
    joined = shardings({"trunk": trunk, "value_head": params["value_head"]}, mesh, table=JOINED)
    assert joined["trunk"] == shardings(trunk, mesh) and joined["value_head"] == got["params"]["value_head"]
    assert not multiplies((jax.tree_util.DictKey("value_head"),), params["value_head"], JOINED)


def test_a_mesh_that_does_not_divide_a_decoder():
    check_mesh(FAMILIES["qwen2"], None)
    with pytest.raises(UserError, match="num_attention_heads 4 does not divide over 8 shards .mesh axes tensor"):
        check_mesh(FAMILIES["qwen2"], make_mesh(MeshConfig(tensor=8)))
    odd = dataclasses.replace(FAMILIES["qwen2"], num_kv_heads=1, head_dim=6, vocab_size=56)
    with pytest.raises(UserError, match="num_key_value_heads x head_dim 6 does not divide over 4 shards"):
        check_mesh(odd, make_mesh(MeshConfig(fsdp=2, tensor=4)))
    with pytest.raises(UserError, match="vocab_size 53 does not divide over 2 shards"):
        check_mesh(FAMILIES["qwen2"], make_mesh(MeshConfig(data=4, tensor=2)))


def test_an_axis_for_experts_is_refused_without_them():
    with pytest.raises(UserError, match="mesh.expert=2: qwen2 has no experts.*\nset mesh.expert to 1$"):
        check_mesh(FAMILIES["qwen2"], make_mesh(MeshConfig(expert=2)))
