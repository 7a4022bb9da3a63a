"""The arrays that every module agrees on, and the names of their axes.

========  =====================================================================
axis      meaning
========  =====================================================================
``P``     prompts in a batch
``G``     samples of one prompt (the group)
``L``     prompt positions, right-padded
``T``     completion positions, right-padded
``B``     shards: the equal parts that a batch is cut into, one a batch shard
``K``     prompts of one shard
``R``     rows of one shard; a row holds whole completions
``S``     positions of one row; in the sampler, slots of one prompt
``M``     micro-batches, or blocks of rows that an update takes one after the other
``D``     hidden size;  ``V`` vocabulary;  ``H``/``Hkv`` heads
``N``     tokens, or samples in a row, without regard to their prompts
========  =====================================================================

``C`` is a count that stands beside the array: choices of experts, completions of a gather, or readings.

Padding is always on the right and always comes from lengths, never from token ids.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

# Every array here may be jax's or numpy's. A signature says its shape by one of these names.
Array = Any
Scalar = Array  # []
PerPrompt = Array  # [P]
Samples = Array  # [P, G]
Tokens = Array  # [P, G, T]
AnyTokens = Array  # [..., T], tokens in any layout: the last axis is one sample, or several with segment ids
Hidden = Array  # [P, G, T, D]


@dataclass_transform(kw_only_default=True, frozen_default=True)
def pytree(cls: type) -> Any:
    """Makes ``cls`` a frozen dataclass that jax treats as a pytree; all fields are children."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, kw_only=True)(cls))


@dataclasses.dataclass(frozen=True)
class Declared:
    """What an array is that only some variants, settings or extensions have. Such arrays go by their names, in
    `Rows.arrays` or in `grpojax.advantages.Signals`; a name that nobody declares is an error.

    Attributes:
      axes: "P", "P G" or "P G T".
      meaning: what it holds, with its unit, and who fills it.
      dtype: its numbers.
    """

    axes: str
    meaning: str
    dtype: str = "float32"

    def check(self, name: str, x: Array, sizes: Mapping[str, int]) -> None:
        """Raises `ValueError` if ``x`` has another shape or another kind of numbers.

        Args:
          name: for the error.
          x: the array.
          sizes: of each axis.

        Example:
          >>> Declared("P G", "a share").check("luck", np.zeros((2, 3), np.float32), {"P": 2, "G": 4})
          Traceback (most recent call last):
          ValueError: luck is float32 [2, 3], declared as float32 [P, G] = [2, 4]
        """
        shape, kind = tuple(sizes[axis] for axis in self.axes.split()), np.dtype(self.dtype).kind
        if np.shape(x) != shape or np.dtype(x.dtype).kind != kind:
            declared = f"{self.dtype} [{', '.join(self.axes.split())}] = {list(shape)}"
            raise ValueError(f"{name} is {x.dtype} {list(np.shape(x))}, declared as {declared}")


@pytree
class Prompts:
    """A batch of prompts.

    Attributes:
      tokens: ``[P, L]`` int32.
      lengths: ``[P]`` int32, tokens in use, at least 1.
      uids: ``[P]`` uint32, stable over epochs and runs; a draw's random key depends on it.
      first_sample: ``[P]`` int32, the number of a row's first sample among all samples of its prompt, over 0 where a
        prompt stands in several rows.
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
      lengths: ``[P, G]`` int32, the end-of-sequence token included.
      logps: ``[P, G, T]`` float32, log-probability of each token under the distribution it was drawn from. None if the
        text was not drawn, as that of a supervised run.
      stopped: ``[P, G]`` bool, whether an end-of-sequence token ended the sample (else it was cut at ``T``). None if
        the text was not drawn.
      choices: ``[P, G, T, C]`` uint8 or uint16, the experts that the routers chose for each token
        (`grpojax.programs.sampler_config.SamplerConfig.router_replay`); C are the k choices of the first layer, then
        those of the next. The dtype's largest number stands where nothing was chosen, as for a sample's last token.
        None if not kept.
      prompt_choices: ``[P, 1, L, C]``, the same for the prompts' tokens; ``[P, n, L, C]`` if each group is split over
        n shards.
      sampled: ``[P, G, T]`` bool, the tokens that the policy drew. None where these are all tokens of a sample. The
        other tokens of an episode are what its environment answered: context, with a log-prob of 0.
    """

    tokens: Array
    lengths: Array
    logps: Array = None
    stopped: Array = None
    choices: Array = None
    prompt_choices: Array = None
    sampled: Array = None


@pytree
class Rows:
    """Prompts and completions in the form that the decoder's forward reads.

    A shard holds ``K`` prompts and ``R`` rows; a row holds completions back to back, with ids in ``segments``. They
    continue one prompt, or, with ``gather``, any.

    Attributes:
      prompts: ``[B, K, L]`` int32.
      prompt_lengths: ``[B, K]`` int32.
      tokens: ``[B, R, S]`` int32.
      segments: ``[B, R, S]`` int32, 0 on padding, otherwise a number that differs between completions of a row.
      offsets: ``[B, R, S]`` int32, position of a token in its own completion.
      token_prompt: ``[B, R, S]`` int32 in ``[0, K)``, the prompt that a token's completion continues; on padding 0.
      gather: None, or, for attention that takes one completion a row, arrays ``[B, C, n]`` int32, each of C completions
        of at most n tokens: where in its shard (``r * S + s``) each of these stands, -1 on padding.
      live: None, or of rows in micro-batches ``[M, B]`` int32, 1 where a shard's rows hold a token; those behind the
        last that does are left out (`grpojax.programs.blocks`).
      read: None, or the prompts as they were read before (`grpojax.models.decoder.read_prompts`).
      choices: None, or ``[B, R, S, C]``, the experts that the sampler chose (`Rollout`), which replace the routers' own
        choices.
      prompt_choices: the same for the prompts, ``[B, K, L, C]``.
      arrays: what else a loss reads of each token, ``[B, R, S]`` by name: "advantages", "weights", and those of the
        variant (`grpojax.programs.policy_update.ARRAYS`, `grpojax.run.parts.part.Part.arrays`). The decoder reads none.
    """

    prompts: Array
    prompt_lengths: Array
    tokens: Array
    segments: Array
    offsets: Array
    token_prompt: Array
    gather: tuple[Array, ...] | None = None
    live: Array | None = None
    read: Any = None
    choices: Array | None = None
    prompt_choices: Array | None = None
    arrays: Mapping[str, Array] = dataclasses.field(default_factory=dict)

    @property
    def bare(self) -> "Rows":
        """The rows without `arrays`, as the decoder reads them: programs that score are the same for every loss."""
        return dataclasses.replace(self, arrays={})

    def with_arrays(self, arrays: Mapping[str, Array]) -> "Rows":
        """The rows with these arrays too."""
        return dataclasses.replace(self, arrays={**self.arrays, **arrays})


@pytree
class TrainState:
    """All that an update changes.

    Attributes:
      step: ``[]`` int32, updates that changed something: not those whose gradient was 0 or not finite.
      params: the policy's weights, float32.
      opt_state: the optimiser's state.
    """

    step: Array
    params: Any
    opt_state: Any


@pytree
class Mean:
    """A metric that is a mean over tokens, samples or whatever ``count`` counts; means of parts add up to that of all.

    Attributes:
      total: ``[]`` float32, the sum.
      count: ``[]`` float32, of how many.

    Example:
      >>> float((Mean(total=1.0, count=1.0) + Mean(total=2.0, count=5.0)).value)
      0.5
    """

    total: Scalar
    count: Scalar

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(total=self.total + other.total, count=self.count + other.count)

    @property
    def value(self) -> Scalar:
        """The mean; 0 of nothing."""
        return self.total / jnp.maximum(self.count, 1.0)


@pytree
class Max:
    """A metric that is the largest of a number of values.

    Attributes:
      value: ``[]`` float32.

    Example:
      >>> float((Max(value=1.0) + Max(value=2.0)).value)
      2.0
    """

    value: Scalar

    def __add__(self, other: "Max") -> "Max":
        return Max(value=jnp.maximum(self.value, other.value))


def is_concrete(x: Any) -> bool:
    """Whether ``x`` has values that Python may look at (it is no tracer)."""
    return isinstance(x, np.ndarray | jax.Array) and not isinstance(x, jax.core.Tracer)
