"""A step on paper: how often it runs each program, and what it and a run of such steps take at least."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from grpojax.run import parts
from grpojax.run.calls import times_a_step
from grpojax.run.recipe import Config
from grpojax.tools.plan_report import ProgramReport

# What a step does one after the other, and the programs of it; `times_a_step` says which of them run.
PHASES = {
    "rollout": ("reshard", "rollout", "rollout phase", "greedy"),
    "scores": (),  # all others: of the policy and of the variant's parts
    "update": ("covariance mask", "update"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunBound:
    """What a run takes at least.

    Attributes:
      phases: seconds of each of `PHASES`, and what binds most of them.
      steps: of the run; those in which the policy is left as it is are left out.
      chips: that it holds all the time.
      ahead: whether chips set apart draw the next step's samples while a step is learned from.
    """

    phases: Mapping[str, tuple[float, str]]
    steps: int
    chips: int
    ahead: bool = False

    @property
    def step(self) -> float:
        """Seconds of a step, its phases one after the other; with rollouts `ahead`, the longer of rollout and rest."""
        seconds = {phase: s for phase, (s, _) in self.phases.items()}
        beside = seconds.pop("rollout", 0.0) if self.ahead else 0.0
        rest = math.fsum(seconds.values())
        return math.nan if math.isnan(beside + rest) else max(beside, rest)

    @property
    def hours(self) -> float:
        """Of all steps."""
        return self.steps * self.step / 3600


def bound(config: Config, reports: Sequence[ProgramReport], chips: int) -> RunBound:
    """Sums the reports over a step.

    Args:
      config: the recipe.
      reports: of its programs; one that was refused, or of a chip that is not known, makes the sum NaN.
      chips: of all slices.
    """
    counts, by_name = times_a_step(config), {r.name: r for r in reports}
    phases = {}
    for phase in PHASES:
        here = {
            n: times * by_name[n].at_least
            for n, times in counts.items()
            if _phase(n) == phase and n in by_name and times
        }
        if here:
            longest = max(here, key=lambda n: here[n])
            phases[phase] = math.fsum(here.values()), by_name[longest].bound_by
    train, rollout = config.train, config.rollout
    tokens = rollout.prompts * rollout.group * rollout.max_tokens
    steps = train.steps if train.steps is not None else -(-(train.tokens or 0) // tokens)
    ahead = rollout.ahead > 0 and config.mesh.rollout > 0
    return RunBound(phases=phases, steps=max(steps - parts.warmup_steps(config), 0), chips=chips, ahead=ahead)


def _phase(name: str) -> str:
    return next((phase for phase, names in PHASES.items() if name in names), "scores")


def format_bound(run: RunBound) -> str:
    """Two lines for people."""
    text = ", ".join(f"{phase} {seconds:.3g} s ({what})" for phase, (seconds, what) in run.phases.items())
    text += "; the rollout runs at the same time as the rest" if run.ahead else ""
    what = "1 chip" if run.chips == 1 else f"{run.chips} chips"
    return (
        f"a step takes at least {run.step:.3g} s: {text}\n"
        f"{run.steps} steps take at least {run.hours:.3g} h on {what}, without evaluations, compiling, judging, saving"
    )
