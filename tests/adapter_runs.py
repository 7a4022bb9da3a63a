"""Runs with adapters on the tiny model."""

import jax
import runs
from flax import nnx
from runs import numbers

from grpojax.models import hf
from grpojax.programs import policy_state
from grpojax.run import recipe as config
from grpojax.train import train

RANK = ("model.adapter.rank=4", "model.adapter.alpha=8", "optimizer.learning_rate=0.02")
SHORT = (*RANK, "train.steps=4", "train.checkpoint_every=2", "train.eval_every=2")


def trainer(recipe, directory, *overrides, eos_ids=None):
    return runs.opened(config.load(recipe, [*SHORT, f"run.dir={directory}", *overrides]), eos_ids=eos_ids)


def hf_params(folder):
    return nnx.split(hf.load(folder))[1]


def check_both(recipe, directory, *overrides, most=1e-4, merged=True):
    """What reads the policy's weights besides updates reads both; sampler and trainer differ by ``most``."""
    short = ["train.steps=2", "data.validation=null", "rewards.0.name=tiny_run:parity", "rollout.max_tokens=4"]
    run = trainer(recipe, directory, *short, *overrides, eos_ids=())
    assert train(run)
    lines = [line for line in numbers(directory) if "reward" in line]
    assert lines[-1]["grad_norm"] > 0 and all(line["skipped_updates"] == 0 for line in lines)
    assert lines[-1]["sampling/logp_difference_max"] < most
    sampled = jax.tree.leaves(run.policy.reshard(policy_state.weights(run.state.networks)))
    shared = [x for x in jax.tree.leaves(run.state.networks["base"]) if any(x is y for y in sampled)]
    assert bool(shared) == (not merged) and (not shared or len(sampled) - len(shared) == 14)
