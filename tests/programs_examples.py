"""Batches whose tokens say where they stand, and what must hold of their rows."""

import flat_batches
import jax
import numpy as np
import packing_oracles
from flat_batches import Flat
from oracles import close

from grpojax.programs import packing
from grpojax.types import Prompts

L_PROMPT = 3


def example(lengths, size, seed=0):
    """A batch whose tokens say where they stand: 1 + their place in ``[P, G, T]``; a prompt's, 100 p + 1, …"""
    lengths, rng = np.asarray(lengths, np.int32), np.random.default_rng(seed)
    n, shape = len(lengths), (*lengths.shape, size)
    mask = np.arange(size) < lengths[..., None]

    def normal():
        return rng.normal(size=shape).astype(np.float32)

    return Flat(
        prompts=Prompts(
            tokens=(100 * np.arange(n)[:, None] + 1 + np.arange(L_PROMPT)).astype(np.int32),
            lengths=(1 + np.arange(n) % L_PROMPT).astype(np.int32),
            uids=np.arange(n, dtype=np.uint32),
            first_sample=np.zeros(n, np.int32),
        ),
        tokens=np.where(mask, 1 + np.arange(np.prod(shape)).reshape(shape), 0).astype(np.int32),
        lengths=lengths,
        arrays=dict(
            advantages=normal(),
            weights=np.where(mask, 1 + rng.random(shape), 0).astype(np.float32),
            old_logps=normal(),
            ref_logps=normal(),
            sampler_logps=normal(),
        ),
    )


def check_gather(rows, completions):
    """Each completion has gather indices of its own, the longest of them those of a whole row."""
    shape, read = rows.tokens.shape, packing_oracles.read_rows(rows)
    sizes = packing.gather_sizes(completions, *shape[2:])
    assert [x.shape for x in rows.gather] == [(*shape[:2], *size) for size in sizes]
    for m, shard in np.ndindex(shape[:2]):
        tokens = rows.tokens[m, shard].reshape(-1)
        gather = [s for of_class in rows.gather for s in of_class[m, shard]]
        whole = [tokens[s[s >= 0]].tolist() for s in gather if (s >= 0).any()]
        there = [c for i, j, _, row in read if (i, j) == (m, shard) for c in row]
        assert whole == sorted(there, key=len, reverse=True)


def check(batch, shards, microbatches, gather):
    """Reads the rows back and compares them with the batch; returns what was packed."""
    packed, layout = flat_batches.pack(batch, shards=shards, microbatches=microbatches, gather=gather)
    n, group, size = batch.tokens.shape
    per_shard = n // shards
    shape = packed.tokens.shape
    assert shape[:2] == (microbatches, shards) and shape[3] <= max(size, 1)
    assert packed.segments.shape == packed.offsets.shape == packed.arrays["weights"].shape == shape
    assert packed.token_prompt.shape == shape and packed.prompts.shape[:2] == shape[:2]
    assert {x.dtype for x in jax.tree.leaves(packed.bare)} == {np.dtype(np.int32)}

    seen, bins = [], {}
    for m, shard, prompts, completions in packing_oracles.read_rows(packed):
        for prompt, tokens in zip(prompts, completions, strict=True):
            p, g, t = np.unravel_index(np.array(tokens) - 1, batch.tokens.shape)
            assert t.tolist() == list(range(batch.lengths[p[0], g[0]])), "not a whole completion"
            assert len(set(zip(p, g, strict=True))) == 1
            p, g = int(p[0]), int(g[0])
            assert prompt == batch.prompts.tokens[p, : batch.prompts.lengths[p]].tolist(), "another prompt's row"
            assert p // per_shard == shard
            seen.append((p, g))
            at = ((p % per_shard) * group + g) * microbatches // (per_shard * group)
            assert at == m, "in another micro-batch"
        bins.setdefault((m, shard, p), []).append([g for _, g in seen[-len(completions) :]])
    assert sorted(seen) == [(int(p), int(g)) for p, g in np.argwhere(batch.lengths)], "not each completion once"
    if packed.gather is None:
        assert not gather or packed.segments.max() <= 1
    else:
        check_gather(packed, n * group // (shards * microbatches))
    for (_, _, p), rows in bins.items():
        order = sorted(g for row in rows for g in row)
        local = [[order.index(g) for g in row] for row in rows]
        if shape[2] == n * group // (shards * microbatches):  # the largest size: a row for each completion
            assert all(len(row) == 1 for row in rows)
        else:
            packing_oracles.check_first_fit(local, [int(batch.lengths[p, g]) for g in order], shape[3])

    mask = np.arange(size) < batch.lengths[..., None]
    for name in ("tokens", "advantages", "weights", "old_logps", "ref_logps", "sampler_logps"):
        x = batch.tokens if name == "tokens" else batch.arrays[name]
        held = packed.tokens if name == "tokens" else packed.arrays[name]
        assert held.dtype == x.dtype and not held[packed.segments == 0].any()
        np.testing.assert_array_equal(layout.unpack(held, fill=7), np.where(mask, x, 7))
        np.testing.assert_array_equal(layout.pack(layout.unpack(held)), held)
    close(layout.useful, batch.lengths.sum() / np.prod(shape))
    return packed, layout
