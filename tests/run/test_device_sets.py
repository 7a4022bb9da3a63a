"""Devices that sample beside those that learn (``mesh.rollout``)."""

import jax
import pytest
from runs import numbers, opened

from grpojax.host.errors import UserError
from grpojax.run import recipe as config
from grpojax.sharding import MeshConfig, disaggregate
from grpojax.train import train


def load(recipe, directory, *overrides):
    return config.load(recipe, [
        f"run.dir={directory}", "data.validation=null", "train.steps=3", "train.checkpoint_every=0",
        "train.eval_every=0", *overrides,
    ])  # fmt: skip


def lines_of(directory):
    return [line for line in numbers(directory) if "reward" in line]


@pytest.mark.slow
def test_with_ahead_0_they_give_the_numbers_of_one_set(recipe, tmp_path):
    """Two learn and two sample, or two do both: programs and shards are the same."""
    assert train(opened(load(recipe, tmp_path / "one"), devices=2))
    trainer = opened(load(recipe, tmp_path / "two", "mesh.rollout=2"), devices=4)
    sampled, plain = [], trainer.policy.fetch
    trainer.policy.fetch = lambda rollout, n, **given: (
        sampled.append(rollout.tokens.devices()) or plain(rollout, n, **given)
    )
    assert train(trainer)
    assert sampled == [set(jax.devices()[2:4])] * 3
    assert {d for x in jax.tree.leaves(trainer.state.networks["policy"]) for d in x.devices()} == set(jax.devices()[:2])
    assert lines_of(tmp_path / "one") == lines_of(tmp_path / "two")


def test_sets_that_cannot_be_are_refused():
    with pytest.raises(UserError, match="mesh.rollout=8 of 8 devices leaves none to learn on"):
        disaggregate(MeshConfig(rollout=8), jax.devices())
    with pytest.raises(UserError, match="rollout=3: must be 0, or a multiple of tensor=2"):
        MeshConfig(rollout=3, tensor=2)
    with pytest.raises(UserError, match="rollout=-1: must be 0"):
        MeshConfig(rollout=-1)


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match="mesh.rollout=2 with 2 processes"):
        disaggregate(MeshConfig(rollout=2), jax.devices())
    assert disaggregate(MeshConfig(), jax.devices())[1] == []
