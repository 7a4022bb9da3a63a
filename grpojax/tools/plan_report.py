"""What `grpojax.tools.planner` found out, and the table that `grpojax plan` prints of it."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from grpojax.tools.hlo import Traffic

PROGRAMS = ("update", "score", "rollout", "reshard")
CRITIC_PROGRAMS = ("critic", "critic update")  # of a run with a critic: what it says, and an update of it alone
# Of held-out problems, and what some variants need: a teacher's log-probs, XRPO's later phases, ReMax's baseline,
# entropies, the tokens of Clip-Cov and KL-Cov, NTHR's scores and true answers' likelihoods of a quarter of the groups,
# and a refreshed reference.
VARIANT_PROGRAMS = (
    "evaluation",
    "teacher",
    "rollout phase",
    "greedy",
    "score with entropy",
    "covariance mask",
    "influence",
    "true answers",
    "reference refresh",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """What one compiled program needs; sizes are GiB on each chip.

    Attributes:
      name: one of `PROGRAMS`, `CRITIC_PROGRAMS` or `VARIANT_PROGRAMS`.
      compile_s: seconds that tracing and compiling took here.
      error: why the compiler refused it, such as too little memory; then all that follows is empty or NaN.
      argument: its inputs (weights, optimiser state, batch).
      temp: what it allocates while it runs.
      output: its results.
      alias: the part of its results that is written over donated inputs.
      resident: what else of the run lies on the chip meanwhile (optimiser state, reference, critic).
      collectives: of one run, by kind; a loop's count as often as it iterates.
      at_least: seconds that its useful FLOPs, or the bytes that it must read, take at the chip's data-sheet rates;
        the real program takes longer. NaN for a chip that is not known.
      per_iteration: of one iteration of a loop whose length depends on the data, by kind: in "rollout", of the
        decoding of one token.
    """

    name: str
    compile_s: float
    error: str = ""
    argument: float = math.nan
    temp: float = math.nan
    output: float = math.nan
    alias: float = math.nan
    resident: float = math.nan
    at_least: float = math.nan
    collectives: Mapping[str, Traffic] = dataclasses.field(default_factory=dict)
    per_iteration: Mapping[str, Traffic] = dataclasses.field(default_factory=dict)

    @property
    def total(self) -> float:
        """GiB that the program itself needs on each chip."""
        return self.argument + self.temp + self.output - self.alias


_SIZES = ("argument", "temp", "output", "alias", "total", "with the run's state")


def format_table(reports: Sequence[ProgramReport]) -> str:
    """The reports as text for people; sizes in the table are GiB a chip."""
    head = ("program", "compile s", *_SIZES, "at least s")
    rows: list[tuple[str, ...]] = [head]
    for r in reports:
        sizes = (r.argument, r.temp, r.output, r.alias, r.total, r.total + r.resident)
        cells = ("-" if math.isnan(s) else f"{s:.2f}" for s in (*sizes, r.at_least))
        rows.append((r.name, f"{r.compile_s:.0f}", *cells))
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        numbers = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join((f"{name:<{widths[0]}}", *numbers)))
    for r in reports:
        if r.error:
            lines.append(f"{r.name}: does not fit: {r.error}")
        for what, traffic in (("moves", r.collectives), ("moves for each token", r.per_iteration)):
            kinds = (f"{t.count} {kind} ({_human(t.gib)})" for kind, t in sorted(traffic.items()))
            if traffic:
                lines.append(f"{r.name} {what}: {', '.join(kinds)}")
    return "\n".join(lines)


def _human(gib: float) -> str:
    for unit, size in (("GiB", gib), ("MiB", gib * 2**10), ("KiB", gib * 2**20)):
        if size >= 1:
            return f"{size:.3g} {unit}"
    return f"{gib * 2**30:.0f} B"
