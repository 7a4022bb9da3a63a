"""Flat arrays [B, T] and grouped ones [P, G, T] are the same samples."""

import jax
import loss_oracles
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_examples import HOW, LENGTHS, G, P, T, arrays, example
from oracles import close
from ragged import prefix

from grpojax import advantages as A
from grpojax import losses as L

SAMPLES = [how for how in HOW if how != "prompt_mean"]
OBJECTIVES = {
    "ppo": L.Objective(kl_coef=0.1),
    "gspo": L.Objective(ratio="sequence", off_policy_limit=0.2, importance="mask"),
    "traces": L.Objective(ratio="trace", trace_decay=0.9, llds_coef=0.5),
    "gmpo": L.Objective(surrogate=L.geometric(), ratio_denominator="sampler"),
    "kl_cov": L.Objective(surrogate=L.unclipped(), covariance="kl", covariance_fraction=0.2),
    "your own": L.Objective(surrogate=lambda log_ratios, advantages: -log_ratios * advantages),
}


def flat(x):
    return None if x is None else np.reshape(x, (P * G, *np.shape(x)[2:]))


@pytest.mark.parametrize("count_empty", [True, False])
@pytest.mark.parametrize("how", SAMPLES)
@settings(max_examples=10)
@given(lengths=LENGTHS)
def test_weights(how, count_empty, lengths):
    """The grouped oracle's; multiplied by T as well, a flat batch weighed T times too little."""
    mask = prefix(lengths)
    options = HOW[how] | {"count_empty": count_empty}
    want = loss_oracles.loss_weights(mask, how, **options)
    close(L.loss_weights(flat(mask), how, **options), flat(want))
    for axis in (0, 1):  # all axes but the last are samples, however many
        close(L.loss_weights(np.expand_dims(mask, axis), how, **options), np.expand_dims(want, axis))


@pytest.mark.parametrize(
    ("how", "total"), [("token_mean", 1), ("sequence_mean", 1), ("sequence_sum", 17 / 6), ("constant", 17 / 6 / 8)]
)
def test_golden_sums(how, total):
    """Samples of 1, 2, 5, 4, 2 and 3 tokens in one flat batch; T times less of the last three before."""
    mask = np.arange(5) < np.array([1, 2, 5, 4, 2, 3])[:, None]
    close(L.loss_weights(mask, how, **HOW[how]).sum(), total, atol=1e-6)


def test_the_mean_over_prompts_needs_prompts():
    with pytest.raises(ValueError, match=r"prompt_mean.*mask has shape \(6, 5\), wanted \[P, G, T\]"):
        L.loss_weights(np.ones((6, 5), bool), "prompt_mean")
    with pytest.raises(ValueError, match=r"loss_weights: mask has shape \(\), wanted \[\.\.\., T\]"):
        L.loss_weights(np.bool_(True), "token_mean")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_loss(name):
    objective = OBJECTIVES[name]
    logps, batch, _ = example(7)
    rng = np.random.default_rng(1)
    mask = np.asarray(batch.weights) > 0
    given = arrays(batch) | {
        "sampler_logps": logps + rng.normal(scale=0.3, size=logps.shape).astype(np.float32),
        "displacement_weights": L.displacement_weights(batch.advantages, mask),
    }
    if objective.needs_covariance_mask:
        read = {k: given[k] for k in ("advantages", "weights", "old_logps")}
        picked = L.covariance_mask(None, logps, objective=objective, **read)
        flat_read = {k: flat(x) for k, x in read.items()}
        np.testing.assert_array_equal(
            L.covariance_mask(None, flat(logps), objective=objective, **flat_read), flat(picked)
        )
        given["covariance_mask"] = picked
    run = jax.jit(jax.value_and_grad(lambda x, given: L.policy_loss(x, objective=objective, **given), has_aux=True))
    (loss, metrics), gradient = run(logps, given)
    (other, others), flat_gradient = run(flat(logps), {k: flat(x) for k, x in given.items()})
    close(other, loss, atol=1e-6)
    close(flat_gradient, flat(gradient), atol=1e-7)
    assert np.abs(np.asarray(gradient)).max() > 1e-3
    jax.tree.map(lambda a, b: close(a, b, atol=1e-4), others, metrics)


@settings(max_examples=8)
@given(lengths=LENGTHS, seed=st.integers(0, 99), lam=st.sampled_from([0.9, 1.0]))
@pytest.mark.slow
def test_transforms_along_tokens(lengths, seed, lam):
    mask, rng = prefix(lengths), np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, *mask.shape)).astype(np.float32)
    assert mask.shape[-1] == T
    for transform in (A.gae(gamma=0.95, lam=lam), A.token_returns(gamma=lam)):
        want = transform(rewards, A.Signals(mask=mask, values=values))
        got = transform(flat(rewards), A.Signals(mask=flat(mask), values=flat(values)))
        np.testing.assert_array_equal(got, flat(want))


@pytest.mark.parametrize(
    ("objective", "names"),
    [
        (L.Objective(kl_coef=0.2), r"policy_loss: kl_coef=0\.2 needs ref_logps, which is missing"),
        (L.Objective(kl_coef=0.2, kl_kind="k1", kl_in="reward"), r"kl_coef=0\.2 needs ref_logps"),
        (L.Objective(ratio_denominator="sampler"), "ratio_denominator='sampler' needs sampler_logps"),
        (L.Objective(importance="mask"), "importance='mask' needs sampler_logps"),
        (L.Objective(off_policy_limit=0.5), r"off_policy_limit=0\.5 needs sampler_logps"),
        (L.Objective(llds_coef=0.3), r"llds_coef=0\.3 needs displacement_weights"),
        (L.Objective(covariance="clip"), "covariance='clip' needs covariance_mask"),
        (L.Objective(entropy_coef=0.1), r"entropy_coef=0\.1.* needs entropy"),
        ("grpo", r"objective is a str, wanted a losses\.Objective"),
    ],
)
def test_what_is_missing_is_named_with_the_term_that_needs_it(objective, names):
    x = np.ones((2, 3), np.float32)
    with pytest.raises(ValueError, match=names):
        L.policy_loss(-x, objective=objective, advantages=x, weights=x, old_logps=-x)
