"""The load-balance loss in an update of a mixture of experts."""

import dataclasses
from typing import get_args

import flat_batches
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from one_update import CONFIG, learning_batch, update
from plain_decoder import random_decoder, with_tokens

from grpojax import losses, masked
from grpojax.extensions.mixtures.experts import Experts
from grpojax.models import Compute
from grpojax.programs import policy_update, state
from grpojax.programs.update import make_update


@pytest.mark.in_ci("shards of experts")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "microbatches", "least"),
    [
        pytest.param((1, 2, 2, 2), 2, None, id="shards of experts"),
        *((None, 4, None), ((2, 2, 2), 1, None), (None, 1, 14), ((1, 1, 1, 8), 1, None)),
    ],
)
def test_the_gradient_with_a_load_balance_loss_does_not_depend_on_the_split(sizes, microbatches, least):
    """Nor on where experts are. The weights add up to 9 over the whole batch, so that a part's sum is no whole."""
    batch, variant = learning_batch()
    batch = with_tokens(batch, weights=9 * batch.arrays["weights"])
    model = dataclasses.replace(CONFIG, family="qwen2_moe", mlp=Experts(count=8, chosen=2, size=12, shared=6))
    how = dict(model=model, balance_coef=0.1)
    want, metrics = update(batch, variant.objective, **how)
    how["compute"] = Compute(experts="grouped")
    got, other = update(batch, variant.objective, sizes=sizes, microbatches=microbatches, least=least, **how)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6, err_msg=jax.tree_util.keystr(path))
    for name in ("loss", "balance_loss", "router_entropy", "router_counts"):
        np.testing.assert_allclose(other[name], metrics[name], rtol=2e-5, atol=2e-6, err_msg=name)
    assert metrics["loss"] == pytest.approx(metrics["policy_loss"] + 0.1 * metrics["balance_loss"], abs=1e-6)
    assert metrics["router_counts"].sum() == 2 * batch.lengths.sum() * model.num_layers
    without, _ = update(batch, variant.objective, model=model, balance_coef=0.0)
    assert np.abs(without["layers"]["router"][...] - want["layers"]["router"][...]).max() > 1e-4


@pytest.mark.slow
def test_a_balanced_router_has_the_same_load_balance_loss_under_any_aggregation():
    """The number of experts that a token goes to."""
    batch, _ = learning_batch(p=2, g=2)
    mask = np.asarray(masked.from_lengths(batch.lengths, batch.tokens.shape[2]))
    model = dataclasses.replace(CONFIG, num_layers=1, mlp=Experts(count=4, chosen=2, size=4))
    graph, params = random_decoder(model)
    router = params["layers"]["router"]
    router.set_value(jnp.zeros_like(router[...]))
    loss = policy_update.policy_objective(graph, losses.Objective(), Compute(), mlp=model.mlp, balance_coef=0.1)
    learn = jax.jit(make_update(loss, optax.sgd(0.0)))
    for aggregate in get_args(losses.Aggregation):
        weights = losses.loss_weights(mask, aggregate, constant=100.0 if aggregate == "constant" else None)
        packed, _ = flat_batches.pack(with_tokens(batch, weights=np.asarray(weights)), microbatches=2)
        _, metrics = learn(state.init_state(params, optax.sgd(0.0)), {}, packed)
        assert float(metrics["balance_loss"]) == pytest.approx(2, rel=1e-5), aggregate
