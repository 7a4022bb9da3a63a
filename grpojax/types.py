"""The arrays that every module agrees on, and the names of their axes.

========  =====================================================================
axis      meaning
========  =====================================================================
``P``     prompts in a batch
``G``     samples of one prompt (the group)
``L``     prompt positions, right-padded
``T``     completion positions, right-padded
``B``     lanes: the equal parts that a batch is cut into, one a batch shard
``K``     prompts of one lane
``R``     rows of one lane; a row holds whole completions of one prompt
``S``     positions of one row
``D``     hidden size;  ``V`` vocabulary;  ``H``/``Hkv`` heads;  ``N`` tokens
========  =====================================================================

Padding is always on the right and always comes from lengths, never from token ids.
"""

import dataclasses
from typing import Any, dataclass_transform

import jax
import numpy as np

Array = Any  # jax.Array or numpy.ndarray: every array here may live on either side.


@dataclass_transform(kw_only_default=True, frozen_default=True)
def pytree(cls: type) -> Any:
    """Makes ``cls`` a frozen dataclass that jax treats as a pytree; all fields are children."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, kw_only=True)(cls))


@pytree
class Prompts:
    """A batch of prompts.

    Attributes:
      tokens: ``[P, L]`` int32.
      lengths: ``[P]`` int32, tokens in use, at least 1.
      uids: ``[P]`` uint32, stable over epochs and runs; a draw's random key depends on it.
      first_sample: ``[P]`` int32, the number of a prompt's first sample. It is 0 except where one prompt
        stands in several rows because its group is split over devices.
    """

    tokens: Array
    lengths: Array
    uids: Array
    first_sample: Array


@pytree
class Rollout:
    """Samples of a batch of prompts.

    Attributes:
      tokens: ``[P, G, T]`` int32, zero from ``lengths`` on.
      logps: ``[P, G, T]`` float32, log-probability of each token under the distribution it was drawn from.
      lengths: ``[P, G]`` int32, the end-of-sequence token included.
      stopped: ``[P, G]`` bool, whether an end-of-sequence token ended the sample (else it was cut at ``T``).
    """

    tokens: Array
    logps: Array
    lengths: Array
    stopped: Array


@pytree
class Rows:
    """Prompts and completions in the form that the decoder's forward reads.

    A lane holds ``K`` prompts and ``R`` rows; each row continues one prompt and holds one or more of its
    completions back to back, told apart by ``segments``.

    Attributes:
      prompts: ``[B, K, L]`` int32.
      prompt_lengths: ``[B, K]`` int32.
      tokens: ``[B, R, S]`` int32.
      segments: ``[B, R, S]`` int32, 0 on padding, otherwise a number that differs between completions of a row.
      offsets: ``[B, R, S]`` int32, position of a token in its own completion.
      row_prompt: ``[B, R]`` int32 in ``[0, K)``, the prompt that a row continues.
      seats: None, or, for attention that takes one completion a row, ``[B, C, S]`` int32: where in its lane
        (``r * S + s``) each token of each of the lane's C completions stands, -1 on padding.
    """

    prompts: Array
    prompt_lengths: Array
    tokens: Array
    segments: Array
    offsets: Array
    row_prompt: Array
    seats: Array | None = None


@pytree
class TrainBatch:
    """What one policy update reads; ``[P, G, T]`` throughout, so that the loss does not know about rows.

    Attributes:
      prompts: the prompts, ``[P, ...]``.
      tokens: ``[P, G, T]`` int32 completions.
      lengths: ``[P, G]`` int32.
      advantages: ``[P, G, T]`` float32.
      weights: ``[P, G, T]`` float32, the aggregation (`grpojax.losses.loss_weights`), 0 on padding.
      behavior_logps: ``[P, G, T]`` float32 or None: log-probs of the policy that the ratio is taken against.
        None means the policy itself before the update, as with one update a rollout.
      ref_logps: ``[P, G, T]`` float32 or None: log-probs of the frozen reference.
      sampler_logps: ``[P, G, T]`` float32 or None: log-probs that the sampler reported, to watch the mismatch.
      displacement_weights: ``[P, G, T]`` float32 or None: `grpojax.losses.displacement_weights`.
    """

    prompts: Prompts
    tokens: Array
    lengths: Array
    advantages: Array
    weights: Array
    behavior_logps: Array | None = None
    ref_logps: Array | None = None
    sampler_logps: Array | None = None
    displacement_weights: Array | None = None


@pytree
class TrainState:
    """All that an update changes.

    Attributes:
      step: ``[]`` int32, updates done.
      params: the policy's weights, float32.
      opt_state: the optimiser's state.
    """

    step: Array
    params: Any
    opt_state: Any


def is_concrete(x) -> bool:
    """Whether ``x`` has values that Python may look at (it is no tracer)."""
    return isinstance(x, np.ndarray | jax.Array) and not isinstance(x, jax.core.Tracer)
