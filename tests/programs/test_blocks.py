import functools
import itertools

import flat_batches
import jax
import jax.numpy as jnp
import numpy as np
import packing_oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import close
from programs_examples import L_PROMPT, check_gather, example

from grpojax.host.errors import UserError
from grpojax.programs import blocks, packing

# P, G, T, shards, micro-batches, least; in the last but one a micro-batch holds a part of a group.
SIZES = [
    (7, 5, 11, 1, 1, 1),
    (12, 4, 13, 3, 2, 1),
    (6, 8, 37, 2, 3, 70),
    (2, 6, 13, 2, 3, 1),
    (3, 5, 11, 1, 1, 10_000),
]


def check(batch, shards, microbatches, gather, least, gaps=False):
    """Each completion stands once, whole, after its own prompt, in a block of the run's."""
    how = dict(shards=shards, microbatches=microbatches, least=least, gaps=gaps)
    packed, layout = flat_batches.pack_blocks(batch, gather=gather, **how)
    (n, group, size), shape = batch.tokens.shape, packed.tokens.shape
    made = packing.block_shapes_of(batch.prompts, batch, **how)
    block = next(b for b in made if (b.reads * b.count, b.rows) == (shape[0], shape[2]))
    assert shape == (block.reads * block.count, shards, block.rows, size)
    assert packed.prompts.shape == (block.reads, shards, block.prompts, L_PROMPT)
    assert blocks.after_reading(packed) == block.count
    seen, home, read = [], {}, packing_oracles.read_rows(packed)
    for _, shard, prompts, completions in read:
        assert gather or len({*map(tuple, prompts)}) == 1
        for prompt, tokens in zip(prompts, completions, strict=True):
            p, g, t = np.unravel_index(np.array(tokens) - 1, batch.tokens.shape)
            assert len({*zip(p, g, strict=True)}) == 1 and t.tolist() == list(range(batch.lengths[p[0], g[0]]))
            assert prompt == batch.prompts.tokens[p[0], : batch.prompts.lengths[p[0]]].tolist()
            assert home.setdefault(int(p[0]), shard) == shard
            seen.append((int(p[0]), int(g[0])))
    assert all(list(home.values()).count(shard) <= n // shards for shard in range(shards))
    assert sorted(seen) == [(int(p), int(g)) for p, g in np.argwhere(batch.lengths)]
    mask = np.arange(size) < batch.lengths[..., None]
    np.testing.assert_array_equal(layout.unpack(packed.arrays["weights"]), batch.arrays["weights"] * mask)
    if packed.gather is None:
        assert not (gather and block.shared)
    else:
        check_gather(packed, min(block.prompts * group, packing.GATHERED * block.rows))
    last = {c: m % block.count for m, *_ in read for c in [m // block.count]}
    taken = sum(last.get(c, 0) + 1 for c in range(max(last, default=0) + 1)) if block.shared else shape[0]
    rows = jax.tree.map(jnp.asarray, packed)
    readings = int(blocks.readings(rows))
    assert readings == (max(last, default=0) + 1 if block.shared else block.reads)
    if block.shared:
        assert taken == sum(int(blocks.taken(blocks.reading(rows, c))) for c in range(readings))
    close(layout.useful, batch.lengths.sum() / (taken * np.prod(shape[1:])))
    return block, taken


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
@settings(max_examples=8)
@given(data=st.data(), gaps=st.booleans())
@pytest.mark.slow
def test_every_token_once(sizes, gather, data, gaps):
    n, group, size, shards, microbatches, least = sizes
    top = data.draw(st.sampled_from([1, size // 2, size]))
    lengths = data.draw(st.lists(st.integers(0, top), min_size=n * group, max_size=n * group))
    there = data.draw(st.lists(st.booleans(), min_size=n, max_size=n)) if gaps else [True] * n
    lengths = np.reshape(lengths, (n, group)) * np.array(there)[:, None]
    check(example(lengths, size), shards, microbatches, gather, least, gaps)


@pytest.mark.parametrize("sizes", SIZES)
def test_two_shapes_whatever_the_lengths(sizes):
    """Of sixteen sizes of rows by four of prompts a run met a new one in its seventh step."""
    n, group, size, shards, microbatches, least = sizes
    rng, shapes = np.random.default_rng(0), set()
    for top in np.linspace(0, size, 40).astype(int):
        batch = example(rng.integers(0, top + 1, (n, group)), size)
        packed, _ = flat_batches.pack_blocks(batch, shards=shards, microbatches=microbatches, least=least)
        again, _ = flat_batches.pack_blocks(batch, shards=shards, microbatches=microbatches, least=least)
        jax.tree.map(np.testing.assert_array_equal, packed, again)
        shapes.add(packed.tokens.shape)
    assert (
        len(shapes)
        <= len(packing.block_shapes_of(batch.prompts, batch, shards=shards, microbatches=microbatches, least=least))
        <= 2
    )


def test_full_groups_are_one_block():
    block, taken = check(example(np.full((16, 8), 5), 5), 1, 1, True, 1)
    assert block == packing.BlockShape(16, 1, 128, 1, shared=False) and taken == 1


@pytest.mark.parametrize("mean", [12, 20, 30])
def test_cost_follows_the_tokens(mean):
    """The share of useful positions is that of sixteen sizes of rows; with gather, whose rows take completions of any
    prompt, nearly all of them are useful."""
    rng, useful = np.random.default_rng(1), []
    how = [
        flat_batches.pack,
        functools.partial(flat_batches.pack_blocks, least=64),
        functools.partial(flat_batches.pack_blocks, least=64, gather=True),
    ]
    for _ in range(20):
        batch = example(np.clip(rng.geometric(1 / mean, (16, 8)), 1, 40), 40)
        useful.append([pack(batch)[1].useful for pack in how])
    before, now, mixed = np.mean(useful, axis=0)
    assert now > before - 0.02 and now > 0.7
    assert mixed > 0.87 and mixed > now + 0.04


def test_prompts_of_groups_that_are_not_there_are_not_read():
    full, block = packing.block_shapes(16, 8, 12, 96, least=512, gaps=True)
    assert (block.prompts, block.reads) == (6, 3)  # 6 prompts are 576 positions of the 512
    assert packing.block_shapes(16, 8, 12, 96, least=512)[1].reads == 1
    lengths = np.zeros((16, 8), int)
    lengths[[2, 7, 11, 13, 15]] = 3
    batch = example(lengths, 12)
    packed, _ = flat_batches.pack_blocks(batch, least=6, gaps=True)
    readings = int(blocks.readings(jax.tree.map(jnp.asarray, packed)))
    there = packed.prompts[:readings, 0].reshape(-1, L_PROMPT)[:5]
    np.testing.assert_array_equal(there, batch.prompts.tokens[[2, 7, 11, 13, 15]])
    assert readings * packed.prompts.shape[2] < 16


def test_a_block_and_its_prompts_are_no_larger_than_a_micro_batch():
    for (n, group, microbatches), most, longest in itertools.product(
        [(8, 6, 4), (2, 6, 4), (5, 7, 1), (6, 4, 6)], (8, 64), (3, 50, 400)
    ):
        full, *more = packing.block_shapes(n, group, most, longest, microbatches=microbatches)
        for block in more:
            assert block.prompts * longest + block.rows * most <= full.prompts * longest + full.rows * most
            assert block.prompts * block.reads >= n and block.rows * block.count >= block.prompts * group
    with pytest.raises(UserError, match=r"microbatches=4 .*3 prompts.*5"):
        packing.block_shapes(3, 5, 8, 3, microbatches=4)


def test_golden_deal():
    """Rows of 4 + 1, 3 + 2 and 3 of the first prompt, and 5 and 4 of the third; two in a block, twice."""
    lengths = np.array([[4, 3, 3, 2, 1], [0] * 5, [5, 4, 0, 0, 0]])
    block = packing.BlockShape(prompts=2, reads=2, rows=2, count=5, shared=True)
    lengths, mine = np.concatenate([np.ones((10, 5), int), lengths]), np.array([10, 11, 12])
    dealt = packing._deal(lengths, mine, most=5, block=block, gather=False)
    rows = [[[[(x.k, x.prompt, x.sample) for x in row] for row in b] for b in after] for after in dealt.blocks]
    first, second = [(0, 10, 0), (0, 10, 4)], [(0, 10, 1), (0, 10, 3)]
    assert rows == [[[first, second], [[(0, 10, 2)], [(1, 12, 0)]], [[(1, 12, 1)]]], []]
    assert [x.tolist() for x in dealt.prompts] == [[10, 12], [11, 11]]
    with_gather = packing._deal(lengths, mine, most=5, block=block, gather=True)
    assert [(x.prompt, x.sample) for x in with_gather.blocks[0][0][1]] == [(10, 0), (10, 4)]
    assert [[len(row) for row in b] for b in with_gather.blocks[0]] == [[1, 2], [1, 2], [1]]


def test_shards_have_as_many_prompts_and_about_as_many_tokens():
    assert packing._even(np.array([1, 9, 8, 2, 0, 3]), 2).tolist() == [[0, 1, 3], [2, 4, 5]]  # 9 + 2 + 1 and 8 + 3 + 0
    lengths = np.full((6, 4), 3)
    lengths[:3] = 9  # three long groups, which would be one shard's
    packed, _ = flat_batches.pack_blocks(example(lengths, 17), shards=2, gather=True)
    loads = (packed.segments > 0).sum((0, 2, 3))
    assert sorted(loads.tolist()) == [9 * 4 + 2 * 3 * 4, 2 * 9 * 4 + 3 * 4]


def test_a_row_has_no_more_completions_than_its_gather_indices():
    batch = example(np.ones((4, 16), int), 40)
    packed, _ = flat_batches.pack_blocks(batch, gather=True)
    assert packed.segments.max() == packing.GATHERED


def test_each_block_that_is_taken():
    """A block that holds nothing costs nothing: its values are those that the array began with. Prompts are read once
    for the blocks behind them."""
    lengths = np.array([[3, 1, 2, 5, 0, 1, 1, 2]] * 12) * (np.arange(12) % 3 > 0)[:, None]
    packed, _ = flat_batches.pack_blocks(example(lengths, 11), least=8, gaps=True)
    rows = jax.tree.map(jnp.asarray, packed)

    def run(rows):
        return blocks.each(lambda part: part.tokens + part.read, rows, lambda mine: mine.prompts.sum())

    text = jax.jit(run).lower(rows).as_text()
    assert text.count("stablehlo.while") == 2
    n, m = len(rows.prompts), blocks.after_reading(rows)
    there = np.zeros((n, m), bool)
    for c in range(int(blocks.readings(rows))):
        there[c, : int(blocks.taken(blocks.reading(rows, c)))] = True
    assert 1 < there.any(1).sum() < n and 1 < there.sum(1).max() < m
    read = np.repeat(packed.prompts.sum((1, 2, 3)), m)[:, None, None, None]
    want = np.where(there.reshape(-1)[:, None, None, None], packed.tokens + read, 0)
    np.testing.assert_array_equal(jax.jit(run)(rows), want)
