"""Samples whose advantages are 0 are left out of the updates: what is learned stays the same, and costs less."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import opened
from variant_examples import built

from grpojax import losses, variants
from grpojax.host.errors import UserError
from grpojax.programs import packing
from grpojax.records import metrics
from grpojax.run import recipe as config
from grpojax.train import train

BASE = ("data.validation=null", "train.steps=3", "rollout.prompts=6", "rollout.group=2", "rollout.max_tokens=7",
        "rewards.0.name=tiny_run:parity", "variant.kl_coef=0", "train.seed=5")  # fmt: skip


def load(recipe, directory, *overrides):
    return config.load(recipe, [f"run.dir={directory}", *BASE, *overrides])


def trained(recipe, directory, *overrides, devices=1):
    trainer = opened(load(recipe, directory, *overrides), devices=devices)
    last = []
    assert train(trainer, lambda updates: last.insert(0, updates))
    lines = [x for x in metrics.read_metrics(directory) if "loss" in x]
    return jax.tree.map(np.asarray, trainer.state.networks["policy"].params), lines, last[0].flops


@pytest.mark.parametrize(
    ("options", "devices"),
    [
        (("variant={name: dr_grpo}", "train.truncated=mask"), 2),
        *(pytest.param(options, 1, marks=pytest.mark.exhaustive) for options in [
            (),
            ("variant={name: gspo, ratio_denominator: sampler, kl_coef: 0}", "train.minibatches=2",
             "train.microbatches=3"),
        ]),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.slow
def test_what_is_learned_is_the_same(recipe, tmp_path, monkeypatch, options, devices):
    gaps, pack = [], packing.pack
    monkeypatch.setattr(packing, "pack", lambda *given, **how: gaps.append(how["gaps"]) or pack(*given, **how))
    all_params, plain, whole = trained(recipe, tmp_path / "all", *options, devices=devices)
    skip = (*options, "train.skip_zero_advantage=true")
    some_params, thin, part = trained(recipe, tmp_path / "some", *skip, devices=devices)
    # Adam divides by a gradient's size, and so magnifies rounding where one is near 0. A step is 5e-3.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), all_params, some_params)
    for a, b in zip(plain, thin, strict=True):
        for name in ("reward", "grad_norm", "frac_reward_zero_std", "sampled_tokens"):
            np.testing.assert_allclose(a[name], b[name], rtol=1e-4, err_msg=name)
    assert all(0 < x["frac_reward_zero_std"] < 1 for x in plain)
    assert plain[-1]["flops"] - plain[-2]["flops"] == pytest.approx(sum(whole.values()))
    assert part["update"] < whole["update"] and part["rollout"] == whole["rollout"]
    assert gaps == sorted(gaps) and {*gaps} == {False, True}  # blocks are those of such groups in the second run


@pytest.mark.slow
def test_where_nothing_has_an_advantage_the_update_is_as_it_was(recipe, tmp_path):
    """All of it runs, with a gradient of 0."""
    options = "rewards.0.name=tiny_run:level", "data.train=" + constant(recipe, tmp_path), "train.steps=1"
    params, lines, work = trained(recipe, tmp_path / "run", *options, "train.skip_zero_advantage=true")
    assert lines[0]["grad_norm"] == 0 and lines[0]["empty_updates"] == 0 and work["update"] == 3 * work["rollout"]


def constant(recipe, folder) -> str:
    """Data by whose column all samples have the same reward."""
    text = (recipe.parent / "sums.jsonl").read_text()
    (folder / "level.jsonl").write_text(text.replace("}", ', "level": 1.0}'))
    return str(folder / "level.jsonl")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["variant.kl_coef=0.1"], "kl_coef=0.1"),
        (["variant.entropy_coef=0.1"], "entropy_coef=0.1"),
        (["variant.entropy_target=0.1"], "entropy_coef=0"),
        (["variant=clip_cov"], "covariance=clip"),
        (["variant={name: dppo, ratio_kl_coef: 0.1}"], r"ratio_kl_coef=0\.1"),
        (["variant={name: gtpo, kl_coef: 0}"], "entropy of all samples"),
        (["train.ppo_epochs=2"], "ratio_denominator=sampler"),
    ],
)
def test_what_does_not_go_with_it(recipe, tmp_path, options, said):
    assert load(recipe, tmp_path, *options).method.variant
    told = f"skip_zero_advantage=true does not go with .*{said}.*; or set train.skip_zero_advantage=false"
    with pytest.raises(UserError, match=told):
        assert load(recipe, tmp_path, *options, "train.skip_zero_advantage=true").method


def _objectives():
    for name in variants.names():
        objective = built(name, kl_coef=0.0).objective
        if not (objective.needs_entropy or objective.needs_displacement_weights or objective.needs_covariance_mask):
            yield pytest.param(objective, id=name)


@pytest.mark.parametrize("objective", _objectives())
@pytest.mark.slow
def test_a_sample_without_an_advantage_has_no_gradient(objective):
    """By every objective that it goes with."""
    rng = np.random.default_rng(0)
    shape = 2, 3, 5
    logps, old, sampler = (jnp.asarray(-rng.uniform(0.1, 2, shape), jnp.float32) for _ in range(3))
    advantages = jnp.asarray(rng.standard_normal(shape), jnp.float32).at[:, 1].set(0.0)
    batch = dict(weights=jnp.full(shape, 0.1), advantages=advantages, old_logps=old, sampler_logps=sampler)
    grads = np.asarray(jax.grad(lambda x: losses.policy_loss(x, objective=objective, **batch)[0])(logps))
    assert not grads[:, 1].any() and grads[:, 0].any()
