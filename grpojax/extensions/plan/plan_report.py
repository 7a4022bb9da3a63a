"""The findings of `grpojax.extensions.plan.planner`, and the table of them that `grpojax plan` prints."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from grpojax.extensions.plan.hlo import Traffic
from grpojax.extensions.plan.plan_links import LinkLoad

PROGRAMS = ("update", "rollout", "reshard")  # of any run


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """The needs of one compiled program; sizes are GiB on each chip.

    Attributes:
      name: of the program (`grpojax.extensions.plan.plan_calls.calls_of`), such as one of `PROGRAMS`. The prefix
        "ragged " means the same program for a batch with shorter samples.
      compile_s: seconds that tracing and compiling took here.
      error: why the compiler refused it, such as too little memory. Then all later fields are empty or NaN, except
        ``resident``, ``room`` and ``consumers``.
      argument: the size of its inputs (weights, optimiser state, batch).
      temp: the memory that it allocates while it runs.
      output: the size of its results.
      alias: the part of its results that overwrites donated inputs.
      resident: the rest of the run's state that is on the chip meanwhile (optimiser state, reference, critic).
      room: the memory of a chip that programs can use.
      consumers: the memory in use while it runs, by name.
      seconds: the time that each of "compute", "HBM", "ICI" and "DCN" is busy with it at the data sheet's rates, with
        every sample at its longest; of a ragged program, with one iteration of its loops and without FLOPs. Bytes and
        collectives come from the compiled program, FLOPs from its shapes. Empty for an unknown chip.
      collectives: the collectives of one run, by kind; those in a loop count once for each iteration.
      per_iteration: those of one iteration of a loop whose length depends on the data, by kind. In a program that
        samples an iteration decodes one token; in one of ragged rows it is one forward of prompts with one block of
        rows.
      samples: whether it draws tokens.
      links, links_each: the same by link, in bytes that a chip receives.
      read, read_each: the memory of a chip that is read and written, in a run outside of such a loop and in an
        iteration.
      optional_each: the part of ``read_each`` that may be left out: blocks of the cache in which no slot has a token.
      sampling_chips: number of chips that it runs on, if these only sample; 0 for chips that learn.
      sent: GiB of weights that each of these receives beforehand.
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
    links: Mapping[str, LinkLoad] = dataclasses.field(default_factory=dict)
    links_each: Mapping[str, LinkLoad] = dataclasses.field(default_factory=dict)
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
        """Whether it fits next to the run's state."""
        return not self.error and self.total + self.resident <= self.room

    @property
    def at_least(self) -> float:
        """A lower bound in seconds for a run of it on these chips; NaN if nothing is known."""
        return max(self.seconds.values(), default=math.nan)

    @property
    def bound_by(self) -> str:
        """The resource that takes that time."""
        return max(self.seconds, key=lambda what: self.seconds[what], default="-")


_SIZES = ("argument", "temp", "output", "alias", "total", "with the run's state")


def format_table(reports: Sequence[ProgramReport]) -> str:
    """The reports as text for people; sizes in the table are in GiB per chip."""
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
            busy = "is busy with one iteration of its loops" if _ragged(r) else "is busy"
            lines.append(f"{r.name} {busy}: " + ", ".join(f"{what} {s:.3g} s" for what, s in r.seconds.items()))
    if any(_ragged(r) for r in reports):
        lines.append(
            "at least s of ragged programs is of one iteration of their loops, without compute; a batch takes as many "
            "as its tokens fill, or the program without that prefix where that is faster"
        )
    return "\n".join(lines)


def _ragged(r: ProgramReport) -> bool:
    """Whether it is the program for a batch with shorter samples, whose number of iterations depends on the batch."""
    return r.name.startswith("ragged ")


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


def _kinds(load: LinkLoad) -> str:
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
