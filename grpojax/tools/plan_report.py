"""What `grpojax.tools.planner` found out, and the table that `grpojax plan` prints of it."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from grpojax.tools.hlo import Traffic
from grpojax.tools.plan_links import Load

PROGRAMS = ("update", "rollout", "reshard")
CRITIC_PROGRAMS = ("critic", "critic update")  # of a run with a critic: its scores, and its own update
# Log-probs; programs of held-out problems, with their own weights where a rollout's are others; and what some variants
# need: a teacher's log-probs, XRPO's later phases, ReMax's baseline, entropies, the tokens of Clip-Cov and KL-Cov,
# NTHR's scores and true answers' likelihoods of a quarter of the groups, and a refreshed reference.
VARIANT_PROGRAMS = (
    "score",
    "evaluation",
    "evaluation reshard",
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
      name: one of `PROGRAMS`, `CRITIC_PROGRAMS` or `VARIANT_PROGRAMS`, or of a part of one's own; with "ragged "
        before it the same program for a batch whose samples are shorter.
      compile_s: seconds that tracing and compiling took here.
      error: why the compiler refused it, such as too little memory; then all that follows is empty or NaN but for
        ``resident``, ``room`` and ``consumers``.
      argument: its inputs (weights, optimiser state, batch).
      temp: what it allocates while it runs.
      output: its results.
      alias: the part of its results that is written over donated inputs.
      resident: what else of the run lies on the chip meanwhile (optimiser state, reference, critic).
      room: what a chip has for programs.
      consumers: what takes the memory while it runs, by name.
      seconds: that each of "compute", "HBM", "ICI" and "DCN" is busy with it at the data sheet's rates, every sample
        at its longest. Bytes and collectives are those of the compiled program, FLOPs those of its shapes. Empty for a
        chip that is not known.
      collectives: of one run, by kind; a loop's count as often as it iterates.
      per_iteration: of one iteration of a loop whose length depends on the data, by kind: in a program that samples,
        of the decoding of one token; in one of ragged rows, of one forward of prompts with one block of rows.
      samples: whether it draws tokens.
      links, links_each: the same by the link they take, in what a chip receives.
      read, read_each: what is read and written of a chip's memory, in a run outside of such a loop and in an iteration.
      optional_each: of the latter, what is left out where it can be: blocks of the cache in which no slot has a token.
      sampling_chips: chips that it runs on, where these do nothing but sample; 0 for those that learn.
      sent: GiB of weights that each of these is sent before.
    """

    name: str
    compile_s: float
    error: str = ""
    argument: float = math.nan
    temp: float = math.nan
    output: float = math.nan
    alias: float = math.nan
    resident: float = math.nan
    room: float = math.inf
    consumers: Mapping[str, float] = dataclasses.field(default_factory=dict)
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    collectives: Mapping[str, Traffic] = dataclasses.field(default_factory=dict)
    per_iteration: Mapping[str, Traffic] = dataclasses.field(default_factory=dict)
    samples: bool = False
    links: Mapping[str, Load] = dataclasses.field(default_factory=dict)
    links_each: Mapping[str, Load] = dataclasses.field(default_factory=dict)
    read: float = math.nan
    read_each: float = math.nan
    optional_each: float = 0.0
    sampling_chips: int = 0
    sent: float = 0.0

    @property
    def total(self) -> float:
        """GiB that the program itself needs on each chip."""
        return self.argument + self.temp + self.output - self.alias

    @property
    def fits(self) -> bool:
        """Whether it has room in addition to the run's state."""
        return not self.error and self.total + self.resident <= self.room

    @property
    def at_least(self) -> float:
        """Seconds that no run of it on these chips is below; NaN where nothing is known."""
        return max(self.seconds.values(), default=math.nan)

    @property
    def bound_by(self) -> str:
        """What it takes them for."""
        return max(self.seconds, key=lambda what: self.seconds[what], default="-")


_SIZES = ("argument", "temp", "output", "alias", "total", "with the run's state")


def format_table(reports: Sequence[ProgramReport]) -> str:
    """The reports as text for people; sizes in the table are GiB a chip."""
    head = ("program", "compile s", *_SIZES, "at least s", "for")
    rows: list[tuple[str, ...]] = [head]
    for r in reports:
        sizes = (r.argument, r.temp, r.output, r.alias, r.total, r.total + r.resident)
        cells = ("-" if math.isnan(s) else f"{s:.2f}" for s in (*sizes, r.at_least))
        rows.append((r.name, f"{r.compile_s:.0f}", *cells, r.bound_by))
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        numbers = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join((f"{name:<{widths[0]}}", *numbers)))
    for r in reports:
        lines += _misfit(r)
        if r.sampling_chips:
            each, whole = human(r.sent), human(r.sent * r.sampling_chips)
            chips = "the chip" if r.sampling_chips == 1 else f"the {r.sampling_chips} chips"
            lines.append(f"{r.name} runs on {chips} of its own; weights sent before: {each} to each, {whole} in all")
        each_time = " for each token" if r.samples else " for each iteration of its loops"
        for when, traffic in (("", r.collectives), (each_time, r.per_iteration)):
            kinds = (f"{t.count} {kind} ({human(t.gib)})" for kind, t in sorted(traffic.items()))
            if traffic:
                lines.append(f"{r.name} moves{when}: {', '.join(kinds)}")
        lines += [
            f"{r.name} receives{when} by {link}: {_kinds(load)}"
            for when, links in (("", r.links), (each_time, r.links_each))
            for link, load in links.items()
        ]
        if r.read_each:
            rest = f", {human(r.optional_each)} of it only where samples are that long" if r.optional_each else ""
            lines += [f"{r.name} reads and writes{each_time}: {human(r.read_each)}{rest}"] * (
                not math.isnan(r.read_each)
            )
        if len(r.seconds) > 1:
            lines.append(f"{r.name} is busy: " + ", ".join(f"{what} {s:.3g} s" for what, s in r.seconds.items()))
    return "\n".join(lines)


def _misfit(r: ProgramReport) -> list[str]:
    """Why a program does not fit, and the largest consumers."""
    if r.fits or (not r.error and math.isnan(r.total)):
        return []
    why = r.error or f"{r.total + r.resident:.2f} GiB with the run's state, and a chip has {r.room:.2f}"
    largest = sorted(r.consumers.items(), key=lambda part: -part[1])
    lines = [f"{r.name}: does not fit: {why}"]
    if largest:
        lines.append(f"{r.name} needs GiB: " + ", ".join(f"{what} {size:.2f}" for what, size in largest))
    return lines


def _kinds(load: Load) -> str:
    return ", ".join(f"{kind} {human(size / 2**30)}" for kind, size in sorted(load.received.items()))


def human(gib: float) -> str:
    """A size for people.

    Example:
      >>> human(0.25)
      '256 MiB'
    """
    for unit, size in (("GiB", gib), ("MiB", gib * 2**10), ("KiB", gib * 2**20)):
        if size >= 1:
            return f"{size:.3g} {unit}"
    return f"{gib * 2**30:.0f} B"
