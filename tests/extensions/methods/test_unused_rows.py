"""Rows of the vocabulary without a token, in the influence of tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_decoder import BASE, ragged_batch, random_decoder

from grpojax.extensions.methods import token_influence
from grpojax.models import Compute
from grpojax.programs import packing

TOKENS = 40


PADDED = dataclasses.replace(
    BASE, vocab_size=56, num_layers=1, num_kv_heads=4, tie_embeddings=False, unused_rows=((TOKENS, 56),)
)


TRIMMED = dataclasses.replace(PADDED, vocab_size=TOKENS, unused_rows=())


@pytest.fixture(scope="module")
def models():
    """``(graph, params)`` with the rows and without; of the planted ones each second is huge for any hidden state."""
    (graph, params), (trimmed_graph, trimmed) = random_decoder(PADDED), random_decoder(TRIMMED)
    planted = 50.0 * np.random.default_rng(5).standard_normal((56 - TOKENS, PADDED.hidden_size)).astype(np.float32)
    planted[1::2] = -planted[::2]

    def padded(whole, part):
        return part if whole.shape == part.shape else jnp.concatenate([part, jnp.asarray(planted)])

    return (graph, jax.tree.map(padded, params, trimmed)), (trimmed_graph, trimmed)


def test_influence_of_tokens_is_that_without_the_rows(models):
    """An entry without a token adds nothing."""
    batch = ragged_batch(np.random.default_rng(3), p=1, vocab=TOKENS)
    packed, layout = packing.pack(batch)
    live = (layout.index >= 0).astype(np.float32)
    entries = token_influence.vocabulary(batch.tokens, layout.unpack(live) > 0, TOKENS)[None]
    more = np.concatenate([entries, [[[TOKENS + 1, TOKENS + 2]]]], -1).astype(np.int32)
    got, want = (
        token_influence.make_influence(graph, Compute(), temperature=0.7)(
            params, packed.rows, np.zeros(live.shape, np.int32), live, ids
        ).scores
        for (graph, params), ids in zip(models, (more, entries), strict=True)
    )
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    assert np.abs(want).max() > 0
