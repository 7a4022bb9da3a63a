"""Checks of a form of a weight (`grpojax.models.matrix.Matrix`) against the array that it merges to."""

import jax
import jax.numpy as jnp
import numpy as np

from grpojax.models import matrix
from grpojax.models.matrix import Times


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def check_product(made):
    """A weight ``[12, 7]``."""
    x, g, whole = random(5, 12, seed=3), random(5, 7, seed=4), made.merged()
    assert made.shape == whole.shape == (12, 7) and made.ndim == 2
    close = dict(rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jax.jit(matrix.matmul)(x, made), x @ whole, **close)
    np.testing.assert_allclose(made.back(g, None), g @ whole.T, **close)
    gradient = jax.vjp(lambda x: matrix.matmul(x, made), x)[1](g)[0]
    np.testing.assert_allclose(gradient, g @ whole.T, **close)
    _, back = jax.vjp(lambda x: matrix.frozen_matmul(x, made, None), x)
    np.testing.assert_allclose(back(g)[0], g @ whole.T, **close)


def check_stacked(made):
    """Four weights ``[4, 12, 7]``."""
    x = random(4, 5, 12, seed=3)

    def scaled(x, values, scale):
        return jnp.einsum("end,edf->enf", x, values.astype(x.dtype)) * scale[:, None]

    times = Times(lambda x, w: jnp.einsum("end,edf->enf", x, w), scaled)
    np.testing.assert_allclose(matrix.stacked(x, made, times), x @ matrix.merged(made), rtol=1e-5, atol=1e-5)


def check_map(made):
    """Four weights ``[4, 12, 7]``, perhaps with factors of rank 3: each array is handed its axes."""
    sizes = {"experts": 4, "embed": 12, "mlp": 7, "rank": 3}

    def same(x, axes, dtype):
        assert x.shape == tuple(sizes[a] for a in axes)
        return x

    jax.tree.map(np.testing.assert_array_equal, matrix.each(made, same, ("experts", "embed", "mlp"), None), made)
