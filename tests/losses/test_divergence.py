"""The KL to the reference, in the loss and in the reward."""

import dataclasses

import jax
import jax.numpy as jnp
import loss_oracles
import numpy as np
import pytest
from loss_examples import (
    DELTA,
    LOGITS,
    OBJECTIVES,
    OLD,
    OTHER,
    Batch,
    arrays,
    compiled,
    example,
)
from oracles import close

from grpojax import losses as L


@pytest.mark.parametrize(
    ("kind", "loss", "gradient"),
    [
        ("k2", 0.0240625, [0.075, -0.075, 0.025, -0.0125]),
        ("k3", 0.02419639, [0.06479544, -0.0874647, 0.02379065, -0.01281777]),
    ],
)
def test_golden_kl_tokens(kind, loss, gradient):
    value, got = jax.value_and_grad(lambda logps: L.kl(logps, OLD, kind).mean())(OLD + DELTA)
    close(value, loss)
    close(got, gradient)


REF = jax.nn.log_softmax(jnp.array([0.0, 0.5, -0.3]))
REVERSE = [-0.00205667, -0.20159464, 0.20365132]  # the gradient of KL(π || π_ref), which is the one wanted
FORWARD = [0.04255921, -0.23632576, 0.19376655]  # that of KL(π_ref || π)


@pytest.mark.parametrize(
    ("kind", "values", "mean"),
    [
        ("k1", [0.13475475, -0.66524525, 0.63475475], 0.14084707),
        ("k2", [0.00907942, 0.22127562, 0.2014568], 0.14146963),
        ("k3", [0.00868497, 0.27972221, 0.16482022], 0.14084707),
    ],
)
def test_golden_kl_values(kind, values, mean):
    logps = jax.nn.log_softmax(LOGITS)
    close(L.kl(logps, REF, kind), values)
    close((jnp.exp(logps) * L.kl(logps, REF, kind)).sum(), mean)
    close(values, [loss_oracles.kl(float(a), float(b), kind) for a, b in zip(logps, REF, strict=True)])


def expected_gradient(token_loss, drawn_from=None):
    """The mean gradient of ``token_loss(logps [3])`` over the three tokens there are, by enumeration."""

    def loss(logits):
        logps = jax.nn.log_softmax(logits)
        drawn = logps if drawn_from is None else drawn_from
        return (jax.lax.stop_gradient(jnp.exp(drawn)) * token_loss(logps)).sum()

    return jax.jit(jax.grad(loss))(LOGITS)


def expected_policy_gradient(objective, drawn_from=None, reward=None):
    """The same of `policy_loss`, in which a token's weight is its probability."""
    logps = jax.lax.stop_gradient(jax.nn.log_softmax(LOGITS))
    drawn = logps if drawn_from is None else drawn_from
    batch = Batch(
        weights=jnp.exp(drawn), advantages=jnp.zeros(3) if reward is None else reward(logps),
        old_logps=drawn_from, ref_logps=REF,
    )  # fmt: skip
    return jax.jit(
        jax.grad(lambda logits: L.policy_loss(jax.nn.log_softmax(logits), objective=objective, **arrays(batch))[0])
    )(LOGITS)


def test_the_two_gradients():
    """By automatic differentiation of the sum over the vocabulary."""

    def reverse(x):
        return (jax.nn.softmax(x) * (jax.nn.log_softmax(x) - REF)).sum()

    def forward(x):
        return (jnp.exp(REF) * (REF - jax.nn.log_softmax(x))).sum()

    for f, value, gradient in ((reverse, 0.14084707, REVERSE), (forward, 0.14509681, FORWARD)):
        got = jax.jit(jax.value_and_grad(f))(LOGITS)
        close(got[0], value)
        close(got[1], gradient)


def test_k1_as_a_loss_has_no_gradient():
    close(expected_gradient(lambda logps: L.kl(logps, REF, "k1")), 0)


@pytest.mark.parametrize(("kind", "want"), [("k2", REVERSE), ("k3", FORWARD), ("unbiased", REVERSE)])
def test_golden_kl_gradient_on_policy(kind, want):
    close(expected_policy_gradient(L.Objective(kl_coef=1.0, kl_kind=kind)), want)
    close(expected_policy_gradient(L.Objective(kl_coef=0.25, kl_kind=kind)), np.array(want) / 4)


def test_golden_kl_gradient_off_policy():
    """Tokens of an older policy: only "unbiased" still has the gradient of the KL, whoever differentiates its ratio.
    ``sg(ρ) k3`` would have `FORWARD`."""
    close(expected_policy_gradient(L.Objective(kl_coef=1.0, kl_kind="unbiased"), OTHER), REVERSE)
    close(
        expected_policy_gradient(L.Objective(kl_coef=1.0, kl_kind="k3"), OTHER),
        [0.08833488, -0.25378392, 0.16544904],
    )
    ratios = jax.lax.stop_gradient(jax.nn.log_softmax(LOGITS)) - OTHER
    close(expected_gradient(lambda logps: L.kl(logps, REF, "unbiased", log_ratios=ratios), OTHER), REVERSE)
    close(expected_gradient(lambda logps: jnp.exp(ratios) * L.kl(logps, REF), OTHER), FORWARD)


def test_golden_kl_in_the_reward():
    """k1 has the gradient of the KL there; k3 has that of nothing."""
    objective = L.Objective(kl_coef=1.0, kl_kind="k1", kl_in="reward")
    close(expected_policy_gradient(objective, reward=lambda x: -L.kl(x, REF, "k1")), REVERSE)
    close(
        expected_policy_gradient(objective, reward=lambda x: -L.kl(x, REF, "k3")),
        [-0.04461588, 0.03473111, 0.00988477],
    )
    close(expected_policy_gradient(objective), 0)  # nothing of it is in the loss


def test_kl_in_the_reward_is_not_in_the_loss():
    logps, batch, entropy = example()
    (loss, metrics), gradients = compiled(OBJECTIVES["k1 in the reward"])(logps, batch, entropy)
    (want, _), wanted = compiled(OBJECTIVES["policy"])(logps, batch, entropy)
    close(loss, want)
    close(gradients, wanted)
    assert metrics["kl"].value > 0


def test_kl_at_the_reference_is_0():
    logps, batch, entropy = example()
    batch = dataclasses.replace(batch, ref_logps=logps)
    for name in ("k2", "k3"):
        (_, metrics), _ = compiled(OBJECTIVES[name])(logps, batch, entropy)
        assert metrics["kl_loss"] == 0 and metrics["kl"].total == 0


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"kl_kind": "k1"}, "k1.*loss"),
        ({"kl_kind": "k2", "kl_in": "reward"}, "k2.*reward"),
        ({"kl_kind": "k3", "kl_in": "reward"}, "k3.*reward"),
        ({"kl_kind": "unbiased", "kl_in": "reward"}, "unbiased.*reward"),
        ({"kl_coef": -0.1}, "-0.1"),
    ],
)
def test_wrong_kl_is_refused(options, names):
    with pytest.raises(ValueError, match=names):
        L.Objective(**{"kl_coef": 0.1, **options})


def test_kl_refuses():
    with pytest.raises(ValueError, match="unbiased.*log_ratios"):
        L.kl(jnp.zeros(2), jnp.zeros(2), "unbiased")
    with pytest.raises(ValueError, match="'k4'"):
        L.kl(jnp.zeros(2), jnp.zeros(2), "k4")


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "unbiased"])
def test_kl_of_a_masked_slot_is_0_in_value_and_gradient(kind):
    ref = np.array([-1.0, np.nan, 200.0], np.float32)
    mask = np.array([True, False, False])

    def total(lp):
        return L.kl(lp, ref, kind, log_ratios=lp + 1.0, mask=mask).sum()

    value, gradient = jax.value_and_grad(total)(np.array([-1.5, -1.0, np.nan], np.float32))
    assert np.isfinite(value) and np.isfinite(gradient[0]) and not np.asarray(gradient[1:]).any()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "unbiased"])
@pytest.mark.parametrize("d", [-300.0, -90.0, -25.0, -3.0, 3.0, 25.0, 300.0])
def test_far_from_the_reference_a_token_is_still_pulled_back(kind, d):
    """Clipped at 20 nats, no estimator had a gradient beyond; k3's linear part alone would push away from it."""
    ratio = jnp.float32(0.7)
    value, gradient = jax.value_and_grad(lambda x: L.kl(x, jnp.float32(-1), kind, log_ratios=jnp.log(ratio)))(d - 1.0)
    close(gradient, loss_oracles.kl_slope(d, kind, 0.7), rtol=1e-5)
    assert jnp.isfinite(value) and (kind == "k1" or gradient * d > 0)


@pytest.mark.slow
def test_an_unbiased_gradient_is_exact_where_exponentials_cancel():
    """ρ (k3 + 1 - exp(-d)) in float32: 18 nats under the reference its terms, 6.6e7 each, left 16 or 20 of 18."""
    objective = L.Objective(kl_coef=1.0, kl_kind="unbiased")
    for d in (-18.0, -19.5, -40.0):
        batch = Batch(weights=jnp.ones(1), advantages=jnp.zeros(1), ref_logps=jnp.array([-1.0 - d]))
        gradient = jax.grad(lambda x: L.policy_loss(x, objective=objective, **arrays(batch))[0])(jnp.array([-1.0]))  # noqa: B023
        close(gradient, d)


SAMPLER = jax.nn.log_softmax(jnp.array([0.5, -0.6, 0.1]))


@pytest.mark.parametrize("options", [{"importance": "truncate"}, {"importance": "mask", "importance_low": 0.0}])
@pytest.mark.parametrize("old", [None, OTHER])
def test_an_unbiased_kl_is_exact_on_a_samplers_tokens(options, old):
    """Tokens of a sampler of eight bits, at the first update and at later ones, against the exact gradient.

    The ratio leads to the trainer's old policy, the correction from there to the sampler. Without the correction the
    gradient would be that of tokens of the old policy, which they are not; k2 is not exact, and says so.
    """
    objective = L.Objective(kl_coef=1.0, kl_kind="unbiased", importance_high=100.0, **options)
    exact = np.array(loss_oracles.full_kl(LOGITS, REF)[1])

    def gradient(objective):
        given = dict(
            weights=jnp.exp(SAMPLER), advantages=jnp.zeros(3), old_logps=old, sampler_logps=SAMPLER, ref_logps=REF
        )
        return jax.grad(lambda logits: L.policy_loss(jax.nn.log_softmax(logits), objective=objective, **given)[0])(
            LOGITS
        )

    close(gradient(objective), exact, atol=1e-6)
    assert np.abs(gradient(dataclasses.replace(objective, kl_kind="k2")) - exact).max() > 0.01
    cut = dataclasses.replace(objective, importance_high=1.0)  # what a bound cuts off is missing, in both terms alike
    assert np.abs(gradient(cut) - exact).max() > 0.01
