import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import close

from grpojax import masked

P, G, T = 3, 5, 7
RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(0, T + 1, (P, G))
LENGTHS[1] = 0  # a whole group of nothing
LENGTHS[0, 0] = 1
MASK = np.arange(T) < LENGTHS[..., None]
X = RNG.normal(size=(P, G, T)).astype(np.float32)

REDUCTIONS = {
    "total": (masked.total, np.sum),
    "mean": (masked.mean, lambda x: x.mean() if x.size else 0.0),
    "variance": (masked.variance, lambda x: x.var() if x.size else 0.0),
    "variance, ddof 1": (
        functools.partial(masked.variance, ddof=1),
        lambda x: x.var(ddof=1) if x.size > 1 else 0.0,
    ),
    "all_equal": (masked.all_equal, lambda x: len(set(x)) <= 1),
}


def oracle(f, axis):
    axes = tuple(range(3)) if axis is None else np.atleast_1d(axis)
    kept = [a for a in range(3) if a not in axes]
    x, mask = (np.transpose(a, (*kept, *axes)) for a in (X.astype(np.float64), MASK))
    shape = x.shape[: len(kept)]
    return np.array([f(x[i][mask[i]]) for i in np.ndindex(shape)]).reshape(shape)


@pytest.mark.parametrize("axis", [None, 1, (1, 2)])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name, axis):
    plain, want = REDUCTIONS[name]
    f = jax.jit(plain, static_argnums=2, static_argnames="keepdims")
    got = f(X, MASK, axis)
    assert got.dtype == (bool if name == "all_equal" else jnp.float32)
    close(got, oracle(want, axis))
    kept = f(X, MASK, axis, keepdims=True)
    assert kept.shape == X.sum(axis, keepdims=True).shape
    np.testing.assert_array_equal(kept.reshape(got.shape), got)


@pytest.mark.parametrize("name", ["total", "mean", "variance"])
def test_what_stands_outside_the_mask_has_no_part(name):
    """With ``(x * mask).sum()`` a NaN outside the mask makes all of it NaN, as 0 * NaN is NaN."""
    f = REDUCTIONS[name][0]
    run = jax.jit(jax.value_and_grad(lambda x: (f(x, MASK, 2) * jnp.arange(1.0, G + 1)[None]).sum()))
    value, gradient = run(X)
    assert np.isfinite(value) and np.isfinite(gradient).all()
    assert gradient[MASK].any() and not gradient[~MASK].any()
    for garbage in (np.nan, np.inf, -np.inf, 200.0, -200.0):
        planted_value, planted_gradient = run(np.where(MASK, X, np.float32(garbage)))
        np.testing.assert_array_equal(planted_value, value)
        np.testing.assert_array_equal(planted_gradient, gradient)


def test_variance_does_not_cancel():
    """E[x²] - E[x]² in float32 gives 0 here, or a multiple of 8: squares of 10,000 are that far apart."""
    x = jnp.array([10_000.0, 10_001.0, 10_002.0, -1.0])
    close(masked.variance(x, jnp.array([True, True, True, False])), 2 / 3)
    assert (jnp.square(x[:3]).mean() - x[:3].mean() ** 2) % 8 == 0


@pytest.mark.parametrize(("n", "ddof", "want"), [(0, 0, 0), (1, 0, 0), (1, 1, 0), (2, 0, 4), (2, 1, 8), (2, 2, 0)])
def test_variance_of_few(n, ddof, want):
    x = jnp.array([1.0, 5.0, jnp.nan])
    assert masked.variance(x, jnp.arange(3) < n, ddof=ddof) == want


@pytest.mark.parametrize("number", [0.1, 0.95, -3.3])
def test_all_equal_of_equal_numbers(number):
    """A variance of 64 times 0.1 is not 0 in float32, so that ``std == 0`` does not see them."""
    mask = masked.from_lengths(jnp.arange(65), 64)
    x = jnp.where(mask, number, jnp.nan)
    all_equal = jax.jit(lambda x: masked.all_equal(x, mask, 1))
    assert all_equal(x).all()
    other = x.at[:, 0].set(jnp.nextafter(jnp.float32(number), 9.0))
    np.testing.assert_array_equal(all_equal(other), np.arange(65) < 2)


def test_sums_are_float32():
    """A sum in bfloat16 stops at 256: 256 + 1 rounds to 256."""
    x, mask = jnp.ones(300, jnp.bfloat16), jnp.ones(300, bool)
    assert masked.total(x, mask) == 300 and masked.total(x, mask).dtype == jnp.float32
    assert masked.mean(x, mask) == 1 and masked.variance(x, mask) == 0


def test_from_lengths():
    np.testing.assert_array_equal(masked.from_lengths(jnp.array([0, 2, 3]), 3), [[0, 0, 0], [1, 1, 0], [1, 1, 1]])
    with jax.numpy_rank_promotion("raise"):
        np.testing.assert_array_equal(masked.from_lengths(LENGTHS, T), MASK)
    np.testing.assert_array_equal(jax.jit(masked.from_lengths, static_argnums=1)(LENGTHS, T), MASK)
    np.testing.assert_array_equal(jax.vmap(lambda n: masked.from_lengths(n, T))(LENGTHS), MASK)
    np.testing.assert_array_equal(masked.from_lengths(2, 3), [True, True, False])


@pytest.mark.parametrize("name", REDUCTIONS)
def test_jit_and_vmap(name):
    f = REDUCTIONS[name][0]
    close(jax.jit(f, static_argnums=2)(X, MASK, 1), f(X, MASK, 1))
    close(jax.vmap(lambda x, m: f(x, m, 0))(X, MASK), f(X, MASK, 1))


@pytest.mark.slow
def test_a_deviation_of_any_size():
    """The square of 1e20 is no float32, and that of 1e-30 is 0; a factor of 2 changes no digit of the others."""
    x, mask = np.array([[1.0, 0.25, 0.0, 0.1]], np.float32), np.ones((1, 4), bool)
    std = np.sqrt(masked.variance(x, mask, 1, keepdims=True, ddof=1))
    np.testing.assert_array_equal(masked.deviation(x, mask, 1, 1)[0], std)
    offset = np.float32(2**24) + np.array([[0.0, 0.0, 2.0, 4.0]], np.float32)
    close(masked.deviation(offset, mask, 1, 1)[0], [[np.std([0, 0, 2, 4], ddof=1)]])  # 1.9 with the mean of the sum
    for size in (1e20, 3e37, 1e-30):
        got, dead = masked.deviation(x * np.float32(size), mask, 1, 1)
        close(got / np.float32(size), std, rtol=1e-6)
        assert not dead.any()


def test_a_mask_may_be_numbers():
    numbers = MASK.astype(np.float32)
    for plain, _ in REDUCTIONS.values():
        np.testing.assert_array_equal(plain(X, numbers, 1), plain(X, MASK, 1))
    np.testing.assert_array_equal(masked.sequence_mean(X, numbers), masked.sequence_mean(X, MASK))
    np.testing.assert_array_equal(masked.all_fail(X[..., 0], numbers[..., 0]), masked.all_fail(X[..., 0], MASK[..., 0]))
