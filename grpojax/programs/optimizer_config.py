"""The optimiser of a network in a recipe: settings only. A recipe is read without optax."""

import dataclasses
from typing import Literal

from grpojax.host.errors import UserError, require


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW or SGD with warm-up, a schedule and clipping.

    Attributes:
      name: the optimiser: "adamw" or "sgd".
      learning_rate: the rate after the warm-up, the highest one.
      schedule: the rate after the warm-up. "constant" keeps it; "linear" and "cosine" lower it to ``final_fraction`` of
        the peak after the last step. Updates that are left out, since their gradient is 0 or not finite, do not count.
        In a run whose length is ``train.tokens``, the rate falls over all of these tokens, those of the policy's and
        the critic's warm-up included.
      final_fraction: share of the peak rate that "linear" and "cosine" end at.
      warmup_steps: updates over which the rate rises from 0. The first update has 1 / warmup_steps of the peak.
      b1: Adam's decay of the first moment, or SGD's momentum; 0 for none.
      b2: Adam's decay of the second moment.
      eps: Adam's epsilon, which is added to the root of the second moment.
      weight_decay: decoupled weight decay of matrices; norms and biases do not decay. AdamW only.
      grad_clip: largest global norm of the gradient; 0 for none.
    """

    name: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_fraction: float = 0.0
    warmup_steps: int = 0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0

    def __post_init__(self) -> None:
        require(
            self,
            learning_rate="(0, inf)",
            final_fraction="[0, 1]",
            warmup_steps="[0, inf)",
            b1="[0, 1)",
            b2="[0, 1)",
            eps="(0, inf)",
            weight_decay="[0, inf)",
            grad_clip="[0, inf)",
        )
        if self.name == "sgd":
            for field in ("b2", "eps", "weight_decay"):
                if getattr(self, field) != getattr(type(self), field):
                    raise UserError(f"{field}={getattr(self, field)!r}: is AdamW's, and sgd has none; leave it out")
        if self.schedule == "constant" and self.final_fraction:
            raise UserError(f"final_fraction={self.final_fraction!r}: goes with schedule: linear or cosine")
