"""The entropy bonus: its gradient is the loss's, its weight may follow a target."""

import jax
import jax.numpy as jnp
import loss_oracles
import numpy as np
import pytest
from loss_examples import arrays, example
from oracles import close

from grpojax import losses as L


def test_golden_coefficients():
    """Applied while the entropy is at most the target; without that rule the third would be 0.01."""
    entropies, applied, coef = [0.1, 0.15, 0.3, 0.2, 0.1], [], 0.0
    for entropy in entropies:
        coef, now = L.adapt_entropy_coef(coef, entropy, 0.2, 0.005)
        applied.append(float(now))
    close(applied, [0, 0.005, 0, 0.005, 0.005])
    close(coef, 0.01)
    assert float(L.adapt_entropy_coef(0.002, 0.9, 0.2, 0.005)[0]) == 0.0  # not under 0: entropy is never pushed down


def test_oracle():
    rng = np.random.default_rng(0)
    entropies, coef, applied = rng.uniform(0, 0.5, 50).astype(np.float32), 0.01, []
    for entropy in entropies:
        coef, now = L.adapt_entropy_coef(coef, float(entropy), 0.25, 0.01)
        applied.append(float(now))
    close(applied, loss_oracles.adapt_entropy(0.01, entropies.tolist(), 0.25, 0.01), atol=1e-6)


def test_in_the_loss():
    """The coefficient is an array of the compiled program; with the fixed one of the objective the loss is the same."""
    logps, batch, entropy = example()
    adaptive = L.Objective(entropy_target=0.2)
    assert adaptive.needs_entropy
    run = jax.jit(
        lambda coef: L.policy_loss(logps, objective=adaptive, **arrays(batch), entropy=entropy, entropy_coef=coef)
    )
    for coef in (0.0, 0.25):
        loss, metrics = run(jnp.float32(coef))
        close(loss, L.policy_loss(logps, objective=L.Objective(entropy_coef=coef), **arrays(batch), entropy=entropy)[0])
    assert run._cache_size() == 1 and metrics["entropy"].value > 0
    with pytest.raises(ValueError, match="entropy_target=0.2 with entropy_coef=None"):
        L.policy_loss(logps, objective=adaptive, **arrays(batch), entropy=entropy)
    with pytest.raises(ValueError, match="entropy_target=0.2 needs entropy"):
        L.policy_loss(logps, objective=adaptive, **arrays(batch), entropy_coef=0.1)
    with pytest.raises(ValueError, match="entropy_target=None with entropy_coef=0.1"):
        L.policy_loss(
            logps, objective=L.Objective(entropy_coef=0.2), **arrays(batch), entropy=entropy, entropy_coef=0.1
        )
    with pytest.raises(ValueError, match="entropy_coef goes with"):
        L.policy_loss(logps, objective=L.Objective(), **arrays(batch), entropy_coef=0.1)
