import functools
import operator

import flat_batches
import jax
import numpy as np
import packing_oracles
import pytest
from hypothesis import example as hypothesis_example
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import close
from plain_decoder import with_tokens
from programs_examples import check, example

from grpojax import losses as L
from grpojax.host.errors import UserError
from grpojax.programs import packing

# P, G, T, shards, micro-batches; in the last ones a micro-batch holds a part of a group.
SIZES = [
    (3, 5, 11, 1, 1),
    (3, 5, 11, 1, 3),
    (3, 5, 41, 3, 1),
    (6, 4, 37, 3, 2),
    (2, 6, 13, 2, 3),
    (1, 5, 7, 1, 5),
    (4, 6, 19, 2, 4),
]


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
@settings(max_examples=12)
@given(data=st.data())
def test_every_token_once(sizes, gather, data):
    n, group, size, shards, microbatches = sizes
    lengths = data.draw(st.lists(st.integers(0, size), min_size=n * group, max_size=n * group))
    check(example(np.reshape(lengths, (n, group)), size), shards, microbatches, gather)


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("length", [0, 1, 11])
def test_equal_lengths(length, gather):
    check(example(np.full((3, 5), length), 11), 1, 1, gather)


def test_golden_layout():
    """Sixteen positions hold 16; 10 + 6; 9 + 3 + 2. In the order they come in it would take a fourth row."""
    batch = example([[6, 3, 10, 16, 9, 2]], 32)
    packed, layout = flat_batches.pack(batch)
    assert packed.tokens.shape == (1, 1, 3, 16)
    assert packed.segments[0, 0].tolist() == [
        [1] * 16,
        [1] * 10 + [2] * 6,
        [1] * 9 + [2] * 3 + [3] * 2 + [0] * 2,
    ]
    assert packed.offsets[0, 0, 2].tolist() == [*range(9), *range(3), *range(2), 0, 0]
    assert packed.tokens[0, 0, 2].tolist() == [
        *(1 + 4 * 32 + np.arange(9)), *(1 + 32 + np.arange(3)), *(1 + 5 * 32 + np.arange(2)), 0, 0,
    ]  # fmt: skip
    assert layout.useful == 46 / 48
    whole, half = flat_batches.pack(batch, gather=True)[0].gather
    assert whole.shape == (1, 1, 3, 16) and half.shape == (1, 1, 3, 8)
    assert [x[0, 0, :, 0].tolist() for x in (whole, half)] == [[0, 16, 32], [26, 41, 44]]


def test_optional_arrays_may_be_missing():
    names = ("old_logps", "ref_logps", "sampler_logps")
    packed, _ = flat_batches.pack(with_tokens(example([[3, 2]], 5), **dict.fromkeys(names)))
    assert packed.arrays.keys() == {"advantages", "weights"}


def test_fill_keeps_the_dtype():
    _, layout = flat_batches.pack(example([[3, 2]], 5))
    flags = np.array([[[True, False, True, False, False], [False, True, True, True, True]]])
    packed = layout.pack(flags, fill=True)
    assert (
        packed.dtype == bool
        and packed[0, 0, 0].tolist() == [True, False, True, False, True, *[True] * 0][: packed.shape[3]]
    )
    assert layout.unpack(packed).dtype == bool


@pytest.mark.parametrize(("n", "group", "shards", "microbatches"), [(3, 5, 1, 2), (4, 6, 2, 8), (2, 5, 2, 3)])
def test_uneven_micro_batches_are_refused(n, group, shards, microbatches):
    with pytest.raises(UserError, match=f"microbatches={microbatches} .*{n // shards} prompts.*{group}"):
        flat_batches.pack(example(np.ones((n, group)), 4), shards=shards, microbatches=microbatches)


def test_packing_is_tight():
    """Lengths as in training; with a row for each sample two thirds of the positions would be padding."""
    lengths = np.minimum(np.random.default_rng(0).geometric(1 / 40, (8, 16)), 128)
    assert lengths.sum() / (lengths.size * lengths.max()) < 0.35
    assert flat_batches.pack(example(lengths, 128))[1].useful > 0.6


@pytest.mark.parametrize("parts", [1, 4, 8])
@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("most", [1, 7, 37, 512])
def test_bucket(most, multiple, parts):
    sizes = [packing.bucket(n, most, parts, multiple) for n in range(most + 1)]
    assert all(n <= size <= most for n, size in enumerate(sizes))
    assert len(set(sizes)) <= parts and sizes == sorted(sizes) and sizes[-1] == most
    assert all(size % multiple == 0 or size == most for size in sizes)


@given(lengths=st.lists(st.integers(1, 20), max_size=12))
@settings(max_examples=100)
def test_first_fit(lengths):
    packing_oracles.check_first_fit(packing.first_fit(lengths, 20), lengths, 20)


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
    n, group, size, shards, microbatches = sizes
    batch = example(np.random.default_rng(0).integers(0, size + 1, (n, group)), size)
    mask = np.arange(size) < batch.lengths[..., None]
    batch = with_tokens(batch, weights=np.asarray(L.loss_weights(mask, "token_mean")))

    def loss(logps, tokens, segments=None):
        return L.policy_loss(logps, objective=objective, **tokens, segments=segments)

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    logps = np.random.default_rng(1).normal(size=mask.shape).astype(np.float32)
    (value, metrics), gradient = run(logps, batch.arrays)

    packed, layout = flat_batches.pack(batch, shards=shards, microbatches=microbatches)
    in_rows = layout.pack(logps, fill=float("nan"))
    each = []
    for m in range(microbatches):
        tokens, segments = jax.tree.map(lambda x, m=m: x[m], (packed.arrays, packed.segments))
        each.append(run(in_rows[m], tokens, segments))
    close(sum(value for (value, _), _ in each), value)
    for name, number in metrics.items():
        parts = [m[name] for (_, m), _ in each]
        jax.tree.map(close, functools.reduce(operator.add, parts), number)
    close(layout.unpack(np.stack([g for _, g in each])), gradient)
    assert np.abs(gradient).max() > 1e-3


@pytest.mark.parametrize("sizes", [(6, 4, 37, 3, 2), (2, 6, 13, 2, 3), (1, 5, 7, 1, 5)])
def test_three_sizes(sizes):
    """A quarter of all positions, a half and all, or a half and all of a micro-batch of one sample; gather as rows are
    shared."""
    n, group, size, shards, microbatches = sizes
    whole, shapes = n * group // (shards * microbatches), {}
    for lengths in (
        np.ones((n, group), int),
        size * (np.arange(n * group) == 1).reshape(n, group),
        [[size] * group] * n,
    ):
        batch = example(lengths, size)
        packed, layout = flat_batches.pack(batch, shards=shards, microbatches=microbatches, gather=True)
        mask = np.arange(size) < batch.lengths[..., None]
        np.testing.assert_array_equal(layout.unpack(packed.tokens), batch.tokens * mask)
        shapes[packed.tokens.shape[2:]] = packed.gather is not None
    half, few = min(size, -(-size // 16) * 8), max(1, whole // 2)
    assert shapes == {(few, half): few < whole, (few, size): few < whole, (whole, size): False}


@settings(max_examples=40)
@given(lengths=st.lists(st.integers(1, 23), max_size=40), size=st.integers(1, 23), empty=st.integers(0, 5))
@hypothesis_example(lengths=[6] * 9, size=23, empty=0)
@hypothesis_example(lengths=[12] * 3 + [1] * 30, size=23, empty=0)
def test_gather_indices_hold_whatever_the_rows_hold(lengths, size, empty):
    """However completions share rows, so many of them are longer than a half or a quarter of a row, and no more."""
    lengths = sorted((n for n in lengths if n <= size), reverse=True)
    rows = len(packing.first_fit(lengths, size)) + empty
    gather = [n for count, n in packing.gather_sizes(len(lengths), rows, size) for _ in range(count)]
    assert len(gather) <= len(lengths) and all(n <= indices for n, indices in zip(lengths, gather, strict=True))
