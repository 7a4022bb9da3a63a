"""Advantages and token weights of a batch's samples, and their values in each row."""

from collections.abc import Mapping

import numpy as np

from grpojax import losses as L
from grpojax.advantages import Transform, text_of
from grpojax.host.errors import UserError
from grpojax.run import parts
from grpojax.run.batch import RolloutBatch
from grpojax.run.method import Method
from grpojax.types import Samples, Tokens


def counted(batch: RolloutBatch, truncated: str) -> tuple[Samples, Samples]:
    """``(rewards, cut)``, ``[P, G]``: the rewards, NaN for samples that are in no statistic, and the samples that were
    cut at the limit and have weight 0."""
    rewards = np.where(batch.dropped[:, None], np.nan, batch.total)
    cut = ~batch.rollout.stopped & (truncated != "train")
    return np.where(cut, np.nan, rewards) if truncated == "drop" else rewards, cut


def advantages(
    method: Method,
    batch: RolloutBatch,
    counted: Samples,
    mask: Tokens,
    signals: Mapping[str, Tokens],
    rule: Transform | None = None,
) -> Tokens:
    """Advantages ``[P, G, T]`` by the variant or ``rule``. Rewards ``[P, G]`` are NaN for samples that do not count.

    Raises:
      UserError: the variant refuses the rewards or the signals, or a sample that counts has an advantage that is not
        finite.
    """
    rule = rule or method.variant.advantage
    known = {
        "outcome": batch.by_name[method.deciding],
        "lengths": batch.own_lengths,
        "mask": mask,
        "behavior_logps": batch.rollout.logps,
        "tokens": batch.rollout.tokens,
    }
    try:
        given = parts.signals_of({**known, **batch.signals, **signals})
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


def rows(
    objective: L.Objective,
    places: np.ndarray,
    advantages: Tokens,
    live: Tokens,
    dropped: np.ndarray,
) -> dict[str, Tokens]:
    """The arrays for a minibatch's rows, ``[p, G, T]`` each, from arrays of the batch."""
    return {"advantages": advantages[places], "weights": _weights(objective, live[places], dropped[places])}


def lengths_that_teach(rows: Mapping[str, Tokens], lengths: Samples) -> Samples:
    """Lengths ``[p, G]``, 0 for samples without a gradient, whose tokens all have advantage or weight 0. If none has
    one, as given.

    Args:
      rows: "advantages" and "weights" of a minibatch, ``[p, G, T]``.
      lengths: lengths of its samples.

    Example:
      >>> rows = {"advantages": np.array([[[0, 1], [0, 0]]]), "weights": np.ones((1, 2, 2))}
      >>> lengths_that_teach(rows, np.array([[2, 2]])).tolist()
      [[2, 0]]
    """
    teach = ((rows["advantages"] != 0) & (rows["weights"] != 0)).any(-1)
    return np.where(teach, lengths, 0) if teach.any() else lengths


def _weights(objective: L.Objective, counts: Tokens, dropped: np.ndarray) -> np.ndarray:
    """Loss weights ``[p, G, T]`` of one minibatch, which is an update of its own."""
    weights = L.loss_weights(
        counts, objective.aggregate, constant=objective.constant, count_empty=objective.count_empty
    )
    if objective.count_empty and objective.aggregate != "token_mean":
        # Means over samples or prompts leave out dropped ones.
        weights = weights / max(1.0 - dropped.mean(), 1.0 / len(dropped))
    return np.asarray(weights)
