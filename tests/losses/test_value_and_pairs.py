"""The critic's loss, and DPO."""

import jax
import jax.numpy as jnp
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
