"""A model with rows of the embedding that belong to no token, and the same model without them.

The rows' weights are planted so that they would take nearly all of the probability. ``TRIMMED`` is the model with these
rows cut off, so that any probability that leaks to them shows.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_decoder import BASE, random_decoder

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
