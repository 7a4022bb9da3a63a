import functools

import advantage_oracles
import allocation_oracles
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import close
from ragged import NAN, SEEDS, G, P, T, many, scores

from grpojax import advantages as A
from grpojax import allocation as X

# --- dynamic sampling

ACCURACY = jnp.array(
    [[0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0], [NAN, 0, 0, NAN], [NAN] * 4, [NAN, 1, 0, 0]]
)


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, [0, 0, 1, 1, 0, 0, 1]),  # DAPO
        ({"above": 0.0, "below": 1.0}, [0, 0, 1, 1, 0, 0, 1]),  # the same by the pass rate
        ({"below": 1.0}, [1, 0, 1, 1, 1, 0, 1]),  # NGRPO
        ({"above": 0.0, "below": 0.5}, [0, 0, 1, 0, 0, 0, 1]),
        ({"above": 0.0}, [0, 1, 1, 1, 0, 0, 1]),
        ({"success": 2.0}, [0] * 7),
    ],
)
def test_golden_keep(options, want):
    keep = jax.jit(functools.partial(X.keep_prompts, on="accuracy", **options))
    np.testing.assert_array_equal(keep({"accuracy": ACCURACY}), want)


def test_the_filter_looks_at_the_metric_it_names():
    """By the total reward, a format bonus would keep the group in which all fail."""
    metrics = {"accuracy": jnp.zeros((1, 4)), "reward": jnp.array([[1.0, 0, 1.0, 0]])}
    assert not X.keep_prompts(metrics, "accuracy")[0] and X.keep_prompts(metrics, "reward")[0]
    with pytest.raises(ValueError, match="'acc'.*accuracy, reward"):
        X.keep_prompts(metrics, "acc")


def test_a_graded_metric_is_filtered_by_variance():
    """By a pass rate at 1, the second group would be dropped: nobody passes."""
    metrics = {
        "likeness": np.array([[0.1] * 3, [0.2, 0.9, 0.4], [NAN, 0.3, NAN], [0.3, NAN, 0.5], [1, 1, 1]], np.float32)
    }
    np.testing.assert_array_equal(X.keep_prompts(metrics, "likeness"), [0, 1, 0, 1, 0])
    np.testing.assert_array_equal(X.keep_prompts(metrics, "likeness", success=0.4), [0, 1, 0, 1, 0])
    np.testing.assert_array_equal(X.keep_prompts(metrics, "likeness", success=0.1), [0] * 5)


@pytest.mark.parametrize("bounds", [{"below": 0.9}, {"above": 0.0}, {"above": 0.0, "below": 1.0}])
def test_bounds_of_a_graded_metric_are_refused(bounds):
    """Where all answers are at 0.9 they would drop, or keep, whatever the samples are like."""
    graded = {"likeness": np.array([[1, 0.9, NAN], [0, 1, 0]], np.float32)}
    with pytest.raises(ValueError, match=r"likeness.*0 and 1.*0\.9.*success"):
        X.keep_prompts(graded, "likeness", **bounds)
    with pytest.raises(ValueError, match=r"likeness.*0 and 1.*0\.9.*success"):
        X.keep_prompts({"likeness": graded["likeness"].tolist()}, "likeness", **bounds)
    np.testing.assert_array_equal(
        X.keep_prompts(graded, "likeness", success=0.5, **bounds), [bounds == {"above": 0.0}, 1]
    )
    jax.jit(functools.partial(X.keep_prompts, on="likeness", **bounds))(graded)  # tracers tell no values


# --- culling


def test_solved_from_a_share_on():
    """ScaleRL's 0.9, of all samples: one without a metric is not known to pass."""
    metric = np.zeros((4, 10), np.float32)
    metric[0, :9], metric[1, :8], metric[2, :9], metric[2, 9], metric[3] = 1, 1, 1, NAN, NAN
    np.testing.assert_array_equal(X.solved(metric, 0.9), [1, 0, 1, 0])
    np.testing.assert_array_equal(X.solved(metric), [0, 0, 0, 0])
    # Samples that were never drawn are no failures.
    np.testing.assert_array_equal(X.solved(metric, drawn=np.broadcast_to(np.arange(10) < 9, (4, 10))), [1, 0, 1, 0])
    np.testing.assert_array_equal(X.solved(metric / 2, 0.9, success=0.5), [1, 0, 1, 0])
    sizes = (1, 2, 3, 7, 10, 11, 20, 30, 64)  # k / n is not always rounded to the share
    k, n = np.array([(k, n) for n in sizes for k in range(n + 1)]).T
    passed, drawn = (np.arange(64) < count[:, None] for count in (k, n))
    for share in (0.1, 0.3, 0.6, 0.7, 0.9):
        got = X.solved(passed.astype(np.float32), share, drawn=drawn)
        np.testing.assert_array_equal(got, 10 * k >= round(10 * share) * n)
    for share in (0.0, 1.5):
        with pytest.raises(ValueError, match=f"share={share}"):
            X.solved(metric, share)


# --- XRPO


@pytest.mark.parametrize("p", [0.975, 0.9, 0.995])
def test_t_quantile(p):
    dof = np.array([1, 2, 3, 4, 7, 30, 200])
    close(jax.jit(X.t_quantile, static_argnums=0)(p, dof), scipy.stats.t.ppf(p, dof), rtol=2e-4)
    with pytest.raises(ValueError, match="0.3"):
        X.t_quantile(0.3, dof)


def test_golden_priority():
    """With the normal's quantile, 1.96, the gain would be 0.0597; without the root the bonus 0.7083."""
    priority = jax.jit(X.xrpo_priority)
    std, counts = np.full(4, 0.57735027, np.float32), np.full(4, 4, np.int32)
    close(priority(std, counts, bonus=1.0), 0.20181807 + 0.84160759, rtol=2e-4)
    close(priority(std, counts, bonus=0.0), 0.20181807, rtol=1e-3)
    got = priority(0 * std, np.array([1, 0, 0, 0], np.int32), bonus=1.0)
    close(got[0], np.sqrt(np.log(2)))
    assert np.isinf(got[1:]).all()


def test_allocation_is_one_by_one():
    std, counts = np.array([0.5, 0.1, 0.0, 0.4], np.float32), np.array([4, 4, 2, 0], np.int32)
    got = jax.jit(X.xrpo_allocate, static_argnums=2)(std, counts, 9)
    assert got.sum() == 9 and got.dtype == jnp.int32
    n, want = counts.copy().astype(int), np.zeros(4, int)

    def half(i, n):
        return scipy.stats.t.ppf(0.975, n - 1) * std[i] / np.sqrt(n)

    for _ in range(9):
        gain = [half(i, n[i]) - half(i, n[i] + 1) if n[i] > 1 else 0 for i in range(4)]
        priority = [gain[i] + np.sqrt(np.log1p(n.sum()) / n[i]) if n[i] else np.inf for i in range(4)]
        best = int(np.argmax(priority))
        n[best] += 1
        want[best] += 1
    np.testing.assert_array_equal(got, want)


# --- lengths


def test_golden_overlong():
    """In characters, or from the limit on only, 90 tokens of 100 would cost nothing."""
    close(X.overlong_penalty(jnp.array([80, 81, 90, 100, 101]), 100, 20), [0, -0.05, -0.5, -1, -1])
    episode = A.Signals(lengths=jnp.array([[40, 30]]), full_lengths=jnp.array([[100, 30]]))
    close(A.chain(reward=X.soft_overlong(100, 20))(jnp.ones((1, 2)), episode), [[0.5, 1.0]])
    chain = A.chain(A.center(), reward=X.soft_overlong(100, 20))
    got = jax.jit(chain)(np.ones((1, 2), np.float32), A.Signals(lengths=np.array([[80, 90]])))
    close(got, [[0.125, -0.125]])
    for limit, buffer in ((100, 0), (100, 101)):
        with pytest.raises(ValueError, match=f"buffer={buffer}"):
            X.overlong_penalty(jnp.array([1]), limit, buffer)


@pytest.mark.parametrize(("options", "want"), [({}, 0.12609), ({"factor": 1.0}, -0.72457), ({"factor": 0.0}, 0.93541)])
def test_golden_overlong_factor(options, want):
    """Four of eight are right, one of them at the limit: in full the punishment makes it a wrong one."""
    rewards, lengths = jnp.array([[1.0] * 4 + [0.0] * 4]), jnp.array([[10, 10, 10, 100] + [10] * 4])
    chain = A.chain(A.center(), A.scale(eps=0.0), reward=X.soft_overlong(100, 20, **options))
    close(jax.jit(chain)(rewards, A.Signals(lengths=lengths))[0, 3], want, atol=1e-4)
    with pytest.raises(ValueError, match="factor=-1"):
        X.soft_overlong(100, 20, factor=-1)


GROUP = {"lengths": jnp.array([[100, 200, 300, 50]]), "rewards": jnp.array([[1.0, 1, 1, 0]])}


@pytest.mark.parametrize(
    ("alpha", "rewards"),
    [(0.2, [0.9545795, 0.9, 0.8454205, 0]), (0.6, [0.86373849, 0.7, 0.53626151, 0])],
)
def test_golden_length_selected(alpha, rewards):
    """With statistics over all four the first would be 0.9314; a wrong answer rewarded for its length, 0.9725."""
    s = A.Signals(lengths=GROUP["lengths"])
    close(jax.jit(A.chain(reward=X.length_selected(alpha)))(GROUP["rewards"], s), [rewards])
    if alpha == 0.2:
        chain = A.chain(A.center(), A.scale(ddof=0, eps=0.0), reward=X.length_selected(alpha))
        close(jax.jit(chain)(GROUP["rewards"], s), [[0.71390916, 0.57453984, 0.43517053, -1.72361953]], atol=1e-5)


def test_which_groups_are_selected():
    """A fifth of six is two, of five one; ties go to the first; one right answer costs half of alpha."""
    rewards = np.array([[1, 0], [1, 1], [0, 0], [1, 1], [1, 1], [NAN, NAN]], np.float32)
    s = A.Signals(lengths=jnp.full((6, 2), 7))
    chain = jax.jit(A.chain(reward=X.length_selected(0.6)))
    want = np.nan_to_num(rewards)
    want[[1, 3]] = 0.7
    close(chain(rewards, s), want)
    five = chain(rewards[1:], A.Signals(lengths=s.lengths[1:]))
    close(five, [[0.7, 0.7], [0, 0], [1, 1], [1, 1], [0, 0]])
    form = np.array([[0.5, 0.0]], np.float32)  # nobody right: no group is selected, and what a form earned stays
    close(chain(form, A.Signals(lengths=s.lengths[:1])), form)
    for options in ({"alpha": 1.5}, {"share": 0.0}):
        with pytest.raises(ValueError, match=str(next(iter(options.values())))):
            X.length_selected(**options)


@functools.cache
def compiled(share):
    return jax.jit(A.chain(reward=X.length_selected(0.4, share=share)))


@pytest.mark.parametrize("share", [0.2, 0.5])
@settings(max_examples=12)
@given(seed=st.integers(0, 999))
def test_length_oracle(share, seed):
    rng = np.random.default_rng(seed)
    rewards = rng.integers(0, 2, (P, G)).astype(np.float32)
    rewards[rng.random((P, G)) < 0.1] = NAN
    lengths = rng.integers(1, 6, (P, G)).astype(np.int32)
    got = compiled(share)(rewards, A.Signals(lengths=lengths))
    close(got, np.nan_to_num(allocation_oracles.length_selected(rewards, lengths, 0.4, share)), atol=1e-5)


def test_golden_xrpo_half_widths():
    """h(4) and h(5) of rewards [1, 0, 0, 1]: the gain is their difference."""
    std, quantile = np.std([1, 0, 0, 1], ddof=1), jax.jit(functools.partial(X.t_quantile, 0.975))

    def h(n):
        return float(quantile(np.float32(n - 1))) * std / np.sqrt(n)

    close(h(4), 0.91869312, atol=1e-4)
    close(std * float(quantile(np.float32(4))) / np.sqrt(5), 0.71687504, atol=1e-4)


def test_xrpo_counts_an_unknown_deviation_as_none():
    """One valid reward has no deviation (ddof 1); as NaN it would take the whole budget."""
    counts, allocate = np.array([4, 4, 4], np.int32), jax.jit(X.xrpo_allocate, static_argnums=2)
    unknown, none = (np.array([0.5, x, 0.1], np.float32) for x in (NAN, 0.0))
    assert np.isfinite(jax.jit(X.xrpo_priority)(unknown, counts)).all()
    np.testing.assert_array_equal(allocate(unknown, counts, 6), allocate(none, counts, 6))
    assert int(allocate(unknown, counts, 0).sum()) == 0


# --- all of these against loops

KEEP = [(0.0, 1.0, 1.0), (None, 0.8, 0.5), (0.2, None, 0.75), (0.4, 0.6, 0.25), (None, None, 1.0), (None, None, None)]


@jax.jit
def kept_and_paid(rewards, outcome, lengths):
    signals = A.Signals(lengths=lengths, outcome=outcome)
    return (
        [
            X.keep_prompts({"reward": rewards, "accuracy": outcome}, "accuracy", above=a, below=b, success=s)
            for a, b, s in KEEP
        ],
        [
            A.chain(reward=X.length_selected(0.4, share=share, success=0.75))(rewards, signals)
            for share in (0.2, 0.5, 1.0)
        ],
        A.chain(A.center("group"), reward=X.soft_overlong(6, 4))(rewards, signals),
    )


@many
@given(seed=SEEDS)
def test_kept_and_paid(seed):
    rng = np.random.default_rng(seed)
    rewards, outcome = scores(rng), scores(rng)
    lengths = rng.integers(0, T + 1, (P, G)).astype(np.int32)
    keep, selected, overlong = kept_and_paid(rewards, outcome, lengths)
    for options, got in zip(KEEP, keep, strict=True):
        np.testing.assert_array_equal(got, allocation_oracles.keep_prompts(outcome, *options))
    for share, got in zip((0.2, 0.5, 1.0), selected, strict=True):
        want = allocation_oracles.length_selected(rewards, lengths, 0.4, share, outcome, 0.75)
        close(got, np.nan_to_num(want), atol=1e-5)
    close(overlong, advantage_oracles.advantages(allocation_oracles.soft_overlong(rewards, lengths, 6, 4)))
