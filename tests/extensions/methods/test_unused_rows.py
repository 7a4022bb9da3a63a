"""Rows of the vocabulary without a token, in the influence of tokens."""

import flat_batches
import numpy as np
import pytest
import unused_rows
from plain_decoder import ragged_batch
from unused_rows import TOKENS

from grpojax.extensions.methods import token_influence
from grpojax.models import Compute

models = unused_rows.models


@pytest.mark.slow
def test_influence_of_tokens_is_that_without_the_rows(models):
    """An entry without a token adds nothing."""
    batch = ragged_batch(np.random.default_rng(3), p=1, vocab=TOKENS)
    packed, layout = flat_batches.pack(batch)
    live = (layout.index >= 0).astype(np.float32)
    entries = token_influence.vocabulary(batch.tokens, layout.unpack(live) > 0, TOKENS)[None]
    more = np.concatenate([entries, [[[TOKENS + 1, TOKENS + 2]]]], -1).astype(np.int32)
    got, want = (
        token_influence.make_influence(graph, Compute(), temperature=0.7)(
            params, packed, np.zeros(live.shape, np.int32), live, ids
        ).scores
        for (graph, params), ids in zip(models, (more, entries), strict=True)
    )
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    assert np.abs(want).max() > 0
