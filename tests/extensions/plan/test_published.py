"""Small models with the ratios of published ones learn: heads that share keys, delta nets that share heads of keys."""

import dataclasses

import flat_batches
import jax
import numpy as np
import pytest
from plain_decoder import ragged_batch, random_decoder, with_tokens

from grpojax import losses
from grpojax.extensions.plan.plan_shapes import SHAPES
from grpojax.models import Compute
from grpojax.programs import optimizer, policy_update, state
from grpojax.programs.optimizer_config import OptimizerConfig
from grpojax.programs.update import make_update


def small(config):
    """A config of few numbers, in which everything that serves several of another still serves as many."""
    kv_heads = min(config.num_kv_heads, 2)
    heads = kv_heads * config.num_heads // config.num_kv_heads
    own_width = config.num_heads * config.head_dim != config.hidden_size
    sizes = dict(vocab_size=56, num_heads=heads, num_kv_heads=kv_heads, head_dim=4, intermediate_size=24)
    sizes |= dict(hidden_size=24 if own_width else 4 * heads, rotary_dim=config.rotary_dim and 2)
    sizes["num_layers"] = max(2, len(config.period)) + config.dense_layers
    if config.mlp is not None:
        sizes["mlp"] = dataclasses.replace(config.mlp, size=12)
    if (delta := config.mixer) is not None:
        few = dict(key_heads=4, value_heads=4 * delta.shared, key_size=8, value_size=8)
        sizes["mixer"] = dataclasses.replace(delta, **few)
    return dataclasses.replace(config, **sizes)


def models():
    """One published model for each small one."""
    first = {small(config): name for name, config in reversed(SHAPES.items())}
    return {name: config for config, name in reversed(first.items())}


@pytest.mark.in_ci("qwen3.5-9b")  # which ended the process once
@pytest.mark.slow
@pytest.mark.parametrize("name", models())
def test_a_model_with_the_ratios_of_a_published_one_learns(name):
    """From prompts of more than one chunk of a delta net."""
    config = models()[name]
    graph, params = random_decoder(config)
    batch = ragged_batch(np.random.default_rng(0), p=2, g=2, length=80, most=9, vocab=56)
    there = np.arange(9) < batch.lengths[..., None]
    weights = np.asarray(losses.loss_weights(there, "token_mean"))
    batch = with_tokens(batch, advantages=there * np.float32([[[1], [-1]], [[-1], [1]]]), weights=weights)
    tx = optimizer.make_optimizer(OptimizerConfig(name="sgd", b1=0.0), 10)
    loss = policy_update.policy_objective(graph, losses.Objective(), Compute())
    update = jax.jit(make_update(loss, tx), donate_argnums=0)
    learner, metrics = update(state.init_state(params, tx), {}, flat_batches.pack(batch)[0])
    assert int(learner.step) == 1 and metrics["skipped"] == 0 < metrics["grad_norm"]
