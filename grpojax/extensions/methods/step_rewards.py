"""Rewards of the steps of a sample, for variants that learn from them."""

import numpy as np

from grpojax.host.errors import UserError
from grpojax.rewards import Scores
from grpojax.types import Array


def read(scores: Scores, variant: str, longest: int) -> dict[str, Array]:
    """The rewards of steps as a signal.

    Args:
      scores: of ``N`` samples.
      variant: its name.
      longest: most tokens of a sample, T.

    Returns:
      ``{"step_rewards": [N, T]}``, NaN where no step ends.

    Raises:
      UserError: no reward gives any.
    """
    if scores.step_rewards is not None:
        return {"step_rewards": scores.step_rewards}
    if np.isfinite(scores.total).any():
        raise UserError(
            f"variant {variant!r} learns from rewards of steps, and no reward of the run gives "
            "any: take equations, or a function that returns a list of (token end, reward) for a sample"
        )
    return {"step_rewards": np.full((scores.total.size, longest), np.nan, np.float32)}
