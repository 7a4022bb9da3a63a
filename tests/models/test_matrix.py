"""Every form of a weight multiplies as the array that it merges to, and a forward takes any form."""

import dataclasses

import flat_batches
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_decoder import BASE, MIXTURE, learning_batch, random_decoder, some_prompts

from grpojax.models import Compute, matrix
from grpojax.models import decoder as dec
from grpojax.models.adapters import Adapted, Factors
from grpojax.models.matrix import Matrix, Times, Transposed
from grpojax.models.quantised import Int8Matrix
from grpojax.programs.sampler import SamplerConfig, sample_groups

GREEDY = SamplerConfig(group=2, max_tokens=6, temperature=0.0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Doubled(Matrix):
    """A form that has no products of its own: a weight that is stored as its half."""

    half: jax.Array

    @property
    def shape(self):
        return self.half.shape

    def merged(self):
        return 2 * self.half

    def map(self, f, axes, dtype):
        return Doubled(f(self.half, axes, dtype))


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def factors(*lead):
    return Factors(random(*lead, 12, 3, seed=1), random(*lead, 3, 7, seed=2))


FORMS = {
    "int8": lambda w: Int8Matrix.of(w, -2),
    "frozen": lambda w: Adapted(base=w, factors=None, scale=2.0),
    "adapted": lambda w: Adapted(base=w, factors=factors(*w.shape[:-2]), scale=0.5),
    "adapted int8": lambda w: Adapted(base=Int8Matrix.of(w, -2), factors=factors(*w.shape[:-2]), scale=0.5),
    "of a stranger": lambda w: Doubled(w / 2),
}


@pytest.mark.parametrize("form", [*FORMS, "transposed"])
def test_a_product_is_that_of_the_merged_weight(form):
    made = {**FORMS, "transposed": Transposed.of}[form](random(12, 7))
    x, g, whole = random(5, 12, seed=3), random(5, 7, seed=4), made.merged()
    assert made.shape == whole.shape == (12, 7) and made.ndim == 2
    close = dict(rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jax.jit(matrix.matmul)(x, made), x @ whole, **close)
    np.testing.assert_allclose(made.back(g, None), g @ whole.T, **close)
    gradient = jax.vjp(lambda x: matrix.matmul(x, made), x)[1](g)[0]
    np.testing.assert_allclose(gradient, g @ whole.T, **close)
    _, back = jax.vjp(lambda x: matrix.frozen_matmul(x, made, None), x)
    np.testing.assert_allclose(back(g)[0], g @ whole.T, **close)


@pytest.mark.parametrize("form", FORMS)
def test_several_weights_at_once(form):
    made, x = FORMS[form](random(4, 12, 7)), random(4, 5, 12, seed=3)

    def scaled(x, values, scale):
        return jnp.einsum("end,edf->enf", x, values.astype(x.dtype)) * scale[:, None]

    times = Times(lambda x, w: jnp.einsum("end,edf->enf", x, w), scaled)
    np.testing.assert_allclose(matrix.stacked(x, made, times), x @ matrix.merged(made), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", [lambda w: w, lambda w: Int8Matrix.of(w, 1), lambda w: Doubled(w / 2)])
def test_a_table(form):
    made, x, ids = form(random(9, 12)), random(2, 3, 12, seed=3), jnp.array([[8, 0], [3, 3]])
    whole = matrix.merged(made)
    np.testing.assert_allclose(matrix.take(made, ids, "float32"), whole[ids], rtol=1e-6)
    np.testing.assert_allclose(matrix.unembed(x, made), x @ whole.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_map_hands_each_array_its_axes(form):
    made = FORMS[form](random(4, 12, 7))
    sizes = {"experts": 4, "embed": 12, "mlp": 7, "rank": 3}

    def same(x, axes, dtype):
        assert x.shape == tuple(sizes[a] for a in axes)
        return x

    jax.tree.map(np.testing.assert_array_equal, matrix.each(made, same, ("experts", "embed", "mlp"), None), made)


@pytest.mark.parametrize("config", [BASE, MIXTURE], ids=["dense", "mixture"])
def test_a_forward_takes_a_form_that_it_does_not_know(config):
    """Log-probs, and greedy samples."""
    graph, params = random_decoder(config)
    whole = jax.tree.map(lambda x: x, params)
    for name in ("q", "o", *(["expert_gate", "expert_down"] if config.experts else ["gate", "down"])):
        params["layers"][name] = Doubled(params["layers"][name].get_value() / 2)
    packed, _ = flat_batches.pack(learning_batch(0))
    rows, compute = jax.tree.map(lambda x: x[0], packed.bare), Compute()
    score = jax.jit(lambda params: dec.score(graph, params, rows, compute).logps)
    np.testing.assert_allclose(score(params), score(whole), rtol=1e-5, atol=1e-5)
    drawn = [
        sample_groups(graph, w, some_prompts(4), jax.random.key(0), GREEDY, eos_ids=(0, 1), compute=compute)
        for w in (params, whole)
    ]
    np.testing.assert_array_equal(drawn[0].tokens, drawn[1].tokens)
