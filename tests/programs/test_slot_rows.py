"""Which sample each slot draws: every sample once, and no slot idle while one of its prompt waits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.programs import slot_rows
from grpojax.programs.slot_rows import Slots, Waiting

MOST = 29


def start(group, slots, ended):
    n_prompts = len(ended)
    idle = jnp.zeros((n_prompts, slots), jnp.int32)
    keys = jax.random.split(jax.random.key(0), n_prompts * group).reshape(n_prompts, group)
    known = Waiting(
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


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_every_sample_is_drawn_once_and_no_slot_waits(slots):
    """Three prompts of five samples of 1 to 29 tokens; 1 token stands for a sample that its first token ended."""
    n_prompts, group = 3, 5
    lengths = np.random.default_rng(slots).integers(1, MOST + 1, (n_prompts, group))
    known, s = start(group, slots, lengths == 1)
    refill, longest = jax.jit(slot_rows.refill), jax.jit(slot_rows.longest, static_argnums=1)
    drawn = np.zeros((n_prompts, group), int)
    while (most := int(longest(s, group)[0])) > 0:
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
    known, s = start(4, 3, np.zeros((2, 4), bool))
    s = slot_rows.refill(known, s)
    assert s.sample.tolist() == [[0, 1, 2]] * 2 and s.waiting.tolist() == [3, 3]
    s = slot_rows.refill(known, dataclasses.replace(s, active=s.active.at[1, 1].set(False)))
    assert s.sample.tolist() == [[0, 1, 2], [0, 3, 2]] and s.waiting.tolist() == [3, 4]
