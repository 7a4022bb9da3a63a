"""Advantages and token weights of a batch's samples, and their values in each row."""

import numpy as np

from grpojax import losses as L
from grpojax.advantages import Transform, text_of
from grpojax.host.errors import UserError
from grpojax.run import parts
from grpojax.run.batch import Batch
from grpojax.run.run_method import RunMethod
from grpojax.types import PerPrompt, Samples, Tokens


def rewards_that_count(batch: Batch, truncated: str) -> tuple[Samples, Samples]:
    """The rewards as statistics take them, ``[P, G]``, and which samples are cut, ``[P, G]`` bool.

    A sample that is in no statistic has the reward NaN. A cut one ended at the limit and has weight 0.
    """
    rewards = np.where(batch.dropped[:, None], np.nan, batch.total)
    cut = ~batch.rollout.stopped & (truncated != "train")
    return np.where(cut, np.nan, rewards) if truncated == "drop" else rewards, cut


def advantages(method: RunMethod, batch: Batch, rule: Transform | None = None) -> Tokens:
    """Advantages ``[P, G, T]``, by the variant's chain or by ``rule``, from the batch's rewards and signals.

    Raises:
      UserError: the variant refuses the rewards or the signals, or a sample that counts has an advantage that is not
        finite.
    """
    rule, counted, mask = rule or method.variant.advantage, batch.counted, batch.sampled
    known = {
        "outcome": batch.by_name[method.deciding],
        "lengths": batch.own_lengths,
        "mask": mask,
        "behavior_logps": batch.rollout.logps,
        "tokens": batch.rollout.tokens,
    }
    try:
        # Its signals may have the policy's own log-probs in place of the sampler's (`Part.needs_policy_logps`).
        given = parts.signals_of({**known, **batch.signals})
        made = np.asarray(rule(counted, given))
    except ValueError as e:
        raise UserError(f"variant {method.variant.name!r}: {e}") from e
    wrong = (mask & np.isfinite(counted)[..., None] & ~np.isfinite(made)).any(-1)
    if wrong.any():
        prompt = int(wrong.any(-1).argmax())
        shown = " ".join(f"{r:g}" for r in counted[prompt][:8]) + (" ..." if counted.shape[1] > 8 else "")
        raise UserError(
            f"variant {method.variant.name!r}: {wrong.sum()} samples have an advantage that is not finite, such as "
            f"in a group with the rewards {shown}\na transform of it divides by 0 or takes a NaN for a number: "
            f"{text_of(rule)[:300]}"
        )
    return made


def weights(objective: L.Objective, batch: Batch) -> Tokens:
    """Loss weights ``[P, G, T]`` of a batch; each of its minibatches is an update of its own."""
    made = np.zeros(batch.live.shape, np.float32)
    for which in batch.minibatches:
        made[which] = _weights(objective, batch.live[which], batch.dropped[which])
    return made


def lengths_that_teach(advantages: Tokens, weights: Tokens, lengths: Samples, which: PerPrompt) -> Samples:
    """Lengths ``[p, G]`` of a minibatch's samples, 0 for those without a gradient, whose tokens all have advantage or
    weight 0. If none has one, as given.

    Args:
      advantages, weights, lengths: of the batch, ``[P, G, T]`` and ``[P, G]``.
      which: the minibatch's prompts.

    Example:
      >>> lengths_that_teach(np.array([[[0, 1], [0, 0]]]), np.ones((1, 2, 2)), np.array([[2, 2]]), [0]).tolist()
      [[2, 0]]
    """
    teach = ((advantages[which] != 0) & (weights[which] != 0)).any(-1)
    return np.where(teach, lengths[which], 0) if teach.any() else lengths[which]


def _weights(objective: L.Objective, counts: Tokens, dropped: np.ndarray) -> np.ndarray:
    """Loss weights ``[p, G, T]`` of one minibatch, which is an update of its own."""
    weights = L.loss_weights(
        counts, objective.aggregate, constant=objective.constant, count_empty=objective.count_empty
    )
    if objective.count_empty and objective.aggregate != "token_mean":
        # Means over samples or prompts leave out dropped ones.
        weights = weights / max(1.0 - dropped.mean(), 1.0 / len(dropped))
    return np.asarray(weights)
