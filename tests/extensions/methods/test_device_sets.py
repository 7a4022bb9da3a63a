"""Devices that sample beside those that learn, with rollouts ahead of their steps."""

import dataclasses
import time

import jax
import numpy as np
import pytest
import spies
from runs import numbers, opened

from grpojax.records.metrics import read_metrics
from grpojax.run import recipe as config
from grpojax.train import train


def load(recipe, directory, *overrides):
    return config.load(recipe, [
        f"run.dir={directory}", "data.validation=null", "train.steps=3", "train.checkpoint_every=0",
        "train.eval_every=0", *overrides,
    ])  # fmt: skip


def lines_of(directory):
    return [line for line in numbers(directory) if "reward" in line]


@pytest.mark.exhaustive("run/test_device_sets.py::test_with_ahead_0_they_give_the_numbers_of_one_set")
def test_one_device_of_each_kind_with_rollouts_ahead_gives_those_of_one(recipe, tmp_path):
    assert train(opened(load(recipe, tmp_path / "one", "rollout.ahead=1")))
    trainer = opened(load(recipe, tmp_path / "two", "rollout.ahead=1", "mesh.rollout=1"), devices=2)
    assert train(trainer)
    one, two = lines_of(tmp_path / "one"), lines_of(tmp_path / "two")
    assert [line["rollout/staleness"] for line in two] == [0.0, 1.0, 1.0]
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        np.testing.assert_array_equal(list(a.values()), list(b.values()))


def slow(x, seconds=0.4):
    """``x`` after a while in which its device does nothing else that waits for it."""

    def wait(now):
        time.sleep(seconds)
        return now

    return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def take_their_time(trainer, seconds):
    """Has every rollout and every update of a trainer take so long on its device."""
    delay, plain_sample = jax.jit(slow, static_argnums=1), trainer.policy.sample

    def sample(*given, **more):
        rollout = plain_sample(*given, **more)
        return dataclasses.replace(rollout, stopped=delay(rollout.stopped, seconds))

    def train_step(state, frozen, packed):
        later = delay(packed.arrays["advantages"], seconds)
        return plain_step(state, frozen, packed.with_arrays({"advantages": later}))

    trainer.policy.sample = sample
    plain_step = spies.update_by(trainer, train_step)


def median_step(directory):
    return float(np.median([line["time/step_s"] for line in read_metrics(directory)[2:]]))


@pytest.mark.exhaustive("run/test_device_sets.py::test_with_ahead_0_they_give_the_numbers_of_one_set")
def test_rollout_and_updates_take_their_time_side_by_side(recipe, tmp_path):
    """Both take 0.4 s of sleep, so that it shows what waits for what, and not what two cores can do at once."""
    took = {}
    for name, options, devices in (("one", (), 1), ("two", ("rollout.ahead=1", "mesh.rollout=1"), 2)):
        trainer = opened(load(recipe, tmp_path / name, "train.steps=6", *options), devices=devices)
        take_their_time(trainer, 0.4)
        assert train(trainer)
        took[name] = median_step(tmp_path / name)
    assert took["one"] / took["two"] > 1.3
