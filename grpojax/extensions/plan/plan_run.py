"""A step on paper: how often it runs each program, and the least time of a step and of a run."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from grpojax.extensions.plan.plan_calls import PlannedCall
from grpojax.extensions.plan.plan_report import ProgramReport
from grpojax.run import parts
from grpojax.run.recipe import Config

PHASES = ("rollout", "scores", "update")  # of a step, in their order


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunBound:
    """The least time that a run takes.

    Attributes:
      phases: seconds of each of `PHASES`, and the resource that takes most of them.
      steps: number of steps of the run, without those in which the policy does not learn.
      chips: number of chips that it holds all the time.
      ahead: whether separate chips draw the next step's samples while a step learns.
    """

    phases: Mapping[str, tuple[float, str]]
    steps: int
    chips: int
    ahead: bool = False

    @property
    def step(self) -> float:
        """Seconds of a step: the sum of its phases or, with rollouts `ahead`, the longer of rollout and rest."""
        seconds = {phase: s for phase, (s, _) in self.phases.items()}
        beside = seconds.pop("rollout", 0.0) if self.ahead else 0.0
        rest = math.fsum(seconds.values())
        return math.nan if math.isnan(beside + rest) else max(beside, rest)

    @property
    def hours(self) -> float:
        """Hours of all steps."""
        return self.steps * self.step / 3600


def bound(config: Config, calls: Mapping[str, PlannedCall], reports: Sequence[ProgramReport], chips: int) -> RunBound:
    """Sums the reports over a step.

    Args:
      config: the recipe.
      calls: how often a step calls its programs, by name.
      reports: the reports of its programs. One of a refused program, or of an unknown chip, makes the sum NaN.
      chips: number of chips of all slices.
    """
    by_name, phases = {r.name: r for r in reports}, {}
    for phase in PHASES:
        here = {
            n: call.times * by_name[n].at_least
            for n, call in calls.items()
            if call.phase == phase and n in by_name and call.times
        }
        if here:
            longest = max(here, key=lambda n: here[n])
            phases[phase] = math.fsum(here.values()), by_name[longest].bound_by
    train, rollout = config.train, config.rollout
    tokens = rollout.prompts * rollout.group * rollout.max_tokens
    steps = train.steps if train.steps is not None else -(-(train.tokens or 0) // tokens)
    ahead = rollout.ahead > 0 and config.mesh.rollout > 0
    return RunBound(phases=phases, steps=max(steps - parts.warmup_steps(config), 0), chips=chips, ahead=ahead)


def format_bound(run: RunBound) -> str:
    """The bound in two lines for people."""
    text = ", ".join(f"{phase} {seconds:.3g} s ({what})" for phase, (seconds, what) in run.phases.items())
    text += "; the rollout runs at the same time as the rest" if run.ahead else ""
    what = "1 chip" if run.chips == 1 else f"{run.chips} chips"
    return (
        f"a step takes at least {run.step:.3g} s: {text}\n"
        f"{run.steps} steps take at least {run.hours:.3g} h on {what}, without evaluations, compiling, judging, saving"
    )
