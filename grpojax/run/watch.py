"""Looks at a run's metrics as they come, and says when they look like the start of a collapse. Plain numpy on the host.

What a healthy run does as well is no alarm: while the reward grows, or most groups are all right, the entropy may fall
and samples may get longer. An alarm rings once a run. The line of ``metrics.jsonl`` that it rings at has its name after
`KEY`, with the value 1; no other line does.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpojax import diagnostics
from grpojax.evaluation import Judge
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.run.sections import TrainConfig
from grpojax.run.session import Session

KEY = "watch/"
_SLOWER = "lower optimizer.learning_rate"

# What each alarm tells the user, and the remedy.
SAID = {
    "not_finite": ("the entropy is not a finite number", _SLOWER),
    "entropy_jump": (
        "one step changed the policy's entropy a lot, in nats a token",
        f"{_SLOWER} or optimizer.grad_clip, or raise optimizer.warmup_steps",
    ),
    "entropy_collapse": (
        "the policy hardly varies any more (entropy collapse), in nats a token",
        f"{_SLOWER}, or add variant.entropy_coef",
    ),
    "entropy_explosion": (
        "the policy draws almost at random (entropy explosion), in nats a token",
        f"{_SLOWER} or variant.entropy_coef",
    ),
    "entropy_falling": (
        "the entropy falls fast and the reward does not grow, in nats a token",
        f"{_SLOWER}, or add variant.entropy_coef",
    ),
    "displacement": (
        "right answers get less likely and the reward does not grow (likelihood displacement), in nats a token",
        f"{_SLOWER}, or take variant nthr, or llds with several updates a rollout",
    ),
    "groups_all_fail": (
        "nearly all groups are all wrong and teach nothing, as a share",
        "train on easier problems, or raise rollout.group",
    ),
    "groups_all_right": (
        "nearly all groups have been all right from the start and teach nothing, as a share",
        "train on harder problems",
    ),
    "length_growing": (
        "samples get longer and the reward does not grow, in tokens",
        "add the reward soft_overlong, or take variant dr_grpo",
    ),
    "truncation": (
        "more and more samples are cut at rollout.max_tokens, as a share",
        "raise rollout.max_tokens, or add the reward soft_overlong",
    ),
    "repetition": (
        "the samples repeat themselves more and more, as a share of their 4-grams",
        f"{_SLOWER}, or add the reward repetition",
    ),
    "bias_growing": (
        "the critic's bias grows without bound and is more than the advantages, a token",
        "set variant.bound or variant.l2, or lower critic.optimizer.learning_rate (grpojax show --critic has each)",
    ),
    "reward_falling": (
        "the training reward has fallen from its best",
        f"{_SLOWER}, or raise variant.kl_coef",
    ),
    "held_out_falling": (
        "the held-out reward has fallen from its best",
        f"{_SLOWER}, raise variant.kl_coef, or see to it that the reward asks for what is right",
    ),
}

REWARD, ENTROPY, BIAS = "reward", "entropy", "critic/bias_abs"
FAIL, RIGHT, SAME = "groups/all_fail", "groups/all_correct", "groups/zero_variance"
LENGTH, CUT = "completions/mean_length", "completions/clipped_ratio"
REPEATS, RIGHT_LOGP = "completions/repetition", "completions/right_logp"
HELD_OUT = ("eval/reward", "eval/accuracy")
READS = (REWARD, ENTROPY, BIAS, FAIL, RIGHT, LENGTH, CUT, REPEATS, RIGHT_LOGP, *HELD_OUT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits(diagnostics.CollapseLimits):
    """When an alarm rings. A change is that of the mean of the ``recent`` newest steps.

    Attributes:
      window, entropy_low, entropy_high, entropy_drop, deviations: as in `grpojax.diagnostics.CollapseLimits`; the
        entropy's trend waits for a whole window. ``displacement`` is not used: one Δ takes an update of its own.
      recent: steps that are averaged, at least 2; what is not the entropy is compared from twice as many on.
      solved: share of groups all right, over the window, from which on a low or falling entropy is what learning
        looks like.
      jump: factor between the entropies of two steps, up or down, ...
      jump_nats: ... and difference in nats a token, that the policy is not to make at once.
      right_logp: fall of the right samples' log-prob in a window, nats a token.
      idle: share of groups that teach nothing: all wrong over a window, or all right over the run's first one.
      longer: growth of the length in a window, as a share.
      cut: rise of the share of truncated samples in a window.
      repeated: rise of the share of repeated n-grams in a window.
      bias: mean size of a critic's bias; the advantages' own deviation is 1.
      bias_growth: its growth in a window, as a factor; known from the third step on.
      fall: fall of a reward from its best, as a share; a training reward's best is that of ``recent`` steps.

    Example:
      >>> Limits(window=8, recent=2).fall
      0.25
    """

    recent: int = 5
    solved: float = 0.5
    jump: float = 4.0
    jump_nats: float = 0.05
    right_logp: float = 0.1
    idle: float = 0.95
    longer: float = 0.5
    cut: float = 0.2
    repeated: float = 0.2
    bias: float = 1.0
    bias_growth: float = 2.0
    fall: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.recent <= self.window // 2:
            raise ValueError(f"recent={self.recent}: must be at least 2 steps and at most half of window={self.window}")


class _Track:
    """A metric's newest finite values, and what is kept of all before them."""

    def __init__(self, limits: Limits):
        self._recent = limits.recent
        self.values: deque[float] = deque(maxlen=limits.window)
        self.count = 0
        self.best = -math.inf  # mean of ``recent`` steps
        self._squares = 0.0

    def add(self, x: float) -> None:
        if self.values:
            self._squares += (x - self.values[-1]) ** 2
        self.values.append(x)
        self.count += 1
        if self.count >= self._recent:
            self.best = max(self.best, self.now())

    def now(self) -> float:
        """The mean of the newest steps."""
        return float(np.mean(list(self.values)[-self._recent :])) if self.values else math.nan

    def before(self) -> float:
        """The mean at the window's start; NaN as long as the two would overlap."""
        n = self._recent
        return float(np.mean(list(self.values)[:n])) if len(self.values) >= 2 * n else math.nan

    def mean(self) -> float:
        """Over the whole window; NaN before there is one."""
        return float(np.mean(self.values)) if len(self.values) == self.values.maxlen else math.nan

    def error(self) -> float:
        """Standard error of a difference of two such means, by what differs from step to step."""
        return math.sqrt(self._squares / max(self.count - 1, 1) / self._recent)

    def change(self) -> str:
        return f"{self.now():.3g}, {self.before():.3g} {len(self.values) - self._recent} steps before"


class Watch:
    """Warns once of each kind of trouble.

    Args:
      directory: of the run, for what to look at.
      limits: when it rings.
      judge: says which reward is that for what is right; None where there is none.
      problems: how many are held out.
      comparable: whether the prompts of all steps are alike, so that their rewards can be compared.

    Attributes:
      rings: the alarms that the last values have set off, and what is said of each.
    """

    def __init__(
        self,
        directory: Path,
        limits: Limits = Limits(),  # noqa: B008
        *,
        judge: Judge | None = None,
        problems: int = 0,
        comparable: bool = True,
    ):
        self._directory, self.limits, self._problems = directory, limits, problems
        self._rewards = [REWARD, *([f"rewards/{judge.metric}/mean"] if judge else [])] if comparable else []
        self._tracks = {name: _Track(limits) for name in (*READS, *self._rewards)}
        self._rung: set[str] = set()
        self.rings: dict[str, str] = {}

    def replay(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Takes in the metrics of the steps before, so that a run that goes on rings as one that never stopped."""
        for line in lines:
            self._add(line)
            self._rung |= {name.removeprefix(KEY) for name in line if name.startswith(KEY)}

    def note(self, number: int, values: Mapping[str, float]) -> dict[str, float]:
        """Takes a step's metrics in, or those of an evaluation; the alarms that ring now, as metrics.

        Args:
          number: the step.
          values: its metrics.
        """
        self._add(values)
        if any(name in values for name in HELD_OUT):
            found = _held_out(self._tracks, self.limits, self._problems)
        else:
            found = _entropy(self._tracks, self.limits, values) | _samples(self._tracks, self.limits)
            found |= _bias(self._tracks[BIAS], self.limits) | _rewards(self._tracks, self.limits, self._rewards)
        fresh = {name: figures for name, figures in found.items() if name not in self._rung}
        self.rings = {name: f"{SAID[name][0]}: {x}; {SAID[name][1]}" for name, x in fresh.items()}
        self._rung |= fresh.keys()
        for name, said in self.rings.items():
            log.warning("step %d: %s: %s, or look at the samples: grpojax show %s", number, name, said, self._directory)
        return {f"{KEY}{name}": 1.0 for name in self.rings}

    def _add(self, values: Mapping[str, Any]) -> None:
        for name, track in self._tracks.items():
            x = values.get(name)
            if x is not None and name in (FAIL, RIGHT):  # a group whose rewards differ teaches something all the same
                x = min(x, values.get(SAME) or 0.0)
            if x is not None and math.isfinite(x):
                track.add(float(x))


_Tracks = Mapping[str, _Track]


def _learns(tracks: _Tracks) -> bool:
    return tracks[REWARD].now() > tracks[REWARD].before()


def _entropy(tracks: _Tracks, limits: Limits, values: Mapping[str, float]) -> dict[str, str]:
    """The alarms of a step's entropy, each with its figures; none of a step without an update."""
    if ENTROPY not in values:
        return {}
    if not math.isfinite(values[ENTROPY]):
        return {"not_finite": str(values[ENTROPY])}
    y, found = list(tracks[ENTROPY].values), {}
    if len(y) > 1:
        low, high = sorted(y[-2:])
        if high > limits.jump * low and high - low > limits.jump_nats:
            found["entropy_jump"] = f"{y[-1]:.3g}, {y[-2]:.3g} the step before"
    if len(y) < limits.window:
        return found
    figures = f"{y[-1]:.3g}, {y[0]:.3g} {len(y) - 1} steps before"
    if y[-1] > limits.entropy_high:
        found["entropy_explosion"] = figures
    if _learns(tracks) or tracks[RIGHT].mean() >= limits.solved:
        return found
    if y[-1] < limits.entropy_low:
        found["entropy_collapse"] = figures
    start, fall = falls(y)
    if fall > limits.entropy_drop * max(start, 1e-30):
        found["entropy_falling"] = figures
    return found


def falls(y: Sequence[float]) -> tuple[float, float]:
    """Where the least-squares line through ``y`` starts, and how far it falls.

    Args:
      y: two values at least.

    Example:
      >>> falls([3.0, 2.0, 1.0])
      (3.0, 2.0)
    """
    x = np.arange(len(y)) - (len(y) - 1) / 2
    slope = float(np.dot(x, y) / np.dot(x, x))
    return float(np.mean(y)) - slope * (len(y) - 1) / 2, -slope * (len(y) - 1)


def _samples(tracks: _Tracks, limits: Limits) -> dict[str, str]:
    found = {}
    fail, right, length, logp = (tracks[name] for name in (FAIL, RIGHT, LENGTH, RIGHT_LOGP))
    if fail.mean() >= limits.idle:
        found["groups_all_fail"] = f"{fail.mean():.3g} over {limits.window} steps"
    if right.count == limits.window and right.mean() >= limits.idle:
        found["groups_all_right"] = f"{right.mean():.3g} over {limits.window} steps"
    for name, track, rise in (
        ("truncation", tracks[CUT], limits.cut),
        ("repetition", tracks[REPEATS], limits.repeated),
    ):
        if track.now() - track.before() > rise:
            found[name] = track.change()
    if _learns(tracks):
        return found
    if length.now() > (1 + limits.longer) * length.before():
        found["length_growing"] = length.change()
    if logp.before() - logp.now() > max(limits.right_logp, limits.deviations * logp.error()):
        found["displacement"] = logp.change()
    return found


def _bias(track: _Track, limits: Limits) -> dict[str, str]:
    y = list(track.values)
    if len(y) < 3 or y[-1] < max(y) or y[-1] <= limits.bias or y[-1] < limits.bias_growth * y[0]:
        return {}
    return {"bias_growing": f"{y[-1]:.3g}, {y[0]:.3g} {len(y) - 1} steps before"}


def _rewards(tracks: _Tracks, limits: Limits, names: Sequence[str]) -> dict[str, str]:
    for name in names:
        now, best, error = tracks[name].now(), tracks[name].best, tracks[name].error()
        if best - now > max(limits.fall * abs(best), limits.deviations * error):
            return {"reward_falling": f"{name} {now:.3g}, {best:.3g} at its best, over {limits.recent} steps"}
    return {}


def _held_out(tracks: _Tracks, limits: Limits, problems: int) -> dict[str, str]:
    """What is right or wrong is told from chance by the number of problems."""
    for name in HELD_OUT:
        if y := tracks[name].values:
            now, best = y[-1], max(y)
            spread = max(now * (1 - now), 0.0) + max(best * (1 - best), 0.0)
            chance = limits.deviations * math.sqrt(spread / max(problems, 1))
            if best - now > max(limits.fall * abs(best), chance):
                return {"held_out_falling": f"{name} {now:.3g}, {best:.3g} at its best"}
    return {}


def heed(watch: Watch, number: int, session: Session, meta: dict[str, Any], train: TrainConfig) -> None:
    """What follows an alarm: the last checkpoint from before it stays, and by option the run stops.

    Alarms within a window of each other are of one collapse, and share the first one's checkpoint.

    Args:
      watch: that has just noted something.
      number: the step.
      session: of the run.
      meta: the record that is saved with the state; ``alarm`` in it says what rang.
      train: what an alarm does; after the last step there is nothing to stop.

    Raises:
      UserError: an alarm rang, and the run is to stop.
    """
    if not watch.rings:
        return
    stop = train.on_collapse == "stop" and number < train.steps
    before = meta.get("alarm")
    if before is None or number - before["step"] > watch.limits.window:
        session.wait()
        before = {"step": number, "checkpoint": session.checkpoints.good()}
        session.checkpoints.held = before["checkpoint"]
    said = [f"{name}: {text}" for name, text in watch.rings.items()]
    meta["alarm"] = before | {"stopped": f"step {number}: {said[0]}" if stop else None}
    if stop:
        raise UserError(_stopped(session, meta["alarm"]))


def resume(session: Session, meta: dict[str, Any], train: TrainConfig) -> None:
    """Holds on to what `heed` did, in a run that goes on.

    Args:
      session: of the run.
      meta: the record of the newest checkpoint.
      train: what an alarm does.

    Raises:
      UserError: an alarm has stopped it, and would again.
    """
    if (alarm := meta.get("alarm")) is None:
        return
    session.checkpoints.held = alarm["checkpoint"]
    if alarm["stopped"] and train.on_collapse == "stop":
        raise UserError(_stopped(session, alarm))
    meta["alarm"] = alarm | {"stopped": None}


def _stopped(session: Session, alarm: Mapping[str, Any]) -> str:
    good, run = alarm["checkpoint"], session.directory
    remedy = "no checkpoint is from before it: give a new run train.checkpoint_every"
    if good is not None:
        remedy = f"a new run can start from before it: grpojax export {run} --step {good} --to FOLDER"
    return f"{run} stopped at {alarm['stopped']}\n{remedy}; train.on_collapse=warn goes on from here as it is"
