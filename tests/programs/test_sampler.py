"""The sampler against the trainer's forward, against plain numpy, and against itself in other layouts."""

import dataclasses
from types import SimpleNamespace

import flat_batches
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_hf
from flat_batches import Flat
from flax import nnx
from plain_decoder import BASE, FAMILIES, random_decoder, score, some_prompts, there
from short_blocks import blocks_of

from grpojax import sharding
from grpojax.host.errors import UserError
from grpojax.models import Compute, hf
from grpojax.models.weight_table import shardings
from grpojax.programs import batch_shards, sampler, state
from grpojax.programs.sampler import SampleQueue, Slots, sample_groups
from grpojax.programs.sampler_config import SamplerConfig

EOS = tuple(range(6))


@pytest.fixture(scope="module")
def decoder():
    return random_decoder(BASE)


def run(decoder, prompts, config, *, key=0, eos=EOS, compute=Compute(), block=None):  # noqa: B008
    with blocks_of(block):
        rollout = sample_groups(*decoder, prompts, jax.random.key(key), config, eos_ids=eos, compute=compute)
    return jax.tree.map(np.asarray, rollout)


# Families whose layers differ from those of Qwen and Llama.
BLOCKS = ["smollm3", "granite", "olmo2", "glm4", "hunyuan", "gemma3_text", "gemma2", "ministral3"]
BLOCKS += there("qwen3_5", "gpt_oss", "glm4_moe")
CONFIG = SamplerConfig(group=5, max_tokens=11)


@pytest.mark.slow
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


@pytest.mark.parametrize(("slots", "block"), [(3, None), (1, 3)], ids=["slots", "one slot, three blocks"])
@pytest.mark.slow
def test_draws_do_not_depend_on_slots_or_blocks(decoder, slots, block):
    want = run(decoder, some_prompts(), CONFIG)
    got = run(decoder, some_prompts(), dataclasses.replace(CONFIG, decode_slots=slots), block=block)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.lengths, want.lengths)
    np.testing.assert_allclose(got.logps, want.logps, atol=1e-5)


TPU = Compute(platform="tpu", attention="xla")  # its program, run here


@pytest.mark.slow
def test_a_loop_over_blocks_draws_the_same(decoder):
    want = run(decoder, some_prompts(), CONFIG)
    got = run(decoder, some_prompts(), dataclasses.replace(CONFIG, decode_slots=2), compute=TPU, block=3)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.lengths, want.lengths)
    np.testing.assert_allclose(got.logps, want.logps, atol=1e-5)


GPU = Compute(platform="gpu", attention="xla")  # the same, its kernel interpreted


@pytest.mark.in_ci("slots")
@pytest.mark.slow
@pytest.mark.parametrize(("slots", "block"), [(2, None), (5, 16)], ids=["slots", "blocks"])
def test_a_kernel_draws_the_same(decoder, slots, block):
    long = dataclasses.replace(CONFIG, max_tokens=19)  # two blocks of 16, or one of 32 that goes round
    want = run(decoder, some_prompts(), long)
    got = run(decoder, some_prompts(), dataclasses.replace(long, decode_slots=slots), compute=GPU, block=block)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.lengths, want.lengths)
    np.testing.assert_allclose(got.logps, want.logps, atol=1e-5)


@pytest.mark.parametrize(
    ("of", "slots", "block"),
    [(Compute(), 2, 4), (TPU, 2, 4), pytest.param(GPU, 2, None, marks=pytest.mark.slow)],
    ids=["blocks", "loop over blocks", "kernel"],
)
def test_a_window_slides_from_a_prompt_over_its_samples(of, slots, block):
    """Windows of 5 tokens, prompts of up to 7 and samples of up to 19; against one block and slots of their own."""
    windows, long = random_decoder(FAMILIES["windows"]), dataclasses.replace(CONFIG, max_tokens=19)
    want = run(windows, some_prompts(), long)
    got = run(windows, some_prompts(), dataclasses.replace(long, decode_slots=slots), compute=of, block=block)
    np.testing.assert_array_equal(got.tokens, want.tokens)
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


def test_samples_of_a_group_differ_and_so_do_the_draws_of_a_sample(decoder):
    tokens = run(decoder, some_prompts(), CONFIG).tokens
    assert len({tuple(t) for t in tokens[0]}) == 5
    graph, params = decoder
    out = run((graph, jax.tree.map(jnp.zeros_like, params)), some_prompts(), CONFIG)  # all tokens are equally likely
    first, second = out.tokens[out.lengths > 1][:, :2].T
    assert len(first) > 5 and (first != second).sum() > len(first) / 2


@pytest.mark.slow
def test_a_group_split_over_shards_draws_the_same_samples(decoder):
    prompts = some_prompts()
    want = run(decoder, prompts, dataclasses.replace(CONFIG, group=6))
    spread, part = batch_shards.spread(prompts, 6, 6)
    got = run(decoder, spread, dataclasses.replace(CONFIG, group=part))
    np.testing.assert_array_equal(batch_shards.gather_groups(got.tokens, 3), want.tokens)


@pytest.mark.in_ci("both")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "of", "family"),
    [
        pytest.param(*given, id=name)
        for name, given in {
            "shards": ((8, 1, 1), Compute(), "qwen2"),
            "tpu": ((1, 8, 1), TPU, "qwen2"),
            "both": ((2, 2, 2), Compute(), "qwen2"),
            "gpu": ((2, 2, 2), GPU, "qwen2"),
            "windows": ((2, 2, 2), TPU, "windows"),
            "windows, gpu": ((2, 2, 2), GPU, "windows"),
            "gemma3": ((2, 2, 2), Compute(), "gemma3_text"),
            "gpt-oss": ((2, 2, 2), Compute(), "gpt_oss"),
            "gpt-oss, gpu": ((2, 2, 2), GPU, "gpt_oss"),
            "glm4-moe": ((2, 2, 2), Compute(), "glm4_moe"),
        }.items()
        if given[-1] in FAMILIES
    ],
)
def test_draws_do_not_depend_on_the_mesh(sizes, of, family):
    """A mesh of the sampler is also in ``test_unused_rows.py``, in fewer seconds."""
    prompts = some_prompts(8)
    mesh = sharding.make_mesh(sharding.MeshConfig(data=sizes[0], fsdp=sizes[1], tensor=sizes[2]))
    config = dataclasses.replace(FAMILIES[family], vocab_size=56)  # a vocabulary that divides
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


@pytest.mark.parametrize(
    ("family", "temperature", "of"),
    [
        ("qwen2", 1.0, Compute()),
        ("qwen2", 0.6, Compute()),
        ("gemma3_text", 1.0, TPU),
        *((family, 1.0, Compute()) for family in there("qwen3_5")),
        *(
            pytest.param(family, 1.0, TPU, marks=pytest.mark.slow)
            for family in BLOCKS
            if family in ("smollm3", "gemma2", "ministral3", "gpt_oss", "glm4_moe")
        ),
        *(pytest.param(family, 1.0, Compute(), marks=pytest.mark.slow) for family in there("gpt_oss")),
        # Their layers compute what they compute in the trainer, and cache as the others.
        *(
            pytest.param(family, 1.0, TPU, marks=pytest.mark.exhaustive)
            for family in BLOCKS
            if family in ("granite", "olmo2", "glm4", "hunyuan", "qwen3_5")
        ),
        *(
            pytest.param(family, 1.0, Compute(), marks=pytest.mark.exhaustive)
            for family in BLOCKS
            if family not in ("qwen3_5", "gpt_oss")
        ),
    ],
)
def test_log_probs_equal_the_trainers(family, temperature, of):
    """Also with a pad id (0) that is an end-of-sequence id."""
    graph, params = random_decoder(FAMILIES[family])
    prompts = some_prompts()
    config = dataclasses.replace(CONFIG, temperature=temperature, decode_slots=2)
    out = run((graph, params), prompts, config, compute=of, block=4)
    zeros = np.zeros(out.logps.shape, np.float32)
    arrays = dict(advantages=zeros, weights=zeros)
    packed, layout = flat_batches.pack(Flat(prompts=prompts, tokens=out.tokens, lengths=out.lengths, arrays=arrays))
    rows = jax.tree.map(lambda x: x[0], packed)
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


# To others, but for a detail, which `test_log_probs_equal_the_trainers` or transformers' log-probs would show.
ALIKE = "glm exaone4 seed-oss ernie4_5 helium hyperclovax mistral-tied smollm3 granite olmo2 glm4 hunyuan".split()
ALIKE += ["mistral-window", "qwen3-window", "phi3", "olmo3"]


@pytest.mark.in_ci()
@pytest.mark.parametrize(
    "name",
    [
        *tiny_hf.there("qwen3", "gemma3", "qwen3_5"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ALIKE),
    ],
)
def test_greedy_equals_transformers(tmp_path, name):
    from with_torch import torch

    theirs = tiny_hf.save(tmp_path, name)
    ours = nnx.split(hf.load(tmp_path))
    prompts = some_prompts(4)
    out = run(ours, prompts, SamplerConfig(group=1, max_tokens=13, temperature=0.0), eos=())
    for p, n in enumerate(prompts.lengths):
        ids = torch.tensor(prompts.tokens[p : p + 1, :n], dtype=torch.long)
        want = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=13, eos_token_id=None
        )
        assert want[0, n:].tolist() == out.tokens[p, 0].tolist()


@pytest.mark.parametrize(
    "bad",
    [
        {"group": 0},
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": 1e-4},
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


@pytest.mark.slow
def test_one_token_and_one_sample(decoder):
    out = run(decoder, some_prompts(), SamplerConfig(group=1, max_tokens=1))
    assert out.tokens.shape == (3, 1, 1) and (out.lengths == 1).all()


# ---------------------------------------------------------------------------- which sample each slot draws

MOST = 29


def queue_of(group, slots, ended):
    n_prompts = len(ended)
    idle = jnp.zeros((n_prompts, slots), jnp.int32)
    keys = jax.random.split(jax.random.key(0), n_prompts * group).reshape(n_prompts, group)
    known = SampleQueue(
        keys=keys,
        first=jnp.arange(n_prompts * group, dtype=jnp.int32).reshape(n_prompts, group),
        ended=jnp.asarray(ended),
        lengths=jnp.arange(n_prompts, dtype=jnp.int32) + 1,
    )
    s = Slots(
        waiting=jnp.zeros(n_prompts, jnp.int32),
        sample=idle + group,
        count=idle,
        token=idle,
        key=jnp.broadcast_to(keys[:1, :1], idle.shape),
        active=idle > 0,
    )
    return known, s


@pytest.mark.parametrize("slots", [2, 5])
def test_every_sample_is_drawn_once_and_no_slot_waits(slots):
    """Three prompts of five samples of 1 to 29 tokens; 1 token stands for a sample that its first token ended."""
    n_prompts, group = 3, CONFIG.group
    lengths = np.random.default_rng(slots).integers(1, MOST + 1, (n_prompts, group))
    known, s = queue_of(group, slots, lengths == 1)
    refill, constants = jax.jit(sampler._refill), SimpleNamespace(left=None, compute=Compute(), config=CONFIG)
    longest = jax.jit(lambda s: sampler._longest(constants, s))
    drawn = np.zeros((n_prompts, group), int)
    while (most := int(longest(s))) > 0:
        active = np.asarray(s.active)
        assert most == max(1, np.asarray(s.count)[active].max(initial=0))
        s = refill(known, s)
        waiting, active, sample, count = (np.asarray(x) for x in (s.waiting, s.active, s.sample, s.count))
        ended = np.zeros_like(active)
        for p, i in zip(*np.nonzero(active), strict=True):
            at = p, sample[p, i]
            assert int(s.token[p, i]) == int(known.first[at]) or count[p, i] > 1
            assert (jax.random.key_data(s.key[p, i]) == jax.random.key_data(known.keys[at])).all()
            drawn[at] += 1
            ended[p, i] = drawn[at] == lengths[at] - 1
            assert count[p, i] == drawn[at]
        free = ~active & (waiting < group)[:, None]
        assert not free.any() or (lengths == 1).any()
        s = dataclasses.replace(s, count=s.count + 1, active=s.active & ~ended)
    np.testing.assert_array_equal(drawn, lengths - 1)


def test_a_free_slot_takes_the_next_sample_of_its_prompt():
    known, s = queue_of(4, 3, np.zeros((2, 4), bool))
    s = sampler._refill(known, s)
    assert s.sample.tolist() == [[0, 1, 2]] * 2 and s.waiting.tolist() == [3, 3]
    s = sampler._refill(known, dataclasses.replace(s, active=s.active.at[1, 1].set(False)))
    assert s.sample.tolist() == [[0, 1, 2], [0, 3, 2]] and s.waiting.tolist() == [3, 4]


def test_choices_of_experts_cannot_be_kept_without_experts(decoder):
    with pytest.raises(UserError, match="router_replay=true.*no experts"):
        run(decoder, some_prompts(), dataclasses.replace(CONFIG, router_replay=True))
