"""The sampler against the trainer's forward, against plain numpy, and against itself in other layouts."""

import dataclasses
import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from plain_decoder import BASE, random_decoder

from grpojax.host.errors import UserError
from grpojax.models import Compute, hf, score, sharding
from grpojax.models.weight_table import shardings
from grpojax.programs import drawing, lanes, packing, sampler, state
from grpojax.programs.drawing import DrawConfig, draw
from grpojax.programs.sampler import SamplerConfig, sample_groups
from grpojax.types import PerToken, Prompts, TrainBatch

EOS = tuple(range(6))


@pytest.mark.parametrize("module", [drawing, sampler])
def test_doctests(module):
    assert doctest.testmod(module).failed == 0


@pytest.fixture(scope="module")
def decoder():
    return random_decoder(BASE)


def some_prompts(p=3, length=7, seed=0):
    rng = np.random.default_rng(seed)
    return Prompts(
        tokens=rng.integers(0, 53, (p, length)).astype(np.int32),
        lengths=rng.integers(1, length + 1, p).astype(np.int32),
        uids=np.arange(10, 10 + p, dtype=np.uint32),
        first_sample=np.zeros(p, np.int32),
    )


def run(decoder, prompts, config, *, key=0, eos=EOS, compute=Compute()):  # noqa: B008
    rollout = sample_groups(*decoder, prompts, jax.random.key(key), config, eos_ids=eos, compute=compute)
    return jax.tree.map(np.asarray, rollout)


CONFIG = SamplerConfig(group=5, max_tokens=11)


def test_lengths_stops_and_padding(decoder):
    out = run(decoder, some_prompts(), CONFIG)
    is_eos = np.isin(out.tokens, EOS)
    for p, g in np.ndindex(3, 5):
        n = out.lengths[p, g]
        assert 1 <= n <= 11
        assert not is_eos[p, g, : n - 1].any()
        assert out.stopped[p, g] == is_eos[p, g, n - 1]
        assert out.stopped[p, g] or n == 11
        assert (out.tokens[p, g, n:] == 0).all() and (out.logps[p, g, n:] == 0).all()
    assert len(set(out.lengths.ravel().tolist())) > 3


@pytest.mark.parametrize("slots", [1, 3])
def test_draws_do_not_depend_on_slots(decoder, slots):
    want, got = (run(decoder, some_prompts(), dataclasses.replace(CONFIG, slots=s)) for s in (0, slots))
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.lengths, want.lengths)
    np.testing.assert_allclose(got.logps, want.logps, atol=1e-5)


def test_draws_do_not_depend_on_prompt_order_and_do_on_step_and_uid(decoder):
    prompts = some_prompts()
    want = run(decoder, prompts, CONFIG)
    order = np.array([2, 0, 1])
    got = run(decoder, jax.tree.map(lambda x: x[order], prompts), CONFIG)
    np.testing.assert_array_equal(got.tokens, want.tokens[order])
    assert (run(decoder, prompts, CONFIG, key=1).tokens != want.tokens).any(axis=(1, 2)).all()
    other = run(decoder, dataclasses.replace(prompts, uids=prompts.uids + np.uint32(7)), CONFIG)
    assert (other.tokens != want.tokens).any(axis=(1, 2)).all()


def test_samples_of_a_group_differ(decoder):
    tokens = run(decoder, some_prompts(), CONFIG).tokens
    assert len({tuple(t) for t in tokens[0]}) == 5


def test_a_group_split_over_lanes_draws_the_same_samples(decoder):
    prompts = some_prompts()
    want = run(decoder, prompts, dataclasses.replace(CONFIG, group=6))
    spread, part = lanes.spread(prompts, 6, 6)
    got = run(decoder, spread, dataclasses.replace(CONFIG, group=part))
    np.testing.assert_array_equal(lanes.gather_groups(got.tokens, 3), want.tokens)


@pytest.mark.parametrize("sizes", [(2, 2, 2), (8, 1, 1), (1, 8, 1)])
def test_draws_do_not_depend_on_the_mesh(decoder, sizes):
    prompts = some_prompts(8)
    mesh = sharding.make_mesh(sharding.MeshConfig(data=sizes[0], fsdp=sizes[1], tensor=sizes[2]))
    graph, params = decoder
    config = dataclasses.replace(BASE, vocab_size=56)  # a vocabulary that divides
    graph, params = random_decoder(config)
    want = run((graph, params), prompts, CONFIG)
    placed = jax.device_put(params, shardings(params, mesh))
    compute = Compute(mesh=mesh)
    rollout_params = state.make_reshard(compute)(placed)
    got = run((graph, rollout_params), prompts, CONFIG, compute=compute)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.logps, want.logps, atol=1e-5)


def test_params_are_an_argument_not_a_constant(decoder):
    graph, params = decoder
    before = run((graph, params), some_prompts(), CONFIG)
    moved = jax.tree.map(lambda x: x + 0.05 * jnp.sign(x), params)
    after = run((graph, moved), some_prompts(), CONFIG)
    assert np.abs(after.logps[:, :, 0] - before.logps[:, :, 0]).max() > 1e-3


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_equal_the_trainers(decoder, temperature):
    """Also with a pad id (0) that is an end-of-sequence id."""
    graph, params = decoder
    prompts = some_prompts()
    out = run(decoder, prompts, dataclasses.replace(CONFIG, temperature=temperature, slots=2))
    zeros = np.zeros(out.logps.shape, np.float32)
    per_token = PerToken(advantages=zeros, weights=zeros)
    packed, layout = packing.pack(
        TrainBatch(prompts=prompts, tokens=out.tokens, lengths=out.lengths, per_token=per_token)
    )
    rows = jax.tree.map(lambda x: x[0], packed.rows)
    logps = layout.unpack(np.asarray(score(graph, params, rows, Compute(), temperature=temperature).logps)[None])
    mask = np.arange(11) < out.lengths[..., None]
    assert np.abs(logps - out.logps)[mask].max() < 1e-4
    if temperature != 1.0:
        wrong = layout.unpack(np.asarray(score(graph, params, rows, Compute()).logps)[None])
        assert np.abs(wrong - out.logps)[mask].max() > 1e-2


def test_greedy_ignores_the_key(decoder):
    out = run(decoder, some_prompts(), SamplerConfig(group=2, max_tokens=9, temperature=0.0), eos=())
    assert (out.lengths == 9).all() and not out.stopped.any()
    again = run(decoder, some_prompts(), SamplerConfig(group=2, max_tokens=9, temperature=0.0), key=5, eos=())
    np.testing.assert_array_equal(again.tokens, out.tokens)
    np.testing.assert_array_equal(out.tokens[:, 1], out.tokens[:, 0])


def test_greedy_equals_transformers(tmp_path):
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    theirs = transformers.Qwen3ForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = nnx.split(hf.load(tmp_path))
    prompts = some_prompts(4)
    out = run(ours, prompts, SamplerConfig(group=1, max_tokens=13, temperature=0.0), eos=())
    for p, n in enumerate(prompts.lengths):
        ids = torch.tensor(prompts.tokens[p : p + 1, :n], dtype=torch.long)
        want = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=13, eos_token_id=None
        )
        assert want[0, n:].tolist() == out.tokens[p, 0].tolist()


# ------------------------------------------------------------------------------------------- drawing


def many_draws(logits, config, n=20000):
    keys = jax.random.split(jax.random.key(0), n)[None]
    tokens, logps = draw(jnp.asarray(logits, jnp.float32)[None, None], keys, config)
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


def test_top_p_keeps_the_smallest_sufficient_set():
    p = np.array([0.5, 0.25, 0.125, 0.125])
    for top_p, kept in [(0.4, {0}), (0.6, {0, 1}), (0.74, {0, 1}), (0.8, {0, 1, 2, 3})]:  # ties stay together
        tokens, _ = many_draws(np.log(p), DrawConfig(top_p=top_p), 2000)
        assert set(tokens.tolist()) == kept, top_p


def test_extreme_logits_are_drawn_without_nan():
    logits = np.array([0.0, -1e9, 88.0, -np.inf, 87.0])
    tokens, logps = many_draws(logits, DrawConfig(), 1000)
    assert set(tokens.tolist()) <= {2, 4} and np.isfinite(logps).all()


@pytest.mark.parametrize(
    "bad",
    [
        {"group": 0},
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": 2.0},
        {"slots": -1},
        {"slots": 9},
    ],
)
def test_bad_values_are_refused(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        SamplerConfig(**bad)


def test_one_token_and_one_sample(decoder):
    out = run(decoder, some_prompts(), SamplerConfig(group=1, max_tokens=1))
    assert out.tokens.shape == (3, 1, 1) and (out.lengths == 1).all()
