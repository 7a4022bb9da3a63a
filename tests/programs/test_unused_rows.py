"""Rows of the embedding that belong to no token: a model with them is the model without them (`unused_rows`)."""

import dataclasses
import functools

import flat_batches
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick_xla
import unused_rows
from flat_batches import Flat
from flax import nnx
from plain_decoder import FORMATS, ragged_batch, random_decoder, some_prompts
from unused_rows import PADDED, TOKENS

from grpojax import sharding
from grpojax.models import Compute, decoder, score
from grpojax.models.logprobs import log_normalisers, mask_unused, token_scores
from grpojax.models.weight_table import shardings
from grpojax.programs import state
from grpojax.programs.sampler import sample_groups
from grpojax.programs.sampler_config import DrawConfig, SamplerConfig
from grpojax.programs.token_sampling import draw

models = unused_rows.models


def packed_rows(batch, shards=1):
    packed, layout = flat_batches.pack(batch, shards=shards)
    return jax.tree.map(lambda x: x[0], packed), layout


def prompts():
    made = some_prompts(4)
    return dataclasses.replace(made, tokens=made.tokens % TOKENS)


def sampled(model, compute=Compute()):  # noqa: B008
    config = SamplerConfig(group=4, max_tokens=5)
    out = sample_groups(*model, prompts(), jax.random.key(0), config, eos_ids=(1,), compute=compute)
    return jax.tree.map(np.asarray, out)


def scored(model, out, compute=Compute(), shards=1):  # noqa: B008
    """The trainer's log-probs and entropies of samples, ``[P, G, T]``."""
    zeros = np.zeros(out.logps.shape, np.float32)
    batch = Flat(
        prompts=prompts(),
        tokens=out.tokens,
        lengths=out.lengths,
        arrays=dict(advantages=zeros, weights=zeros),
    )
    rows, layout = packed_rows(batch, shards)
    graph, params = model
    run = jax.jit(
        lambda params: score(graph, params, rows, compute, entropy="value")[:2], compiler_options=quick_xla.OPTIONS
    )
    return [layout.unpack(np.asarray(x)[None]) for x in run(params)]


@pytest.mark.slow
def test_values_and_gradients_are_those_without_the_rows(models):
    batch = ragged_batch(np.random.default_rng(1), vocab=TOKENS)
    rows, layout = packed_rows(batch)
    used = layout.index[0] >= 0

    def loss(params, graph):
        got = score(graph, params, rows, Compute(vocab_chunk=13), temperature=0.7, entropy=True)
        return jnp.where(used, got.logps + 0.3 * got.entropy, 0.0).sum(), got.entropy

    run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1, compiler_options=quick_xla.OPTIONS)
    (value, entropy), grads = run(models[0][1], models[0][0])
    (want, _), want_grads = run(models[1][1], models[1][0])
    np.testing.assert_allclose(value, want, rtol=1e-5)
    assert np.isfinite(entropy).all() and (np.asarray(entropy)[used] <= np.log(TOKENS)).all()
    for (path, got), want in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(want_grads), strict=True):
        scale = np.abs(want).max()
        np.testing.assert_allclose(got[: len(want)], want, atol=1e-5 * scale, err_msg=jax.tree_util.keystr(path))
        if got.shape != want.shape:
            assert not np.asarray(got[TOKENS:]).any()


@pytest.mark.parametrize("chunk", [0, 5])
@pytest.mark.parametrize("unused", [((25, 29),), ((0, 2), (7, 11), (28, 29))], ids=["the last", "any"])
def test_scores_equal_numpy(unused, chunk):
    """Holes anywhere, whole blocks of them too; and a gradient of exactly 0, also where a target is one."""
    rng = np.random.default_rng(0)
    without = np.zeros(29, bool)
    for start, stop in unused:
        without[start:stop] = True
    hidden, weight = rng.standard_normal((2, 13, 6)), rng.standard_normal((29, 6))
    weight[without] *= 1e3
    targets = rng.choice(np.flatnonzero(~without), (2, 13))
    z = 1.3 * hidden @ weight[~without].T
    normaliser = np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1)) + z.max(-1)
    p = np.exp(z - normaliser[..., None])
    logps = (1.3 * hidden * weight[targets]).sum(-1) - normaliser
    entropy = -(p * (z - normaliser[..., None])).sum(-1)

    h, w, t = jnp.float32(hidden), jnp.float32(weight), jnp.int32(targets)
    options = {"inverse_temperature": 1.3, "chunk": chunk, "unused": unused}
    got = jax.jit(functools.partial(token_scores, with_entropy=True, **options))(h, w, t)
    np.testing.assert_allclose(got[0], logps, atol=2e-5)
    np.testing.assert_allclose(got[1], entropy, atol=2e-5)
    normalisers = jax.jit(functools.partial(log_normalisers, **options))(h, w)
    np.testing.assert_allclose(normalisers, normaliser, atol=2e-5)

    no_token = t.at[0, 0].set(int(np.flatnonzero(without)[0]))

    def total(w):
        return sum(x.sum() for x in token_scores(h, w, no_token, with_entropy=True, **options))

    grad = jax.jit(jax.grad(total))(w)
    assert np.isfinite(grad).all() and not np.asarray(grad)[without].any() and np.asarray(grad)[~without].all()


@pytest.mark.parametrize(
    ("temperature", "cut"),
    [
        (0.0, {}),
        (1e-3, {}),
        (1.0, {}),
        (50.0, {}),
        (50.0, {"top_k": 20}),
        (0.6, {"top_k": 3, "min_p": 0.2}),
        (50.0, {"top_p": 0.8}),
    ],
)
def test_no_temperature_draws_them(temperature, cut):
    """``top_k: 20`` is more than there are tokens."""
    unused = ((0, 3), (9, 10), (13, 24))
    ids = [3, 4, 5, 6, 7, 8, 10, 11, 12]
    logits = np.random.default_rng(2).standard_normal(24).astype(np.float32)
    logits[np.setdiff1d(np.arange(24), ids)] = 1e4
    keys, config = jax.random.split(jax.random.key(0), 2000)[None], DrawConfig(temperature=temperature, **cut)

    def masked_draw(logits, keys):
        return draw(mask_unused(logits, unused), keys, config)

    def plain_draw(logits, keys):
        return draw(logits, keys, config)

    tokens, logps = jax.jit(masked_draw)(jnp.asarray(logits)[None, None], keys)
    trimmed, want = jax.jit(plain_draw)(jnp.asarray(logits[ids])[None, None], keys)
    np.testing.assert_array_equal(tokens, np.take(ids, trimmed))
    np.testing.assert_allclose(logps, want, atol=1e-4)  # a logit over 0.001 is off by that much
    assert np.isfinite(logps).all()


def test_divergence_of_masked_logits_equals_numpy():
    unused, ids = ((0, 2), (9, 12)), np.arange(2, 9)
    z, ref = 5 * np.random.default_rng(4).standard_normal((2, 3, 12))

    def log_softmax(x):
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    logps, ref_logps = log_softmax(z[:, ids]), log_softmax(ref[:, ids])
    want = (np.exp(logps) * (logps - ref_logps)).sum(-1)

    def divergence(*logits):
        logps, ref_logps = (jax.nn.log_softmax(mask_unused(x, unused)) for x in logits)
        return (jnp.exp(logps) * (logps - ref_logps)).sum()

    got, grad = jax.jit(jax.vmap(jax.value_and_grad(divergence)))(np.float32(z), np.float32(ref))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert np.isfinite(grad).all() and not np.delete(grad, ids, -1).any()


def check_samples(models, out, logps, entropy):
    """Samples, and what the trainer makes of them, are those of the model without the rows."""
    want = sampled(models[1])
    here = np.arange(5) < want.lengths[..., None]
    np.testing.assert_array_equal(out.tokens, want.tokens)
    np.testing.assert_allclose(out.logps, want.logps, atol=1e-5)
    want_logps, want_entropy = scored(models[1], want)
    for got, expected in [(logps, out.logps), (logps, want_logps), (entropy, want_entropy)]:
        np.testing.assert_allclose(got[here], expected[here], atol=1e-4)
    return here


@pytest.mark.slow
def test_samples_and_scores_are_those_without_the_rows(models):
    out = sampled(models[0])
    logps, entropy = scored(models[0], out)
    here = check_samples(models, out, logps, entropy)
    every_row = random_decoder(dataclasses.replace(PADDED, unused_rows=()))[0], models[0][1]
    assert (scored(every_row, out)[0] - out.logps)[here].max() < -10


@pytest.mark.slow
def test_a_mesh_samples_and_scores_alike(models):
    """Over four parts of the vocabulary, of which the last holds no token."""
    mesh = sharding.make_mesh(sharding.MeshConfig(data=1, fsdp=2, tensor=4))
    compute, (graph, params) = Compute(mesh=mesh), models[0]
    placed = jax.device_put(params, shardings(params, mesh))
    out = sampled((graph, state.make_reshard(PADDED, compute)(placed)), compute)
    check_samples(models, out, *scored((graph, placed), out, compute, shards=2))


@pytest.mark.parametrize("weights", FORMATS[1:])
@pytest.mark.slow
def test_logits_of_rounded_weights_are_masked_too(models, weights):
    graph, params = models[0]
    model = nnx.merge(graph, state.make_reshard(PADDED, Compute(), weights)(params))
    logits = decoder.logits(model, jnp.ones((2, 1, PADDED.hidden_size)), Compute())
    assert (logits[..., TOKENS:] == -1e30).all() and np.abs(logits[..., :TOKENS]).max() < 100


def test_without_such_rows_the_programs_are_what_they_were():
    """No operation is added: neither to scores nor to draws."""
    h, w, t = jnp.ones((1, 3, 8)), jnp.ones((16, 8)), jnp.zeros((1, 3), jnp.int32)
    logits = jnp.ones((2, 16))
    assert mask_unused(logits, ()) is logits

    def program(unused):
        return str(jax.make_jaxpr(jax.grad(lambda w: token_scores(h, w, t, chunk=8, unused=unused)[0].sum()))(w))

    assert "1e+30" in program(((15, 16),)) and "1e+30" not in program(())
