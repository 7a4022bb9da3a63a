"""Which variants have a ratio, and which are the same while it is 1."""

import dataclasses
import functools
import types

import jax
import numpy as np
import pytest
from loss_examples import arrays, covariance_mask
from oracles import close
from variant_examples import built

from grpojax import losses as L
from grpojax import variants

ON_POLICY = {"rloo", "gpg", "opo", "remax", "gtpo", "w_reinforce"}
TWINS = {"gspo", "gspo_token", "gmpo", "sapo", "dual_clip", "luspo", "cispo", "ngrpo", "dapo", "scale_rl"}
TWINS |= {"magistral", "vespo", "kl_cov", "high_entropy_tokens", "lp_reg"}


def test_which_have_no_ratio():
    assert {name for name in variants.names() if not built(name).objective.has_ratio} == ON_POLICY


@pytest.mark.parametrize("name", sorted(ON_POLICY))
def test_a_ratio_can_be_asked_for(name):
    """PPO's clip then, whose gradient at ratio 1 is what the method has without."""
    published = built(name)
    levels = ["token"] if name == "gtpo" else ["token", "sequence"]
    assert variants.parameters(name)["ratio"] == "none"
    for level in levels:
        clipped = built(name, ratio=level, clip_high=0.3)
        assert clipped.objective == dataclasses.replace(published.objective, surrogate=L.clipped(high=0.3), ratio=level)
        assert clipped.objective.has_ratio
        close(gradient(clipped.objective), gradient(published.objective), atol=1e-6)
    with pytest.raises(ValueError, match=f"'{name}'.*clip_high=0.3 with ratio='none'"):
        built(name, clip_high=0.3)
    with pytest.raises(ValueError, match="ratio='trace'.*none, token"):
        built(name, ratio="trace")


@functools.cache
def batch():
    """Ragged samples with one advantage each, of a policy whose log-probs are known to be the behaviour's."""
    rng = np.random.default_rng(0)
    mask = np.arange(7) < rng.integers(1, 8, (3, 5))[..., None]
    logps = -np.abs(rng.normal(size=mask.shape)).astype(np.float32)
    advantages = np.broadcast_to(rng.normal(size=(3, 5, 1)), mask.shape).astype(np.float32)
    return mask, logps, advantages


def gradient(objective):
    """At ratio 1."""
    mask, logps, advantages = batch()
    part = types.SimpleNamespace(
        weights=L.loss_weights(mask, objective.aggregate, constant=objective.constant), advantages=advantages,
        old_logps=None, ref_logps=logps - 0.3, sampler_logps=logps - 0.1,
        displacement_weights=L.displacement_weights(advantages, mask),
    )  # fmt: skip
    if objective.needs_covariance_mask:
        part.covariance_mask = covariance_mask(jax.random.key(0), logps, part, objective)
    return np.asarray(jax.grad(lambda x: L.policy_loss(x, objective=objective, **arrays(part))[0])(logps))


def plain(objective):
    """The objective with PPO's clip on tokens in place of its own ratio, clip and masks."""
    off = {
        name: L.Objective.__dataclass_fields__[name].default
        for name in ("ratio_denominator", "covariance", "covariance_coef")
    }
    return dataclasses.replace(objective, surrogate=L.clipped(), ratio="token", trace_decay=None, **off)


@pytest.mark.parametrize("name", variants.names())
@pytest.mark.slow
def test_twins_have_one_gradient(name):
    """Those that are said to be another are, and those with a ratio of which nothing is said are not, or are PPO's."""
    variant = built(name)
    text, objective = variants.twin_at_one_update(variant), variant.objective
    assert (text is not None) == (name in TWINS)
    if text is not None:
        assert name in text and "\n" not in text
        close(gradient(objective), gradient(plain(objective)), atol=1e-6)
    elif objective.has_ratio and objective != plain(objective):
        some = (
            dataclasses.replace(objective, covariance_fraction=1.0, covariance_low=-9.0)
            if name == "clip_cov"
            else objective
        )
        assert np.abs(gradient(some) - gradient(plain(objective))).max() > 1e-4


def test_what_the_line_says():
    line = variants.twin_at_one_update
    assert "GRPO's loss" in line(variants.gspo()) and "DAPO's loss" in line(variants.cispo())
    assert "aggregated by 'prompt_mean'" in line(variants.scale_rl())
    assert line(variants.gspo(ratio_denominator="sampler")) is None and line(variants.gspo(covariance="clip")) is None
    assert line(variants.grpo(clip_high=0.28)) is not None
    assert line(variants.dppo(ratio_denominator="trainer")) is not None  # against the old policy nothing has moved yet


def test_dppo_has_two_forms():
    assert variants.dppo().objective.surrogate == L.dppo_tv(0.2, 0.2)
    assert variants.dppo(divergence="kl").objective.surrogate == L.dppo_kl(0.05, 0.05)
    got = variants.dppo(divergence="kl", clip_high=0.1, ratio_kl_coef=1e-3).objective.surrogate
    assert got == L.dppo_kl(0.05, 0.1, kl_coef=1e-3)
    assert variants.dppo().objective.needs_sampler_logps


@pytest.mark.slow
def test_golden_luspo():
    """GSPO's gradient at one token times the sample's length: 2 and 4 tokens; 1 / 2 and 1 / 4 of it in GSPO."""
    mask = np.arange(4) < np.array([[2, 4]])[..., None]
    part = types.SimpleNamespace(
        weights=L.loss_weights(mask, "sequence_sum"), advantages=np.ones(mask.shape, np.float32), old_logps=None
    )
    got = jax.grad(lambda x: L.policy_loss(x, objective=variants.luspo().objective, **arrays(part))[0])(
        np.zeros(mask.shape, np.float32)
    )
    close(got, np.where(mask, -0.5, 0))


def test_gdpo_says_how_rewards_are_combined():
    assert variants.gdpo().combine == "normalize"
    # Steps, greedy baselines and plans are defined on one sum.
    assert {built(name).combine for name in variants.names()} == {None, "sum", "normalize"}
    assert {name for name in variants.names() if built(name).combine == "sum"} == {"grpo_process", "remax", "xrpo"}


def test_adaptive_entropy_and_covariance_are_options_of_all():
    for name in variants.names():
        objective = built(name, entropy_target=0.2, covariance="none").objective
        assert objective.needs_entropy and objective.entropy_step == 0.005
    assert variants.get("dapo", covariance="clip", covariance_fraction=1e-3).objective.needs_covariance_mask
