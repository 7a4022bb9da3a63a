"""Drawing a token against plain numpy: what is cut off, how often a token is drawn, and a vocabulary over devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax import sharding
from grpojax.programs.sampler_config import DrawConfig
from grpojax.programs.token_sampling import draw

plain_draw = jax.jit(draw, static_argnums=2)  # on one device


def many_draws(logits, config, n=20000):
    keys = jax.random.split(jax.random.key(0), n)[None]
    tokens, logps = plain_draw(np.asarray(logits, np.float32)[None, None], keys, config)
    return np.asarray(tokens)[0], np.asarray(logps)[0]


def truncated(logits, config):
    """Oracle: sorts the vocabulary."""
    p = np.exp(np.float64(logits) / config.temperature - np.max(np.float64(logits) / config.temperature))
    p /= p.sum()
    keep = np.ones(len(p), bool)
    order = np.argsort(-p, kind="stable")
    if config.top_k:
        keep[order[config.top_k :]] = False
    q = np.where(keep, p, 0) / p[keep].sum()
    if config.top_p < 1:
        order = np.argsort(-q, kind="stable")
        n = int(np.searchsorted(np.cumsum(q[order]), config.top_p)) + 1
        keep[order[n:]] = False
    if config.min_p:
        keep &= p >= config.min_p * p.max()
    q = np.where(keep, p, 0)
    return q / q.sum()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 5, "top_p": 0.8, "min_p": 0.1},
    ],
)
@pytest.mark.parametrize("vocab", [7, 300])
def test_draws_follow_the_distribution_and_report_it(options, vocab):
    config = DrawConfig(**options)
    logits = np.random.default_rng(vocab).standard_normal(vocab) * (1.5 if vocab == 7 else 2.5)
    p = truncated(logits, config)
    tokens, logps = many_draws(logits, config)
    counts = np.bincount(tokens, minlength=vocab)
    assert (counts[p == 0] == 0).all()
    np.testing.assert_allclose(logps, np.log(p[tokens]), atol=2e-5)
    expected = p * len(tokens)
    big = expected > 5
    chi2 = ((counts - expected)[big] ** 2 / expected[big]).sum()
    degrees = max(big.sum() - 1, 1)
    assert chi2 < degrees + 5 * np.sqrt(2 * degrees) + 5, (chi2, degrees)


QWEN = 151936


@pytest.mark.parametrize(
    ("tensor", "options"),
    [
        (4, {"temperature": 0.0}),
        (2, {"temperature": 0.8}),
        (4, {"top_k": 300, "top_p": 0.8, "min_p": 0.01}),
        *(
            pytest.param(tensor, options, marks=pytest.mark.exhaustive)
            for tensor in (2, 4)
            for options in ({}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05})
        ),
    ],
    ids=str,
)
def test_a_vocabulary_over_devices_is_drawn_from_where_it_lies(tensor, options):
    """The tokens of one device."""
    mesh = sharding.make_mesh(sharding.MeshConfig(fsdp=2, tensor=tensor), jax.devices()[: 2 * tensor])
    config, rng = DrawConfig(**options), np.random.default_rng(3)
    logits = np.float32(3.0 * rng.standard_normal((2, 3, QWEN)))
    logits[0, 0, [5, QWEN - 5]] = 20.0  # the likeliest twice, in the first part and the last
    keys = jax.random.split(jax.random.key(7), (2, 3))
    want = plain_draw(logits, keys, config)
    placed = jax.device_put(logits, sharding.named(mesh, ("shard", None, "vocab")))
    got = jax.jit(lambda z, k: draw(z, k, config, mesh))(placed, keys)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1], atol=2e-5)


def test_one_row_of_logits_over_devices_is_drawn_from_for_all_of_a_prompts_keys():
    mesh = sharding.make_mesh(sharding.MeshConfig(fsdp=2, tensor=4))
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((2, 1, 1400)), jnp.float32)
    keys = jax.random.split(jax.random.key(0), (2, 60))
    for config in (DrawConfig(temperature=0.0), DrawConfig(top_k=7)):
        want = plain_draw(logits, keys, config)
        got = jax.jit(functools.partial(draw, config=config, mesh=mesh))(logits, keys)
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_allclose(got[1], want[1], atol=1e-5)


@pytest.mark.exhaustive("programs/test_token_sampling.py::test_draws_follow_the_distribution_and_report_it")
@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"temperature": 0.6}])
def test_a_million_draws_follow_the_distribution(options):
    config, vocab, n = DrawConfig(**options), 11, 1_000_000
    logits = np.random.default_rng(vocab).standard_normal(vocab) * 1.5
    p = truncated(logits, config)
    counts = np.bincount(many_draws(logits, config, n)[0], minlength=vocab)
    assert (counts[p == 0] == 0).all()
    chi2 = ((counts - n * p)[p > 0] ** 2 / (n * p[p > 0])).sum()
    degrees = (p > 0).sum() - 1
    assert chi2 < degrees + 5 * np.sqrt(2 * degrees), (chi2, degrees)  # the p-value of five deviations is below 1e-3


def test_top_p_keeps_the_smallest_sufficient_set():
    p = np.array([0.5, 0.25, 0.125, 0.125])
    for top_p, kept in [(0.4, {0}), (0.6, {0, 1}), (0.74, {0, 1}), (0.8, {0, 1, 2, 3})]:  # ties stay together
        tokens, _ = many_draws(np.log(p), DrawConfig(top_p=top_p), 2000)
        assert set(tokens.tolist()) == kept, top_p


def test_extreme_logits_are_drawn_without_nan():
    logits = np.array([0.0, -1e9, 88.0, -np.inf, 87.0])
    tokens, logps = many_draws(logits, DrawConfig(), 1000)
    assert set(tokens.tolist()) <= {2, 4} and np.isfinite(logps).all()
