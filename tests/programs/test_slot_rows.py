"""Which sample each slot draws: every sample once, and no slot idle while one waits that it may take."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.programs import slot_rows
from grpojax.programs.slot_rows import Slots, Waiting

MOST = 29


def start(n_prompts, group, rows, slots, ended):
    idle = jnp.zeros((rows, slots), jnp.int32)
    keys = jax.random.split(jax.random.key(0), n_prompts * group).reshape(n_prompts, group)
    known = Waiting(
        keys=keys,
        first=jnp.arange(n_prompts * group, dtype=jnp.int32).reshape(n_prompts, group),
        ended=jnp.asarray(ended),
        lengths=jnp.arange(n_prompts, dtype=jnp.int32) + 1,
    )
    s = Slots(
        prompt=jnp.full(rows, n_prompts, jnp.int32),
        length=jnp.ones(rows, jnp.int32),
        waiting=jnp.zeros(n_prompts, jnp.int32),
        sample=idle + group,
        count=idle,
        token=idle,
        key=jnp.broadcast_to(keys[:1, :1], idle.shape),
        active=idle > 0,
    )
    return known, s


@pytest.mark.parametrize(("rows", "slots"), [(3, 2), (7, 1), (2, 5)])
def test_every_sample_is_drawn_once_and_no_row_waits(rows, slots):
    """Five prompts of five samples of 1 to 29 tokens; 0 tokens stand for a sample that its first token ended."""
    n_prompts, group = 5, 5
    lengths = np.random.default_rng(rows).integers(1, MOST + 1, (n_prompts, group))
    known, s = start(n_prompts, group, rows, slots, lengths == 1)
    held, prompts = jnp.full((rows, 2), -1), jnp.stack([jnp.arange(n_prompts)] * 2, 1)
    refill = jax.jit(slot_rows.refill)
    wants = jax.jit(lambda s: slot_rows.wants(s, group, MOST, shared=True))
    take = jax.jit(lambda known, s, held: slot_rows.take_prompt(known, s, MOST, held, prompts))
    drawn, steps = np.zeros((n_prompts, group), int), 0
    while (wanted := np.asarray(wants(s))).any():
        if wanted.max() > MOST:
            s, held = take(known, s, held)
            continue
        s = refill(known, s)
        waiting, active, prompt = np.asarray(s.waiting), np.asarray(s.active), np.asarray(s.prompt)
        assert (np.asarray(held)[prompt < n_prompts] == prompt[prompt < n_prompts, None]).all()
        assert (np.asarray(s.length)[prompt < n_prompts] == prompt[prompt < n_prompts] + 1).all()
        sample, count = np.asarray(s.sample), np.asarray(s.count)
        ended = np.zeros_like(active)
        for r, g in zip(*np.nonzero(active), strict=True):
            at = prompt[r], sample[r, g]
            assert int(s.token[r, g]) == int(known.first[at]) or count[r, g] > 1
            assert (jax.random.key_data(s.key[r, g]) == jax.random.key_data(known.keys[at])).all()
            drawn[at] += 1
            ended[r, g] = drawn[at] == lengths[at] - 1
            assert count[r, g] == drawn[at]
        free = ~active & (np.take(np.append(waiting, group), prompt) < group)[:, None]
        assert not free.any() or (lengths == 1).any()
        s = dataclasses.replace(s, count=s.count + 1, active=s.active & ~ended)
        steps += 1
    np.testing.assert_array_equal(drawn, lengths - 1)
    if (
        slots == 1
    ):  # nobody waits: at most the work of all, plus the last sample and one step for each that ended at once
        assert steps <= (lengths - 1).sum() / rows + MOST + (lengths == 1).sum()


def test_rows_of_one_prompt_share_its_samples():
    """Two rows of three slots and seven samples: the first row takes 0 to 2, the second 3 to 5, and 6 waits."""
    known, s = start(1, 7, 2, 3, np.zeros((1, 7), bool))
    s = slot_rows.refill(known, dataclasses.replace(s, prompt=jnp.zeros(2, jnp.int32)))
    assert s.sample.tolist() == [[0, 1, 2], [3, 4, 5]] and s.waiting.tolist() == [6]
    s = slot_rows.refill(known, dataclasses.replace(s, active=s.active.at[1, 1].set(False)))
    assert s.sample.tolist() == [[0, 1, 2], [3, 6, 5]] and s.waiting.tolist() == [7]
