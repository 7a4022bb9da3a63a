"""Measures that test the claims of methods beyond the held-out result, from a run's metrics and samples."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from grpojax.evaluation import judge_of
from grpojax.extensions.experiments.runs import PastRun
from grpojax.host import settings
from grpojax.host.errors import UserError
from grpojax.records.samples import read_samples, sample_steps
from grpojax.rewards import RewardsConfig

PARTS = 10  # of a run's steps, over which samples are averaged


def measure(run: PastRun) -> dict[str, Any]:
    """The measures of a run, as plain data.

    Returns:
      ``grad_norm``: mean, and variance over the steps, of the gradient's norm before clipping. ``entropy`` and
      ``critic_bias`` (mean size of a token critic's output): the values of the first and of the last step. ``alarm``:
      the step of the first alarm, and which alarms rang then. ``samples``: the measures of `of_samples` for the
      training samples. Each is None if the run has no such numbers.
    """
    norms, entropy, bias = (_series(run.lines, name) for name in ("grad_norm", "entropy", "critic/bias_abs"))
    alarms = [(line["step"], name.removeprefix("watch/")) for line in run.lines for name in line if "watch/" in name]
    first = min((step for step, _ in alarms), default=None)
    return {
        "grad_norm": None if not norms else {"mean": _mean(norms), "variance": _variance(norms)},
        "entropy": None if not entropy else [entropy[0], entropy[-1]],
        "critic_bias": None if not bias else [bias[0], bias[-1]],
        "alarm": None if first is None else {"step": first, "names": sorted(n for s, n in alarms if s == first)},
        "samples": _of_run(run),
    }


def of_samples(steps: Iterable[tuple[int, Sequence[Mapping[str, Any]]]], judge: str) -> dict[str, Any]:
    """Measures of the samples that a run has learned from.

    Args:
      steps: in order, the number of each step and its samples, as in ``samples/``.
      judge: the reward that says whether a sample is right: 1 is right, and anything less is wrong.

    Returns:
      ``starts_all_fail``: ``prompts`` that had no right sample when they were drawn first, how many of them were drawn
      ``again``, and how many then had a right one (``solved``). ``parts`` has an entry for each tenth of the steps: its
      last ``step``, the mean length in tokens of right and of wrong samples, and the mean of every other reward over
      right and over wrong samples; None if there are none. Two measures are over groups without a right sample.
      ``distinct`` in ``parts`` is the share of different texts in a group. ``all_fail_advantage`` is the correlation of
      a sample's mean advantage with its length and with every other reward (Pearson's, in a group, averaged over
      groups); None if both vary in no group. A sample without a reward does not count anywhere.

    Example:
      >>> def sample(uid, right, text, advantage=0.0):
      ...     rewards = {"answer": right, "follows": 1.0}
      ...     return {"uid": uid, "completion": text, "length": len(text), "rewards": rewards, "advantage": advantage}
      >>> failed = [sample(7, 0.0, "1+1=3", 0.5), sample(7, 0.0, "3", -0.5)]
      >>> found = of_samples([(1, failed), (2, [sample(7, 1.0, "1+1=2")])], "answer")
      >>> found["starts_all_fail"]
      {'prompts': 1, 'again': 1, 'solved': 1}
      >>> round(found["all_fail_advantage"]["length"], 3)
      1.0
      >>> found["parts"][0]
      {'step': 1, 'length': {'right': None, 'wrong': 3.0}, 'distinct': 1.0, 'follows': {'right': None, 'wrong': 1.0}}
    """
    kept = [(step, [s for s in samples if _is_number(s["rewards"].get(judge))]) for step, samples in steps]
    first: dict[Any, int] = {}
    failed, again, solved = set(), set(), set()
    for step, samples in kept:
        right: dict[Any, bool] = defaultdict(bool)
        for s in samples:
            right[s["uid"]] |= s["rewards"][judge] >= 1
        for uid, passed in right.items():
            if first.setdefault(uid, step) == step:
                failed |= set() if passed else {uid}
            elif uid in failed:
                again.add(uid)
                solved |= {uid} if passed else set()
    return {
        "starts_all_fail": {"prompts": len(failed), "again": len(again), "solved": len(solved)},
        "all_fail_advantage": _of_advantages([g for _, samples in kept for g in _failed_groups(samples, judge)], judge),
        "parts": [_of_part(part, judge) for part in _parts(kept)],
    }


def _failed_groups(samples: Sequence[Mapping[str, Any]], judge: str) -> list[list[Mapping[str, Any]]]:
    """The groups of a step that have no right sample."""
    groups = defaultdict(list)
    for s in samples:
        groups[s["uid"]].append(s)
    return [group for group in groups.values() if all(s["rewards"][judge] < 1 for s in group)]


def _of_advantages(groups: Sequence[Sequence[Mapping[str, Any]]], judge: str) -> dict[str, float | None]:
    """`of_samples`' ``all_fail_advantage``."""
    found: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        rewards = {name: [s["rewards"].get(name) for s in group] for s in group for name in s["rewards"]}
        for name, values in {"length": [s["length"] for s in group], **rewards}.items():
            pairs = [(s["advantage"], x) for s, x in zip(group, values, strict=True)]
            pairs = [pair for pair in pairs if all(map(_is_number, pair))]
            if name != judge:
                found[name] += [r] if (r := _correlation(pairs)) is not None else []
    return {name: _mean(each) for name, each in found.items()}


def _correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    if len(pairs) < 2 or any(len(set(values)) < 2 for values in zip(*pairs, strict=True)):
        return None
    return float(np.corrcoef(np.asarray(pairs, np.float64).T)[0, 1])


def _parts(steps: list[tuple[int, Any]]) -> list[list[tuple[int, Any]]]:
    count = min(PARTS, len(steps))
    ends = [round(len(steps) * i / count) for i in range(count + 1)] if count else []
    return [steps[a:b] for a, b in zip(ends, ends[1:], strict=False)]


def _of_part(part: list[tuple[int, list[Mapping[str, Any]]]], judge: str) -> dict[str, Any]:
    samples = [s for _, of_step in part for s in of_step]
    by_kind = {"right": [], "wrong": []}
    for s in samples:
        by_kind["right" if s["rewards"][judge] >= 1 else "wrong"].append(s)
    failed = [group for _, of_step in part for group in _failed_groups(of_step, judge)]
    found: dict[str, Any] = {
        "step": part[-1][0],
        "length": {k: _mean(s["length"] for s in x) for k, x in by_kind.items()},
        "distinct": _mean(len({s["completion"] for s in group}) / len(group) for group in failed),
    }
    for name in sorted({name for s in samples for name in s["rewards"]} - {judge}):
        found[name] = {
            k: _mean(s["rewards"][name] for s in x if _is_number(s["rewards"].get(name))) for k, x in by_kind.items()
        }
    return found


def _of_run(run: PastRun) -> dict[str, Any] | None:
    """The measures of a run's samples; None if no samples were kept, or no reward says what is right."""
    try:
        rewards = settings.build(RewardsConfig, run.config["rewards"])
        judge = judge_of(rewards, (run.config.get("evaluate") or {}).get("judge"))
        if judge is None:
            return None
        steps = [read_samples(run.path, step) for step in sample_steps(run.path)]
    except (UserError, KeyError):  # of another version, without samples, or with a file that cannot be read
        return None
    return of_samples(steps, judge.metric)


def _series(lines: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [float(line[name]) for line in lines if _is_number(line.get(name))]


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and math.isfinite(x)


def _mean(values: Iterable[float]) -> float | None:
    given = list(values)
    return math.fsum(given) / len(given) if given else None


def _variance(values: Sequence[float]) -> float | None:
    mean = _mean(values)
    if mean is None or len(values) < 2:
        return None
    return math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1)
