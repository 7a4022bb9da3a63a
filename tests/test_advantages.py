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
