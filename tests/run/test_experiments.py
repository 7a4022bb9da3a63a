"""The arms of the experiments in ``configs/experiments``: placebos for what is learned from groups that fail."""

import types
from pathlib import Path

import jax
import numpy as np
import pytest
from runs import Trainer, numbers

from grpojax import advantages as A
from grpojax import variants
from grpojax.run import recipe as recipes

ROOT = Path(__file__).parent.parent.parent
NAN = np.nan
CHANCE = np.random.default_rng(0).random((5, 6), np.float32)


@pytest.fixture(autouse=True)
def from_the_checkout(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


def advantages(name, rewards, chance=CHANCE, **signals):
    rewards = np.asarray(rewards, np.float32)
    signals = A.Signals(mask=np.ones((*rewards.shape, 1), bool), extra={"chance": chance}, **signals)
    return np.asarray(jax.jit(variants.get(name).advantage)(rewards, signals))[..., 0]


def arm(name):
    return f"configs.experiments.arms:{name}"


def test_the_placebo_has_random_signs_of_mean_0_where_a_group_fails():
    rewards = np.zeros((5, 6), np.float32)
    rewards[1, 2], rewards[2] = 1, 1  # mixed, all right
    rewards[3, 1], rewards[4, :2] = NAN, NAN  # an odd and an even number of samples that count
    got, control = (advantages(name, rewards) for name in (arm("placebo"), "grpo"))
    np.testing.assert_array_equal(got[1:3], control[1:3])
    assert sorted(got[0]) == [-1, -1, -1, 1, 1, 1]
    assert sorted(got[3]) == [-1, -1, 0, 0, 1, 1] and got[3, 1] == 0
    assert sorted(got[4]) == [-1, -1, 0, 0, 1, 1] and (got[4, :2] == 0).all()
    assert (advantages(arm("placebo"), rewards, 1 - CHANCE)[0] == -got[0]).all()


def test_permuted_likelihoods_are_those_of_the_group_at_other_samples():
    rewards, likelihood = np.zeros((5, 6), np.float32), np.random.default_rng(1).random((5, 6), np.float32)
    likelihood[1, [0, 4]] = NAN
    given = {"outcome": rewards, "likelihood": likelihood}
    got = advantages(arm("permuted_likelihood"), rewards, **given)
    mixed = np.full_like(likelihood, NAN)
    for values, group, chance in zip(mixed, likelihood, CHANCE, strict=True):
        known = [g for g in range(6) if np.isfinite(group[g])]
        values[known] = group[sorted(known, key=lambda g: chance[g])]
    np.testing.assert_array_equal(got, advantages("gt_likelihood", rewards, **given | {"likelihood": mixed}))
    assert (got[1, [0, 4]] == 0).all() and (mixed != likelihood)[[0, 2, 3, 4]].any(1).all()


def test_chance_follows_from_the_samples_alone():
    from configs.experiments.arms import Chance

    part = Chance(types.SimpleNamespace(method=types.SimpleNamespace(variant=None)), None)

    def drawn(tokens):
        batch = types.SimpleNamespace(rollout=types.SimpleNamespace(tokens=tokens))
        return part.after({}, batch, np.zeros((2, 3)))[0]["chance"]

    tokens = np.arange(12, dtype=np.int32).reshape(2, 3, 2)
    np.testing.assert_array_equal(drawn(tokens), drawn(tokens[:, :, ::-1][:, :, ::-1]))
    assert (drawn(tokens) != drawn(tokens + 1)).all()


@pytest.mark.parametrize(
    ("name", "control"),
    [
        ("placebo", ("negative_advantage", {"c": 0.0})),
        ("permuted_likelihood", ("gt_likelihood", {})),
    ],
)
def test_an_arm_is_compared_with_what_it_stands_in_for(name, control):
    assert variants.control(arm(name)) == control


@pytest.mark.parametrize("file", sorted((ROOT / "configs/experiments").glob("[!s]*.yaml")), ids=lambda file: file.stem)
def test_recipes_have_no_clip_but_for_the_first(file):
    assert recipes.load(file).optimizer.grad_clip == (1.0 if file.stem == "base" else 0.0)


@pytest.mark.slow
def test_an_arm_trains(recipe, tmp_path):
    overrides = [
        f"run.dir={tmp_path / 'run'}", f"variant.name={arm('permuted_likelihood')}", "data.validation=null",
        "rewards.0.name=tiny_run:parity", "rollout.max_tokens=4", "train.steps=1",
    ]  # fmt: skip
    assert Trainer(recipes.load(recipe, overrides), eos_ids=()).run()
    assert numbers(tmp_path / "run")[0]["grad_norm"] > 0
