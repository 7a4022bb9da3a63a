"""The gated delta rule in chunks against a loop over tokens, and how completions start from their prompt."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_decoder import plain_rule

from grpojax.extensions.delta import delta_net
from grpojax.extensions.delta.delta_net import Tokens

H, R, DK, DV = 2, 3, 5, 7


def some_tokens(n, size, seed=0):
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((n, size, H, DK)).astype(np.float32) for _ in range(2))
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.standard_normal((n, size, H, R, DV)).astype(np.float32)
    decay = -rng.exponential(0.2, (n, size, H, R)).astype(np.float32)
    rate = rng.uniform(size=(n, size, H, R)).astype(np.float32)
    return Tokens(q, k, v, decay, rate)


def plain(x, segments, initial):
    """Each segment of each row by itself, head by head."""
    rows = []
    for i in range(len(segments)):
        starts = [0, *(np.flatnonzero(np.diff(segments[i])) + 1).tolist(), segments.shape[1]]
        parts = []
        for first, last in zip(starts[:-1], starts[1:], strict=True):
            heads = []
            for h, r in np.ndindex(H, R):
                one = (x.q[i, first:last, h], x.k[i, first:last, h], x.v[i, first:last, h, r])
                one += (jnp.exp(x.decay[i, first:last, h, r]), x.rate[i, first:last, h, r])
                heads.append(plain_rule(*(y[None] for y in one), state=initial[i, h, r][None])[0])
            parts.append(jnp.stack(heads, 1).reshape(last - first, H, R, DV))
        rows.append(jnp.concatenate(parts))
    return jnp.stack(rows)


@pytest.mark.in_ci("67")
@pytest.mark.parametrize("size", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (7, 64, 67, 149))])
def test_chunks_equal_a_loop_over_tokens(size):
    """Values and gradients, with segments of any length that begin anywhere, from a state that is not zero."""
    rng, x = np.random.default_rng(1), some_tokens(2, size)
    initial = rng.standard_normal((2, H, R, DK, DV)).astype(np.float32)
    segments = np.sort(rng.integers(0, 5, (2, size)), 1).astype(np.int32)
    segments[1] = 3  # one segment over all chunks
    weight = rng.standard_normal((2, size, H, R, DV)).astype(np.float32)

    def values(f):
        out, back = jax.vjp(lambda x, initial: f(x, segments, initial), x, initial)
        return out, back(weight)

    got = jax.jit(lambda: values(lambda *given: delta_net.chunked(*given)[0]))()
    want = jax.jit(lambda: values(plain))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max()), got, want)


@pytest.mark.slow
def test_steps_equal_chunks_and_padding_leaves_the_state():
    x, there = some_tokens(3, 71), np.arange(71) < np.array([[70], [1], [33]])
    masked = x._replace(
        decay=np.where(there[..., None, None], x.decay, 0), rate=np.where(there[..., None, None], x.rate, 0)
    )
    out, last = delta_net.chunked(masked, jnp.ones(there.shape, jnp.int32))
    state = jnp.zeros((3, H, R, DK, DV))
    step = jax.jit(delta_net.advance)
    for t in range(70):
        made, after = step(jax.tree.map(lambda y, t=t: y[:, t], x), state)
        state = jnp.where(there[:, t][:, None, None, None, None], after, state)
        np.testing.assert_allclose(made[0], out[0, t], atol=1e-5)
    np.testing.assert_allclose(last, state, atol=1e-5)


@pytest.mark.slow
def test_keys_that_are_all_alike_lose_no_precision():
    """Powers of such a matrix have entries up to 1e18, so that an inverse by a sum of powers would be noise."""
    x = some_tokens(1, 64)
    x = x._replace(k=np.zeros_like(x.k) + np.float32(DK**-0.5), decay=x.decay * 0, rate=x.rate * 0 + np.float32(0.9))
    ones = np.ones((1, 64), np.int32)
    got, want = delta_net.chunked(x, ones)[0], plain(x, ones, jnp.zeros((1, H, R, DK, DV)))
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 9])
def test_a_convolution_reads_the_prompt_at_the_start_of_a_completion(size):
    rng, count = np.random.default_rng(0), 4
    x, before = (rng.standard_normal((2, n, 3)).astype(np.float32) for n in (size, count - 1))
    taps = rng.standard_normal((3, 1, count)).astype(np.float32)
    offsets = np.array([[0, 1, 2, 3, 0, 0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 4, 5, 6]], np.int32)[:, :size]
    for given in (before, None):
        got = delta_net.convolved(x, taps, offsets, given)
        for i, t in np.ndindex(2, size):
            start = t - offsets[i, t]
            head = before[i] if given is not None else np.zeros((count - 1, 3), np.float32)
            seen = np.concatenate([head, x[i, start : t + 1]])[-count:]
            y = (seen * taps[:, 0].T).sum(0)
            np.testing.assert_allclose(got[i, t], y / (1 + np.exp(-y)), atol=1e-5)
