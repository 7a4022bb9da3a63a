"""What an objective refuses, and what it asks for."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_examples import MASK4, arrays, example
from oracles import close

from grpojax import losses as L


class WithoutHash(L.clipped):
    """Compared by value, like a dataclass that is not frozen."""

    __hash__ = None


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"ratio": "word"}, "ratio='word'.*sequence_token"),
        ({"ratio": "trace"}, "trace_decay=None"),
        ({"trace_decay": 0.9}, "ratio='token' with trace_decay=0.9"),
        ({"ratio": "trace", "trace_decay": 1.5}, "1.5"),
        ({"surrogate": L.geometric(), "aggregate": "token_mean"}, "geometric.*'token_mean'"),
        ({"surrogate": L.geometric(), "ratio": "sequence"}, "geometric.*'sequence'"),
        ({"importance": "clip"}, "importance='clip'"),
        ({"importance_high": 2.0}, "importance_level, _low and _high go with importance='truncate'"),
        ({"importance_level": "sequence"}, "importance_level"),
        ({"importance": "mask", "importance_low": 3.0, "importance_high": 2.0}, "no range"),
        ({"importance": "mask", "importance_low": 3.0}, r"importance_low=3.0, importance_high=2.0: no range"),
        ({"importance": "mask", "importance_high": 0.3}, r"importance_low=0.5, importance_high=0.3: no range"),
        ({"importance": "truncate", "importance_high": -1.0}, "importance_high=-1.0: must be over 0"),
        ({"surrogate": L.reinforce(), "ratio": "sequence"}, "reinforce.*reads no ratio"),
        ({"importance": "truncate", "importance_low": 0.5}, "importance_low=0.5.*'mask'"),
        ({"llds_coef": -1.0}, "llds_coef=-1.0"),
        ({"llds_gate": "word"}, "llds_gate='word'"),
        ({"kl_in": "token_reward", "kl_coef": 0.1}, "k3.*token_reward"),
        ({"kl_in": "prompt"}, "kl_in='prompt'"),
        ({"surrogate": "clipped"}, r"surrogate='clipped' is no function: give losses\.clipped\(\)"),
        ({"surrogate": "cispo"}, r"surrogate='cispo' is no function: give losses\.cispo\(\)"),
        ({"surrogate": "grpo"}, r"surrogate='grpo' is no function: give losses\.clipped\(\)"),
        ({"surrogate": None}, "surrogate=None is no function"),
        ({"surrogate": WithoutHash()}, "surrogate WithoutHash has no hash: .*frozen=True"),
        ({"surrogate": L.clipped}, r"surrogate=clipped is a class: call it, clipped\(\)"),
        ({"kl_coef": "0.1"}, "kl_coef='0.1': must be a number"),
        ({"kl_coef": True}, "kl_coef=True: must be a number"),
        ({"kl_coef": None}, "kl_coef=None: must be a number"),
        ({"entropy_coef": float("nan")}, "entropy_coef=nan: must be a number"),
        ({"trace_decay": "0.9", "ratio": "trace"}, "trace_decay='0.9': must be a number"),
        ({"importance": "mask", "importance_high": [2.0]}, r"importance_high=\[2\.0\]: must be a number"),
        ({"count_empty": "no"}, "count_empty='no': must be True or False"),
        ({"count_empty": 1}, "count_empty=1: must be True or False"),
        ({"ratio": None}, "ratio=None: must be one of token"),
        ({"aggregate": ["token_mean"]}, "aggregate=.*must be one of token_mean"),
        ({"aggregate": "constant"}, "aggregate='constant' needs constant=, the tokens to divide by"),
        ({"aggregate": "constant", "constant": 0.0}, "constant=0.0"),
        ({"constant": 8.0}, "'sequence_mean' with constant=8.0"),
    ],
)
def test_objective_refuses(options, names):
    with pytest.raises(ValueError, match=names):
        L.Objective(**options)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: L.cispo(weight_max=0.28), "weight_max=0.28.*ratio"),
        (lambda: L.soft_adaptive(tau_positive=0.0), "tau_positive=0.0"),
        (lambda: L.log_ratio(MASK4, None, MASK4, "token", decay=0.5), "'token'.*0.5"),
    ],
)
def test_surrogates_refuse(make, names):
    with pytest.raises(ValueError, match=names):
        make()


def test_objectives_are_values():
    assert L.Objective(surrogate=L.cispo()) == L.Objective(surrogate=L.cispo(weight_max=5.0))
    assert len({L.Objective(), L.Objective(), L.Objective(ratio="sequence")}) == 2


@pytest.mark.slow
def test_only_the_policy_is_differentiated():
    """Behaviour, reference and advantages are constants, even where they are made of the same array."""
    mask = np.ones((1, 2, 3), bool)
    logps = -np.abs(np.random.default_rng(0).normal(size=mask.shape)).astype(np.float32)
    advantages = np.array([[[1.0], [-1.0]]], np.float32) * mask

    def loss(logps, behavior, ref, advantages):
        batch = types.SimpleNamespace(
            weights=L.loss_weights(mask, "sequence_sum"),
            advantages=advantages,
            old_logps=behavior,
            ref_logps=ref,
        )
        return L.policy_loss(logps, objective=L.Objective(aggregate="sequence_sum", kl_coef=0.1), **arrays(batch))[0]

    own, *others = jax.grad(loss, (0, 1, 2, 3))(logps, logps, logps - 0.3, advantages)
    assert own.any() and not any(np.asarray(x).any() for x in others)
    close(jax.grad(lambda x: loss(x, x, x - 0.3, advantages))(logps), own)
    pair = jax.grad(L.dpo_loss, (0, 1, 2, 3))(*map(jnp.float32, (-10, -15, -12, -14)))
    assert pair[0] < 0 < pair[1] and not pair[2] and not pair[3]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"ratio_denominator": "reference"}, "ratio_denominator='reference'.*sampler"),
        (
            {"ratio_denominator": "sampler", "importance": "truncate"},
            "importance='truncate' with ratio_denominator='sampler'",
        ),
        (
            {"ratio_denominator": "sampler", "surrogate": L.reinforce()},
            "ratio_denominator='sampler' with reinforce.*no ratio",
        ),
        ({"ratio_denominator": "sampler", "surrogate": L.unclipped(), "ratio": "own"}, "there is no ratio"),
        ({"surrogate": L.vespo()}, "vespo with ratio='token'.*'joint'"),
        ({"surrogate": L.dppo_tv(), "ratio": "sequence"}, "dppo_tv with ratio='sequence'.*'token'"),
        ({"covariance": "both"}, "covariance='both'.*clip"),
        ({"covariance": "kl"}, "covariance='kl' with clipped.*kl_cov"),
        ({"covariance_fraction": 0.1}, "covariance_fraction=0.1 with covariance='none'"),
        ({"covariance": "clip", "covariance_coef": 0.1}, "covariance_coef=0.1 with covariance='clip'"),
        ({"covariance": "clip", "covariance_low": 6.0}, "covariance_low=6.0.*range"),
        ({"covariance": "clip", "covariance_fraction": 0.0}, "covariance_fraction=0.0"),
        ({"entropy_target": -0.1}, "entropy_target=-0.1"),
        ({"entropy_target": 0.1, "entropy_coef": -0.1}, "entropy_coef=-0.1"),
        ({"entropy_step": 0.0}, "entropy_step=0.0"),
    ],
)
def test_newer_options_refuse(options, names):
    with pytest.raises(ValueError, match=names):
        L.Objective(**options)


def test_which_have_a_ratio():
    without = [L.Objective(surrogate=L.reinforce()), L.Objective(surrogate=L.unclipped(), ratio="own")]
    assert not any(objective.has_ratio for objective in without)
    for surrogate in (L.clipped(), L.unclipped(), L.cispo(), L.soft_adaptive(), L.geometric(), L.dppo_tv(), max):
        assert L.Objective(surrogate=surrogate).has_ratio
    assert L.Objective(surrogate=L.vespo(), ratio="joint").has_ratio


def test_anchored_at_the_sampler():
    """Its log-probs stand in for the old policy's, in the ratio, the unbiased KL and LLDS."""
    logps, batch, _ = example(3)
    share = L.displacement_weights(np.where(batch.weights > 0, batch.advantages, -1), batch.weights > 0)
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)} | {"displacement_weights": share}
    swapped = types.SimpleNamespace(**fields | {"old_logps": None, "sampler_logps": batch.old_logps})
    terms = {"kl_coef": 0.3, "kl_kind": "unbiased", "llds_coef": 0.2}
    want = L.policy_loss(logps, objective=L.Objective(**terms), **arrays(types.SimpleNamespace(**fields)))
    objective = L.Objective(ratio_denominator="sampler", **terms)
    jax.tree.map(np.testing.assert_array_equal, L.policy_loss(logps, objective=objective, **arrays(swapped)), want)
    assert objective.needs_sampler_logps
    with pytest.raises(ValueError, match="ratio_denominator='sampler' needs sampler_logps"):
        L.policy_loss(logps, objective=objective, **arrays(types.SimpleNamespace(**fields)))
