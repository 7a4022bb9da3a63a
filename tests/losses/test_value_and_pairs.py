"""The critic's loss, cross-entropy, and DPO."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_examples import (
    NAN,
)
from oracles import close

from grpojax import losses as L


def test_golden_value_loss():
    """The smaller of the two squares would give 0.045."""

    def one(x):
        return jnp.array([x, NAN])

    weights = jnp.array([1.0, 0.0])

    def loss(v):
        return L.value_loss(v, one(0.4), weights, old_values=one(0.5), clip=0.2)

    value, gradient = jax.value_and_grad(loss)(one(0.9))
    close(value, 0.125)
    close(gradient, [0.5, 0])
    value, gradient = jax.value_and_grad(loss)(one(0.1))  # far under V_old: the clipped square, 0.01, is not larger
    close(value, 0.045)
    close(gradient, [-0.3, 0])
    value, gradient = jax.value_and_grad(lambda v: L.value_loss(v, one(1.4), weights, old_values=one(0.5), clip=0.2))(
        one(0.9)
    )  # clipped: 0.7 is farther from 1.4
    close(value, 0.245)
    close(gradient, [0, 0])
    close(L.value_loss(one(0.9), one(0.4), weights), 0.125)
    with pytest.raises(ValueError, match="clip=0.2.*together"):
        L.value_loss(one(0.9), one(0.4), weights, clip=0.2)


def test_golden_dpo():
    """The margin is 0.3; without the reference it would be 0.5 and the loss 0.4741."""
    close(L.dpo_loss(-10, -15, -12, -14), 0.55435524)
    gradient = jax.grad(lambda w, l: L.dpo_loss(w, l, -12.0, -14.0).sum(), argnums=(0, 1))(-10.0, -15.0)
    close(gradient, [-0.1 * 0.42555748, 0.1 * 0.42555748])


@pytest.mark.parametrize("how", ["token_mean", "sequence_mean"])
def test_cross_entropy_against_loops(how):
    """Ragged groups with a completion that is not there; what stands on padding has no part."""
    rng = np.random.default_rng(0)
    lengths = np.array([[3, 0, 7], [1, 5, 2]])
    logps = -rng.random((2, 3, 7)).astype(np.float32) * 5
    mask = np.arange(7) < lengths[..., None]
    each = [[float(x) for x in logps[i][: lengths[i]]] for i in np.ndindex(2, 3) if lengths[i]]
    if how == "token_mean":
        want = -sum(map(sum, each)) / sum(map(len, each))
    else:
        want = -sum(sum(x) / len(x) for x in each) / len(each)
    weights = L.loss_weights(mask, how, count_empty=False)
    value, gradient = jax.value_and_grad(L.sft_loss)(jnp.where(mask, logps, NAN), weights)
    close(value, want)
    close(gradient, -np.asarray(weights))


def test_golden_cross_entropy():
    """Answers of 2 and 1 tokens: (1 + 2 + 6) / 3 by tokens, (1.5 + 6) / 2 by answers."""
    mask, logps = jnp.array([[[True, True], [True, False]]]), jnp.array([[[-1.0, -2.0], [-6.0, NAN]]])
    close(L.sft_loss(logps, L.loss_weights(mask, "token_mean")), 3.0)
    close(L.sft_loss(logps, L.loss_weights(mask, "sequence_mean")), 3.75)
