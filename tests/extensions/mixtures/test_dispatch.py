"""Tokens reach their experts on other shards and come back, however uneven the routing is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax import sharding
from grpojax.extensions.mixtures import dispatch, experts
from grpojax.extensions.mixtures.experts import Experts

SIZES = Experts(count=8, chosen=3, size=7)
HIDDEN = 5


def routings(n, seed=0):
    """Choices ``[n, 3]`` of 8 experts: random ones, all tokens to one shard of four, one expert without a token."""
    rng = np.random.default_rng(seed)
    random = rng.permuted(np.tile(np.arange(8), (n, 1)), axis=1)[:, :3]
    one = np.stack([np.full(n, 6), np.full(n, 7), np.full(n, 6)], 1)
    return {"random": random, "one shard": one, "an idle expert": np.where(random == 4, 5, random)}


APPLY = {"everywhere": experts.every, "exchanged": experts.grouped}
ROUTINGS = ("random", "one shard", "an idle expert")
IN_CI = [
    ("everywhere", "random", 11),
    ("exchanged", "an idle expert", 11),
    ("exchanged", "random", 97),
    ("exchanged", "one shard", 97),
]


@pytest.mark.parametrize(
    ("apply", "routing", "tokens"),
    [
        pytest.param(APPLY[name], routing, n, marks=[] if (name, routing, n) in IN_CI else pytest.mark.exhaustive)
        for name in APPLY
        for routing in ROUTINGS
        for n in (11, 97)
    ],
)
def test_values_and_gradients_equal_those_without_shards(apply, routing, tokens):
    """Over 4 shards of experts and 2 of ``tensor``. 97 tokens that all go to one shard take rounds of their own."""
    rng = np.random.default_rng(1)
    mesh = sharding.make_mesh(sharding.MeshConfig(fsdp=1, expert=4, tensor=2))
    chosen = jnp.asarray(np.concatenate([routings(tokens, i)[routing] for i in range(4)]), jnp.int32)
    h, up = (jnp.asarray(rng.standard_normal((4 * tokens, HIDDEN)), jnp.float32) for _ in range(2))
    weights = jnp.asarray(rng.random((4 * tokens, 3)), jnp.float32)
    shapes = [(8, HIDDEN, 6), (8, HIDDEN, 6), (8, 6, HIDDEN)]
    matrices = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]

    def run(apply, h, weights, *matrices):
        return apply(h, experts.Routing(chosen, weights, weights), *matrices)

    def on_shards(h, weights, *matrices):
        def shard(h, chosen, weights, *matrices):
            h, weights = (jax.lax.pcast(x, ("data", "fsdp", "tensor"), to="varying") for x in (h, weights))
            matrices = [jax.lax.pcast(x, ("data", "fsdp"), to="varying") for x in matrices]
            apply_here = experts.sharded(apply, mesh)
            y = apply_here(h, experts.Routing(chosen, weights, weights), *matrices)
            return jax.lax.psum(y, ("data", "fsdp", "tensor"))

        P = jax.P
        cut = P("expert", None, "tensor"), P("expert", None, "tensor"), P("expert", "tensor")
        specs = P("expert"), P("expert"), P("expert"), *cut
        return jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=P("expert"))(h, chosen, weights, *matrices)

    def out(run):
        grad = jax.value_and_grad(lambda *given: (up * run(*given)).sum(), argnums=range(5))
        return jax.jit(grad)(h, weights, *matrices)

    want = out(functools.partial(run, experts.every))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4), out(on_shards), want)


def test_a_round_moves_an_eighth_of_an_even_load():
    assert dispatch.piece(8 * 8 * 4 * 16, 4) == 8 * 16
    assert dispatch.piece(1, 64) % 16 == 0
