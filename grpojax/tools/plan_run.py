"""A step on paper: how often it runs each program, and what it and a run of such steps take at least."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from grpojax.run.recipe import Config
from grpojax.tools.plan_report import ProgramReport

# What a step does one after the other, and the programs of it; a recipe's own count says which of them run.
PHASES = {
    "rollout": ("reshard", "rollout", "rollout phase", "greedy"),
    "scores": ("score", "score with entropy", "teacher", "critic", "influence", "true answers"),
    "update": ("covariance mask", "update"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunBound:
    """What a run takes at least.

    Attributes:
      phases: seconds of each of `PHASES`, and what binds most of them.
      steps: of the run; those that train a critic by itself are left out.
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


def times_a_step(config: Config) -> dict[str, int]:
    """How often a step runs each program.

    As `grpojax.run.learner.Learner` does it: every minibatch is scored by the reference, and by the policy where it
    moves before its last update or its log-probs are a signal; the update runs for each minibatch in each pass.
    """
    method, train = config.method, config.train
    objective, needs = method.variant.objective, method.variant.needs
    moves = method.scores_old(train.updates_a_rollout)
    compares = "teacher" in needs or (objective.needs_reference and objective.kl_in != "loss")
    own = moves or "entropy" in needs or compares
    name = "score with entropy" if "entropy" in needs else "score"
    per_mini = {"score": int(objective.needs_reference)}
    per_mini[name] = per_mini.get(name, 0) + int(own)
    critic = method.variant.critic is not None
    per_mini |= {"teacher": int("teacher" in needs), "critic": int(critic)}
    updates, masks = train.updates_a_rollout, int(objective.needs_covariance_mask)
    counts = {what: n * train.minibatches for what, n in per_mini.items()}
    counts["score"] += updates * masks  # the mask is of the policy as it is before each update
    return counts | {
        "reshard": 1,
        "rollout": 1,
        "rollout phase": 0 if method.plan is None else method.plan.phases,
        "greedy": int("greedy" in needs),
        "influence": 4 * int("hidden_states" in needs),  # the program is that of a quarter of the groups
        "true answers": 4 * int("ground_truth" in needs),
        "covariance mask": updates * masks,
        "update": updates,
    }


def bound(config: Config, reports: Sequence[ProgramReport], chips: int) -> RunBound:
    """Sums the reports over a step.

    Args:
      config: the recipe.
      reports: of its programs; one that was refused, or of a chip that is not known, makes the sum NaN.
      chips: of all slices.
    """
    counts, by_name = times_a_step(config), {r.name: r for r in reports}
    phases = {}
    for phase, names in PHASES.items():
        here = {n: counts.get(n, 0) * by_name[n].at_least for n in names if n in by_name and counts.get(n)}
        if here:
            longest = max(here, key=lambda n: here[n])
            phases[phase] = math.fsum(here.values()), by_name[longest].bound_by
    train, rollout = config.train, config.rollout
    tokens = rollout.prompts * rollout.group * rollout.max_tokens
    steps = train.steps if train.steps is not None else -(-(train.tokens or 0) // tokens)
    warmup = 0 if config.own_critic is None else config.own_critic.warmup_steps
    ahead = rollout.ahead > 0 and config.mesh.rollout > 0
    return RunBound(phases=phases, steps=max(steps - warmup, 0), chips=chips, ahead=ahead)


def format_bound(run: RunBound) -> str:
    """Two lines for people."""
    parts = ", ".join(f"{phase} {seconds:.3g} s ({what})" for phase, (seconds, what) in run.phases.items())
    parts += "; the rollout beside the rest" if run.ahead else ""
    what = "1 chip" if run.chips == 1 else f"{run.chips} chips"
    return (
        f"a step takes at least {run.step:.3g} s: {parts}\n"
        f"{run.steps} steps take at least {run.hours:.3g} h on {what}, without evaluations, compiling, judging, saving"
    )
