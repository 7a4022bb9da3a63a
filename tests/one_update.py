"""One update of a small decoder, however its batch is split."""

import dataclasses

import flat_batches
import jax
import numpy as np
from plain_decoder import BASE, ragged_batch, random_decoder, with_tokens

from grpojax import advantages, losses, masked, sharding, variants
from grpojax.device import ROWS, Real
from grpojax.models import Compute
from grpojax.models.weight_table import shardings
from grpojax.programs import blocks, policy_update, state
from grpojax.programs import optimizer as opt
from grpojax.programs.update import make_update, update_program

CONFIG = dataclasses.replace(BASE, vocab_size=56, hidden_size=16, intermediate_size=24, num_layers=2)
SGD = opt.OptimizerConfig(name="sgd", b1=0.0, learning_rate=1.0, grad_clip=0.0)


def learning_batch(p=8, g=4, variant=None, off_policy=False, seed=0):
    """A ragged batch with advantages and weights; `off_policy` puts the ratio off 1."""
    rng = np.random.default_rng(seed)
    batch = ragged_batch(rng, p=p, g=g, vocab=56)
    variant = variant or variants.get("grpo", kl_coef=0.0)
    mask = np.asarray(masked.from_lengths(batch.lengths, batch.tokens.shape[2]))
    rewards = rng.random((p, g)).astype(np.float32)
    adv = np.asarray(variant.advantage(rewards, advantages.Signals(mask=mask)))
    objective = variant.objective
    weights = np.asarray(losses.loss_weights(mask, objective.aggregate, constant=objective.constant))

    def noise():
        return -4.0 + 0.3 * rng.standard_normal(mask.shape).astype(np.float32)

    return with_tokens(
        batch, advantages=adv, weights=weights, old_logps=noise() if off_policy else None,
        ref_logps=noise() if objective.needs_reference else None, sampler_logps=noise(),
    ), variant  # fmt: skip


def update(
    batch, objective, *, sizes=None, microbatches=1, least=None, compute=None, optimizer=SGD, model=CONFIG, **more
):
    """Weights after one update, and its metrics; with ``least`` of blocks, some prompts of a shard at a time."""
    data, fsdp, tensor, expert = (*(sizes or ()), 1, 1, 1, 1)[:4]
    config = sharding.MeshConfig(data=data, fsdp=fsdp, tensor=tensor, expert=expert)
    mesh = None if sizes is None else sharding.make_mesh(config)
    compute = dataclasses.replace(compute or Compute(), mesh=mesh)
    graph, params = random_decoder(model)
    if mesh is not None:
        params = jax.device_put(params, shardings(params, mesh))
    tx = opt.make_optimizer(optimizer, 10)
    learner = state.init_state(params, tx, Real(mesh))
    how = dict(shards=sharding.shards(mesh), microbatches=microbatches, gather=compute.needs_gather)
    packed, _ = (
        flat_batches.pack(batch, **how)
        if least is None
        else flat_batches.pack_blocks(batch, least=least, gaps=True, **how)
    )
    assert least is None or blocks.after_reading(packed) > 1 < packed.prompts.shape[2]
    loss, read = (
        policy_update.policy_objective(graph, objective, compute, entropy=True, mlp=model.mlp, **more),
        policy_update.reader(graph, compute),
    )
    train_step = update_program("update", make_update(loss, tx, read=read), compute)
    learner, metrics = train_step(learner, {}, Real(mesh).put(packed, ROWS))
    assert int(learner.step) == (float(metrics["grad_norm"]) > 0)
    values = {k: np.asarray(getattr(v, "value", v)) for k, v in metrics.items()}
    return jax.tree.map(np.asarray, learner.params), {k: x if x.ndim else float(x) for k, x in values.items()}
