"""Batches that are spread over their shards and not in rows: what tests pack, and compare rows with."""

from typing import Any

from grpojax.programs import packing
from grpojax.types import Rollout, pytree


@pytree
class Flat:
    """Prompts ``[P, ...]``, samples ``[P, G, T]`` and, by name, arrays of their tokens, so that a loss without rows
    reads them too; ``choices`` and ``prompt_choices`` as in `Rows`, with ``prompt_choices [P, L, C]``."""

    prompts: Any
    tokens: Any
    lengths: Any
    arrays: Any
    choices: Any = None
    prompt_choices: Any = None


def pack(batch, by=packing.pack_groups, **how):
    of_prompts = None if batch.prompt_choices is None else batch.prompt_choices[:, None]
    samples = Rollout(tokens=batch.tokens, lengths=batch.lengths, choices=batch.choices, prompt_choices=of_prompts)
    return by(batch.prompts, samples, batch.arrays, **how)


def pack_blocks(batch, **how):
    return pack(batch, packing.pack, **how)
