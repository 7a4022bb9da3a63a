import dataclasses

import jax
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import close

from grpojax import losses as L
from grpojax.host.errors import UserError
from grpojax.programs import packing
from grpojax.types import Prompts, TrainBatch

L_PROMPT = 3


def example(lengths, size, seed=0):
    """A batch whose tokens say where they stand: 1 + their place in ``[P, G, T]``; a prompt's, 100 p + 1, …"""
    lengths, rng = np.asarray(lengths, np.int32), np.random.default_rng(seed)
    n, shape = len(lengths), (*lengths.shape, size)
    mask = np.arange(size) < lengths[..., None]
    normal = lambda: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return TrainBatch(
        prompts=Prompts(
            tokens=(100 * np.arange(n)[:, None] + 1 + np.arange(L_PROMPT)).astype(np.int32),
            lengths=(1 + np.arange(n) % L_PROMPT).astype(np.int32),
            uids=np.arange(n, dtype=np.uint32),
            first_sample=np.zeros(n, np.int32),
        ),
        tokens=np.where(mask, 1 + np.arange(np.prod(shape)).reshape(shape), 0).astype(np.int32),
        lengths=lengths,
        advantages=normal(),
        weights=np.where(mask, 1 + rng.random(shape), 0).astype(np.float32),
        behavior_logps=normal(),
        ref_logps=normal(),
        sampler_logps=normal(),
    )


def check(batch, lanes, microbatches, seats):
    """Reads the rows back and compares them with the batch; returns what was packed."""
    packed, layout = packing.pack(batch, lanes=lanes, microbatches=microbatches, seats=seats)
    n, group, size = batch.tokens.shape
    per_lane = n // lanes
    shape = packed.rows.tokens.shape
    assert shape[:2] == (microbatches, lanes) and shape[3] <= max(size, 1)
    assert packed.rows.segments.shape == packed.rows.offsets.shape == packed.weights.shape == shape
    assert packed.rows.row_prompt.shape == shape[:3] and packed.rows.prompts.shape[:2] == shape[:2]
    assert {x.dtype for x in jax.tree.leaves(packed.rows)} == {np.dtype(np.int32)}

    seen, bins = [], {}
    for m, lane, prompt, completions in oracles.read_rows(packed.rows):
        for tokens in completions:
            p, g, t = np.unravel_index(np.array(tokens) - 1, batch.tokens.shape)
            assert t.tolist() == list(range(batch.lengths[p[0], g[0]])), "not a whole completion"
            assert len(set(zip(p, g, strict=True))) == 1
            p, g = int(p[0]), int(g[0])
            assert prompt == batch.prompts.tokens[p, : batch.prompts.lengths[p]].tolist(), "another prompt's row"
            assert p // per_lane == lane
            seen.append((p, g))
            at = ((p % per_lane) * group + g) * microbatches // (per_lane * group)
            assert at == m, "in another micro-batch"
        bins.setdefault((m, lane, p), []).append([g for _, g in seen[-len(completions) :]])
    assert sorted(seen) == [(int(p), int(g)) for p, g in np.argwhere(batch.lengths)], "not each completion once"
    if packed.rows.seats is None:
        assert not seats or packed.rows.segments.max() <= 1
    else:
        assert packed.rows.seats.shape == (*shape[:2], n * group // (lanes * microbatches), shape[3])
        for m, lane in np.ndindex(shape[:2]):
            tokens = packed.rows.tokens[m, lane].reshape(-1)
            whole = [tokens[s[s >= 0]].tolist() for s in packed.rows.seats[m, lane] if (s >= 0).any()]
            assert whole == [c for i, j, _, row in oracles.read_rows(packed.rows) if (i, j) == (m, lane) for c in row]
    for (_, _, p), rows in bins.items():
        order = sorted(g for row in rows for g in row)
        local = [[order.index(g) for g in row] for row in rows]
        oracles.check_first_fit(local, [int(batch.lengths[p, g]) for g in order], shape[3])

    mask = np.arange(size) < batch.lengths[..., None]
    for name in ("tokens", "advantages", "weights", "behavior_logps", "ref_logps", "sampler_logps"):
        x = getattr(batch, name)
        held = packed.rows.tokens if name == "tokens" else getattr(packed, name)
        assert held.dtype == x.dtype and not held[packed.rows.segments == 0].any()
        np.testing.assert_array_equal(layout.unpack(held, fill=7), np.where(mask, x, 7))
        np.testing.assert_array_equal(layout.pack(layout.unpack(held)), held)
    close(layout.useful, batch.lengths.sum() / np.prod(shape))
    return packed, layout


# P, G, T, lanes, micro-batches; in the last ones a micro-batch holds a part of a group.
SIZES = [
    (3, 5, 11, 1, 1),
    (3, 5, 11, 1, 3),
    (3, 5, 41, 3, 1),
    (6, 4, 37, 3, 2),
    (2, 6, 13, 2, 3),
    (1, 5, 7, 1, 5),
    (4, 6, 19, 2, 4),
]


@pytest.mark.parametrize("seats", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_every_token_once(sizes, seats, data):
    n, group, size, lanes, microbatches = sizes
    lengths = data.draw(st.lists(st.integers(0, size), min_size=n * group, max_size=n * group))
    check(example(np.reshape(lengths, (n, group)), size), lanes, microbatches, seats)


@pytest.mark.parametrize("seats", [True, False])
@pytest.mark.parametrize("length", [0, 1, 11])
def test_equal_lengths(length, seats):
    check(example(np.full((3, 5), length), 11), 1, 1, seats)


def test_golden_layout():
    """Sixteen positions hold 16; 10 + 6; 9 + 3 + 2. In the order they come in it would take a fourth row."""
    batch = example([[6, 3, 10, 16, 9, 2]], 32)
    packed, layout = packing.pack(batch)
    assert packed.rows.tokens.shape == (1, 1, 3, 16)
    assert packed.rows.segments[0, 0].tolist() == [
        [1] * 16,
        [1] * 10 + [2] * 6,
        [1] * 9 + [2] * 3 + [3] * 2 + [0] * 2,
    ]
    assert packed.rows.offsets[0, 0, 2].tolist() == [*range(9), *range(3), *range(2), 0, 0]
    assert packed.rows.tokens[0, 0, 2].tolist() == [
        *(1 + 4 * 32 + np.arange(9)), *(1 + 32 + np.arange(3)), *(1 + 5 * 32 + np.arange(2)), 0, 0,
    ]  # fmt: skip
    assert layout.useful == 46 / 48
    assert packing.pack(batch, seats=True)[0].rows.seats[0, 0, :, 0].tolist() == [0, 16, 26, 32, 41, 44]


def test_optional_arrays_may_be_missing():
    names = ("behavior_logps", "ref_logps", "sampler_logps")
    packed, _ = packing.pack(dataclasses.replace(example([[3, 2]], 5), **dict.fromkeys(names)))
    assert all(getattr(packed, name) is None for name in names)


def test_fill_keeps_the_dtype():
    _, layout = packing.pack(example([[3, 2]], 5))
    flags = np.array([[[True, False, True, False, False], [False, True, True, True, True]]])
    packed = layout.pack(flags, fill=True)
    assert (
        packed.dtype == bool
        and packed[0, 0, 0].tolist() == [True, False, True, False, True, *[True] * 0][: packed.shape[3]]
    )
    assert layout.unpack(packed).dtype == bool


@pytest.mark.parametrize(("n", "group", "lanes", "microbatches"), [(3, 5, 1, 2), (4, 6, 2, 8), (2, 5, 2, 3)])
def test_uneven_micro_batches_are_refused(n, group, lanes, microbatches):
    with pytest.raises(UserError, match=f"microbatches={microbatches} .*{n // lanes} prompts.*{group}"):
        packing.pack(example(np.ones((n, group)), 4), lanes=lanes, microbatches=microbatches)


def test_few_shapes():
    """With just the rows that a batch needs, nearly each of these would be a program of its own."""
    rng, shapes, needs = np.random.default_rng(0), set(), set()
    for _ in range(250):
        lengths = rng.integers(0, rng.integers(1, 129) + 1, (4, 8))
        packed, layout = packing.pack(example(lengths, 128))
        shapes.add(packed.rows.tokens.shape)
        used = (packed.rows.segments > 0).any(-1).sum()
        needs.add((int(used), int(lengths.max())))
        assert layout.useful <= 1
    assert len(shapes) <= 2 * 8
    assert len(needs) > 150


def test_packing_is_tight():
    """Lengths as in training; with a row for each sample two thirds of the positions would be padding."""
    lengths = np.minimum(np.random.default_rng(0).geometric(1 / 40, (8, 16)), 128)
    assert lengths.sum() / (lengths.size * lengths.max()) < 0.35
    assert packing.pack(example(lengths, 128))[1].useful > 0.6


@pytest.mark.parametrize("parts", [1, 4, 8])
@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("most", [1, 7, 37, 512])
def test_bucket(most, multiple, parts):
    sizes = [packing.bucket(n, most, parts, multiple) for n in range(most + 1)]
    assert all(n <= size <= most for n, size in enumerate(sizes))
    assert len(set(sizes)) <= parts and sizes == sorted(sizes) and sizes[-1] == most
    assert all(size % multiple == 0 or size == most for size in sizes)


@given(lengths=st.lists(st.integers(1, 20), max_size=12))
@settings(max_examples=100, deadline=None)
def test_first_fit(lengths):
    oracles.check_first_fit(packing.first_fit(lengths, 20), lengths, 20)


def test_golden_first_fit():
    """In the order they come in: four bins, of [3, 4], [5], [7], [6]."""
    assert packing.first_fit([3, 4, 5, 7, 6], 10) == [[3, 0], [4, 1], [2]]


# --- the loss of rows is the loss of the batch


@pytest.mark.parametrize(
    ("sizes", "objective"),
    [
        ((3, 5, 11, 1, 3), L.Objective(kl_coef=0.1)),
        ((2, 6, 13, 2, 3), L.Objective(kl_coef=0.1)),
        ((2, 6, 13, 2, 3), L.Objective(ratio="sequence", importance="mask", importance_level="geometric")),
        ((2, 6, 13, 2, 3), L.Objective(ratio="trace", trace_decay=0.9)),
    ],
)
def test_loss_of_rows(sizes, objective):
    """A micro-batch that divided by its own tokens would give a gradient up to M times as large, and a row taken for
    one sample another ratio."""
    n, group, size, lanes, microbatches = sizes
    batch = example(np.random.default_rng(0).integers(0, size + 1, (n, group)), size)
    mask = np.arange(size) < batch.lengths[..., None]
    batch = dataclasses.replace(batch, weights=np.asarray(L.loss_weights(mask, "token_mean")))
    run = jax.jit(jax.value_and_grad(lambda x, b: L.policy_loss(x, b, objective), has_aux=True))
    logps = np.random.default_rng(1).normal(size=mask.shape).astype(np.float32)
    (loss, metrics), gradient = run(logps, batch)

    packed, layout = packing.pack(batch, lanes=lanes, microbatches=microbatches)
    in_rows = layout.pack(logps, fill=float("nan"))
    each = [run(in_rows[m], jax.tree.map(lambda x: x[m], packed)) for m in range(microbatches)]  # noqa: B023
    close(sum(value for (value, _), _ in each), loss)
    for name, number in metrics.items():
        close(sum(m[name] for (_, m), _ in each), number)
    close(layout.unpack(np.stack([g for _, g in each])), gradient)
    assert np.abs(gradient).max() > 1e-3


# --- groups over lanes


def prompts(n, first=0):
    return dataclasses.replace(example(np.ones((n, 1)), 1).prompts, first_sample=np.full(n, first, np.int32))


@pytest.mark.parametrize(
    ("n", "group", "lanes"), [(6, 5, 3), (3, 5, 1), (3, 5, 3), (2, 6, 4), (1, 5, 5), (3, 4, 6), (2, 8, 8)]
)
@pytest.mark.parametrize("first", [0, 7])
def test_spread(n, group, lanes, first):
    """Every sample of every prompt once, with the number (and so the random key) it has without spreading."""
    before = prompts(n, first)
    after, part = packing.spread(before, group, lanes)
    assert len(after.lengths) % lanes == 0 and len(after.lengths) * part == n * group
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, before)
    sample = after.first_sample[:, None] + np.arange(part)
    gathered = packing.gather_groups(sample, n)
    np.testing.assert_array_equal(gathered, np.broadcast_to(first + np.arange(group), (n, group)))
    for name in ("tokens", "lengths", "uids"):
        x = getattr(after, name)
        x = np.broadcast_to(x.reshape(len(x), 1, -1), (len(x), part, x.size // len(x)))
        want = getattr(before, name).reshape(n, 1, -1)
        np.testing.assert_array_equal(packing.gather_groups(x, n), np.broadcast_to(want, (n, group, want.shape[2])))


@pytest.mark.parametrize(("n", "group", "lanes"), [(3, 4, 2), (2, 5, 4), (4, 6, 6)])
def test_spread_refuses(n, group, lanes):
    with pytest.raises(UserError, match=f"prompts={n} .*group={group} .* {lanes} batch shards"):
        packing.spread(prompts(n), group, lanes)


def test_a_spread_batch_packs():
    """Two prompts of six samples over four lanes: three samples of one prompt in each."""
    spread, part = packing.spread(prompts(2), 6, 4)
    batch = example(np.random.default_rng(0).integers(0, 12, (4, part)), 11)
    batch = dataclasses.replace(batch, prompts=spread)
    packed, layout = check(batch, lanes=4, microbatches=1, seats=True)
    unpacked = packing.gather_groups(layout.unpack(packed.rows.tokens), 2)
    np.testing.assert_array_equal(unpacked, batch.tokens.reshape(2, 6, 11))
