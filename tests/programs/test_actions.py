"""LLDS's actions in rows: the turns of each episode."""

import dataclasses

import flat_batches
import jax
import numpy as np
import pytest
from plain_decoder import BASE, ragged_batch, random_decoder

from grpojax import losses as L
from grpojax.models import Compute
from grpojax.programs import policy_update


@pytest.mark.slow
def test_an_action_is_one_turn_of_one_completion_also_where_completions_share_a_row(monkeypatch):
    rng = np.random.default_rng(0)
    batch = ragged_batch(rng, p=3, g=5, most=11)
    batch = dataclasses.replace(batch, lengths=np.minimum(batch.lengths, 3))
    there = np.arange(11) < batch.lengths[..., None]
    starts = there & ((np.arange(11) == 0) | (rng.random(there.shape) < 0.3))
    zero = np.zeros(there.shape, np.float32)
    arrays = dict(advantages=zero, weights=zero, action_starts=starts)
    packed, layout = flat_batches.pack(dataclasses.replace(batch, arrays=arrays))
    seen = []

    def policy_loss(logps, *, actions, **given):
        seen.append(actions)
        return logps.sum(), {}

    monkeypatch.setattr(L, "policy_loss", policy_loss)
    graph, params = random_decoder(BASE)
    loss = policy_update.policy_objective(graph, L.Objective(), Compute())
    loss(params, None, jax.tree.map(lambda x: x[0], packed))
    (actions,) = seen
    rows = np.broadcast_to(np.arange(actions.shape[1])[None, None, :, None], layout.index.shape)
    row, action = layout.unpack(rows), layout.unpack(np.asarray(actions)[None])
    turn = np.cumsum(starts, -1)
    met = {}
    for p, g, t in np.argwhere(there):
        met.setdefault((row[p, g, t], action[p, g, t]), set()).add((p, g, turn[p, g, t]))
    assert all(len(turns) == 1 for turns in met.values()) and len(met) == starts.sum()
    assert action[there].min() >= 1 and action[there].max() <= actions.shape[-1]
    assert len({r for r, _ in met}) < batch.lengths.size  # some share a row
