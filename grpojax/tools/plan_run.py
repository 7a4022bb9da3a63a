"""A whole run on paper: how often a step runs each program, what a step and the run take at least, what they cost."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from grpojax.run.held_out import config_of
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
      steps: of the run.
      chips: that it holds all the time.
      beside: seconds of all evaluations and refreshed references, less what steps that train the critic alone save.
      left_out: what is in none of it.
      ahead: whether chips set apart draw the next step's samples while a step is learned from.
    """

    phases: Mapping[str, tuple[float, str]]
    steps: int
    chips: int
    beside: float = 0.0
    left_out: tuple[str, ...] = ()
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
        """Of the whole run but for what is left out."""
        return (self.steps * self.step + self.beside) / 3600


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


def bound(
    config: Config, reports: Sequence[ProgramReport], chips: int, counts: Mapping[str, int] | None = None
) -> RunBound:
    """Sums the reports over a step and the run.

    Args:
      config: the recipe.
      reports: of its programs; one that was refused, or of a chip that is not known, makes the sum NaN.
      chips: of all slices.
      counts: `times_a_step` where it is known.
    """
    counts, by_name = counts or times_a_step(config), {r.name: r for r in reports}
    phases = {}
    for phase, names in PHASES.items():
        here = {n: counts.get(n, 0) * by_name[n].at_least for n in names if n in by_name and counts.get(n)}
        if here:
            longest = max(here, key=lambda n: here[n])
            phases[phase] = math.fsum(here.values()), by_name[longest].bound_by
    train, rollout = config.train, config.rollout
    tokens = rollout.prompts * rollout.group * rollout.max_tokens
    steps = train.steps if train.steps is not None else -(-(train.tokens or 0) // tokens)
    left_out = ("compiling", "judging", "saving")
    if (config.data.validation or config.data.test) and "evaluation" not in by_name:
        left_out = ("evaluations", *left_out)
    elif config.data.test:
        left_out = ("the test set", *left_out)
    beside = _beside(config, by_name, steps, chips)
    ahead = rollout.ahead > 0 and config.mesh.rollout > 0
    return RunBound(phases=phases, steps=steps, chips=chips, beside=beside, left_out=left_out, ahead=ahead)


def _beside(config: Config, by_name: Mapping[str, ProgramReport], steps: int, chips: int) -> float:
    """Seconds of a run outside of its steps: evaluations before, after and on schedule, and what else is not of every
    step."""

    def seconds(name: str) -> float:
        return by_name[name].at_least if name in by_name else 0.0

    train, total = config.train, 0.0
    if "evaluation" in by_name and config.data.validation:
        times = 2 + ((steps - 1) // train.eval_every if train.eval_every else 0)
        own = "evaluation reshard" if "evaluation reshard" in by_name else "reshard"
        total += times * (seconds(own) + batches(config, chips) * seconds("evaluation"))
    if train.reference_every:
        total += steps // train.reference_every * seconds("reference refresh")
    if config.own_critic is not None:
        alone = config.own_critic.warmup_steps * train.updates_a_rollout
        total += alone * (seconds("critic update") - seconds("update"))
    return total


def batches(config: Config, chips: int) -> int:
    """Into how many batches an evaluation is cut where there are as many problems as it takes."""
    drawn, mesh = config_of(config), config.mesh
    tensor = (chips - mesh.rollout) // (mesh.data * mesh.fsdp) if mesh.tensor == -1 else mesh.tensor
    lanes = (mesh.rollout or chips) // tensor
    size = min(max(1, drawn.batch // drawn.sampler.group), drawn.limit)
    return -(-drawn.limit // (-(-size // lanes) * lanes))


def format_bound(run: RunBound, price: float | None = None) -> str:
    """Two or three lines for people.

    Args:
      run: what `bound` found.
      price: of an hour of one chip, in any currency; None for no cost.
    """
    parts = ", ".join(f"{phase} {seconds:.3g} s ({what})" for phase, (seconds, what) in run.phases.items())
    parts += "; the rollout beside the rest" if run.ahead else ""
    lines = [f"a step takes at least {run.step:.3g} s: {parts}"]
    chip_hours = run.hours * run.chips
    what = "1 chip" if run.chips == 1 else f"{run.chips} chips"
    lines.append(f"{run.steps} steps take at least {run.hours:.3g} h on {what}: {chip_hours:.3g} chip-hours")
    if run.left_out:
        lines[-1] += f", without {', '.join(run.left_out)}"
    if price is not None:
        lines.append(f"at {price:g} an hour of a chip: {chip_hours * price:.2f} at least")
    return "\n".join(lines)
