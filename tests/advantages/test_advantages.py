import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from oracles import close

from grpojax import advantages as A

P, G, T = 3, 5, 7
NAN = float("nan")

# How a chain of `center` and `scale` is put together; what is left out is the oracle's default.
CASES = {
    "as it comes": {"center": "none"},
    "mean": {},
    "leave one out": {"leave_one_out": True},
    "std, ddof 0": {"scale": "group", "ddof": 0, "eps": 1e-6},
    "std, ddof 1": {"scale": "group"},
    "std of advantages": {"scale": "group", "of": "advantages"},
    "std without a mean": {"center": "none", "scale": "group"},
    "batch mean": {"center": "batch"},
    "batch std of rewards": {"scale": "batch", "ddof": 0},
    "batch std of advantages": {"scale": "batch", "of": "advantages"},
    "batch mean and std": {"center": "batch", "scale": "batch", "leave_one_out": True},
}


def build(center="group", leave_one_out=False, scale="none", of="rewards", ddof=1, eps=1e-4):
    return A.chain(A.center(center, leave_one_out=leave_one_out), A.scale(scale, of=of, ddof=ddof, eps=eps))


@functools.cache
def compiled(case):
    return jax.jit(build(**CASES[case]))


def rewards_and_holes(seed=0):
    """Rewards with a missing one, a group of equal ones and none that is missing whole."""
    rewards = np.random.default_rng(seed).integers(0, 5, (P, G)).astype(np.float32) / 4
    rewards[1] = 0.1
    rewards[2, 3] = NAN
    return rewards


# rewards: the mean alone; leave one out; std with ddof 0; with ddof 1; with ddof 1 and eps 1e-4. A broken
# version gives the number of another column: with the other ddof, or with the mean in place of leave one out.
PINS = {
    "one of four": (
        [1, 0, 0, 0],
        [0.75, -0.25, -0.25, -0.25],
        [1, -1 / 3, -1 / 3, -1 / 3],
        [1.73205081, -0.57735027, -0.57735027, -0.57735027],
        [1.5, -0.5, -0.5, -0.5],
        [1.49970006, -0.49990002, -0.49990002, -0.49990002],
    ),
    "one of eight": (
        [1] + [0] * 7,
        [0.875] + [-0.125] * 7,
        [1] + [-1 / 7] * 7,
        [2.64575131] + [-0.37796447] * 7,
        [2.47487373] + [-0.35355339] * 7,
        [2.47417393] + [-0.35345342] * 7,
    ),
    "two of four": (
        [1, 1, 0, 0],
        [0.5, 0.5, -0.5, -0.5],
        [2 / 3, 2 / 3, -2 / 3, -2 / 3],
        [1, 1, -1, -1],
        [0.8660254, 0.8660254, -0.8660254, -0.8660254],
        [0.86587543, 0.86587543, -0.86587543, -0.86587543],
    ),
    "graded": (
        [0.5, 1, 0, 0.25],
        [0.0625, 0.5625, -0.4375, -0.1875],
        [0.25 / 3, 2.25 / 3, -1.75 / 3, -0.75 / 3],
        [0.16903085, 1.52127766, -1.18321596, -0.50709255],
        [0.14638501, 1.3174651, -1.02469508, -0.43915503],
        [0.14635073, 1.3171566, -1.02445513, -0.4390522],
    ),
    "a pair": (
        [1, 0],
        [0.5, -0.5],
        [1, -1],
        [1, -1],
        [0.70710678, -0.70710678],
        [0.70700679, -0.70700679],
    ),
}
COLUMNS = {
    "mean": {},
    "leave one out": {"leave_one_out": True},
    "ddof 0": {"scale": "group", "ddof": 0, "eps": 0.0},
    "ddof 1": {"scale": "group", "ddof": 1, "eps": 0.0},
    "ddof 1, eps 1e-4": {"scale": "group"},
}


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("row", PINS)
def test_golden(row, column):
    rewards, *wanted = PINS[row]
    want = wanted[list(COLUMNS).index(column)]
    close(build(**COLUMNS[column])(np.array([rewards], np.float32))[0], want)
    close(oracles.advantages([rewards], **COLUMNS[column])[0], want)


# The standard deviation over the batch, of raw rewards or of centred ones; either is the broken other.
@pytest.mark.parametrize(
    ("rewards", "of", "ddof", "want"),
    [
        ([[1, 0, 0, 0], [1, 1, 1, 0]], "rewards", 0, [[1.5, -0.5, -0.5, -0.5], [0.5, 0.5, 0.5, -1.5]]),
        (
            [[1, 0, 0, 0], [1, 1, 1, 0]],
            "rewards",
            1,
            [
                [1.40312152, -0.46770717, -0.46770717, -0.46770717],
                [0.46770717, 0.46770717, 0.46770717, -1.40312152],
            ],
        ),
        (
            [[1, 0, 0, 0], [1, 1, 1, 0]],
            "advantages",
            0,
            [[1.7320508, -0.5773503, -0.5773503, -0.5773503], [0.5773503, 0.5773503, 0.5773503, -1.7320508]],
        ),
        (
            [[1, 1, 1, 1], [0, 0, 0, 1]],
            "rewards",
            0,
            [[0, 0, 0, 0], [-0.51639778, -0.51639778, -0.51639778, 1.54919334]],
        ),
        (
            [[1, 1, 1, 1], [0, 0, 0, 1]],
            "advantages",
            0,
            [[0, 0, 0, 0], [-0.81649658, -0.81649658, -0.81649658, 2.44948974]],
        ),
    ],
)
def test_golden_batch_std(rewards, of, ddof, want):
    close(jax.jit(build(scale="batch", of=of, ddof=ddof, eps=0.0))(jnp.array(rewards)), want)


def test_the_group_is_the_second_axis():
    """Statistics over the prompts instead would be of equal numbers here, and all advantages 0."""
    grpo = build(scale="group", ddof=0, eps=0.0)
    close(grpo(jnp.array([[1, 0, 0], [1, 0, 0]])), [[1.41421356, -0.70710678, -0.70710678]] * 2)


@pytest.mark.parametrize(
    "case",
    ["mean", "leave one out", "std, ddof 1", "std of advantages", "std without a mean", "batch mean and std"],
)
def test_equal_rewards_give_exactly_0(case):
    """In float32 the mean of 63 times 0.95 is not 0.95. Told by ``std == 0``, the worst advantage of these
    groups is 0.99; with a variance that cancels, E[x²] - E[x]², it is 358."""
    sizes = np.arange(2, 65)
    groups = np.where(np.arange(64) < sizes[:, None], np.float32(1), np.float32(NAN))
    groups = np.concatenate([number * groups for number in (0.1, 0.95, -0.3, 1.0)])
    each = jax.jit(jax.vmap(build(**{**CASES[case], "eps": 1e-9})))  # each group a batch of its own
    got = np.asarray(each(groups[:, None]))
    assert got.shape == (252, 1, 64) and not got.any()


@pytest.mark.parametrize("n", [2, 3, 7, 63])
def test_equal_rewards_give_exactly_0_without_a_mask(n):
    f = jax.jit(build(scale="group", eps=1e-9))
    assert not np.asarray(f(np.full((1, n), 0.1))).any() and not np.asarray(f(np.full((1, n), 0.95))).any()


@pytest.mark.parametrize("case", [c for c in CASES if c != "as it comes"])
def test_a_group_of_one_gives_0(case):
    """With ``std := 1`` where there is none, and a mean of 0, it would be the reward: 0.7."""
    rewards = np.full((P, G), NAN, np.float32)
    rewards[1, 2] = 0.7
    assert not np.asarray(compiled(case)(rewards)).any()


@pytest.mark.parametrize("rewards", [[[0.7]], [[NAN, 0.7, NAN]]])
def test_a_group_of_one_may_keep_its_reward(rewards):
    """As in verl; in a group of two the option does nothing."""
    chain = A.chain(A.center(singleton="reward"), A.scale(singleton="reward"))
    close(chain(jnp.array(rewards)), 0.7 * np.isfinite(rewards))
    for two in (chain, A.chain(A.center(singleton="reward")), A.chain(A.scale(singleton="reward"))):
        close(two(jnp.array([[0.7, 0.7], [NAN, NAN]])), 0)
    close(chain(jnp.array([[1, 0]])), [[0.70700679, -0.70700679]])
    for make in (A.center, A.scale):
        with pytest.raises(ValueError, match="'one'.*'reward'"):
            make(singleton="one")


def test_an_axis_of_one_gives_0():
    assert compiled("std, ddof 1")(np.array([[0.7]])) == 0


@pytest.mark.parametrize("case", CASES)
def test_a_missing_group_gives_0_and_changes_no_neighbour(case):
    rewards = np.array([[1.0, 0, 0.5, 0, 0], [0, 0, 0, 0, 0], [0.25, 1, 1, 0, 0.5]], np.float32)
    alone = oracles.advantages(rewards[[0, 2]], **CASES[case])
    for missing in (NAN, np.inf, -np.inf):
        rewards[1] = missing
        got = np.asarray(compiled(case)(rewards))
        close(got[[0, 2]], alone)
        assert not got[1].any()
    assert not np.asarray(compiled(case)(np.full((P, G), np.float32(NAN)))).any()  # and a batch of nothing


@pytest.mark.parametrize("case", CASES)
def test_a_missing_sample_counts_nowhere(case):
    rewards = np.array([[1, NAN, 0, 0, 0.25], [0, 1, 1, 0, 1], [0.5, 0, NAN, NAN, 1]], np.float32)
    got = np.asarray(compiled(case)(rewards))
    close(got, oracles.advantages(rewards, **CASES[case]))
    assert got[0, 1] == 0 and got[2, 2] == 0


def test_golden_missing_sample():
    """Taken for a reward of 0 it would be [1.5, -0.5, -0.5, -0.5]."""
    got = build(scale="group", eps=0.0)(jnp.array([[1, NAN, 0, 0]]))
    close(got, [[1.15470054, 0, -0.57735027, -0.57735027]])


def test_valid_may_be_given():
    valid = jnp.array([[True, False, True, True]])
    got = build(scale="group", eps=0.0)(jnp.array([[1.0, 1, 0, 0]]), A.Signals(valid=valid))
    close(got, [[1.15470054, 0, -0.57735027, -0.57735027]])
    close(oracles.advantages([[1, 1, 0, 0]], valid=valid, scale="group", eps=0.0), got)


def test_the_deviation_is_of_the_raw_rewards():
    """`scale` reads signals.rewards, which need not be what a chain starts from; of the values gives 2.31."""
    rewards = jnp.array([[4.0, 0, 0, 0]])
    got = A.chain(A.scale("group", ddof=0, eps=0.0))(rewards / 2, A.Signals(rewards=rewards))
    close(got, [[2 / 1.73205081, 0, 0, 0]])


def test_chain_goes_from_left_to_right():
    double, plus = (lambda values, signals: 2 * values), (lambda values, signals: values + 1)
    assert A.chain(double, plus)(jnp.array([[3.0]])) == 7
    assert A.chain(plus, double)(jnp.array([[3.0]])) == 8
    assert A.chain()(jnp.array([[3.0]])) == 3


def test_to_tokens():
    mask = np.arange(3) < np.array([[3, 1], [0, 2]])[..., None]
    got = A.chain(A.center(), A.to_tokens())(jnp.array([[1, 0], [0, 1]]), A.Signals(mask=mask))
    close(got, [[[0.5, 0.5, 0.5], [-0.5, 0, 0]], [[0, 0, 0], [0.5, 0.5, 0]]])
    got = A.chain(A.to_tokens())(jnp.array([[NAN, 2], [1, 1]]), A.Signals(mask=mask))
    close(got, [[[0, 0, 0], [2, 0, 0]], [[0, 0, 0], [1, 1, 0]]])


def test_a_missing_signal_is_named():
    with pytest.raises(ValueError, match=r"to_tokens.*signals\.mask"):
        A.chain(A.to_tokens())(jnp.ones((1, 2)))
    with pytest.raises(ValueError, match=r"mine.*signals\.entropy"):
        A.need(A.Signals(mask=1), "entropy", "mine")


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: A.center("prompt"), r"center.*'prompt'.*'group'"),
        (lambda: A.scale("prompt"), r"scale.*'prompt'.*'group'"),
        (lambda: A.scale(of="values"), r"scale.*'values'.*'rewards'"),
    ],
)
def test_unknown_choices_are_refused(make, names):
    with pytest.raises(ValueError, match=names):
        make()


REWARD = st.sampled_from([0.0, 0.1, 0.95, 1.0, NAN]) | st.integers(-200, 200).map(lambda n: n / 100)


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=25, deadline=None)
@given(rewards=hnp.arrays(np.float32, (P, G), elements=REWARD.map(np.float32)))
def test_oracle(case, rewards):
    close(compiled(case)(rewards), oracles.advantages(rewards, **CASES[case]), atol=3e-4, rtol=3e-4)


@pytest.mark.parametrize("case", CASES)
def test_permutations(case):
    rewards, rng = rewards_and_holes(), np.random.default_rng(1)
    prompts, samples = rng.permutation(P), rng.permutation(G)
    f = compiled(case)
    close(f(rewards[prompts]), np.asarray(f(rewards))[prompts])
    close(f(rewards[:, samples]), np.asarray(f(rewards))[:, samples])


@pytest.mark.parametrize("case", CASES)
def test_vmap_and_bfloat16(case):
    many = np.stack([rewards_and_holes(seed) for seed in range(2)])
    low = jnp.asarray(many, jnp.bfloat16)
    got = jax.jit(jax.vmap(build(**CASES[case])))(low)
    assert got.dtype == jnp.float32
    close(got, [compiled(case)(x) for x in np.asarray(low, np.float32)])


def test_integer_rewards():
    got = build()(jnp.array([[1, 0, 0]]))
    assert got.dtype == jnp.float32 and got[0, 0] > 0.66


@pytest.mark.parametrize("case", CASES)
def test_advantages_are_constant_for_the_gradient(case):
    """Without stop_gradient, the standard deviation of equal rewards has a NaN gradient."""
    loss = lambda r: (compiled(case)(r) * np.arange(1.0, G + 1)[None]).sum()  # noqa: E731
    gradient = jax.grad(loss)(rewards_and_holes())
    assert not np.asarray(gradient).any()


# --- other baselines and scales

EIGHT = [[1, 0, 0, 0], [1, 1, 1, 0]]
MASK = np.arange(T) < np.array([[7, 2, 5, 1, 3], [1, 1, 4, 0, 7], [2, 6, 3, 5, 4]])[..., None]
LENGTHS = MASK.sum(-1)


def run(*transforms, rewards, reward=None, **signals):
    """A chain on rewards, compiled."""
    signals = A.Signals(**{name: jnp.asarray(x) for name, x in signals.items()})
    return jax.jit(A.chain(*transforms, reward=reward))(jnp.asarray(rewards, jnp.float32), signals)


def prefix(lengths, size):
    return np.arange(size) < np.asarray(lengths)[..., None]


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
    got = A.chain(A.virtual_best(**options))(jnp.array([rewards]))
    close(got[0], want, atol=2e-6)
    close(oracles.virtual_best([rewards], **options)[0], want, atol=2e-6)


@pytest.mark.parametrize("best", [0.1, 0.95])
def test_virtual_best_of_a_perfect_group_is_exactly_0(best):
    """In float32 their mean is not the best reward: told by ``std == 0``, some of these groups have advantages."""
    groups = np.where(np.arange(64) < np.arange(2, 65)[:, None], np.float32(best), np.float32(NAN))
    assert not np.asarray(A.chain(A.virtual_best(best, eps=1e-9))(groups)).any()


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
    ],
)
def test_golden_pass_at_k(n, right, k, high, low):
    rewards = [[1.0] * right + [0.0] * (n - right)]
    got = A.chain(A.pass_at_k(k))(jnp.array(rewards))[0]
    close(got, [high] * right + [low] * (n - right))
    close(got.sum(), 0)
    close(oracles.pass_at_k(rewards, k)[0], got)


def test_pass_at_1_is_grpo():
    rewards = np.random.default_rng(0).integers(0, 2, (P, G))
    close(run(A.pass_at_k(1), rewards=rewards), compiled("std, ddof 0")(rewards.astype(np.float32)), atol=1e-4)
    for k, names in ((0, "k=0"), (G + 1, "k=6.*5 samples")):
        with pytest.raises(ValueError, match=names):
            A.chain(A.pass_at_k(k))(jnp.ones((P, G)))


def test_golden_best_margin():
    """The second best in place of the mean: minus the mean it would be 0.475."""
    close(A.chain(A.best_margin())(jnp.array([[0.2, 0.9, 0.5, 0.1]])), [[0, 0.4, 0, 0]])
    close(A.chain(A.best_margin(scaled=True))(jnp.array([[0.2, 0.9, 0.5, 0.1]])), [[0, 0.4 / 0.35939764, 0, 0]],
          atol=1e-5)  # fmt: skip
    close(A.chain(A.best_margin())(jnp.array([[0.9, 0.9, 0.5], [NAN, 0.3, NAN]])), np.zeros((2, 3)))
    assert A.chain(A.best_margin())(jnp.array([[0.7]])) == 0


def test_golden_center_by_length():
    """Its baseline is 0.5 where the plain mean is too, and 0.75 where long samples are right."""
    lengths = jnp.array([[2, 4, 6, 8], [1, 1, 3, 3]])
    got = run(A.center_by_length(), rewards=[[1, 0, 0, 1], [0, 0, 1, 1]], lengths=lengths)
    close(got, [[0.5, -0.5, -0.5, 0.5], [-0.75, -0.75, 0.25, 0.25]])
    close(oracles.center_by_length([[1, 0, 0, 1], [0, 0, 1, 1]], lengths), got)
    close(run(A.center_by_length(), rewards=[[1, 0]], lengths=[[0, 0]]), 0)


def test_golden_rescale_live():
    """Half of the batch has equal rewards: twice the advantage. Alone it is [0.75, -0.25, ...]."""
    got = run(A.center(), A.rescale_live(), rewards=[[1, 0, 0, 0], [1, 1, 1, 1]])
    close(got, [[1.5, -0.5, -0.5, -0.5], [0, 0, 0, 0]])
    close(run(A.center(), A.rescale_live(), rewards=[[1, 1], [0, 0]]), 0)


def test_golden_subtract_greedy():
    """Centred by the group it would be [0.5, -0.5]."""
    close(run(A.subtract_greedy(), rewards=[[1, 0], [1, 0]], greedy_rewards=[1.0, NAN]), [[0, -1], [0, 0]])
    close(run(A.subtract_greedy(), rewards=[[1.0]], greedy_rewards=[0.25]), [[0.75]])


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


# --- on tokens


# Sequence-weighted, and with tokens of these lengths; either is the other broken.
@pytest.mark.parametrize(
    ("by_tokens", "want"),
    [
        (False, [[1.7320508] + [-0.5773503] * 3, [0.5773503] * 3 + [-1.7320508]]),
        (True, [[1.99323179] + [-0.2847474] * 3, [0.8542422] * 3 + [-1.42373699]]),
    ],
)
def test_golden_whiten(by_tokens, want):
    lengths = np.array([[2, 4, 4, 2], [1, 3, 3, 5]])
    mask = prefix(lengths, 5)
    steps = [A.whiten(), A.to_tokens()]
    got = run(A.center(), *(steps[::-1] if by_tokens else steps), rewards=EIGHT, mask=mask)
    close(got[..., 0], want, atol=2e-6)
    assert not np.asarray(got)[~mask].any()
    centred = oracles.advantages(EIGHT)
    if by_tokens:
        close(oracles.whiten(np.where(mask, centred[..., None], 0), mask), got)
    else:
        close(oracles.whiten(centred, np.ones((2, 4), bool)), got[..., 0])


@pytest.mark.parametrize("number", [0.1, 0.95])
def test_whiten_of_equal_numbers_is_0(number):
    for rewards in (np.full((P, G), number), np.full((P, G), NAN), [[number, NAN]]):
        assert not np.asarray(A.chain(A.whiten())(jnp.asarray(rewards, jnp.float32))).any()


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


def test_floor():
    close(run(A.center(), A.floor(-0.1), rewards=[[1, 0], [0, 0]]), [[0.5, -0.1], [0, 0]])
    with pytest.raises(ValueError, match=r"0\.1"):
        A.floor(0.1)


def test_token_transforms_say_where_they_belong():
    mask = jnp.ones((1, 2, 3), bool)
    for steps, names in (
        ((A.to_tokens(), A.center()), r"center.*\[P, G\].*\(1, 2, 3\).*before to_tokens"),
        ((A.to_tokens(), A.scale()), "scale.*before"),
        ((A.to_tokens(), A.to_tokens()), "to_tokens.*before"),
        ((A.token_returns(),), r"token_returns.*\[P, G, T\].*after"),
        ((A.gae(),), "gae.*signals.values"),
    ):
        with pytest.raises(ValueError, match=names):
            A.chain(*steps)(jnp.ones((1, 2)), A.Signals(mask=mask))


# --- all of these against loops

RNG = np.random.default_rng(7)
LOGPS = -RNG.exponential(size=MASK.shape).astype(np.float32)
REF = -RNG.exponential(size=MASK.shape).astype(np.float32)
VALUES = RNG.normal(size=MASK.shape).astype(np.float32)
SPARSE = np.where(RNG.random(MASK.shape) < 0.4, RNG.random(MASK.shape), NAN).astype(np.float32)
ALL = A.Signals(lengths=LENGTHS, mask=MASK, behavior_logps=LOGPS, ref_logps=REF, values=VALUES, step_rewards=SPARSE)
ORACLES = {
    "center_by_length": (A.chain(A.center_by_length()), lambda r: oracles.center_by_length(r, LENGTHS)),
    "gpg": (A.chain(A.center(), A.rescale_live()), oracles.gpg),
    "virtual_best": (A.chain(A.virtual_best(2.0, 2)), lambda r: oracles.virtual_best(r, 2.0, 2)),
    "pass_at_k": (A.chain(A.pass_at_k(3, success=0.5)), lambda r: oracles.pass_at_k(r, 3, success=0.5)),
    "best_margin": (A.chain(A.best_margin()), oracles.best_margin),
    "process_rewards": (A.chain(A.process_rewards()), lambda r: oracles.process_rewards(r, SPARSE, MASK)),
    "returns": (
        A.chain(A.token_rewards(kl_coef=0.1), A.token_returns(gamma=0.9)),
        lambda r: oracles.token_returns(r, MASK, LOGPS - REF, 0.1, 0.9),
    ),
    "gae": (
        A.chain(A.token_rewards(), A.gae(gamma=0.99, lam=0.9)),
        lambda r: oracles.token_returns(r, MASK, gamma=0.99, values=VALUES, lam=0.9),
    ),
    "whiten": (
        A.chain(A.to_tokens(), A.whiten(ddof=1, eps=1e-4)),
        lambda r: oracles.whiten(
            np.where(MASK, np.nan_to_num(r)[..., None], 0), MASK & np.isfinite(r)[..., None], 1, 1e-4
        ),
    ),
}


@functools.cache
def compiled_chain(name):
    return jax.jit(ORACLES[name][0])


@pytest.mark.parametrize("name", ORACLES)
@settings(max_examples=12, deadline=None)
@given(rewards=hnp.arrays(np.float32, (P, G), elements=REWARD.map(np.float32)))
def test_further_oracles(name, rewards):
    close(compiled_chain(name)(rewards, ALL), ORACLES[name][1](rewards), atol=3e-4, rtol=3e-4)


# --- corner cases


@pytest.mark.parametrize("n", [5, 8, 16, 64])
def test_a_reward_at_the_mean_has_no_sign(n):
    """Graded rewards k/10: what rounding leaves of r - mean r would otherwise be a sign, and depend on the order."""
    rng = np.random.default_rng(n)
    tenths = rng.integers(0, 11, (500, n))
    rewards = (tenths / 10).astype(np.float32)
    got = np.sign(A.chain(A.center("group"))(rewards))
    np.testing.assert_array_equal(got, np.sign(tenths * n - tenths.sum(1, keepdims=True)))
    order = rng.permutation(n)
    np.testing.assert_array_equal(np.sign(A.chain(A.center("group"))(rewards[:, order])), got[:, order])


def test_a_common_offset_costs_no_digits():
    """Differences of 1 at 10^6: the mean of the sum in float32 is off by up to 0.06."""
    rewards = np.float32(1e6) + np.array([[0, 1, 1, 0, 1]], np.float32)
    np.testing.assert_allclose(A.chain(A.center("group"))(rewards), [[-0.6, 0.4, 0.4, -0.6, 0.4]], atol=1e-6)
    np.testing.assert_array_equal(A.chain(A.center("group"))(np.full((1, 3), -1e30, np.float32)), np.zeros((1, 3)))


@pytest.mark.parametrize("ddof", [1, 2, 3])
def test_no_more_samples_than_ddof_is_no_deviation(ddof):
    """0, where dividing by eps alone would give 5000."""
    rewards = np.eye(1, ddof, dtype=np.float32) if ddof > 1 else np.ones((1, 1), np.float32)
    for eps in (0.0, 1e-4):
        assert not A.chain(A.center("group"), A.scale("group", ddof=ddof, eps=eps))(rewards).any()
        assert not A.chain(A.whiten(ddof=ddof, eps=eps))(rewards).any()


def test_the_deviation_of_live_groups_only():
    rewards = np.array([[1, 1, 1, 1], [0, 0, 0, 1]], np.float32)
    options = {"of": "advantages", "ddof": 0, "eps": 0.0}
    diluted = A.chain(A.center("group"), A.scale("batch", **options))(rewards)
    close(diluted[1], [-0.81649658] * 3 + [2.44948974])
    close(
        A.chain(A.center("group"), A.scale("batch", live_only=True, **options))(rewards)[1],
        [-0.57735027] * 3 + [1.73205081],
    )
    with pytest.raises(ValueError, match="live_only"):
        A.scale("group", live_only=True)


def test_rescale_live_of_dead_groups_is_0():
    assert not A.chain(A.rescale_live())(np.ones((2, 3), np.float32)).any()
    assert not A.chain(A.center("batch"), A.rescale_live())(np.array([[1, 1], [0, 0]], np.float32)).any()


def test_what_is_not_finite_is_not_valid_whatever_is_said():
    rewards = np.array([[1, 0, np.nan]], np.float32)
    got = A.chain(A.center("group"))(rewards, A.Signals(valid=np.ones((1, 3), bool)))
    close(got, [[0.5, -0.5, 0.0]])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.5, 0.0)])
def test_a_hole_in_the_mask_is_no_step(gamma, lam):
    """Tool outputs between tokens: the same as without them."""
    rng = np.random.default_rng(3)
    mask = np.array([[[1, 1, 0, 1, 0, 0, 1, 0]]], bool)
    values = rng.normal(size=mask.shape).astype(np.float32)
    dense = lambda x: x[mask][None, None]  # noqa: E731
    rewards = np.ones((1, 1), np.float32)
    for steps in ((A.gae(gamma=gamma, lam=lam),), (A.token_returns(gamma=gamma),)):
        chain = A.chain(A.token_rewards(), *steps)
        got = np.asarray(chain(rewards, A.Signals(mask=mask, values=values)))
        want = chain(rewards, A.Signals(mask=dense(mask), values=dense(values)))
        close(got[mask], np.asarray(want)[0, 0], atol=1e-6)
        assert not got[~mask].any()


@given(rewards=hnp.arrays(np.float32, (P, G), elements=REWARD.map(np.float32)))
@settings(max_examples=30, deadline=None)
def test_ppo_at_lambda_1_is_return_minus_value(rewards):
    rng = np.random.default_rng(5)
    mask = np.arange(6) < rng.integers(1, 7, (P, G))[..., None]
    signals = A.Signals(mask=mask, values=rng.normal(size=mask.shape).astype(np.float32))
    rewards = np.nan_to_num(rewards)
    returns = A.chain(A.token_rewards(), A.token_returns())(rewards, signals)
    got = A.chain(A.token_rewards(), A.gae())(rewards, signals)
    close(got, np.where(mask, returns - signals.values, 0), atol=1e-4)


def test_nothing_to_do_takes_no_options():
    with pytest.raises(ValueError, match="leave_one_out"):
        A.center("none", leave_one_out=True)
    with pytest.raises(ValueError, match="of='bogus'"):
        A.scale("none", of="bogus")
