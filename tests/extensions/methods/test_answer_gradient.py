"""The gradient of the expected likelihood of the true answer, by enumeration of a tiny policy's samples."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax import advantages as A
from grpojax import losses as L
from grpojax.extensions.methods.true_answers import derivatives, likelihoods

KINDS = {  # of the probabilities of an answer's tokens, [..., k]
    "joint": lambda p: p.prod(-1),
    "per_token": lambda p: p.prod(-1) ** (1 / p.shape[-1]),
    "mean": lambda p: p.mean(-1),
    "log": lambda p: jnp.log(p).sum(-1),
}
SIZE, REASONING, ANSWER = 3, 2, (1, 2)
TEXTS = [(*z, *ANSWER) for z in itertools.product(range(SIZE), repeat=REASONING)]
LOGITS = [np.random.default_rng(n).normal(size=(SIZE,) * (n + 1)).astype(np.float32) for n in range(4)]


def logps_of(logits):
    """``[9, 4]`` log-probs of the tokens of all texts: each token has a logit for all that can be before it."""
    rows = [jax.nn.log_softmax(x) for x in logits]
    return jnp.stack([jnp.stack([row[text[: n + 1]] for n, row in enumerate(rows)]) for text in TEXTS])


def expected(logits, kind):
    """``E_z[R(z)]``."""
    logps = logps_of(logits)
    return (jnp.exp(logps[:, :REASONING].sum(-1)) * KINDS[kind](jnp.exp(logps[:, REASONING:]))).sum()


def gradient(kind, coef):
    """The expected gradient of the loss, over all pairs of samples ``[81, 2]`` as groups."""
    fixed = np.asarray(logps_of(LOGITS))
    pairs = np.array(list(itertools.product(range(len(TEXTS)), repeat=2)))
    mask = np.zeros((len(pairs), 2, 4), bool)
    mask[..., REASONING:] = True
    value = likelihoods(fixed[pairs], mask, kind)
    weights = np.where(mask, derivatives(fixed[pairs], mask, kind, value), np.nan)
    signals = A.Signals(likelihood=value, mask=np.ones(mask.shape, bool), answer_weights=weights)
    steps = A.center("group", leave_one_out=True), A.to_tokens(), A.answer_term(coef)
    advantages = A.chain(*steps, reward=A.likelihood_of_all_fail(everywhere=True))(np.zeros(value.shape), signals)
    drawn = np.exp(fixed[pairs][..., :REASONING].sum((1, 2)))  # probability of the pair
    given = {"advantages": advantages, "weights": np.broadcast_to(drawn[:, None, None] / 2, mask.shape)}
    objective = L.Objective(surrogate=L.reinforce())
    return jax.grad(lambda logits: -L.policy_loss(logps_of(logits)[pairs], objective=objective, **given)[0])(LOGITS)


@pytest.mark.parametrize("kind", KINDS)
def test_with_the_answers_term_it_is_exact(kind):
    """Without the term a part is missing, and of the reasoning alone nothing."""
    want, got, without = jax.grad(expected)(LOGITS, kind), gradient(kind, 1.0), gradient(kind, 0.0)
    for n in range(4):
        np.testing.assert_allclose(got[n], want[n], atol=1e-6)
    assert not np.any(without[3]) and np.abs(want[3]).max() > 0.01
    # The second token of the reasoning has no gradient but that of the reward.
    np.testing.assert_allclose(without[1], want[1], atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_are_those_of_the_likelihoods(kind):
    logps = np.log(np.random.default_rng(0).uniform(0.1, 0.9, (2, 3, 5)).astype(np.float32))
    want = jax.grad(lambda x: KINDS[kind](jnp.exp(x)).sum())(logps)
    every = np.ones(logps.shape, bool)
    value = likelihoods(logps, every, kind)
    np.testing.assert_allclose(value, KINDS[kind](np.exp(logps)), rtol=1e-5)
    np.testing.assert_allclose(derivatives(logps, every, kind, value), want, rtol=1e-5)
