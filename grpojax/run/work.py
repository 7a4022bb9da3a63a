"""The useful work of a step, counted from its samples. ``utilisation`` and ``grpojax bench`` are based on it."""

from collections.abc import Iterable, Mapping

import numpy as np

from grpojax.models import DecoderConfig, flops
from grpojax.run.batch import Batch
from grpojax.types import Samples


def step_flops(
    model: DecoderConfig,
    batch: Batch,
    *,
    scores: int,
    ppo_epochs: int,
    learned: Samples | None = None,
    picks: bool = False,
    policy_learns: bool = True,
    frozen: bool = False,
    parts: Iterable[Mapping[str, float]] = (),
) -> dict[str, float]:
    """Useful FLOPs of a step, by phase; a backward pass counts as two forward ones.

    Args:
      model: the policy.
      batch: the samples to learn from, and all that were drawn for them. Completions that were drawn beside them have a
        program of their own, in which their prompts run once more.
      scores: how often the policy scores the samples before the update.
      ppo_epochs: passes over the samples.
      learned: ``[P, G]``, lengths of the samples in the updates; None takes all. A prompt without samples is left out.
      picks: whether the policy scores the samples once more before each pass, to pick tokens by their covariance.
      policy_learns: whether the policy is updated at all.
      frozen: whether only adapters get a gradient, and not the policy's weights. Then a backward pass counts as one
        forward pass.
      parts: FLOPs of each part of the variant, by phase.

    Returns:
      "rollout", "score", "late" and "update".
    """

    sampled = 0.0
    for drawn in batch.everything:
        sampled += forward_flops(model, drawn)
        for more in drawn.besides:
            sampled += flops.forward_flops(model, prompts(drawn), more.lengths)
    whole = taught = forward_flops(model, batch)
    if learned is not None:
        of = np.asarray(learned).any(1)
        taught = flops.forward_flops(model, np.array(prompts(batch))[of], np.asarray(learned)[of])
    counted = {
        "rollout": sampled,
        "score": whole * scores,
        "late": 0.0,
        "update": (3 - frozen + picks) * taught * ppo_epochs * policy_learns,
    }
    for part in parts:
        for phase, count in part.items():
            counted[phase] += count
    return counted


def forward_flops(model: DecoderConfig, batch: Batch) -> float:
    """FLOPs of one forward of a model over all samples of a batch."""
    return flops.forward_flops(model, prompts(batch), batch.rollout.lengths)


def prompts(batch: Batch) -> list[int]:
    """Tokens of each prompt, 0 if it has no samples."""
    drawn = batch.rollout.lengths.any(1)  # a group that is not complete yet is in the batch without samples
    return [len(p.ids) if there else 0 for p, there in zip(batch.problems, drawn, strict=True)]
