"""Rules that find the start of a collapse in a run's metrics, each with a name and a remedy. Plain numbers.

Healthy runs ring no alarm: while the reward grows, or most groups are all right, the entropy may fall and samples may
get longer.
"""

import dataclasses
import math
import types
from collections import deque
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from grpojax.records.lines import INVALID, MANY_INVALID
from grpojax.rewards.worker import happened

LONGEST_ERROR = 160  # characters of a reward's error in an alarm
_SLOWER = "lower optimizer.learning_rate"

# What each alarm tells the user, and the remedy.
SAID = {
    "not_finite": ("the entropy is not a finite number", _SLOWER),
    "entropy_jump": (
        "one step changed the policy's entropy a lot (nats per token)",
        f"{_SLOWER} or optimizer.grad_clip, or raise optimizer.warmup_steps",
    ),
    "entropy_collapse": (
        "the policy hardly varies any more (entropy collapse; nats per token)",
        f"{_SLOWER}, or add variant.entropy_coef",
    ),
    "entropy_explosion": (
        "the policy draws almost at random (entropy explosion; nats per token)",
        f"{_SLOWER} or variant.entropy_coef",
    ),
    "entropy_falling": (
        "the entropy falls fast and the reward does not grow (nats per token)",
        f"{_SLOWER}, or add variant.entropy_coef",
    ),
    "displacement": (
        "right answers get less likely and the reward does not grow (likelihood displacement; nats per token)",
        f"{_SLOWER}; variants nthr and llds are made for it, but what they gain is open",
    ),
    "rewards_invalid": (
        "many samples have no valid reward, and nothing is learned from them (share of samples)",
        "mend the reward function (the log has its first error), or raise rewards.timeout_s if it is slow",
    ),
    "groups_never_differ": (
        "no group so far had samples with different rewards, so that nothing was learned",
        "take a reward that differs between samples, other problems, or a larger rollout.group",
    ),
    "groups_all_fail": (
        "nearly all groups are all wrong and teach nothing (share of groups)",
        "train on easier problems, or raise rollout.group",
    ),
    "groups_all_right": (
        "nearly all groups have been all right from the start and teach nothing (share of groups)",
        "train on harder problems",
    ),
    "length_growing": (
        "samples get longer and the reward does not grow (tokens)",
        "add the reward soft_overlong, or take variant dr_grpo",
    ),
    "truncation": (
        "more and more samples are cut at rollout.max_tokens (share of samples)",
        "raise rollout.max_tokens, or add the reward soft_overlong",
    ),
    "repetition": (
        "the samples repeat themselves more and more (share of their 4-grams)",
        f"{_SLOWER}, or add the reward repetition",
    ),
    "bias_growing": (
        "the critic's bias grows without bound and is larger than the advantages (per token)",
        "set variant.bound or variant.l2, or lower critic.optimizer.learning_rate (grpojax show --critic has each)",
    ),
    "reward_falling": (
        "the training reward has fallen from its best",
        f"{_SLOWER}, or raise variant.kl_coef",
    ),
    "held_out_falling": (
        "the held-out reward has fallen from its best",
        f"{_SLOWER}, raise variant.kl_coef, or check that the reward measures what is right",
    ),
}

# Alarms that mean nothing if groups with equal rewards also teach something.
DIFFERENCES = {"groups_never_differ", "groups_all_fail", "groups_all_right"}

REWARD, ENTROPY, BIAS = "reward", "entropy", "critic/bias_abs"
FAIL, RIGHT, SAME = "groups/all_fail", "groups/all_correct", "groups/zero_variance"
EQUAL = "frac_reward_zero_std"  # of the values that advantages are made of; SAME is of the deciding reward
LENGTH, CUT = "completions/mean_length", "completions/clipped_ratio"
REPEATS, RIGHT_LOGP = "completions/repetition", "completions/right_logp"
ACCURACY = "eval/accuracy"
HELD_OUT = ("eval/reward", ACCURACY)
READS = (REWARD, ENTROPY, BIAS, INVALID, EQUAL, FAIL, RIGHT, LENGTH, CUT, REPEATS, RIGHT_LOGP, *HELD_OUT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """When an alarm rings. Changes are those of the mean over the ``recent`` newest steps.

    Attributes:
      window: number of newest steps for a trend. The entropy's rules, except for the jump, wait for as many steps.
      entropy_low: nats a token under which the policy has collapsed.
      entropy_high: nats a token over which it draws almost at random.
      entropy_drop: fall of the entropy in one window, as a share of what it was at the window's start.
      recent: steps that are averaged, at least 2. Metrics other than the entropy are compared once there are twice as
        many.
      solved: if at least this share of groups is all right over the window, a low or falling entropy is normal.
      jump: a step's entropy jumps if it is this factor over, or under, all of the window before it, ...
      jump_nats: ... and differs by at least this, in nats per token.
      right_logp: fall of the right samples' log-prob in a window, nats per token.
      invalid: share of samples without a valid reward, on average over the ``recent`` newest steps, from the third step
        on, and in two of the three newest: one step without a judge is no alarm.
      equal: steps from the start in which no group differs.
      idle: share of groups that teach nothing: all wrong over a window, or all right over the run's first one.
      longer: growth of the length in a window, as a share.
      cut: rise of the share of truncated samples in a window.
      repeated: rise of the share of repeated n-grams in a window.
      bias: mean size of a critic's bias; advantages have a deviation of 1.
      bias_growth: its growth in a window, as a factor; known from the third step on.
      fall: fall of a reward from its best, as a share; a training reward's best is that of ``recent`` steps.
      deviations: a training reward and a log-prob must also fall by this many standard errors. It is large since the
        best of many noisy values is compared. Held-out accuracy, whose error is known, takes half of it.

    Example:
      >>> Limits(window=8, recent=2).fall
      0.25
    """

    window: int = 20
    entropy_low: float = 0.02
    entropy_high: float = 5.0
    entropy_drop: float = 0.5
    recent: int = 5
    solved: float = 0.5
    jump: float = 4.0
    jump_nats: float = 0.05
    right_logp: float = 0.1
    invalid: float = MANY_INVALID
    equal: int = 10
    idle: float = 0.95
    longer: float = 0.5
    cut: float = 0.2
    repeated: float = 0.2
    bias: float = 1.0
    bias_growth: float = 2.0
    fall: float = 0.25
    deviations: float = 6.0

    def __post_init__(self) -> None:
        if not 2 <= self.recent <= self.window // 2:
            raise ValueError(f"recent={self.recent}: must be at least 2 steps and at most half of window={self.window}")


class Track:
    """A metric's newest finite values, and a summary of all earlier ones."""

    def __init__(self, limits: Limits):
        self._recent = limits.recent
        self.values: deque[float] = deque(maxlen=limits.window)
        self.count = 0
        self.most, self.least = -math.inf, math.inf
        self.best = -math.inf  # mean of ``recent`` steps
        self._squares = self._last = 0.0

    def add(self, x: float) -> None:
        if self.values:
            self._last = (x - self.values[-1]) ** 2
            self._squares += self._last
        self.values.append(x)
        self.count += 1
        self.most, self.least = max(self.most, x), min(self.least, x)
        if self.count >= self._recent:
            self.best = max(self.best, self.now())

    def now(self) -> float:
        """The mean of the newest steps."""
        return _mean(list(self.values)[-self._recent :])

    def before(self) -> float:
        """The mean at the window's start; NaN as long as it would overlap with `now`."""
        n = self._recent
        return _mean(list(self.values)[:n]) if len(self.values) >= 2 * n else math.nan

    def mean(self) -> float:
        """The mean over the whole window; NaN before there is one."""
        return _mean(self.values) if len(self.values) == self.values.maxlen else math.nan

    def error(self) -> float:
        """Standard error of a difference of two such means, from the differences between steps."""
        return math.sqrt(self._squares / max(self.count - 1, 1) / self._recent)

    def scatter(self) -> float:
        """Deviation of a difference of two values, from the values before the last; infinite with fewer than six."""
        return math.sqrt((self._squares - self._last) / (self.count - 2)) if self.count > 6 else math.inf

    def change(self) -> str:
        return f"{self.now():.3g}, {self.before():.3g} {len(self.values) - self._recent} steps before"


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values) if values else math.nan


Tracks = Mapping[str, Track]  # by metric


def ringing(
    tracks: Tracks,
    limits: Limits,
    values: Mapping[str, float],
    *,
    rewards: Sequence[str],
    problems: int,
    errors: Mapping[str, str] = types.MappingProxyType({}),
) -> dict[str, str]:
    """The alarms that ring, each with its numbers.

    Args:
      tracks: the tracks of all metrics in `READS` and ``rewards``, which already include ``values``.
      limits: when the alarms ring.
      values: the metrics of a step or of an evaluation.
      rewards: metrics that should not fall. Empty if the steps' prompts are not alike; then it also means nothing
        whether the reward grows.
      problems: number of held-out problems.
      errors: what was said of the first sample that was invalid, by "name/reason".
    """
    if any(name in values for name in HELD_OUT):
        return _held_out(tracks, limits, problems)
    learns = not rewards or _learns(tracks)
    found = _entropy(tracks, limits, values, learns=learns) | _samples(tracks, limits, learns=learns)
    found |= _invalid(tracks[INVALID], limits, values, errors)
    return found | _bias(tracks[BIAS], limits) | _rewards(tracks, limits, rewards)


def _learns(tracks: Tracks) -> bool:
    """Whether the reward has grown in the window, with a tolerance of one standard error."""
    reward = tracks[REWARD]
    return reward.now() > reward.before() - reward.error()


def _entropy(tracks: Tracks, limits: Limits, values: Mapping[str, float], *, learns: bool) -> dict[str, str]:
    if ENTROPY not in values:  # no update was taken
        return {}
    if not math.isfinite(values[ENTROPY]):
        return {"not_finite": str(values[ENTROPY])}
    y, found = list(tracks[ENTROPY].values), {}
    if len(y) > 1:
        for low, high in ((y[-1], min(y[:-1])), (max(y[:-1]), y[-1])):
            if high > limits.jump * low and high - low > limits.jump_nats:
                found["entropy_jump"] = f"{y[-1]:.3g}, {y[-2]:.3g} the step before"
    if len(y) < limits.window:
        return found
    figures = f"{y[-1]:.3g}, {y[0]:.3g} {len(y) - 1} steps before"
    if y[-1] > limits.entropy_high:
        found["entropy_explosion"] = figures
    if learns or tracks[RIGHT].mean() >= limits.solved:
        return found
    if y[-1] < limits.entropy_low:
        found["entropy_collapse"] = figures
    start, fall = falls(y)
    if fall > limits.entropy_drop * max(start, 1e-30):
        found["entropy_falling"] = figures
    return found


def falls(y: Sequence[float]) -> tuple[float, float]:
    """The start of the least-squares line through ``y``, and how far the line falls.

    Args:
      y: two values at least.

    Example:
      >>> falls([3.0, 2.0, 1.0])
      (3.0, 2.0)
    """
    x = np.arange(len(y)) - (len(y) - 1) / 2
    slope = float(np.dot(x, y) / np.dot(x, x))
    return float(np.mean(y)) - slope * (len(y) - 1) / 2, -slope * (len(y) - 1)


def _samples(tracks: Tracks, limits: Limits, *, learns: bool) -> dict[str, str]:
    found = {}
    equal, reward = tracks[EQUAL], tracks[REWARD]
    if equal.count == limits.equal and equal.least >= 1 and reward.count:
        found["groups_never_differ"] = f"{limits.equal} steps, reward {reward.values[-1]:.3g}"
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
    if learns:
        return found
    if length.now() > (1 + limits.longer) * length.before():
        found["length_growing"] = length.change()
    if logp.before() - logp.now() > max(limits.right_logp, limits.deviations * logp.error()):
        found["displacement"] = logp.change()
    return found


def _invalid(track: Track, limits: Limits, values: Mapping[str, float], errors: Mapping[str, str]) -> dict[str, str]:
    """The alarm on invalid samples: what befell most of those of the newest step, and the first error of that kind."""
    newest = sorted([*track.values][-3:])
    if len(newest) < 3 or min(newest[1], track.now()) < limits.invalid:
        return {}
    shown = f"{track.now():.2f} over {min(track.count, limits.recent)} steps"
    kinds = {name.removeprefix(f"{INVALID}/"): x for name, x in values.items() if name.startswith(f"{INVALID}/")}
    if kinds:
        name, _, reason = max(kinds, key=lambda kind: kinds[kind]).rpartition("/")
        shown += f", {happened(name, reason)}"
        if said := errors.get(f"{name.removeprefix('greedy/')}/{reason}"):
            shown += f": {said[:LONGEST_ERROR]}"
    return {"rewards_invalid": shown}


def _bias(track: Track, limits: Limits) -> dict[str, str]:
    y = list(track.values)
    if len(y) < 3 or y[-1] < max(y) or y[-1] <= limits.bias or y[-1] < limits.bias_growth * y[0]:
        return {}
    return {"bias_growing": f"{y[-1]:.3g}, {y[0]:.3g} {len(y) - 1} steps before"}


def _rewards(tracks: Tracks, limits: Limits, names: Sequence[str]) -> dict[str, str]:
    for name in names:
        now, best, error = tracks[name].now(), tracks[name].best, tracks[name].error()
        if best - now > max(limits.fall * abs(best), limits.deviations * error):
            return {"reward_falling": f"{name} {now:.3g}, {best:.3g} at its best, over {limits.recent} steps"}
    return {}


def _held_out(tracks: Tracks, limits: Limits, problems: int) -> dict[str, str]:
    """Alarms on held-out metrics. The number of problems gives the noise of an accuracy, changes give a reward's."""
    for name in HELD_OUT:
        if y := tracks[name].values:
            now, best, chance = y[-1], tracks[name].most, limits.deviations * tracks[name].scatter()
            if name == ACCURACY:
                error = math.sqrt((now * (1 - now) + best * (1 - best)) / max(problems, 1))
                chance = limits.deviations / 2 * error
            if best - now > max(limits.fall * abs(best), chance):
                return {"held_out_falling": f"{name} {now:.3g}, {best:.3g} at its best"}
    return {}
