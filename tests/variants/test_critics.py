"""What critics learn from, and that a perfect one changes no expected gradient."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_examples import arrays
from oracles import close
from tabular_policy import PATHS, SEQUENCES, WRITTEN, expected_reward

from grpojax import advantages as A
from grpojax import losses as L
from grpojax import variants


def golden():
    """Rewards 1 for three tokens valued .5, .6, .7; a second sample without any reward."""
    mask = jnp.array([[[True, True, True, False], [True, True, False, False]]])
    values = jnp.array([[[0.5, 0.6, 0.7, jnp.nan], [0.2, 0.1, 0.0, 0.0]]])
    return jnp.array([[1.0, jnp.nan]]), A.Signals(mask=mask, values=values, token_bias=values)


@pytest.mark.parametrize(
    ("gamma", "lam", "returns"),
    [(1.0, 1.0, [1, 1, 1]), (1.0, 0.95, [0.96575, 0.985, 1.0]), (0.99, 0.95, [0.94682858, 0.97515, 1.0])],
)
def test_golden_returns(gamma, lam, returns):
    """Whitened they would have mean 0; an invalid sample has none."""
    variant = variants.ppo(gamma=gamma, lam=lam)
    got = jax.jit(variant.critic.targets)(*golden())
    close(got[0, 0], [*returns, 0], atol=1e-6)
    assert not got[0, 1].any()


@pytest.mark.slow
def test_a_bias_learns_the_advantage_without_itself():
    """With it the target of the first token would be 0.5 + 1 after scaling."""
    rewards, signals = jnp.array([[1.0, 0.0]]), golden()[1]
    variant = variants.token_critic(ddof=0, eps=0.0, bound=0.4, center_bias=True)
    close(variant.critic.targets(rewards, signals)[0], [[1, 1, 1, 0], [-1, -1, 0, 0]])
    close(variants.grpo(ddof=0, eps=0.0).advantage(rewards, signals), variant.critic.targets(rewards, signals))
    assert float(jnp.abs(variant.advantage(rewards, signals) - variant.critic.targets(rewards, signals)).max()) > 0.01
    assert variant.critic.at == "after" and variants.ppo().critic.at == "before"


@pytest.mark.slow
def test_a_kl_in_the_reward_is_in_the_targets():
    rewards, signals = jnp.array([[1.0, 0.0]]), golden()[1]
    signals = dataclasses.replace(signals, behavior_logps=jnp.zeros((1, 2, 4)), ref_logps=jnp.full((1, 2, 4), -1.0))
    per_sample = variants.ppo(lam=1.0, kl_coef=0.1, kl_in="reward").critic.targets(rewards, signals)
    per_token = variants.ppo(lam=1.0, kl_coef=0.1).critic.targets(rewards, signals)
    close(per_sample[0, 0, :3], [0.7] * 3)
    close(per_token[0, 0, :3], [0.7, 0.8, 0.9])


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (variants.token_critic, {"bound": 0.0}, "bound=0.0"),
        (variants.token_critic, {"l2": -1.0}, "l2=-1.0"),
        (variants.token_critic, {"normalise": "max"}, "normalise='max'"),
        (variants.ppo, {"value_clip": 0.0}, "value_clip=0.0"),
    ],
)
def test_options_out_of_range_are_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_a_critics_loss_says_what_it_misses():
    tokens = dict(weights=jnp.ones(3))
    with pytest.raises(ValueError, match="critic_targets"):
        variants.BiasLoss()(jnp.ones(3), tokens)
    with pytest.raises(ValueError, match="critic_weights"):
        variants.BiasLoss(normalise="mean")(jnp.ones(3), tokens)
    with pytest.raises(ValueError, match="value_clip=0.2 needs critic_outputs"):
        variants.ValueLoss()(jnp.ones(3), tokens | {"critic_targets": jnp.ones(3)})


# --- a tabular policy whose every sequence is listed


def group_advantage(rewards, ddof=1, eps=1e-4):
    """GRPO's, of a group of three, in plain numpy."""
    r = np.asarray(rewards, float)
    return (r - r.mean()) / (r.std(ddof=ddof) + eps) if np.ptp(r) else np.zeros(len(r))


def test_the_expected_gradient_of_the_bias_is_the_enumerated_advantage():
    """All 343 groups of three, each as often as the policy draws it: a token's bias learns the mean advantage after it.

    The bias stands in a table by what was written: `PATHS` says where. From its first update on its sign is that of
    the advantage more often than not.
    """
    rng = np.random.default_rng(0)
    logits, rewards = rng.normal(size=(3, 3)), rng.integers(0, 2, len(SEQUENCES)).astype(float)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chance = [np.prod([p[row][token] for row, token in zip((0, s[0]), s, strict=False)]) for s in SEQUENCES]
    want = np.zeros(9)
    groups = list(itertools.product(range(7), repeat=3))
    for group in groups:
        odds = np.prod([chance[i] for i in group])
        for i, advantage in zip(group, group_advantage(rewards[list(group)]), strict=True):
            for t in range(len(SEQUENCES[i])):
                want[PATHS[i][t]] -= odds * advantage

    index = np.array(groups)
    mask, places = WRITTEN[0][index], PATHS[index]
    critic = variants.token_critic().critic
    targets = jax.jit(critic.targets)(rewards[index].astype(np.float32), A.Signals(mask=mask))
    odds = np.prod(np.array(chance)[index], axis=1)
    weights = np.where(mask, odds[:, None, None], 0.0).astype(np.float32)

    def loss(table):
        return critic.loss(table[places], dict(weights=jnp.asarray(weights), critic_targets=targets))[0]

    got = jax.jit(jax.grad(loss))(rng.normal(size=9).astype(np.float32))
    close(got, want, atol=1e-6)
    after = -np.asarray(got)[PATHS[:, 0]]  # of a bias at 0, one update on
    better = rewards - np.dot(chance, rewards)
    assert np.abs(want).max() > 0.05 and np.dot(chance, after * better) > 0


def perfect(logits, rewards):
    """``V [1, 7, 2]`` before each token: the mean reward over all that the policy may still write; by loops."""
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    first = expected_reward(logits, rewards)
    second = {
        a: sum(p[a][b] * r for (c, b), r in zip(SEQUENCES[1:], rewards[1:], strict=True) if c == a) for a in (1, 2)
    }
    return np.array([[[first, second.get(s[0], 0.0)] for s in SEQUENCES]], np.float32)


@pytest.mark.parametrize("lam", [0.6, *(pytest.param(x, marks=pytest.mark.exhaustive) for x in (0.0, 1.0))])
def test_with_a_perfect_critic_the_expected_gradient_is_that_of_the_expected_reward(lam):
    rng, h = np.random.default_rng(int(10 * lam)), 1e-5
    logits = rng.normal(size=(3, 3)).astype(np.float32)
    rewards = rng.normal(size=len(SEQUENCES)).astype(np.float32)
    want = np.zeros((3, 3))
    for i in np.ndindex(3, 3):
        step = np.zeros((3, 3))
        step[i] = h
        up, down = (expected_reward(logits.astype(float) + sign * step, rewards) for sign in (1, -1))
        want[i] = -(up - down) / (2 * h)

    critic = variants.ppo(lam=lam, value_clip=None).critic
    values = perfect(logits, rewards)
    signals = A.Signals(mask=jnp.asarray(WRITTEN), values=values)
    returns = np.asarray(jax.jit(critic.targets)(rewards[None], signals))

    def logps(x):
        return jax.nn.log_softmax(x).reshape(-1)[PATHS][None]

    odds = np.exp(np.where(WRITTEN, logps(logits), 0.0).sum(-1, keepdims=True))
    weights = np.where(WRITTEN, odds, 0.0)  # each sequence as often as the policy draws it

    def policy(advantages):
        batch = type("Batch", (), {"weights": weights, "advantages": advantages, "old_logps": logps(logits)})

        def loss(x):
            return L.policy_loss(logps(x), objective=variants.ppo().objective, **arrays(batch))[0]

        return jax.jit(jax.grad(loss))(logits)

    close(policy(np.where(WRITTEN, returns - values, 0)), want, atol=2e-6)
    # A table of values by state: the first token's, and those after 1 and after 2.
    state = np.array([[0, s[0]] for s in SEQUENCES])

    def table_loss(v):
        return critic.loss(v[state][None], dict(weights=weights, critic_targets=returns))[0]

    exact = np.array([values[0, 0, 0], values[0, 1, 1], values[0, 4, 1]])
    slope = jax.jit(jax.grad(table_loss))
    close(slope(exact), 0, atol=1e-6)  # nothing left to learn
    assert np.abs(slope(exact + np.float32(0.5))).min() > 1e-3
