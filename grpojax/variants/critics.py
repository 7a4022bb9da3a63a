"""The critics of variants that have one: their targets, losses and outputs."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp

from grpojax import advantages as A
from grpojax import credit as C
from grpojax import losses as L
from grpojax.advantages.signals import described, need, per_token
from grpojax.types import Array, Declared, Scalar, Tokens

# The arrays of `grpojax.types.Rows` that a critic's loss reads, besides the policy's weights.
ARRAYS = {
    "critic_targets": Declared("P G T", "what the critic learns from (`Critic.targets`)"),
    "critic_outputs": Declared("P G T", "its outputs before the updates of the rollout"),
    "critic_weights": Declared("P G T", "the aggregation of its loss; absent where that is the policy's"),
}


def _need(arrays: Mapping[str, Array], name: str, why: str) -> Tokens:
    if name not in arrays:
        raise ValueError(f"{why} needs {name}, which is missing")
    return arrays[name]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BiasLoss:
    """``-Σ w A b + l2 Σ w b²`` of a token bias (`grpojax.credit.token_bias_loss`).

    Attributes:
      bound: largest bias, by a tanh; None for no bound.
      l2: weight of the squared bias.
      normalise: "sum" takes the policy's weights ``w``, a sum over tokens like the policy's loss. "mean" takes the mean
        over all tokens of an update.
    """

    bound: float | None = None
    l2: float = 0.0
    normalise: Literal["sum", "mean"] = "sum"

    def __post_init__(self) -> None:
        if self.bound is not None and self.bound <= 0:
            raise ValueError(f"bound={self.bound}: must be over 0, or null for none")
        if self.l2 < 0:
            raise ValueError(f"l2={self.l2}: must be 0 or more")
        if self.normalise not in ("sum", "mean"):
            raise ValueError(f"normalise={self.normalise!r}: must be one of sum, mean")

    @property
    def own_weights(self) -> bool:
        """Whether it reads ``critic_weights``, a mean over tokens, in place of the policy's."""
        return self.normalise == "mean"

    @property
    def needs_outputs(self) -> bool:
        """Whether it reads the outputs from before the updates."""
        return False

    def prediction(self, outputs: Any) -> Any:
        """Outputs as they act on the advantages: bounded."""
        return C.bounded_bias(outputs, self.bound)

    def __call__(self, outputs: Any, arrays: Mapping[str, Array]) -> tuple[Scalar, dict[str, Any]]:
        weights = _need(arrays, "critic_weights", "normalise='mean'") if self.own_weights else arrays["weights"]
        targets = _need(arrays, "critic_targets", "the critic's loss")
        loss = C.token_bias_loss(outputs, targets, weights, bound=self.bound, l2=self.l2)
        return loss, {"loss": loss}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """PPO's loss of values, with the policy's weights (`grpojax.losses.value_loss`).

    Attributes:
      clip: most that values may move away from those before the rollout's updates; None for the plain square.
    """

    clip: float | None = 0.2

    def __post_init__(self) -> None:
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"value_clip={self.clip}: must be over 0, or null for none")

    @property
    def own_weights(self) -> bool:
        """Whether it reads ``critic_weights`` in place of the policy's."""
        return False

    @property
    def needs_outputs(self) -> bool:
        """Whether it reads the outputs from before the updates."""
        return self.clip is not None

    def prediction(self, outputs: Any) -> Any:
        """Values as they are."""
        return outputs

    def __call__(self, outputs: Any, arrays: Mapping[str, Array]) -> tuple[Scalar, dict[str, Any]]:
        returns = _need(arrays, "critic_targets", "the critic's loss")
        old = _need(arrays, "critic_outputs", f"value_clip={self.clip}") if self.needs_outputs else None
        loss = L.value_loss(outputs, returns, arrays["weights"], old_values=old, clip=self.clip)
        return loss, {"loss": loss}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Critic:
    """The critic of a variant.

    Attributes:
      signal: the field of `grpojax.advantages.Signals` for its outputs from before the step's updates: "token_bias",
        computed from the state after each token, or "values", from the state before it.
      targets: ``(rewards [P, G], Signals) -> [P, G, T]``, its targets, which are constant for the gradient.
      loss: ``(outputs, arrays) -> (value, metrics)``, with arrays of tokens by name (`ARRAYS`).
    """

    signal: Literal["token_bias", "values"]
    targets: A.Transform
    loss: BiasLoss | ValueLoss

    @property
    def at(self) -> Literal["before", "after"]:
        """Which state of a token it reads."""
        return "before" if self.signal == "values" else "after"


@described
def add_values() -> A.Transform:
    """``A + V``, the returns that values learn, from advantages ``[P, G, T]`` that are not whitened."""

    def transform(values: Tokens, signals: A.Signals | None = None) -> Tokens:
        values, signals = per_token(values, signals, "add_values")
        mask = need(signals, "mask", "add_values")
        return jnp.where(mask, values + need(signals, "values", "add_values"), 0.0)

    return transform
