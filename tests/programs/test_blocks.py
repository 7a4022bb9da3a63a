import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import packing_oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import close
from programs_examples import L_PROMPT, check_seats, example

from grpojax.host.errors import UserError
from grpojax.models import sharding
from grpojax.programs import blocks, packing
from grpojax.programs.state import place_rows
from grpojax.types import PerToken

# P, G, T, lanes, micro-batches, least; in the last but one a micro-batch holds a part of a group.
SIZES = [
    (7, 5, 11, 1, 1, 1),
    (12, 4, 13, 3, 2, 1),
    (6, 8, 37, 2, 3, 70),
    (2, 6, 13, 2, 3, 1),
    (3, 5, 11, 1, 1, 10_000),
]


def check(batch, lanes, microbatches, seats, least):
    """Each completion stands once, whole, after its own prompt, in a block of the run's."""
    packed, layout = blocks.pack(batch, lanes=lanes, microbatches=microbatches, seats=seats, least=least)
    (n, group, size), shape = batch.tokens.shape, packed.rows.tokens.shape
    sizes = blocks.sizes_of(batch, lanes=lanes, microbatches=microbatches, least=least)
    block = next(b for b in sizes if (b.count, b.rows) == (shape[0], shape[2]))
    assert shape == (block.count, lanes, block.rows, size)
    assert packed.rows.prompts.shape == (block.count, lanes, block.prompts, L_PROMPT)
    seen, read = [], packing_oracles.read_rows(packed.rows)
    for _, lane, prompt, completions in read:
        for tokens in completions:
            p, g, t = np.unravel_index(np.array(tokens) - 1, batch.tokens.shape)
            assert len({*zip(p, g, strict=True)}) == 1 and t.tolist() == list(range(batch.lengths[p[0], g[0]]))
            assert prompt == batch.prompts.tokens[p[0], : batch.prompts.lengths[p[0]]].tolist()
            assert p[0] // (n // lanes) == lane
            seen.append((int(p[0]), int(g[0])))
    assert sorted(seen) == [(int(p), int(g)) for p, g in np.argwhere(batch.lengths)]
    mask = np.arange(size) < batch.lengths[..., None]
    np.testing.assert_array_equal(layout.unpack(packed.per_token.weights), batch.per_token.weights * mask)
    if packed.rows.seats is None:
        assert not (seats and block.shared)
    else:
        check_seats(packed.rows, block.prompts * group)
    taken = int(blocks.taken(jax.tree.map(jnp.asarray, packed.rows)))
    assert taken == (max((m for m, *_ in read), default=0) + 1 if block.shared else block.count)
    close(layout.useful, batch.lengths.sum() / (taken * np.prod(shape[1:])))
    return block, taken


@pytest.mark.parametrize("seats", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_every_token_once(sizes, seats, data):
    n, group, size, lanes, microbatches, least = sizes
    lengths = data.draw(st.lists(st.integers(0, size), min_size=n * group, max_size=n * group))
    check(example(np.reshape(lengths, (n, group)), size), lanes, microbatches, seats, least)


@pytest.mark.parametrize("sizes", SIZES)
def test_two_shapes_whatever_the_lengths(sizes):
    """Of sixteen sizes of rows by four of prompts a run met a new one in its seventh step."""
    n, group, size, lanes, microbatches, least = sizes
    rng, shapes = np.random.default_rng(0), set()
    for top in np.linspace(0, size, 40).astype(int):
        batch = example(rng.integers(0, top + 1, (n, group)), size)
        packed, _ = blocks.pack(batch, lanes=lanes, microbatches=microbatches, least=least)
        again, _ = blocks.pack(batch, lanes=lanes, microbatches=microbatches, least=least)
        jax.tree.map(np.testing.assert_array_equal, packed, again)
        shapes.add(packed.rows.tokens.shape)
    assert len(shapes) <= len(blocks.sizes_of(batch, lanes=lanes, microbatches=microbatches, least=least)) <= 2


def test_full_groups_are_one_block():
    block, taken = check(example(np.full((16, 8), 5), 5), 1, 1, True, 1)
    assert block == blocks.Block(16, 128, 1, shared=False) and taken == 1


@pytest.mark.parametrize("mean", [12, 20, 30])
def test_cost_follows_the_tokens(mean):
    """The share of useful positions is that of sixteen sizes of rows. With three sizes it is about two thirds of it."""
    rng, useful = np.random.default_rng(1), []
    for _ in range(20):
        batch = example(np.clip(rng.geometric(1 / mean, (16, 8)), 1, 40), 40)
        useful.append([pack(batch)[1].useful for pack in (packing.pack, functools.partial(blocks.pack, least=64))])
    before, now = np.mean(useful, axis=0)
    assert now > before - 0.02 and now > 0.7


def test_groups_that_are_there_or_not_have_a_block_of_their_own():
    """Of any number of groups of full length a lane computes less than with a block for uneven ones."""
    cost = {}
    for gaps in (True, False):
        full, block = blocks.sizes(16, 8, 12, 96, least=512, gaps=gaps)
        each, whole = (b.prompts * 96 + b.rows * 12 for b in (block, full))
        cost[gaps] = [min(whole, each * len(blocks._deal([8] * n, block))) for n in range(1, 17)]
        assert block.count * each <= whole
    assert np.mean(cost[True]) < 0.9 * np.mean(cost[False])


def test_a_block_is_no_larger_than_a_micro_batch():
    for (n, group, microbatches), most, longest in itertools.product(
        [(8, 6, 4), (2, 6, 4), (5, 7, 1)], (8, 64), (3, 50)
    ):
        full, *more = blocks.sizes(n, group, most, longest, microbatches=microbatches)
        for block in more:
            assert block.prompts * longest + block.rows * most <= full.prompts * longest + full.rows * most
    with pytest.raises(UserError, match=r"microbatches=4 .*3 prompts.*5"):
        blocks.sizes(3, 5, 8, 3, microbatches=4)


def test_golden_deal():
    """Two blocks of 4 rows and 3 prompts hold 5 + 2 + 1 rows: [first of 5] and [the rest, 1], and 2 + 1."""
    dealt = blocks._deal([5, 2, 1], blocks.Block(3, 4, 9, shared=True))
    assert dealt == [[(0, 4)], [(1, 2), (0, 1), (2, 1)]]


def test_each_block_that_is_taken():
    """A block that holds nothing costs nothing: its values are those that the array began with."""
    batch = example([[3, 1, 2, 5, 0, 1, 1, 2]] * 12, 11)
    packed, _ = blocks.pack(batch)
    rows = jax.tree.map(jnp.asarray, packed.rows)
    out = jax.jit(lambda rows: blocks.each(lambda part: part.tokens.astype(jnp.float32) + 1, rows))(rows)
    n = int(blocks.taken(rows))
    assert 1 < n < len(rows.tokens)
    np.testing.assert_array_equal(out, np.where(np.arange(len(out))[:, None, None, None] < n, rows.tokens + 1, 0))


@pytest.mark.parametrize("seats", [True, False])
def test_others_are_what_other_lengths_give(seats):
    batches = [example(np.full((12, 8), length), 11) for length in (11, 1)]
    known = blocks.sizes_of(batches[0], lanes=3, microbatches=1, least=1)
    long, short = (blocks.pack(batch, lanes=3, seats=seats)[0] for batch in batches)

    def like(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype), tree)

    for one, other in ((long, short), (short, long)):
        (got,) = blocks.others(known, 8 if seats else 0, ({"w": 1.0}, one))
        assert got[0] == {"w": 1.0} and like(got[1]) == like(other)
        assert jax.tree.structure(got[1]) == jax.tree.structure(other)
        (got,) = blocks.others(known, 8 if seats else 0, (None, one.rows))
        assert like(got[1]) == like(other.rows)
    assert blocks.others(known, 0, (1.0, PerToken())) == []
    assert blocks.others(known[:1], 0, (1.0, long)) == []


@pytest.mark.parametrize("seats", [False, True])
def test_on_a_mesh_others_lie_as_they_will(seats):
    """Also those of a batch of full length, whose rows do not tell which blocks hold tokens."""
    mesh = sharding.make_mesh(sharding.MeshConfig(fsdp=3), jax.devices()[:3])
    batches = [example(np.full((12, 8), length), 11) for length in (11, 1)]
    known = blocks.sizes_of(batches[0], lanes=3, microbatches=1, least=1)
    packed = [place_rows(blocks.pack(batch, lanes=3, seats=seats)[0], mesh) for batch in batches]
    assert packed[0].rows.live is None and packed[1].rows.live is not None
    for one, other in (packed, packed[::-1]):
        (got,) = blocks.others(known, 8 if seats else 0, ({"w": 1.0}, one))
        told, want = ([(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(y)] for y in (got[1], other))
        assert told == want
