"""The sampler against the trainer's forward, against plain numpy, and against itself in other layouts."""

import dataclasses
import doctest
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from plain_decoder import BASE, random_decoder, some_prompts
from short_blocks import blocks_of

from grpojax.host.errors import UserError
from grpojax.models import Compute, hf, score, sharding
from grpojax.models.weight_table import shardings
from grpojax.programs import drawing, lanes, packing, sampler, state
from grpojax.programs.drawing import DrawConfig, draw
from grpojax.programs.sampler import sample_groups
from grpojax.programs.sampler_config import SamplerConfig
from grpojax.tools import hlo
from grpojax.types import PerToken, TrainBatch

EOS = tuple(range(6))


@pytest.mark.parametrize("module", [drawing, sampler])
def test_doctests(module):
    assert doctest.testmod(module).failed == 0


@pytest.fixture(scope="module")
def decoder():
    return random_decoder(BASE)


def run(decoder, prompts, config, *, key=0, eos=EOS, compute=Compute(), block=None):  # noqa: B008
    with blocks_of(block):
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


@pytest.mark.parametrize(
    ("slots", "block"), [(3, None), (2, 4), (1, 3)], ids=["slots", "two blocks", "one slot, three blocks"]
)
def test_draws_do_not_depend_on_slots_or_blocks(decoder, slots, block):
    want = run(decoder, some_prompts(), CONFIG)
    got = run(decoder, some_prompts(), dataclasses.replace(CONFIG, decode_slots=slots), block=block)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.lengths, want.lengths)
    np.testing.assert_allclose(got.logps, want.logps, atol=1e-5)


TPU = Compute(platform="tpu", attention="xla")  # its program, run here


@pytest.mark.parametrize(("slots", "block"), [(5, 4), (2, 3), (3, 11)], ids=["two blocks", "three blocks", "one block"])
def test_a_loop_over_blocks_draws_the_same(decoder, slots, block):
    want = run(decoder, some_prompts(), CONFIG)
    got = run(decoder, some_prompts(), dataclasses.replace(CONFIG, decode_slots=slots), compute=TPU, block=block)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.lengths, want.lengths)
    np.testing.assert_allclose(got.logps, want.logps, atol=1e-5)


GPU = Compute(platform="gpu", attention="xla")  # the same, its kernel interpreted


@pytest.mark.parametrize(
    ("slots", "block"), [(2, None), pytest.param(5, 16, marks=pytest.mark.exhaustive)], ids=["slots", "blocks"]
)
def test_a_kernel_draws_the_same(decoder, slots, block):
    long = dataclasses.replace(CONFIG, max_tokens=19)  # two blocks of 16, or one of 32 that goes round
    want = run(decoder, some_prompts(), long)
    got = run(decoder, some_prompts(), dataclasses.replace(long, decode_slots=slots), compute=GPU, block=block)
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


@pytest.mark.slow
def test_a_group_split_over_lanes_draws_the_same_samples(decoder):
    prompts = some_prompts()
    want = run(decoder, prompts, dataclasses.replace(CONFIG, group=6))
    spread, part = lanes.spread(prompts, 6, 6)
    got = run(decoder, spread, dataclasses.replace(CONFIG, group=part))
    np.testing.assert_array_equal(lanes.gather_groups(got.tokens, 3), want.tokens)


@pytest.mark.in_ci("both")
@pytest.mark.parametrize(
    ("sizes", "of"),
    [
        ((8, 1, 1), Compute()),
        *(
            pytest.param(*on, marks=pytest.mark.slow)
            for on in [((1, 8, 1), TPU), ((2, 2, 2), Compute()), ((2, 2, 2), GPU)]
        ),
    ],
    ids=["lanes", "tpu", "both", "gpu"],
)
def test_draws_do_not_depend_on_the_mesh(decoder, sizes, of):
    prompts = some_prompts(8)
    mesh = sharding.make_mesh(sharding.MeshConfig(data=sizes[0], fsdp=sizes[1], tensor=sizes[2]))
    graph, params = decoder
    config = dataclasses.replace(BASE, vocab_size=56)  # a vocabulary that divides
    graph, params = random_decoder(config)
    want = run((graph, params), prompts, CONFIG)
    placed = jax.device_put(params, shardings(params, mesh))
    compute = dataclasses.replace(of, mesh=mesh)
    rollout_params = state.make_reshard(config, compute)(placed)
    slots, block = (0, None) if sizes == (8, 1, 1) else (2, None if of is GPU else 4)
    fewer = dataclasses.replace(CONFIG, decode_slots=slots)
    got = run((graph, rollout_params), prompts, fewer, compute=compute, block=block)
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
    out = run(decoder, prompts, dataclasses.replace(CONFIG, temperature=temperature, decode_slots=2), block=4)
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
    """The tokens of one device, and what moves is a few numbers a token and the likeliest k, never logits."""
    mesh = sharding.make_mesh(sharding.MeshConfig(fsdp=2, tensor=tensor), jax.devices()[: 2 * tensor])
    config, rng = DrawConfig(**options), np.random.default_rng(3)
    logits = np.float32(3.0 * rng.standard_normal((2, 3, QWEN)))
    logits[0, 0, [5, QWEN - 5]] = 20.0  # the likeliest twice, in the first part and the last
    keys = jax.random.split(jax.random.key(7), (2, 3))
    want = draw(jnp.asarray(logits), keys, config)
    placed = jax.device_put(logits, sharding.named(mesh, ("lane", None, "vocab")))
    drawn = jax.jit(lambda z, k: draw(z, k, config, mesh)).lower(placed, keys).compile()
    got = drawn(placed, keys)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1], atol=2e-5)
    moved = hlo.analyse(drawn.as_text()).collectives
    assert moved and max(c.size for c in moved) <= 4 * 3 * max(tensor * config.top_k, 8)


def test_one_row_of_logits_over_devices_is_drawn_from_for_all_of_a_prompts_keys():
    mesh = sharding.make_mesh(sharding.MeshConfig(fsdp=2, tensor=4))
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((2, 1, 1400)), jnp.float32)
    keys = jax.random.split(jax.random.key(0), (2, 60))
    for config in (DrawConfig(temperature=0.0), DrawConfig(top_k=7)):
        want = draw(logits, keys, config)
        got = jax.jit(functools.partial(draw, config=config, mesh=mesh))(logits, keys)
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_allclose(got[1], want[1], atol=1e-5)


@pytest.mark.exhaustive("programs/test_sampler.py::test_draws_follow_the_distribution_and_report_it")
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
        {"decode_slots": -1},
        {"decode_slots": 9},
    ],
)
def test_bad_values_are_refused(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        SamplerConfig(**bad)


def test_one_token_and_one_sample(decoder):
    out = run(decoder, some_prompts(), SamplerConfig(group=1, max_tokens=1))
    assert out.tokens.shape == (3, 1, 1) and (out.lengths == 1).all()


@pytest.mark.in_ci("sizes1")
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [None, (2, 2, 2)])
def test_eight_bits_draw_what_the_rounded_weights_draw(sizes):
    """The sampler's own log-probs are those of the rounded policy, and not those of the policy that learns."""
    config = dataclasses.replace(BASE, vocab_size=56)
    graph, params = random_decoder(config)
    prompts = some_prompts(8)
    mesh = sizes and sharding.make_mesh(sharding.MeshConfig(data=sizes[0], fsdp=sizes[1], tensor=sizes[2]))
    compute = Compute(mesh=mesh)
    eight = state.make_reshard(config, Compute(), "int8")(params)

    def whole(x):
        return x.values.astype(jnp.float32) * jnp.expand_dims(x.scale, 1) if hasattr(x, "scale") else x

    rounded = jax.tree.map(whole, eight, is_leaf=lambda x: hasattr(x, "scale"))
    want = run((graph, rounded), prompts, CONFIG)
    placed = params if mesh is None else jax.device_put(params, shardings(params, mesh))
    got = run((graph, state.make_reshard(config, compute, "int8")(placed)), prompts, CONFIG, compute=compute)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.logps, want.logps, atol=2e-5)
    plain = run((graph, params), prompts, CONFIG)
    assert np.abs(plain.logps[:, :, 0] - got.logps[:, :, 0]).max() > 1e-4
