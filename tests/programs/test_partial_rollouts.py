"""Rollouts that leave samples unfinished, and those that go on with them: against a rollout that ends them all."""

import dataclasses
import functools

import flat_batches
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flat_batches import Flat
from flax import nnx
from plain_decoder import BASE, FAMILIES, FORMATS, random_decoder, some_prompts, there
from short_blocks import blocks_of

from grpojax import sharding
from grpojax.host.errors import UserError
from grpojax.models import Compute, score
from grpojax.models.number_formats import Floats
from grpojax.models.weight_table import shardings
from grpojax.programs import kv_cache, sampler, state
from grpojax.programs.kv_cache import Ring
from grpojax.programs.sampler import sample_groups
from grpojax.programs.sampler_config import SamplerConfig
from grpojax.types import Rollout

EOS = (0, 1, 2, 3)
CONFIG = SamplerConfig(group=5, max_tokens=23)
TPU = Compute(platform="tpu", attention="xla")  # its program, run here
GPU = Compute(platform="gpu", attention="xla")  # the same, its kernel interpreted


def run(decoder, prompts, config, given=None, left=0, compute=Compute()):  # noqa: B008
    how = {"eos_ids": EOS, "compute": compute}
    rollout = sample_groups(*decoder, prompts, jax.random.key(0), config, partial=given, left=left, **how)
    return jax.tree.map(np.array, rollout)


def only(rollout, which):
    """Groups ``which [P]``; the others are new."""
    return jax.tree.map(lambda x: np.where(which.reshape(-1, *(1,) * (x.ndim - 1)), x, np.zeros((), x.dtype)), rollout)


def rollouts(decoder, prompts, config, count, left, compute=Compute()):  # noqa: B008
    """``(before, after)`` of each rollout; a group that is whole is begun anew, with the same draws."""
    before = sampler.no_samples(len(prompts.lengths), config.group, config.max_tokens)
    for _ in range(count):
        after = run(decoder, prompts, config, before, left, compute)
        yield before, after
        before = only(after, sampler.unfinished(after).any(1))


def after(before, full, left, shards):
    """Oracle: the lengths of all samples when the rollout ends, a token of each at a time; ``full`` in the end."""
    lengths = np.maximum(before, 1)
    while True:
        wants = lengths < full
        if (wants.reshape(shards, -1).sum(1) <= left).all() and not wants.any(1).all():
            return lengths
        lengths = lengths + wants


def check(decoder, prompts, config, *, left, shards=1, compute=Compute(), want=None, count=6):  # noqa: B008
    want = run(decoder, prompts, config) if want is None else want
    there, taken = np.arange(config.max_tokens), []
    for before, out in rollouts(decoder, prompts, config, count, left, compute):
        expected = after(before.lengths, want.lengths, left, shards)
        np.testing.assert_array_equal(out.lengths, expected)
        mask = there < expected[..., None]
        np.testing.assert_array_equal(out.tokens, np.where(mask, want.tokens, 0))
        np.testing.assert_allclose(out.logps, np.where(mask, want.logps, 0), atol=1e-5)
        np.testing.assert_array_equal(out.stopped, want.stopped & (expected == want.lengths))
        kept = (before.lengths > 0) & ~sampler.unfinished(before)
        np.testing.assert_array_equal(out.logps[kept], before.logps[kept])
        taken.append(sampler.unfinished(before).reshape(shards, -1).sum(1).max())
    assert max(taken) > 1
    return want


@pytest.fixture(scope="module")
def decoder():
    return random_decoder(BASE, seed=5)  # whose groups end at different times


@pytest.mark.parametrize(
    ("compute", "block", "left"),
    [
        (Compute(), 4, 10),
        pytest.param(Compute(), 23, 3, marks=pytest.mark.exhaustive),
        pytest.param(TPU, 4, 6, marks=pytest.mark.slow),
        pytest.param(GPU, 16, 10, marks=pytest.mark.exhaustive),
    ],
    ids=["blocks", "one block", "tpu", "gpu"],
)
@pytest.mark.slow
def test_samples_are_those_of_one_rollout_wherever_it_is_broken_off(decoder, compute, block, left):
    """Keys are of positions, so with one key and the same weights every token is the same, and the loop ends where a
    plain count of tokens says."""
    with blocks_of(block):
        check(decoder, some_prompts(), CONFIG, left=left, compute=compute)


@pytest.mark.parametrize("compute", [Compute(), pytest.param(TPU, marks=pytest.mark.slow)], ids=["cpu", "tpu"])
@pytest.mark.slow
def test_windows_go_on_where_they_were(compute):
    with blocks_of(4):
        check(random_decoder(FAMILIES["windows"], seed=3), some_prompts(), CONFIG, left=10, compute=compute, count=4)


@pytest.mark.parametrize("family", there("qwen3_5"))
@pytest.mark.parametrize("compute", [Compute(), pytest.param(TPU, marks=pytest.mark.exhaustive)], ids=["cpu", "tpu"])
@pytest.mark.slow
def test_layers_that_do_not_attend_go_on_from_the_state_that_they_had(compute, family):
    decoder = random_decoder(FAMILIES[family], seed=5)
    with blocks_of(8):
        check(decoder, some_prompts(), CONFIG, left=10, compute=compute, count=4)


@pytest.mark.slow
def test_log_probs_of_what_went_on_are_the_trainers(decoder):
    prompts = some_prompts()
    *_, (before, out) = rollouts(decoder, prompts, CONFIG, 4, 10)
    assert sampler.unfinished(before).sum() > 2
    packed, layout = flat_batches.pack(Flat(prompts=prompts, tokens=out.tokens, lengths=out.lengths, arrays=dict()))
    rows = jax.tree.map(lambda x: x[0], packed)
    logps = layout.unpack(np.asarray(score(*decoder, rows, Compute()).logps)[None])
    mask = np.arange(23) < out.lengths[..., None]
    assert np.abs(logps - out.logps)[mask].max() < 1e-4


@pytest.mark.parametrize("cache_dtype", FORMATS[1:])
@pytest.mark.parametrize("compute", [Compute(), TPU], ids=["cpu", "tpu"])
@pytest.mark.slow
def test_in_fewer_bits_they_are_rounded_as_they_are_put(decoder, compute, cache_dtype):
    prompts, ring = some_prompts(), Ring(6, 4)
    (before, _), *_ = list(rollouts(decoder, prompts, CONFIG, 2, 10))[1:]

    @functools.partial(jax.jit, static_argnums=0)
    def placed(form):
        model = nnx.merge(*decoder)
        read, _ = sampler._read_partial(model, *jax.tree.map(jnp.asarray, (prompts, before)), 10, compute)
        cache = kv_cache.of(compute)
        empty = cache.empty(model.config, len(prompts.lengths), 5, ring, form)
        return cache.insert(read, empty, 5, ring, form)

    form = kv_cache.format_of_cache(cache_dtype, compute)
    exact, rounded = placed(Floats("float32")), placed(form)
    assert all(np.asarray(x).any() for x in exact[0][:1])
    for kind, axis in ((0, -2), (1, -1)):
        of = jax.tree.map(lambda x, axis=axis: form.stored(x, axis), exact[kind])
        jax.tree.map(np.testing.assert_array_equal, of, rounded[kind])


@pytest.mark.parametrize(
    ("sizes", "of"),
    [
        pytest.param((2, 2, 2), Compute(), marks=pytest.mark.exhaustive),
        pytest.param((2, 2, 2), TPU, marks=pytest.mark.exhaustive),
        pytest.param((4, 2, 1), GPU, marks=pytest.mark.exhaustive),
    ],
    ids=["cpu", "tpu", "gpu"],
)
def test_every_shard_of_a_mesh_goes_on_with_its_own(sizes, of):
    """A shard has some of its samples left however few the others have."""
    config = dataclasses.replace(BASE, vocab_size=56)  # a vocabulary that divides
    graph, params = random_decoder(config)
    mesh = sharding.make_mesh(sharding.MeshConfig(data=sizes[0], fsdp=sizes[1], tensor=sizes[2]))
    shards, prompts = sizes[0] * sizes[1], some_prompts(8)
    want = run((graph, params), prompts, CONFIG)
    compute = dataclasses.replace(of, mesh=mesh)
    placed = state.make_reshard(config, compute)(jax.device_put(params, shardings(params, mesh)))
    with blocks_of(4):
        check((graph, placed), prompts, CONFIG, left=16 // shards, shards=shards, compute=compute, want=want)


@pytest.mark.slow
def test_what_the_last_samples_would_keep_waiting_is_drawn_in_fewer_steps(decoder):
    """Tokens that are drawn in a decode step; lengths are nearly geometric."""
    prompts, config = some_prompts(8), SamplerConfig(group=4, max_tokens=60)

    def tokens_a_step(pairs):
        drawn = sum((after - before).sum() for before, after in pairs)
        return drawn / sum((after - np.maximum(before, 1)).max() for before, after in pairs)

    whole = run(decoder, prompts, config).lengths
    parts = [(before.lengths, out.lengths) for before, out in rollouts(decoder, prompts, config, 5, 8)]
    assert tokens_a_step(parts) > 1.5 * tokens_a_step([(0 * whole, whole)])


def test_fewer_slots_are_refused(decoder):
    with pytest.raises(UserError, match="partial samples need slots of their own"):
        run(decoder, some_prompts(), dataclasses.replace(CONFIG, decode_slots=2), sampler.no_samples(3, 5, 23), 3)


@pytest.mark.slow
def test_a_rollout_that_nothing_goes_on_in_is_the_program_that_it_was(decoder):
    """With nothing given there is no argument, and no trace of the rest in the program."""
    prompts, key = some_prompts(), jax.random.key(0)

    def text(*given):
        def program(params, prompts, key, given=None):
            how = {"eos_ids": EOS, "compute": Compute(), "partial": given, "left": 3}
            return sample_groups(decoder[0], params, prompts, key, CONFIG, **how)

        return jax.jit(program).lower(decoder[1], prompts, key, *given).as_text(debug_info=True)

    assert "read_partial" not in text() and "read_partial" in text(sampler.no_samples(3, 5, 23))


def test_samples_are_unfinished_on_the_device_as_on_the_host():
    rng = np.random.default_rng(0)
    given = sampler.no_samples(3, 5, 7)
    given = dataclasses.replace(given, lengths=rng.integers(0, 8, (3, 5)), stopped=rng.random((3, 5)) < 0.5)
    want = [
        [0 < n < 7 and not s for n, s in zip(*rows, strict=True)]
        for rows in zip(given.lengths, given.stopped, strict=True)
    ]
    assert sampler.unfinished(given).tolist() == want
    assert isinstance(given, Rollout) and np.asarray(jax.jit(sampler.unfinished)(given)).tolist() == want
