"""Configs with a field of every kind, and a file that fills them."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from grpojax.host.errors import UserError, require


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reward:
    name: str
    weight: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear:
    end: float
    steps: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    steps: int = 10
    lr: float = 1e-3
    optimizer: Literal["adam", "sgd"] = "adam"
    resume: bool = False
    clip: float | None = None
    schedule: str | Linear = "constant"
    seed: int | Reward | Linear = 0
    betas: tuple[float, float] = (0.9, 0.99)
    group: int = 8

    def __post_init__(self):
        require(self, steps="[1, inf)", clip="(0, 1]")
        if self.group % 2:
            raise ValueError(f"group={self.group}: an even number, please")
        if self.steps == 13:
            raise UserError("steps 13 brings bad luck\nuse 12")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    path: str
    revision: str | None = None
    dtype: Literal["float32", "bfloat16"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    model: Model
    train: Train = Train()
    rewards: tuple[Reward, ...] = ()
    stops: list[str] = dataclasses.field(default_factory=list)
    extra_rewards: list[Reward] = dataclasses.field(default_factory=list)
    mix: dict[str, float] = dataclasses.field(default_factory=dict)
    judges: dict[str, Reward] | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if self.model.path == self.model.revision:
            raise ValueError("path and revision are the same")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rare:
    size: Literal[1, 2, "auto"] = 1
    panel: Sequence[Reward] = ()  # pydantic's, not this module's
    derived: int = dataclasses.field(init=False, default=0)


MODEL = {"path": "m"}

RUN = """\
model: {path: Qwen/Qwen3-0.6B}
train: {steps: 5, lr: 1e-5}
rewards:
  - {name: math}
  - {name: format, weight: 0.5}
"""
