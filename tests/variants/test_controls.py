"""The control of a variant: the same chain and objective with its one mechanism off."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from variant_examples import REQUIRED, built, example

from grpojax import losses as L
from grpojax import variants

# With the mechanism off these are GRPO on the variant's own options.
BY_OPTION = {
    "negative_advantage": {"c": 0.0},
    "rare_token": {"limit": 1.0},
    "nthr": {"eta": 1.0},
    "entropy_shaping": {"alpha": 0.0},
    "rl_zvp": {"alpha": 0.0},
    "lp_reg": {"coef": 0.0},
    "high_entropy_tokens": {"fraction": 1.0},
    "dual_clip": {"clip_dual": None},
    "llds": {"llds_coef": 0.0},
    "clip_cov": {"covariance": "none"},
    "kl_cov": {"covariance": "none"},
    "grpo_lambda_traces": {"trace_decay": 0.0},
    "pass_at_k": {"k": 1},
    "ngrpo": {"count": 0},
    "xrpo": {"novelty": 0.0},
}
# These have no option for it. Without a signal it does nothing: no bias, no likelihood.
BY_SIGNAL = {"token_critic", "gt_likelihood", "culling"}
# In these GRPO stands in for another step of the chain, or for another ratio with its clip.
BY_STEP = {
    "grpo_lambda_length": {},
    "dr_grpo": {"aggregate": "constant", "constant": 8.0, "kl_coef": 0.0},
    "lite_ppo": {"aggregate": "token_mean", "kl_coef": 0.0},
    "gspo": {"kl_coef": 0.0},
    "gspo_token": {"kl_coef": 0.0},
}
BY_GRPO = BY_SIGNAL | BY_STEP.keys()
# Fields of the objective that are the mechanism.
FIELDS = {"dual_clip": {"surrogate"}, "gspo": {"ratio", "surrogate"}, "gspo_token": {"ratio", "surrogate"}}


def bits(x):
    return np.asarray(x).view(np.uint32)


def test_which_variants_have_one():
    found = {name: variants.control(name, **REQUIRED.get(name, {})) for name in variants.names()}
    assert {name for name, control in found.items() if control} == BY_OPTION.keys() | BY_GRPO | {"w_reinforce"}
    assert found["w_reinforce"] == ("w_reinforce", {"positive": 1.0})  # REINFORCE, which is not GRPO
    assert {name: found[name] for name in BY_OPTION} == {name: (name, off) for name, off in BY_OPTION.items()}
    experiment = ("grpo", {"aggregate": "sequence_sum", "kl_coef": 0.0})
    assert {found[name] for name in ("grpo", "dapo", "rloo")} == {None}
    assert [found[name] for name in BY_SIGNAL] == [experiment] * 3
    assert {name: found[name] for name in BY_STEP} == {name: ("grpo", options) for name, options in BY_STEP.items()}


@pytest.mark.parametrize("name", [*BY_OPTION, *sorted(BY_GRPO)])
def test_it_has_the_objective_of_its_variant_but_for_the_mechanism(name):
    control, options = variants.control(name, **REQUIRED.get(name, {}))
    of_control, own = variants.get(control, **options).objective, built(name).objective
    fields = [f.name for f in dataclasses.fields(L.Objective)]
    differ = {f for f in fields if getattr(own, f) != getattr(of_control, f)}
    assert differ == FIELDS.get(name, {*options} & {*fields} if control == name else set())


@jax.jit
def advantages_of(x):
    """Of each control, and of what it must equal; of the trace, log-ratios."""

    def both(name, other, options, signals=x.signals):
        control, off = variants.control(name)
        pair = variants.get(control, **off), variants.get(other, **options)
        return [variant.advantage(x.rewards, signals) for variant in pair]

    out = {}
    for name in sorted(BY_OPTION.keys() - {"pass_at_k", "grpo_lambda_traces"}):
        known = variants.parameters(name)
        out[name] = both(name, "grpo", {"ddof": known["ddof"], "eps": known["eps"]})
    off = dataclasses.replace(
        x.signals, token_bias=0 * x.signals.token_bias, likelihood=jnp.full_like(x.signals.likelihood, jnp.nan)
    )
    for name in BY_SIGNAL:
        out[name] = both(name, name, {}, off)
    name, options = variants.control("grpo_lambda_traces")
    objective = variants.get(name, **options).objective
    arrays = x.logps, x.signals.behavior_logps, x.signals.mask
    trace = L.log_ratio(*arrays, objective.ratio, decay=objective.trace_decay)
    out["grpo_lambda_traces"] = [trace, L.log_ratio(*arrays, "token")]
    return out, both("pass_at_k", "grpo", {"ddof": 0, "eps": 0.0})


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow
def test_its_advantages_are_those_of_the_mechanism_off_bit_for_bit(seed):
    """Groups that are mixed, all right, all wrong; empty samples, and such without a reward."""
    found, _ = advantages_of(example(seed))
    for name, (got, want) in found.items():
        np.testing.assert_array_equal(bits(got), bits(want), err_msg=name)
        assert (np.asarray(got) != 0).any()


@pytest.mark.slow
def test_pass_at_1_is_grpo_by_the_papers_algebra():
    """To rounding: the closed form does not divide by a deviation."""
    x = example(0)
    right_or_wrong = dataclasses.replace(x, rewards=np.rint(x.rewards))
    np.testing.assert_allclose(*advantages_of(right_or_wrong)[1], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "given", "control"),
    [
        ("rare_token", {"relative_to": "batch", "eps": 1e-3}, ("rare_token", {"eps": 1e-3, "limit": 1.0})),
        ("nthr", {"select": "random", "eta": 0.0, "ddof": 1}, ("nthr", {"ddof": 1, "eta": 1.0})),
        ("clip_cov", {"covariance_fraction": 1e-3}, ("clip_cov", {"covariance": "none"})),
        ("negative_advantage", {"c": 0}, None),
        ("negative_advantage", {"c": 0.1, "kl_coef": 0.1}, ("negative_advantage", {"c": 0.0, "kl_coef": 0.1})),
        ("culling", {"kl_coef": 0.04}, ("grpo", {"aggregate": "sequence_sum"})),
        (
            "culling",
            {"aggregate": "constant", "constant": 9.0, "clip_high": 0.28, "eps": 1e-6},
            ("grpo", {"aggregate": "constant", "constant": 9.0, "clip_high": 0.28, "eps": 1e-6, "kl_coef": 0.0}),
        ),
        ("gt_likelihood", {"train_on": "spliced"}, ("grpo", {"aggregate": "sequence_sum", "kl_coef": 0.0})),
    ],
)
def test_it_goes_with_the_options(name, given, control):
    assert variants.control(name, **given) == control
    if control is not None:
        variants.get(control[0], **control[1])


def test_a_variant_of_ones_own_states_its_own(monkeypatch):
    monkeypatch.setattr(variants.registry, "_ALL", dict(variants.registry._ALL))

    @variants.published(control={"strength": 0.0})
    class mine(variants.GroupNormalised):
        strength: float = 1.0

    assert variants.control("mine", eps=0.1) == ("mine", {"strength": 0.0, "eps": 0.1})
    with pytest.raises(ValueError, match="variant 'mine' takes no 'strenght'; did you mean 'strength'"):
        variants.control("mine", strenght=1.0)
    with pytest.raises(ValueError, match="variant 'another': control=.*: it has no option 'strength'"):

        @variants.published(control={"strength": 0.0})
        class another(variants.GroupNormalised):
            pass

    with pytest.raises(ValueError, match="'nobody' is unknown"):
        variants.control("nobody")
