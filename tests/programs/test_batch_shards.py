import dataclasses

import jax
import numpy as np
import pytest
from programs_examples import check, example

from grpojax.host.errors import UserError
from grpojax.programs import batch_shards as shards_


def prompts(n, first=0):
    return dataclasses.replace(example(np.ones((n, 1)), 1).prompts, first_sample=np.full(n, first, np.int32))


@pytest.mark.parametrize(
    ("n", "group", "shards"), [(6, 5, 3), (3, 5, 1), (3, 5, 3), (2, 6, 4), (1, 5, 5), (3, 4, 6), (2, 8, 8)]
)
@pytest.mark.parametrize("first", [0, 7])
def test_spread(n, group, shards, first):
    """Every sample of every prompt once, with the number (and so the random key) it has without spreading."""
    before = prompts(n, first)
    after, part = shards_.spread(before, group, shards)
    assert len(after.lengths) % shards == 0 and len(after.lengths) * part == n * group
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, before)
    sample = after.first_sample[:, None] + np.arange(part)
    gathered = shards_.gather_groups(sample, n)
    np.testing.assert_array_equal(gathered, np.broadcast_to(first + np.arange(group), (n, group)))
    for name in ("tokens", "lengths", "uids"):
        x = getattr(after, name)
        x = np.broadcast_to(x.reshape(len(x), 1, -1), (len(x), part, x.size // len(x)))
        want = getattr(before, name).reshape(n, 1, -1)
        np.testing.assert_array_equal(shards_.gather_groups(x, n), np.broadcast_to(want, (n, group, want.shape[2])))


@pytest.mark.parametrize(("n", "group", "shards"), [(3, 4, 2), (2, 5, 4), (4, 6, 6)])
def test_spread_refuses(n, group, shards):
    with pytest.raises(UserError, match=f"{n} prompts .*group={group} .* {shards} batch shards"):
        shards_.spread(prompts(n), group, shards)


def test_a_spread_batch_packs():
    """Two prompts of six samples over four shards: three samples of one prompt in each."""
    spread, part = shards_.spread(prompts(2), 6, 4)
    batch = example(np.random.default_rng(0).integers(0, 12, (4, part)), 11)
    batch = dataclasses.replace(batch, prompts=spread)
    packed, layout = check(batch, shards=4, microbatches=1, gather=True)
    unpacked = shards_.gather_groups(layout.unpack(packed.tokens), 2)
    np.testing.assert_array_equal(unpacked, batch.tokens.reshape(2, 6, 11))


# --- minibatches


@pytest.mark.parametrize(
    ("size", "count", "dropped"), [(12, 3, 0), (12, 3, 5), (15, 5, 11), (6, 6, 3), (8, 2, 8), (7, 1, 2)]
)
def test_minibatches_are_the_batch_and_share_what_is_live(size, count, dropped):
    rng = np.random.default_rng(size + dropped)
    drop = np.zeros(size, bool)
    drop[rng.permutation(size)[:dropped]] = True
    got = shards_.minibatches(drop, count)
    assert sorted(np.concatenate(got).tolist()) == list(range(size))
    assert {len(m) for m in got} == {size // count} and all((np.diff(m) > 0).all() for m in got)
    live = [(~drop[m]).sum() for m in got]
    assert max(live) - min(live) <= 1


def test_minibatches_follow_the_global_order():
    """Cut within each shard, as it was once, the first half of eight prompts on two devices would be 0, 1, 4, 5."""
    assert [m.tolist() for m in shards_.minibatches(np.zeros(8, bool), 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_no_minibatch_is_left_without_live_groups():
    """In the plain order the second would have none."""
    drop = np.array([False, False, False, False, True, True, True, True])
    assert [m.tolist() for m in shards_.minibatches(drop, 2)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
