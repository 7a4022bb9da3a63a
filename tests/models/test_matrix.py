"""Every form of a weight multiplies as the array that it merges to, and a forward takes any form."""

import dataclasses
import functools

import flat_batches
import jax
import jax.numpy as jnp
import matrix_forms
import numpy as np
import pytest
from matrix_forms import random
from plain_decoder import FAMILIES, FORMATS, learning_batch, random_decoder, some_prompts, there

from grpojax.models import Compute, matrix
from grpojax.models import decoder as dec
from grpojax.models.matrix import Matrix, Transposed
from grpojax.models.number_formats import format_of
from grpojax.programs.sampler import sample_groups
from grpojax.programs.sampler_config import SamplerConfig

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


def in_format(word, w, summed):
    return format_of(word, "").matrix(w, summed, lambda values: values)


FORMS = {word: functools.partial(in_format, word, summed=-2) for word in FORMATS[1:]}
FORMS["of a stranger"] = lambda w: Doubled(w / 2)
TABLES = [functools.partial(in_format, word, summed=1) for word in FORMATS[1:]]


@pytest.mark.parametrize("form", [*FORMS, "transposed"])
def test_a_product_is_that_of_the_merged_weight(form):
    matrix_forms.check_product({**FORMS, "transposed": Transposed.of}[form](random(12, 7)))


@pytest.mark.parametrize("form", FORMS)
def test_several_weights_at_once(form):
    matrix_forms.check_stacked(FORMS[form](random(4, 12, 7)))


@pytest.mark.parametrize("form", [lambda w: w, *TABLES, lambda w: Doubled(w / 2)])
def test_a_table(form):
    made, x, ids = form(random(9, 12)), random(2, 3, 12, seed=3), jnp.array([[8, 0], [3, 3]])
    whole = matrix.merged(made)
    np.testing.assert_allclose(matrix.take(made, ids, "float32"), whole[ids], rtol=1e-6)
    np.testing.assert_allclose(matrix.unembed(x, made), x @ whole.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_map_hands_each_array_its_axes(form):
    matrix_forms.check_map(FORMS[form](random(4, 12, 7)))


@pytest.mark.parametrize("family", there("qwen2", "qwen2_moe"))
@pytest.mark.slow
def test_a_forward_takes_a_form_that_it_does_not_know(family):
    """Log-probs, and greedy samples."""
    config = FAMILIES[family]
    graph, params = random_decoder(config)
    whole = jax.tree.map(lambda x: x, params)
    for name in ("q", "o", *(["expert_gate", "expert_down"] if config.mlp else ["gate", "down"])):
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
