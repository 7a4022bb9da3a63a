import functools

import advantage_oracles
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from advantage_examples import CASES, NAN, REWARD, G, P, build, compiled, rewards_and_holes, run
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp
from oracles import close
from ragged import prefix

from grpojax import advantages as A

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


@functools.cache
def column_of(name):
    return jax.jit(build(**COLUMNS[name]))


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("row", PINS)
def test_golden(row, column):
    rewards, *wanted = PINS[row]
    want = wanted[list(COLUMNS).index(column)]
    padded = np.full((1, 8), NAN, np.float32)  # of one shape, for one program
    padded[0, : len(rewards)] = rewards
    close(column_of(column)(padded)[0, : len(rewards)], want)
    close(advantage_oracles.advantages([rewards], **COLUMNS[column])[0], want)


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
    grpo = jax.jit(build(scale="group", ddof=0, eps=0.0))
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
    steps = A.center(singleton="reward"), A.scale(singleton="reward")
    close(run(*steps, rewards=rewards), 0.7 * np.isfinite(rewards))
    for two in (steps, steps[:1], steps[1:]):
        close(run(*two, rewards=[[0.7, 0.7], [NAN, NAN]]), 0)
    close(run(*steps, rewards=[[1, 0]]), [[0.70700679, -0.70700679]])
    for make in (A.center, A.scale):
        with pytest.raises(ValueError, match="'one'.*'reward'"):
            make(singleton="one")


def test_an_axis_of_one_gives_0():
    assert compiled("std, ddof 1")(np.array([[0.7]])) == 0


def test_the_deviation_is_of_the_raw_rewards():
    """`scale` reads signals.rewards, which need not be what a chain starts from; of the values gives 2.31."""
    rewards = np.array([[4.0, 0, 0, 0]], np.float32)
    got = jax.jit(A.chain(A.scale("group", ddof=0, eps=0.0)))(rewards / 2, A.Signals(rewards=rewards))
    close(got, [[2 / 1.73205081, 0, 0, 0]])


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


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=25)
@given(rewards=hnp.arrays(np.float32, (P, G), elements=REWARD.map(np.float32)))
def test_oracle(case, rewards):
    close(compiled(case)(rewards), advantage_oracles.advantages(rewards, **CASES[case]), atol=3e-4, rtol=3e-4)


@pytest.mark.parametrize("case", CASES)
def test_permutations(case):
    rewards, rng = rewards_and_holes(), np.random.default_rng(1)
    prompts, samples = rng.permutation(P), rng.permutation(G)
    f = compiled(case)
    close(f(rewards[prompts]), np.asarray(f(rewards))[prompts])
    close(f(rewards[:, samples]), np.asarray(f(rewards))[:, samples])


EIGHT = [[1, 0, 0, 0], [1, 1, 1, 0]]


def test_golden_center_by_length():
    """Its baseline is 0.5 where the plain mean is too, and 0.75 where long samples are right."""
    lengths = jnp.array([[2, 4, 6, 8], [1, 1, 3, 3]])
    got = run(A.center_by_length(), rewards=[[1, 0, 0, 1], [0, 0, 1, 1]], lengths=lengths)
    close(got, [[0.5, -0.5, -0.5, 0.5], [-0.75, -0.75, 0.25, 0.25]])
    close(advantage_oracles.center_by_length([[1, 0, 0, 1], [0, 0, 1, 1]], lengths), got)
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
    centred = advantage_oracles.advantages(EIGHT)
    if by_tokens:
        close(advantage_oracles.whiten(np.where(mask, centred[..., None], 0), mask), got)
    else:
        close(advantage_oracles.whiten(centred, np.ones((2, 4), bool)), got[..., 0])


@pytest.mark.parametrize("number", [0.1, 0.95])
def test_whiten_of_equal_numbers_is_0(number):
    white = jax.jit(A.chain(A.whiten()))
    for rewards in (np.full((P, G), number), np.full((P, G), NAN), [[number, NAN]]):
        assert not np.asarray(white(np.asarray(rewards, np.float32))).any()


def test_floor():
    close(run(A.center(), A.floor(-0.1), rewards=[[1, 0], [0, 0]]), [[0.5, -0.1], [0, 0]])
    with pytest.raises(ValueError, match=r"0\.1"):
        A.floor(0.1)


@pytest.mark.parametrize("n", [5, 8, 16, 64])
def test_a_reward_at_the_mean_has_no_sign(n):
    """Graded rewards k/10: what rounding leaves of r - mean r would otherwise be a sign, and depend on the order."""
    rng = np.random.default_rng(n)
    tenths = rng.integers(0, 11, (500, n))
    rewards = (tenths / 10).astype(np.float32)
    center = jax.jit(A.chain(A.center("group")))
    got = np.sign(center(rewards))
    np.testing.assert_array_equal(got, np.sign(tenths * n - tenths.sum(1, keepdims=True)))
    order = rng.permutation(n)
    np.testing.assert_array_equal(np.sign(center(rewards[:, order])), got[:, order])


def test_a_common_offset_costs_no_digits():
    """Differences of 1 at 10^6: the mean of the sum in float32 is off by up to 0.06."""
    rewards = np.float32(1e6) + np.array([[0, 1, 1, 0, 1]], np.float32)
    np.testing.assert_allclose(A.chain(A.center("group"))(rewards), [[-0.6, 0.4, 0.4, -0.6, 0.4]], atol=1e-6)
    np.testing.assert_array_equal(A.chain(A.center("group"))(np.full((1, 3), -1e30, np.float32)), np.zeros((1, 3)))


@pytest.mark.parametrize(("offset", "rewards"), [(1e6, [0, 0.125, 0.25, 0.375]), (2**24, [0, 0, 2, 4])])
def test_differences_that_a_large_offset_leaves_are_no_rounding(offset, rewards):
    """What counts is a part of the spread: cut by the offset's last digits, the first would be -.19, 0, 0, .19."""
    rewards = np.array([rewards], np.float32)
    want = rewards - rewards.mean()
    np.testing.assert_array_equal(A.chain(A.center("group"))(np.float32(offset) + rewards), want)


@pytest.mark.parametrize("ddof", [1, 2, 3])
def test_no_more_samples_than_ddof_is_no_deviation(ddof):
    """0, where dividing by eps alone would give 5000."""
    rewards = np.eye(1, ddof, dtype=np.float32) if ddof > 1 else np.ones((1, 1), np.float32)
    for eps in (0.0, 1e-4):
        assert not run(A.center("group"), A.scale("group", ddof=ddof, eps=eps), rewards=rewards).any()
        assert not run(A.whiten(ddof=ddof, eps=eps), rewards=rewards).any()


def test_the_deviation_of_live_groups_only():
    rewards = np.array([[1, 1, 1, 1], [0, 0, 0, 1]], np.float32)
    options = {"of": "advantages", "ddof": 0, "eps": 0.0}
    diluted = run(A.center("group"), A.scale("batch", **options), rewards=rewards)
    close(diluted[1], [-0.81649658] * 3 + [2.44948974])
    close(
        run(A.center("group"), A.scale("batch", live_only=True, **options), rewards=rewards)[1],
        [-0.57735027] * 3 + [1.73205081],
    )
    with pytest.raises(ValueError, match="live_only"):
        A.scale("group", live_only=True)


def test_rescale_live_of_dead_groups_is_0():
    assert not run(A.rescale_live(), rewards=np.ones((2, 3))).any()
    assert not run(A.center("batch"), A.rescale_live(), rewards=[[1, 1], [0, 0]]).any()


def test_nothing_to_do_takes_no_options():
    with pytest.raises(ValueError, match="leave_one_out"):
        A.center("none", leave_one_out=True)
    with pytest.raises(ValueError, match="of='bogus'"):
        A.scale("none", of="bogus")
