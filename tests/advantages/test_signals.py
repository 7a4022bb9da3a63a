import advantage_oracles
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from advantage_examples import CASES, NAN, G, P, build, compiled, rewards_and_holes
from oracles import close

from grpojax import advantages as A
from grpojax.advantages.signals import need


def test_chain_goes_from_left_to_right():
    double, plus = (lambda values, signals: 2 * values), (lambda values, signals: values + 1)
    assert A.chain(double, plus)(jnp.array([[3.0]])) == 7
    assert A.chain(plus, double)(jnp.array([[3.0]])) == 8
    assert A.chain()(jnp.array([[3.0]])) == 3


@pytest.mark.parametrize("case", CASES)
def test_a_missing_group_gives_0_and_changes_no_neighbour(case):
    rewards = np.array([[1.0, 0, 0.5, 0, 0], [0, 0, 0, 0, 0], [0.25, 1, 1, 0, 0.5]], np.float32)
    alone = advantage_oracles.advantages(rewards[[0, 2]], **CASES[case])
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
    close(got, advantage_oracles.advantages(rewards, **CASES[case]))
    assert got[0, 1] == 0 and got[2, 2] == 0


def test_golden_missing_sample():
    """Taken for a reward of 0 it would be [1.5, -0.5, -0.5, -0.5]."""
    got = build(scale="group", eps=0.0)(jnp.array([[1, NAN, 0, 0]]))
    close(got, [[1.15470054, 0, -0.57735027, -0.57735027]])


def test_valid_may_be_given():
    valid = jnp.array([[True, False, True, True]])
    got = build(scale="group", eps=0.0)(jnp.array([[1.0, 1, 0, 0]]), A.Signals(valid=valid))
    close(got, [[1.15470054, 0, -0.57735027, -0.57735027]])
    close(advantage_oracles.advantages([[1, 1, 0, 0]], valid=valid, scale="group", eps=0.0), got)


def test_what_is_not_finite_is_not_valid_whatever_is_said():
    rewards = np.array([[1, 0, np.nan]], np.float32)
    got = A.chain(A.center("group"))(rewards, A.Signals(valid=np.ones((1, 3), bool)))
    close(got, [[0.5, -0.5, 0.0]])


def test_a_missing_signal_is_named():
    with pytest.raises(ValueError, match=r"to_tokens.*signals\.mask"):
        A.chain(A.to_tokens())(jnp.ones((1, 2)))
    with pytest.raises(ValueError, match=r"mine.*signals\.entropy"):
        need(A.Signals(mask=1), "entropy", "mine")


@pytest.mark.parametrize(
    ("steps", "names"),
    [
        ({"": (A.center, A.to_tokens())}, r"center is not called: give center\(\.\.\.\)"),
        ({"": (A.center(), A.to_tokens)}, "to_tokens is not called"),
        ({"reward": A.subtract_kl}, "subtract_kl is not called"),
        ({"": ("center",)}, "'center' is no transform.*center"),
    ],
)
def test_a_step_that_is_no_transform_is_named(steps, names):
    with pytest.raises(ValueError, match=names):
        A.chain(*steps.pop("", ()), **steps)


@pytest.mark.parametrize("transform", [A.center(), A.to_tokens(), A.token_returns(), A.chain(A.center())])
def test_signals_have_their_type(transform):
    with pytest.raises(ValueError, match=r"signals must be advantages\.Signals, got dict"):
        transform(jnp.ones((1, 2)), {"mask": jnp.ones((1, 2, 3), bool)})


def test_a_transform_with_a_wrong_result_is_named_and_not_the_one_after_it():
    mask = jnp.ones((1, 2, 3), bool)

    def mine(result):
        return lambda values, signals: result

    for result, says in (
        (None, "its result is None"),
        (jnp.ones((1, 3)), r"its result has shape \(1, 3\)"),
        (jnp.ones((1, 2, 4)), r"its result has shape \(1, 2, 4\)"),
    ):
        for given in ({"": (mine(result), A.center())}, {"": (A.center(),), "reward": mine(result)}):
            with pytest.raises(ValueError, match=f"mine.*{says}"):
                A.chain(*given.pop(""), **given)(jnp.ones((1, 2)), A.Signals(mask=mask))


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
    gradient = jax.grad(lambda r: (compiled(case)(r) * np.arange(1.0, G + 1)[None]).sum())(rewards_and_holes())
    assert not np.asarray(gradient).any()
