"""The useful work of a step, counted from its samples: what ``utilisation`` and ``grpojax bench`` are made of."""

import numpy as np

from grpojax.models import DecoderConfig, flops
from grpojax.models import critic as models
from grpojax.programs.critic_update import CriticModel
from grpojax.run.batch import RolloutBatch
from grpojax.types import Samples


def step_flops(
    model: DecoderConfig,
    batch: RolloutBatch,
    *,
    scores: int,
    iterations: int,
    learned: Samples | None = None,
    picks: bool = False,
    late: float = 0.0,
    critic: CriticModel | None = None,
    teacher: DecoderConfig | None = None,
    warming_up: bool = False,
) -> dict[str, float]:
    """Useful FLOPs of a step, by phase; a backward pass counts as two forward ones.

    Args:
      model: the policy.
      batch: what is learned from, and all that was drawn for it; a greedy completion has a program of its own, in which
        its prompt runs once more.
      scores: how often the policy or the reference scores that before the update.
      iterations: passes over it.
      learned: ``[P, G]``, lengths of its samples as the updates take them; None takes all. A prompt without any is left
        out.
      picks: the policy scores it once more before each pass, to pick tokens by their covariance.
      late: FLOPs of the signals that need the rewards first (`grpojax.run.late_signals.Late`).
      critic: of a variant that has one: it says what it thinks of the batch and learns in each pass; a frozen trunk has
        no backward pass.
      teacher: another model that scores the batch.
      warming_up: the critic alone learns.

    Returns:
      "rollout", "score", "late" and "update".
    """

    def forward(batch: RolloutBatch) -> float:
        return flops.forward_flops(model, _prompts(batch), batch.rollout.lengths)

    sampled = 0.0
    for drawn in batch.everything:
        sampled += forward(drawn)
        if drawn.greedy_lengths is not None:
            sampled += flops.forward_flops(model, _prompts(drawn), drawn.greedy_lengths[:, None])
    whole = taught = forward(batch)
    if learned is not None:
        of = np.asarray(learned).any(1)
        taught = flops.forward_flops(model, np.array(_prompts(batch))[of], np.asarray(learned)[of])
    counted = {
        "rollout": sampled,
        "score": whole * scores,
        "late": late,
        "update": (3 + picks) * taught * iterations,
    }
    if teacher is not None:
        counted["score"] += flops.forward_flops(teacher, _prompts(batch), batch.rollout.lengths)
    if critic is None:
        return counted
    said = models.forward_flops(critic.config, _prompts(batch), batch.rollout.lengths)
    counted["score"] += said
    counted["update"] = (0.0 if warming_up else counted["update"]) + said * (1 if critic.frozen else 3) * iterations
    return counted


def _prompts(batch: RolloutBatch) -> list[int]:
    drawn = batch.rollout.lengths.any(1)  # a group that is not whole yet stands in the batch without samples
    return [len(p.ids) if there else 0 for p, there in zip(batch.problems, drawn, strict=True)]
