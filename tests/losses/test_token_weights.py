"""Aggregation as an array of weights."""

import jax
import jax.numpy as jnp
import loss_oracles
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_examples import (
    HOW,
    LENGTHS,
    NAN,
    G,
    P,
    T,
    weigh,
)
from oracles import close
from ragged import prefix

from grpojax import losses as L


# Losses [1, 2, 3, 4] and [10, 20] of one prompt's two samples, or of two prompts' one.
@pytest.mark.parametrize(
    ("how", "together", "apart"),
    [
        ("token_mean", 6.6666667, 6.6666667),
        ("sequence_mean", 8.75, 8.75),
        ("prompt_mean", 6.6666667, 8.75),
        ("sequence_sum", 20, 20),
        ("constant", 2.5, 2.5),  # 5.0 without the mean over samples
    ],
)
def test_golden_aggregation(how, together, apart):
    losses, mask = np.array([[1, 2, 3, 4], [10, 20, 0, 0]], np.float32), prefix([4, 2], 4)
    for shape, want in (((1, 2, 4), together), ((2, 1, 4), apart)):
        weights = L.loss_weights(mask.reshape(shape), how, **HOW[how])
        assert weights.dtype == jnp.float32
        close((weights * losses.reshape(shape)).sum(), want)
        close(loss_oracles.aggregate(losses.reshape(shape), mask.reshape(shape), how, **HOW[how]), want)


# The same, and a sample (in a prompt of its own) that has no token.
@pytest.mark.parametrize(
    ("how", "counted", "not_counted"),
    [
        ("token_mean", 6.6666667, 6.6666667),
        ("sequence_mean", 17.5 / 3, 8.75),
        ("prompt_mean", 17.5 / 3, 8.75),
        ("sequence_sum", 40 / 3, 20),
        ("constant", 5 / 3, 2.5),
    ],
)
def test_golden_empty_sample(how, counted, not_counted):
    """Divided by a length that is not at least 1, the empty sample's 0 / 0 is NaN."""
    losses = np.array([[[1, 2, 3, 4]], [[10, 20, 0, 0]], [[NAN] * 4]], np.float32)
    mask = prefix([[4], [2], [0]], 4)
    for count_empty, want in ((True, counted), (False, not_counted)):
        weights = L.loss_weights(mask, how, count_empty=count_empty, **HOW[how])
        close(jnp.where(mask, weights * losses, 0).sum(), want)
        close(weights, loss_oracles.loss_weights(mask, how, count_empty=count_empty, **HOW[how]))


@pytest.mark.parametrize("how", HOW)
@settings(max_examples=12)
@given(lengths=LENGTHS, count_empty=st.booleans(), seed=st.integers(0, 99))
def test_aggregation_oracle(how, lengths, count_empty, seed):
    mask, losses = prefix(lengths), np.random.default_rng(seed).normal(size=(P, G, T)) + 1
    weights = np.asarray(weigh(how, count_empty)(mask))
    assert not weights[~mask].any() and (weights[mask] > 0).all()
    close((weights * losses).sum(), loss_oracles.aggregate(losses, mask, how, count_empty=count_empty, **HOW[how]))


@pytest.mark.parametrize("count_empty", [True, False])
@pytest.mark.parametrize("how", HOW)
def test_weights_of_nothing_are_0(how, count_empty):
    assert not np.asarray(weigh(how, count_empty)(np.zeros((P, G, T), bool))).any()


@pytest.mark.parametrize("how", HOW)
def test_weights_permutations_and_vmap(how):
    mask, rng = prefix(np.random.default_rng(0).integers(0, T + 1, (P, G))), np.random.default_rng(1)
    prompts, samples = rng.permutation(P), rng.permutation(G)
    weights = np.asarray(weigh(how)(mask))
    close(weigh(how)(mask[prompts]), weights[prompts])
    close(weigh(how)(mask[:, samples]), weights[:, samples])
    many = jax.vmap(weigh(how))(np.stack([mask, mask[prompts]]))
    close(many, np.stack([weights, weights[prompts]]))


@pytest.mark.parametrize(
    ("how", "constant", "names"),
    [
        ("constant", None, "how='constant' needs constant=, the tokens to divide by"),
        ("token_mean", 8.0, "'token_mean'.*8.0"),
        ("token-mean", None, "'token-mean'.*token_mean, sequence_mean, prompt_mean, sequence_sum, constant"),
    ],
)
def test_weights_refuse(how, constant, names):
    with pytest.raises(ValueError, match=names):
        L.loss_weights(np.ones((1, 1, 1), bool), how, constant=constant)


def test_golden_verl_sum_norm():
    """Σ l / L without the mean over samples; Dr. GRPO's constant gives half of it for two samples."""
    mask = prefix([[4, 2]], 4)
    losses = np.array([[[1, 2, 3, 4], [10, 20, 0, 0]]], np.float32)
    close((L.loss_weights(mask, "constant", constant=8 / 2) * losses).sum(), 5.0)
    close((L.loss_weights(mask, "constant", constant=8.0) * losses).sum(), 2.5)
    for constant in (0.0, -8.0):
        with pytest.raises(ValueError, match="must be over 0"):
            L.loss_weights(mask, "constant", constant=constant)


def test_a_prefix_that_all_share_gets_no_update_from_sums():
    """Σ A = 0 at ratio 1 under sums over tokens; under means over samples the shorter wrong ones pull it down."""
    advantages = np.array([[[1.5], [-0.5], [-0.5], [-0.5]]]) * np.ones((1, 4, 6))
    mask = prefix([[6, 2, 3, 4]], 6)

    def push(how):
        return float((L.loss_weights(mask, how) * advantages)[..., 0].sum())

    assert abs(push("sequence_sum")) < 1e-7 and abs(push("token_mean")) < 1e-7
    assert push("sequence_mean") < -0.05
