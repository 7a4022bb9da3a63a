"""What the episodes of a report's methods were: turns, calls of tools, tokens by who wrote them, and failures."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from grpojax.extensions.experiments.report_problems import attempts
from grpojax.extensions.experiments.runs import MethodRuns, PastRun

# The figures of a row: its field, and the metric of a step. Held-out ones have the set's name before it.
_METRICS = {
    "turns": "episode/turns",
    "calls": "episode/calls",
    "calling": "episode/calling",
    "failures": "episode/failures",
    "malformed": "episode/malformed",
    "own_tokens": "completions/mean_length",
    "answer_tokens": "episode/answer_tokens",
    "invalid": "episode/invalid",
}
_OWN_TOKENS_HELD_OUT = "mean_length"
_REASON = "rewards/invalid/environment/"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpisodeRow:
    """The episodes of a method, means over its seeds; None where no seed has the figure.

    Attributes:
      method: its name.
      where: "test set" or "validation set", at the end; or "training, last step".
      turns: of the policy, per episode.
      calls: of tools, per episode.
      calling: share of episodes with a call.
      failures: share of the calls that were malformed, or whose tool raised.
      malformed: share of the calls that reached no tool.
      own_tokens: the policy's tokens, per episode.
      answer_tokens: the environment's tokens, per episode.
      invalid: share of episodes that the environment made invalid.
      reasons: number of these by reason, over all seeds; in training over all steps.
    """

    method: str
    where: str
    turns: float | None
    calls: float | None
    calling: float | None
    failures: float | None
    malformed: float | None
    own_tokens: float | None
    answer_tokens: float | None
    invalid: float | None
    reasons: Mapping[str, int]


def episodes(methods: Sequence[MethodRuns]) -> list[EpisodeRow]:
    """The rows of each method: its held-out problems, if they were played, and its training. None without episodes."""
    rows = []
    for method in methods:
        for part, where in (("test", "test set"), ("eval", "validation set")):
            if runs := _with(method.drawn, f"{part}/episode/turns"):
                rows.append(_row(method, where, runs, prefix=f"{part}/", reasons=_of_attempts(runs)))
                break
        if runs := _with(method.drawn, "episode/turns"):
            rows.append(_row(method, "training, last step", runs, prefix="", reasons=_of_steps(runs)))
    return rows


def _with(runs: Iterable[PastRun], metric: str) -> list[PastRun]:
    return [run for run in runs if run.last(metric) is not None]


def _row(method: MethodRuns, where: str, runs: Sequence[PastRun], *, prefix: str, reasons: Counter[str]) -> EpisodeRow:
    figures = dict[str, float | None]()
    for name, metric in _METRICS.items():
        held_out = _OWN_TOKENS_HELD_OUT if name == "own_tokens" else metric
        each = [x for run in runs if (x := run.last(prefix + held_out if prefix else metric)) is not None]
        figures[name] = sum(each) / len(each) if each else None
    return EpisodeRow(method=method.name, where=where, reasons=dict(sorted(reasons.items())), **figures)


def _of_attempts(runs: Sequence[PastRun]) -> Counter[str]:
    played = [s.episode for run in runs for a in attempts(run) for s in a.samples if s.episode is not None]
    return Counter(e.invalid for e in played if e.invalid is not None)


def _of_steps(runs: Sequence[PastRun]) -> Counter[str]:
    """Numbers by reason over all steps. If a step is there twice, the later one counts."""
    found = Counter[str]()
    for run in runs:
        for line in {line["step"]: line for line in run.lines if "episode/turns" in line}.values():
            found.update({k.removeprefix(_REASON): int(n) for k, n in line.items() if k.startswith(_REASON) and n})
    return found
