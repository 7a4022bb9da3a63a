import jax
import jax.numpy as jnp
import numpy as np
import pytest
from advantage_examples import NAN, REWARD, G, P, run
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp
from oracles import close
from ragged import prefix

from grpojax import advantages as A


def test_to_tokens():
    mask = prefix([[3, 1], [0, 2]], 3)
    got = run(A.center(), A.to_tokens(), rewards=[[1, 0], [0, 1]], mask=mask)
    close(got, [[[0.5, 0.5, 0.5], [-0.5, 0, 0]], [[0, 0, 0], [0.5, 0.5, 0]]])
    got = run(A.to_tokens(), rewards=[[NAN, 2], [1, 1]], mask=mask)
    close(got, [[[0, 0, 0], [2, 0, 0]], [[0, 0, 0], [1, 1, 0]]])


PLUS_MASK = prefix([[3, 2]], 3)

K1 = np.array([[[0.1, 0.1, 0.1], [0, -0.2, NAN]]], np.float32)


@pytest.mark.parametrize(
    ("ddof", "want"),
    [
        (0, [[0.79516175, 0.81642276, 0.83768377], [-1.22463414, -1.22463414, 0]]),
        (1, [[0.71121429, 0.73023072, 0.74924714], [-1.09534608, -1.09534608, 0]]),
    ],
)
def test_golden_reinforce_pp(ddof, want):
    """Normalised by sample it would be ±1; with k1 taken from the whole sample, the first three would be equal."""
    signals = {
        "rewards": [[1.0, 0.0]],
        "mask": PLUS_MASK,
        "behavior_logps": K1 - 1,
        "ref_logps": -np.ones((1, 2, 3)),
    }
    returns = (A.token_rewards(kl_coef=0.1), A.token_returns())
    close(run(*returns, **signals), [[[0.97, 0.98, 0.99], [0.02, 0.02, 0]]])
    close(run(*returns, A.whiten(ddof=ddof), **signals)[0], want)
    with pytest.raises(ValueError, match=r"token_rewards.*signals\.ref_logps"):
        run(*returns, **{k: v for k, v in signals.items() if k != "ref_logps"})
    got = run(A.token_rewards(), A.token_returns(gamma=0.5), rewards=[[1.0, 2.0]], mask=PLUS_MASK)
    close(got, [[[0.25, 0.5, 1.0], [1.0, 2.0, 0.0]]])


STEPS = np.full((1, 3, 5), NAN, np.float32)
STEPS[0, 0, [1, 3]] = 0.2, 0.8
STEPS[0, 1, 2] = 1.0
STEPS[0, 2, [0, 2, 4]] = 0.0, 0.5, 0.5


@pytest.mark.parametrize(("ddof", "a", "b"), [(0, 0.89113279, 1.48522131), (1, 0.81348922, 1.35581536)])
def test_golden_process_rewards(ddof, a, b):
    """Prefix sums in place of suffix sums would give the first sample [0, -a, -a, 0]."""
    mask = prefix([[4, 3, 5]], 5)
    steps = jnp.asarray(STEPS).at[0, 1, 4].set(9.0)  # on padding
    got = run(A.process_rewards(ddof=ddof, eps=0.0), rewards=[[1.0, 0.0, 0.0]], mask=mask, step_rewards=steps)
    close(got, [[[0, 0, a, a, 0], [b, b, b, 0, 0], [-b, 0, 0, 0, 0]]], atol=2e-6)


@pytest.mark.parametrize(
    ("gamma", "lam", "want"),
    [
        (1.0, 1.0, [0.5, 0.4, 0.3]),
        (1.0, 0.95, [0.46575, 0.385, 0.3]),
        (0.99, 0.95, [0.44682858, 0.37515, 0.3]),
    ],
)
def test_golden_gae(gamma, lam, want):
    """A padded position whose value is not taken for 0 would change all three."""
    signals = {"rewards": [[1.0]], "mask": prefix([[3]], 5), "values": [[[0.5, 0.6, 0.7, 9.0, NAN]]]}
    got = run(A.token_rewards(), A.gae(gamma=gamma, lam=lam), **signals)
    close(got[0, 0], [*want, 0, 0])
    if gamma == lam == 1:  # the return minus the value
        close(got[0, 0, :3], 1.0 - np.array([0.5, 0.6, 0.7]))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.5, 0.0)])
def test_a_hole_in_the_mask_is_no_step(gamma, lam):
    """Tool outputs between tokens: the same as without them."""
    rng = np.random.default_rng(3)
    mask = np.array([[[1, 1, 0, 1, 0, 0, 1, 0]]], bool)
    values = rng.normal(size=mask.shape).astype(np.float32)

    def dense(x):
        return x[mask][None, None]

    rewards = np.ones((1, 1), np.float32)
    for steps in ((A.gae(gamma=gamma, lam=lam),), (A.token_returns(gamma=gamma),)):
        chain = jax.jit(A.chain(A.token_rewards(), *steps))
        got = np.asarray(chain(rewards, A.Signals(mask=mask, values=values)))
        want = chain(rewards, A.Signals(mask=dense(mask), values=dense(values)))
        close(got[mask], np.asarray(want)[0, 0], atol=1e-6)
        assert not got[~mask].any()


PPO_RETURNS = jax.jit(A.chain(A.token_rewards(), A.token_returns()))
PPO_ADVANTAGES = jax.jit(A.chain(A.token_rewards(), A.gae()))


@given(rewards=hnp.arrays(np.float32, (P, G), elements=REWARD.map(np.float32)))
@settings(max_examples=30)
def test_ppo_at_lambda_1_is_return_minus_value(rewards):
    rng = np.random.default_rng(5)
    mask = prefix(rng.integers(1, 7, (P, G)), 6)
    signals = A.Signals(mask=mask, values=rng.normal(size=mask.shape).astype(np.float32))
    rewards = np.nan_to_num(rewards)
    returns, got = (chain(rewards, signals) for chain in (PPO_RETURNS, PPO_ADVANTAGES))
    close(got, np.where(mask, returns - signals.values, 0), atol=1e-4)


def test_distillation_against_loops():
    """Lengths differ, one sample is empty, and what stands on padding has no part; the rewards are not read."""
    rng = np.random.default_rng(3)
    lengths = np.array([[3, 0, 5], [1, 4, 2]])
    student, teacher = (-5 * rng.random((2, 3, 5)).astype(np.float32) for _ in range(2))
    mask = np.arange(5) < lengths[..., None]
    want = np.zeros((2, 3, 5), np.float32)
    for i in np.ndindex(2, 3):
        for t in range(lengths[i]):
            want[(*i, t)] = teacher[(*i, t)] - student[(*i, t)]
    signals = A.Signals(
        mask=mask, behavior_logps=np.where(mask, student, NAN), ref_logps=np.where(mask, teacher, -np.inf)
    )
    for rewards in (jnp.zeros((2, 3)), jnp.array([[1.0, NAN, 0.0], [5.0, -3.0, 2.0]])):
        close(A.chain(A.distill())(rewards, signals), want)
    with pytest.raises(ValueError, match="distill.*ref_logps"):
        A.chain(A.distill())(jnp.zeros((2, 3)), A.Signals(mask=mask, behavior_logps=student))


def test_distillation_is_the_gradient_of_the_reverse_kl():
    """Every token enumerated: Σ π A ∇ log π is minus the gradient of KL(student || teacher)."""
    logits = jnp.array([0.3, -1.1, 0.7, 0.2])
    teacher = jax.nn.log_softmax(jnp.array([1.0, 0.4, -0.6, 0.1]))

    def reverse_kl(logits):
        student = jax.nn.log_softmax(logits)
        return (jnp.exp(student) * (student - teacher)).sum()

    student = jax.nn.log_softmax(logits)
    logps = jnp.stack([student, teacher])[:, None, :, None]  # a sample of one token for each entry of the vocabulary
    signals = A.Signals(mask=jnp.ones((1, 4, 1), bool), behavior_logps=logps[0], ref_logps=logps[1])
    advantages = A.chain(A.distill())(jnp.zeros((1, 4)), signals)[0, :, 0]
    policy = jax.grad(lambda x: (jnp.exp(student) * advantages * jax.nn.log_softmax(x)).sum())(logits)
    close(policy, -jax.grad(reverse_kl)(logits))
    assert float(jnp.abs(policy).max()) > 0.05
