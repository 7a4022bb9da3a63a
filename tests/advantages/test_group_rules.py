import itertools

import advantage_oracles
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from advantage_examples import NAN, G, P, compiled, run
from oracles import close

from grpojax import advantages as A


# Rewards, options, advantages. NGRPO's fails are -1/sqrt(G + 1) with ddof 1 and -1/sqrt(G) with ddof 0; GRPO has 0
# for them, and 2.4749, -0.3536 for one of eight.
@pytest.mark.parametrize(
    ("rewards", "options", "want"),
    [
        ([0] * 8, {}, [-0.333332] * 8),
        ([0] * 8, {"ddof": 0}, [-0.353552] * 8),
        ([1] + [0] * 7, {}, [1.76383] + [-0.503951] * 7),
        ([1] + [0] * 7, {"ddof": 0}, [1.870824] + [-0.534521] * 7),
        ([0] * 4, {}, [-0.447213] * 4),
        ([0] * 4, {"ddof": 0}, [-0.499999] * 4),
        ([1, 0, 0, 0], {}, [1.095443] + [-0.730295] * 3),
        ([1, 0, 0, 0], {"ddof": 0}, [1.224742] + [-0.816495] * 3),
        ([1] * 4, {}, [0] * 4),
        ([2, 0, 0, 0], {"reward_max": 2.0, "eps": 0.0}, [1.095445] + [-0.730297] * 3),
    ],
)
def test_golden_virtual_best(rewards, options, want):
    got = run(A.virtual_best(**options), rewards=[rewards])
    close(got[0], want, atol=2e-6)
    close(advantage_oracles.virtual_best([rewards], **options)[0], want, atol=2e-6)


@pytest.mark.parametrize("best", [0.1, 0.95])
def test_virtual_best_of_a_perfect_group_is_exactly_0(best):
    """In float32 their mean is not the best reward: told by ``std == 0``, some of these groups have advantages."""
    groups = np.where(np.arange(64) < np.arange(2, 65)[:, None], np.float32(best), np.float32(NAN))
    assert not run(A.virtual_best(best, eps=1e-9), rewards=groups).any()


def test_virtual_best_refuses_a_reward_over_its_best():
    with pytest.raises(ValueError, match=r"reward_max=1\.0.*2"):
        A.chain(A.virtual_best())(jnp.array([[2.0, 0.0]]))
    close(run(A.virtual_best(), rewards=[[2.0, 0.0]]), run(A.virtual_best(), rewards=[[1.0, 0.0]]))
    with pytest.raises(ValueError, match="count=0"):
        A.virtual_best(count=0)


# Samples, right ones, k, advantage of a right and of a wrong one. Without the second term of the wrong samples'
# formula the first row would have 0.5222 for both, and with sampling with replacement R is 0.6836, not 0.7857.
@pytest.mark.parametrize(
    ("n", "right", "k", "high", "low"),
    [
        (8, 2, 4, 0.52223297, -0.17407766),
        (8, 1, 4, 1.0, -0.14285714),
        (8, 0, 4, 0, 0),
        (8, 5, 4, 0, 0),
        (8, 8, 4, 0, 0),
        (4, 1, 1, 1.73205081, -0.57735027),
        (256, 192, 64, 0, 0),  # C(64, 64) / C(256, 64) is 0 in float32
    ],
)
def test_golden_pass_at_k(n, right, k, high, low):
    rewards = [[1.0] * right + [0.0] * (n - right)]
    got = np.asarray(run(A.pass_at_k(k), rewards=rewards))[0]
    close(got, [high] * right + [low] * (n - right))
    close(got.sum(), 0)
    close(advantage_oracles.pass_at_k(rewards, k)[0], got)


def test_pass_at_1_is_grpo():
    rewards = np.random.default_rng(0).integers(0, 2, (P, G))
    close(run(A.pass_at_k(1), rewards=rewards), compiled("std, ddof 0")(rewards.astype(np.float32)), atol=1e-4)
    for k, names in ((0, "k=0"), (G + 1, "k=6.*5 samples")):
        with pytest.raises(ValueError, match=names):
            A.chain(A.pass_at_k(k))(jnp.ones((P, G)))


def test_golden_best_margin():
    """The second best in place of the mean: minus the mean it would be 0.475."""
    close(run(A.best_margin(), rewards=[[0.2, 0.9, 0.5, 0.1]]), [[0, 0.4, 0, 0]])
    close(run(A.best_margin(scaled=True), rewards=[[0.2, 0.9, 0.5, 0.1]]), [[0, 0.4 / 0.35939764, 0, 0]], atol=1e-5)
    close(run(A.best_margin(), rewards=[[0.9, 0.9, 0.5], [NAN, 0.3, NAN]]), np.zeros((2, 3)))
    assert run(A.best_margin(), rewards=[[0.7]]) == 0


def test_golden_weigh_signs():
    """With the group's mean as baseline the second group would teach nothing."""
    got = run(A.weigh_signs(), rewards=[[1, 0, NAN], [0, 0, 0]])
    close(got, [[0.1, -1, 0], [-1, -1, -1]])
    close(run(A.weigh_signs(0.0, 0.5, success=0.7), rewards=[[0.7, 0.6]]), [[0, -0.5]])
    with pytest.raises(ValueError, match="weights must be 0 or more"):
        A.weigh_signs(-0.1)


def test_golden_penalize_all_fail():
    """Before the scale, it would be 0 in both groups."""
    grpo = (A.center(), A.scale(ddof=0, eps=0.0))
    got = run(*grpo, A.penalize_all_fail(0.5), rewards=[[0, 0, NAN], [1, 0, 0], [0.1, 0.1, 0.1]])
    close(got, [[-0.5, -0.5, 0], [1.41421356, -0.70710678, -0.70710678], [0, 0, 0]])
    got = run(*grpo, A.penalize_all_fail(0.5, fail_reward=0.1), rewards=[[0.1, 0.1], [NAN, NAN]])
    close(got, [[-0.5, -0.5], [0, 0]])


def test_golden_likelihood_of_all_fail():
    """Only the group that fails; by the mean alone its advantages are -0.00183, 0.46728, -0.33272, -0.13272."""
    likelihood = [[0.43088694, 0.9, 0.1, 0.3]] * 2
    got = run(
        A.center(), A.scale(ddof=0, eps=0.0), rewards=[[0, 0, 0, 0], [1, 0, 0, 0]], likelihood=likelihood,
        reward=A.likelihood_of_all_fail(),
    )  # fmt: skip
    close(
        got,
        [[-0.00623245, 1.58725507, -1.13019222, -0.4508304], [1.7320508, -0.5773503, -0.5773503, -0.5773503]],
    )
    got = run(A.center(), rewards=[[0, 0, 0, 0]], likelihood=likelihood[:1], reward=A.likelihood_of_all_fail())
    close(got, [[-0.0018348, 0.46727827, -0.33272173, -0.13272173]])
    unknown = [[0.9, 0.8, 0.85, NAN], [NAN] * 4]  # in the first group nothing but likelihoods is compared
    rewards, rule = [[0, 0, 0, 0], [-1, 0, -1, 0]], A.likelihood_of_all_fail()
    close(run(A.center(), rewards=rewards, likelihood=unknown, reward=rule), [[0.05, -0.05, 0, 0], [-0.5, 0.5] * 2])


# --- MaxRL


def test_golden_max_rl():
    """Divided by the deviation in place of the mean the first would be 1.73."""
    got = run(A.max_rl(), rewards=[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    close(got, [[3, -1, -1, -1], [1, 1, -1, -1], [0, 0, 0, 0], [0, 0, 0, 0]])
    close(run(A.max_rl(), rewards=[[0.5, 0.25, NAN, 0]]), [[1, 0, 0, -1]])
    assert not np.asarray(run(A.max_rl(), rewards=np.full((1, 63), 0.95))).any()
    assert not np.asarray(run(A.max_rl(), rewards=[[0.7, NAN], [NAN, NAN]])).any()


def test_max_rl_takes_no_negative_rewards():
    with pytest.raises(ValueError, match=r"max_rl.*-0\.5"):
        A.chain(A.max_rl())(jnp.array([[1.0, -0.5]]))
    assert not np.asarray(run(A.max_rl(), rewards=[[0.5, -0.5], [-1, -2]])).any()  # compiled: a mean of 0 or less


@pytest.mark.parametrize("group", [2, 3, 5])
def test_max_rl_is_the_expansion_of_the_log_likelihood(group):
    """All groups that four answers can make, each as likely as it is; REINFORCE would have the order 1 for any size."""
    logits, right = jnp.array([0.2, -0.5, 0.9, -1.0]), np.array([1, 0, 0, 1], np.float32)
    draws = np.array(list(itertools.product(range(4), repeat=group)))
    advantages = run(A.max_rl(), rewards=right[draws])
    odds = jax.jit(lambda x: jnp.exp(jax.nn.log_softmax(x)[draws].sum(-1, keepdims=True)))(logits)

    def surrogate(x):
        return (odds * advantages * jax.nn.log_softmax(x)[draws]).sum() / group

    def expansion(x, order):
        p = (jax.nn.softmax(x) * right).sum()
        return -sum((1 - p) ** k / k for k in range(1, order + 1))

    got, slope = jax.jit(jax.grad(surrogate))(logits), jax.jit(jax.grad(expansion), static_argnums=1)
    close(got, slope(logits, group - 1))
    for other in (group - 2, group):
        assert np.abs(got - (slope(logits, other) if other else 0)).max() > 0.03
