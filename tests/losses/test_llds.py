"""LLDS."""

import functools
import types

import jax
import jax.numpy as jnp
import loss_oracles
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_examples import (
    LENGTHS,
    MASK4,
    arrays,
)
from oracles import close
from ragged import prefix

from grpojax import losses as L

ACTIONS = np.array([[[0, 0, 1, 1]]], np.int32)


# Falls of the likelihood, gate, term.
@pytest.mark.parametrize(
    ("fall", "gate", "want"),
    [
        ([0.2, -0.1, 0.5, 0], "token", 0.175),
        ([0.2, -0.1, 0.5, 0], "action", 0.175),
        ([0.2, -0.1, 0.5, 0], "response", 0.175),
        ([0.2, -0.5, 0.5, 0], "token", 0.175),
        ([0.2, -0.5, 0.5, 0], "action", 0.125),
        ([0.2, -0.5, 0.5, 0], "response", 0.175),
    ],
)
@pytest.mark.slow
def test_golden_llds(fall, gate, want):
    """Without the gate, the action's row is 0.175 too; without the maximum, the token's is 0.05."""
    mask = np.ones((1, 1, 4), bool)
    batch = types.SimpleNamespace(
        weights=0.25 * mask.astype(np.float32), advantages=jnp.zeros((1, 1, 4)),
        old_logps=jnp.zeros((1, 1, 4)), actions=ACTIONS,
        displacement_weights=L.displacement_weights(np.zeros((1, 1, 4)), mask),
    )  # fmt: skip

    def loss(x, c=1.0):
        return L.policy_loss(x, objective=L.Objective(llds_coef=c, llds_gate=gate), **arrays(batch))

    logps = -jnp.array([[fall]])
    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(logps)
    close(value, want)
    close(loss(logps, 0.2)[0], 0.2 * want)
    close(metrics["llds_loss"], want)
    open_ = np.array([True, True, True, True] if want == 0.175 else [False, False, True, True])
    close(gradient[0, 0], np.where(open_ & (np.array(fall) > 0), -0.25, 0))
    with pytest.raises(ValueError, match=r"llds_coef=1\.0.*displacement_weights"):
        L.policy_loss(logps, objective=L.Objective(llds_coef=1.0), **arrays(batch) | {"displacement_weights": None})


@pytest.mark.parametrize("fall", [19.9, 20.1, 80.0])
def test_a_token_that_fell_far_is_pulled_back(fall):
    """With the ratio's limit of 20 nats the gradient was 0 from there on, for LLDS and for the penalty of KL-Cov."""
    ones = jnp.ones((1, 2))
    batch = {"advantages": 0 * ones, "weights": ones, "old_logps": -ones, "displacement_weights": ones}
    llds = L.Objective(llds_coef=1.0)
    kl_cov = L.Objective(surrogate=L.unclipped(), covariance="kl")
    for objective, more in ((llds, {}), (kl_cov, {"covariance_mask": ones > 0})):
        loss = functools.partial(L.policy_loss, objective=objective, **batch, **more)
        (value, _), gradient = jax.value_and_grad(loss, has_aux=True)(-ones - jnp.array([[fall, 0.0]]))
        close(value, fall)
        close(gradient, [[-1.0, 0.0]])


def test_golden_llds_weights():
    """Of the wrong sample's tokens none counts, but "all" divides by them: 0.0625 in place of 0.125."""
    mask = np.ones((1, 2, 4), bool)
    advantages = np.array([[[0.0] * 4, [-1.0] * 4]])
    terms = L.displacement(-jnp.array([[[0.2, -0.5, 0.5, 0], [9, 9, 9, 9]]]), mask, actions=np.repeat(ACTIONS, 2, 1))
    for options, want in (
        ({}, 0.125),
        ({"normalise": "all"}, 0.0625),
        ({"answer": np.repeat(ACTIONS, 2, 1) == 1, "answer_weight": 0.25}, 0.03125),
    ):
        close((L.displacement_weights(advantages, mask, **options) * terms).sum(), want)
    for options, names in (
        ({"normalise": "none"}, "'none'"),
        ({"answer_weight": 0.5}, "answer_weight=0.5.*answer"),
    ):
        with pytest.raises(ValueError, match=names):
            L.displacement_weights(advantages, mask, **options)
    with pytest.raises(ValueError, match="'word'"):
        L.displacement(terms, mask, "word")


def test_llds_does_nothing_at_ratio_1():
    """`jnp.maximum` would push all tokens up with half of the weight."""
    gradient = jax.grad(lambda x: L.displacement(L.log_ratio(x, None, MASK4), MASK4, "token").sum())(jnp.zeros(4))
    assert not np.asarray(gradient).any()


@settings(max_examples=15)
@given(lengths=LENGTHS, seed=st.integers(0, 999))
def test_llds_oracle(lengths, seed):
    mask, rng = prefix(lengths), np.random.default_rng(seed)
    ratios = np.where(mask, rng.normal(size=mask.shape), 0).astype(np.float32)
    actions = np.sort(rng.integers(0, 3, mask.shape), -1).astype(np.int32)
    got = llds_gates(ratios, mask, actions)
    for gate in got:
        close(got[gate], loss_oracles.displacement(ratios, mask, gate, actions))


@jax.jit
def llds_gates(ratios, mask, actions):
    return {gate: L.displacement(ratios, mask, gate, actions=actions) for gate in ("token", "action", "response")}


def test_golden_llds_token_row():
    """The row of the gradient table: 0.0875, and no half gradients where nothing fell."""
    delta = np.array([0.3, -0.3, 0.1, -0.05], np.float32)
    mask = np.ones(4, bool)

    def term(x):
        return L.displacement(x, mask, "token").mean()

    close(term(delta), 0.0875)
    close(jax.grad(term)(delta), [0, -0.25, 0, -0.25])
