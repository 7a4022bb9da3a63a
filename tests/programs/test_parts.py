"""Rollouts that are handed over in parts: against the one program that draws them whole, and a count of tokens."""

import dataclasses

import jax
import numpy as np
import pytest
from plain_decoder import BASE, random_decoder, some_prompts

from grpojax.models import Compute, sharding
from grpojax.models.weight_table import shardings
from grpojax.programs import begun, sampler, state
from grpojax.programs.sampler_config import SamplerConfig

EOS = (0, 1, 2, 3)
CONFIG = SamplerConfig(group=5, max_tokens=23, block=4)
TPU = Compute(platform="tpu", attention="xla")  # its program, run here
GPU = Compute(platform="gpu", attention="xla")  # the same, its kernel interpreted


@pytest.fixture(scope="module")
def decoder():
    return random_decoder(BASE)


def whole(decoder, prompts, config, compute=Compute()):  # noqa: B008
    rollout = sampler.sample_groups(*decoder, prompts, jax.random.key(0), config, eos_ids=EOS, compute=compute)
    return jax.tree.map(np.asarray, rollout)


def parts(decoder, prompts, config, undone, compute=Compute()):  # noqa: B008
    """The samples after each part."""
    how = {"config": config, "eos_ids": EOS, "compute": compute}
    read, going, out = sampler.start_parts(*decoder, prompts, jax.random.key(0), **how)
    for most in undone:
        going, out = sampler.next_part(*decoder, read, going, out, np.int32(most), **how)
        yield jax.tree.map(np.array, out)


def lengths_when(full, undone, lanes):
    """Oracle, where every sample has a slot: a token of each at a time until few enough groups of each lane go on."""
    lengths = np.ones_like(full)
    while ((lengths < full).any(1).reshape(lanes, -1).sum(1) > undone).any():
        lengths = lengths + (lengths < full)
    return lengths


def check(decoder, prompts, config, undone, want, *, compute=Compute(), lanes=1):  # noqa: B008
    """What was drawn is the same, bit for bit but for log-probs; and each part ends where it is to end."""
    seen = []
    for most, out in zip(undone, parts(decoder, prompts, config, undone, compute), strict=True):
        going = begun.unfinished(out).any(1)
        assert (going.reshape(lanes, -1).sum(1) <= most).all()
        mask = np.arange(config.max_tokens) < out.lengths[..., None]
        np.testing.assert_array_equal(out.tokens, np.where(mask, want.tokens, 0))
        np.testing.assert_allclose(out.logps, np.where(mask, want.logps, 0), atol=1e-5)
        np.testing.assert_array_equal(out.stopped, want.stopped & (out.lengths == want.lengths))
        if config.decode_slots in (0, config.group) and not config.rows:
            np.testing.assert_array_equal(out.lengths, lengths_when(want.lengths, most, lanes))
        seen.append(out.lengths)
    np.testing.assert_array_equal(seen[-1], want.lengths)
    return seen


@pytest.mark.parametrize(
    ("compute", "cells"),
    [
        (Compute(), {}),
        (Compute(), {"decode_slots": 2}),
        (TPU, {"decode_slots": 2, "rows": 2}),
        *(
            pytest.param(*on, marks=pytest.mark.exhaustive)
            for on in [(Compute(), {"decode_slots": 3, "rows": 2}), (TPU, {}), (GPU, {"block": 16})]
        ),
    ],
    ids=["own slots", "slots", "tpu rows", "rows", "tpu", "gpu"],
)
def test_parts_draw_what_one_program_draws(decoder, compute, cells):
    prompts, config = some_prompts(7), dataclasses.replace(CONFIG, **cells)
    undone = sampler.undone_after(4, 7, 1)
    assert undone == [5, 3, 1, 0]
    seen = check(decoder, prompts, config, undone, whole(decoder, prompts, CONFIG), compute=compute)
    assert (seen[0] < seen[-1]).any() and (seen[0] == seen[-1]).all(1).any()


def test_a_sample_of_one_token_is_whole_at_once(decoder):
    prompts, config = some_prompts(3), SamplerConfig(group=2, max_tokens=1)
    check(decoder, prompts, config, [2, 1, 0], whole(decoder, prompts, config))


@pytest.mark.parametrize(
    ("sizes", "compute", "cells"),
    [
        ((8, 1, 1), Compute(), {}),
        *(
            pytest.param(*on, marks=pytest.mark.exhaustive)
            for on in [
                ((2, 2, 2), Compute(), {"decode_slots": 2, "rows": 1}),
                ((2, 2, 2), TPU, {}),
                ((4, 2, 1), GPU, {}),
            ]
        ),
    ],
    ids=["lanes", "rows", "tpu", "gpu"],
)
def test_every_lane_has_its_share_and_one_program_draws_all_parts(sizes, compute, cells, caplog):
    """Each part hands the next what lies on the devices as it took it, or the second would compile once more."""
    mesh = sharding.make_mesh(sharding.MeshConfig(data=sizes[0], fsdp=sizes[1], tensor=sizes[2]))
    graph, params = random_decoder(dataclasses.replace(BASE, vocab_size=56))
    prompts, block = some_prompts(16), 16 if compute is GPU else 4
    config = dataclasses.replace(CONFIG, block=block)
    want = whole((graph, params), prompts, config)
    compute = dataclasses.replace(compute, mesh=mesh)
    weights = state.make_reshard(dataclasses.replace(BASE, vocab_size=56), compute)(
        jax.device_put(params, shardings(params, mesh))
    )
    lanes = sharding.lanes(mesh)
    placed = jax.device_put(
        prompts, jax.tree.map(lambda x: sharding.named(mesh, ("lane",) + (None,) * (x.ndim - 1)), prompts)
    )
    undone = sampler.undone_after(3, 16, lanes)
    config = dataclasses.replace(config, **cells)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        check((graph, weights), placed, config, undone, want, compute=compute, lanes=lanes)
    assert caplog.text.count("Compiling jit(next_part)") == 1


def test_caches_are_written_in_place(decoder):
    """A part takes over the memory of the one before."""
    how = {"config": CONFIG, "eos_ids": EOS, "compute": Compute()}
    read, going, out = sampler.start_parts(*decoder, some_prompts(3), jax.random.key(0), **how)
    held = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((going.keys, going.values))]
    after, _ = sampler.next_part(*decoder, read, going, out, np.int32(1), **how)
    assert all(x.is_deleted() for x in jax.tree.leaves(going.keys))
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves((after.keys, after.values))] == held
