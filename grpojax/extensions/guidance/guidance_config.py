"""The section ``rollout.guidance`` of a recipe."""

import dataclasses
from typing import Literal

from grpojax.host.errors import UserError, require


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuidanceConfig:
    """Some groups of a prompt that failed as a whole begin with a part of a solution.

    Bonuses for entropy and rewards by pass@k do not open such prompts; prefixes of solutions do (POPE, arXiv
    2601.18779; prefix sampling, arXiv 2605.05112). A prefix is context, as a prompt is: it is in no loss, ratio, KL or
    length. A guided group is a group of its own, with a baseline of its own. Its prompt is also drawn without a prefix,
    in its turn, and once a sample then passes, it gets no prefix any more.

    Attributes:
      prefix: "solution" takes the beginning of the solution in ``column``, "own" that of the newest sample of the
        prompt that was right. A prompt that has neither is not guided.
      column: the column of the data that has solutions. Only with ``prefix: solution``.
      share: most groups of a rollout that are guided, as a share of all.
      target: share of a guided group's samples that should pass. The prefix of each prompt gets longer while fewer do,
        and shorter while more do.
      start: length of the first prefixes, as a share of the solution. Later prompts begin with a running mean of the
        lengths that others have by then.
      step: how fast the length follows: it changes by ``step * (target - passed)`` of the solution after each group.
      success: a sample passes if its reward is at least this; None is for rewards of 0 and 1.
    """

    prefix: Literal["solution", "own"] = "solution"
    column: str = "solution"
    share: float = 0.25
    target: float = 0.5
    start: float = 0.5
    step: float = 0.5
    success: float | None = None

    def __post_init__(self) -> None:
        require(self, share="(0, 1)", target="(0, 1)", start="(0, 1]", step="(0, 1]")
        if self.prefix == "own" and self.column != type(self).column:
            raise UserError(f"column={self.column!r}: goes with prefix=solution; leave it out")
