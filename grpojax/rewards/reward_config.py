"""The ``rewards`` section of a recipe."""

import dataclasses
import difflib
import typing
from typing import Any, Literal

from grpojax import extension
from grpojax.host import settings
from grpojax.host.errors import UserError, require
from grpojax.rewards import builtin

# Reward functions that have a name too, besides those of extensions.
OWN_FUNCTIONS = {
    "http": "grpojax.rewards.endpoint:http",
    "model": "grpojax.rewards.endpoint:model",
    "unit_tests": "grpojax.rewards.unit_tests:score",
}


def named_functions() -> dict[str, str]:
    """The reward functions that have a name, with their import paths."""
    return {**OWN_FUNCTIONS, **extension.words("rewards")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """One reward.

    Attributes:
      name: one of `builtin.REWARDS` or `named_functions`, or the import path ``package.module:function`` of a reward
        function. One of `named_functions` is replaced by its import path.
      weight: its factor in the sum, between minus and plus a million. 0 only measures the reward; a sample for which it
        is invalid then still counts.
      options: settings of a built-in reward (the fields of its class), or keyword arguments of a function.
      label: its name in metrics; None takes ``name``.
      pieces: give the reward the column ``pieces`` too, the text of each token of a sample, to find where steps end.
      text: the text that the reward gets as a completion. "completion" has no special tokens. "with_special_tokens" has
        them, but not the token that ended the sample. "with_prompt_tail" starts with the part of the answer that the
        prompt ends with, such as ``<think>``. "with_both" has both.
    """

    name: str
    weight: float = 1.0
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    label: str | None = None
    pieces: bool = False
    text: Literal["completion", "with_special_tokens", "with_prompt_tail", "with_both"] = "completion"

    def __post_init__(self):
        require(self, weight="[-1e6, 1e6]")
        if self.name not in builtin.REWARDS and (path := named_functions().get(self.name)) is not None:
            object.__setattr__(self, "label", self.label or self.name)
            object.__setattr__(self, "name", path)
        known = builtin.REWARDS.get(self.name)
        if known is not None:
            root = dataclasses.make_dataclass("Options", [("options", known)], frozen=True)
            settings.build(typing.cast(Any, root), {"options": self.options})
            if self.text != "completion" and not known.reads_text:
                raise UserError(f"reward {self.name!r} reads no text: leave text={self.text!r} out")
        elif not all(self.name.partition(":")[::2]):
            names = (*builtin.REWARDS, *named_functions())
            close = difflib.get_close_matches(self.name, names, n=1)
            known_names = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)},"
            raise UserError(f"reward {self.name!r} is unknown; {known_names} or package.module:function")
        try:
            builtin.freeze(self.options)
        except (TypeError, ValueError) as e:
            raise UserError(f"reward {self.name!r}: options must be plain numbers, texts, lists: {e}") from None

    @property
    def metric(self) -> str:
        """Its name in metrics."""
        return self.label or self.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardsConfig:
    """All rewards of a run. In a recipe a bare list stands for ``{terms: [...]}``.

    Attributes:
      terms: the rewards.
      combine: "sum" adds the weighted rewards. "normalize" first centres each reward in its group and divides it by
        its standard deviation there (GDPO, arXiv:2601.05242), so that no reward outweighs the others by its scale. GDPO
        also scales by the batch: take a variant that does. None is what the variant is defined on, and "sum" if it says
        nothing.
      timeout_s: most seconds of a worker for a job, which is one sample or several. If a job of several is late, each
        of its samples is judged by itself, with the same limit. A sample that is late alone gets NaN as its reward, and
        no update learns from it; of a function's first samples one may have a second try. If no job ends within a
        minute more, the workers are taken for lost. Built-in rewards that cannot hang run without a limit.
      memory_mb: most MiB of address space of a worker, besides its imports; 0 sets no limit.
      workers: number of worker processes for rewards that may hang; 0 takes one for each core, up to 16.
    """

    terms: tuple[RewardConfig, ...]
    combine: Literal["sum", "normalize"] | None = None
    timeout_s: float = 10.0
    memory_mb: int = 2048
    workers: int = 0

    def __post_init__(self):
        if not self.terms:
            raise UserError("at least one is needed")
        names = [t.metric for t in self.terms]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise UserError(f"reward {twice[0]!r} occurs twice; give one of them a label")
        if not any(t.weight for t in self.terms):
            raise UserError("every weight is 0: nothing would be learned")
        require(self, timeout_s="(0, 3600]", workers="[0, 1024]")
        if self.memory_mb and not 64 <= self.memory_mb <= 2**24:
            raise UserError(f"memory_mb={self.memory_mb}: must be 0 (no limit), or between 64 and {2**24}")
