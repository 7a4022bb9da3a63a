"""The results of an evaluation: metrics over problems with intervals, as a table and in a line."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grpojax.evaluation.estimates import MOST_SAMPLES, bootstrap, majority_at_k, pass_at_k
from grpojax.evaluation.judge import Judge
from grpojax.host.errors import UserError, require
from grpojax.programs.sampler_config import SamplerConfig
from grpojax.rewards.worker import happened

# The metric by which a checkpoint is the best: what the run optimises, on problems held out.
BEST = "eval/reward"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What an evaluation draws and reports.

    Attributes:
      sampler: how to draw; ``sampler.group`` is n, the samples of a problem.
      ks: the k of pass@k and maj@k, each at most n; empty takes only n, if n is over 1.
      limit: most problems that are evaluated, the first of the data; 0 takes all.
      seed: seed of the sampling and of the bootstrap.
      batch: completions that are sampled at a time, at least those of one problem. It changes results only by rounding.
    """

    sampler: SamplerConfig
    ks: tuple[int, ...] = ()
    limit: int = 0
    seed: int = 0
    batch: int = 128

    def __post_init__(self):
        n = self.sampler.group
        if n > MOST_SAMPLES:
            raise UserError(f"samples={n}: must be at most {MOST_SAMPLES}")
        if n > 1 and self.sampler.temperature == 0:
            raise UserError(f"samples={n} at temperature 0 would all be the same; give a temperature over 0")
        if bad := [k for k in self.ks if not 1 <= k <= n]:
            raise UserError(f"k={bad[0]}: must be between 1 and samples={n}")
        require(self, limit="[0, inf)", seed="[0, 2147483648)", batch="[1, inf)")
        if not self.ks and n > 1:
            object.__setattr__(self, "ks", (n,))

    @classmethod
    def in_training(
        cls, *, samples: int, temperature: float, limit: int, max_tokens: int, cache_dtype: str
    ) -> "EvalConfig":
        """What a run evaluates on its schedule."""
        sampler = SamplerConfig(
            group=samples,
            max_tokens=max_tokens,
            temperature=temperature,
            cache_dtype=cache_dtype,  # pyrefly: ignore
        )
        return cls(sampler=sampler, limit=limit)

    @property
    def accuracy_name(self) -> str:
        """What the share of right samples is called."""
        return "greedy accuracy" if self.sampler.temperature == 0 else f"avg@{self.sampler.group}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpisodeRecord:
    """What is kept of an episode, a sample of several turns.

    Attributes:
      turns: the texts of what the policy wrote and of what its environment answered, one after the other; the policy's
        is the first.
      tokens: number of tokens of each.
      calls: of tools.
      failures: those of the calls that were malformed, or whose tool raised.
      malformed: those of the failures that reached no tool.
      invalid: why its environment made it invalid, such as "timeout"; None where it counts.
    """

    turns: tuple[str, ...]
    tokens: tuple[int, ...]
    calls: int
    failures: int
    malformed: int
    invalid: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One completion.

    Attributes:
      completion: its text.
      answer: the text that it marks as its answer.
      vote: the answer in a normal form, if the judge reads answers.
      correct: the judge's verdict; None where there is no judge.
      tokens: its length, the end-of-sequence token included.
      stopped: whether it ended by itself; otherwise it was cut at the longest length.
      unjudged: the judge had no verdict, since it took too long or failed; then it is not ``correct``. An episode that
        its environment made invalid is not ``correct`` either, and has no ``vote``, but it is not counted here.
      reward: weighted sum of the rewards; None where one that counts is invalid.
      rewards: each by name, None where it is invalid.
      missing: why those are invalid, by name: of `grpojax.rewards.worker.REASONS`.
      episode: its turns; None where it has one only.
    """

    completion: str
    answer: str | None
    vote: str | None
    correct: bool | None
    tokens: int
    stopped: bool
    unjudged: bool = False
    reward: float | None = None
    rewards: dict[str, float | None] = dataclasses.field(default_factory=dict)
    missing: dict[str, str] = dataclasses.field(default_factory=dict)
    episode: EpisodeRecord | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """One problem and the model's samples: a line of the per-problem file."""

    uid: int
    prompt: str
    gold: str | None
    samples: tuple[Sample, ...]

    @property
    def has_verdict(self) -> bool:
        """Whether a judge gave every sample a verdict."""
        return all(s.correct is not None for s in self.samples)

    @property
    def accuracy(self) -> float:
        """Share of the samples that are right."""
        return sum(s.correct is True for s in self.samples) / len(self.samples)

    @property
    def reward(self) -> float:
        """Mean reward of the samples that have one; NaN where none has."""
        return _mean([s.reward for s in self.samples])


def _mean(values: Sequence[float | None]) -> float:
    known = [v for v in values if v is not None and math.isfinite(v)]
    return sum(known) / len(known) if known else math.nan


def by_problem(done: Sequence[Attempt], ks: Sequence[int] = (), judge: Judge | None = None) -> dict[str, np.ndarray]:
    """Every metric as one value per problem, ``[N]``; the metric is the mean of the finite values.

    ``reward`` is the weighted sum of the run's rewards, ``rewards/NAME`` each single reward: means over the samples for
    which it is valid, NaN where there are none. With a judge of what is right, ``accuracy`` is greedy accuracy, or
    avg@n of n samples, ``pass@k`` comes with the ``ks`` and, if the judge reads answers, ``maj@k`` for k over 1.
    ``mean_length`` is in tokens, ``clipped_ratio`` the share of samples cut at the longest length. ``episode/...`` are
    means over the samples that are episodes; ``episode/failures`` and ``episode/malformed`` are shares of a problem's
    calls, NaN where it has none.
    """
    values = {"reward": np.array([a.reward for a in done])}
    for name in done[0].samples[0].rewards if done else ():
        values[f"rewards/{name}"] = np.array([_mean([s.rewards.get(name) for s in a.samples]) for a in done])
    if judge is not None:
        values["accuracy"] = np.array([a.accuracy for a in done])
    values["mean_length"] = np.array([np.mean([s.tokens for s in a.samples]) for a in done])
    values["clipped_ratio"] = np.array([np.mean([not s.stopped for s in a.samples]) for a in done])
    played = [[s.episode for s in a.samples if s.episode is not None] for a in done]
    if any(played):
        each = [_of_episodes(episodes) for episodes in played]
        values |= {f"episode/{name}": np.array([x[name] for x in each]) for name in each[0]}
    if judge is None:
        return values
    n = np.array([len(a.samples) for a in done])
    verdicts = [[s.correct is True for s in a.samples] for a in done]
    right = np.array([sum(v) for v in verdicts])
    for k in ks:
        values[f"pass@{k}"] = pass_at_k(n, right, k)
        if k > 1 and judge.votes:
            votes = [[s.vote for s in a.samples] for a in done]
            values[f"maj@{k}"] = np.array([majority_at_k(v, c, k) for v, c in zip(votes, verdicts, strict=True)])
    return values


def _of_episodes(episodes: Sequence[EpisodeRecord]) -> dict[str, float]:
    """Means over a problem's episodes, and shares of their calls; NaN is the mean of nothing."""
    calls = sum(e.calls for e in episodes)

    def of_calls(number: int) -> float:
        return number / calls if calls else math.nan

    return {
        "turns": _mean([len(e.turns[::2]) for e in episodes]),
        "calls": _mean([e.calls for e in episodes]),
        "calling": _mean([e.calls > 0 for e in episodes]),
        "failures": of_calls(sum(e.failures for e in episodes)),
        "malformed": of_calls(sum(e.malformed for e in episodes)),
        "answer_tokens": _mean([sum(e.tokens[1::2]) for e in episodes]),
        "invalid": _mean([e.invalid is not None for e in episodes]),
    }


def missing(done: Sequence[Attempt]) -> dict[str, int]:
    """How many samples have no ``reward`` (left out of its mean) and no verdict (counted as wrong), if over 0, and how
    many there are; empty if all have both."""
    samples = [s for a in done for s in a.samples]
    counts = {"invalid": sum(s.reward is None for s in samples), "unjudged": sum(s.unjudged for s in samples)}
    found = {name: n for name, n in counts.items() if n}
    return {"samples": len(samples), **found} if found else {}


def means(done: Sequence[Attempt], ks: Sequence[int] = (), judge: Judge | None = None) -> dict[str, float]:
    """The metrics of `by_problem` as a run logs them, ``eval/reward`` and so on; NaN is the mean of nothing.

    ``eval/invalid`` and ``eval/unjudged`` count samples of ``eval/samples``, where there are any such (`missing`).
    """
    finite = {name: x[np.isfinite(x)] for name, x in by_problem(done, ks, judge).items()}
    values = {name: float(x.mean()) if len(x) else math.nan for name, x in finite.items()}
    return {f"eval/{name}": float(x) for name, x in (values | missing(done)).items()}


def summarize(done: Sequence[Attempt], config: EvalConfig, judge: Judge | None) -> dict[str, dict[str, float | None]]:
    """Each metric's ``value``, with ``low`` and ``high`` of its 95 % interval over problems; all None for no values.

    The interval is None if all problems have the same value, since these do not show how far another one may lie.
    ``samples``, ``invalid`` and ``unjudged`` have a value and no interval (`missing`).
    """
    out: dict[str, dict[str, float | None]] = {}
    for name, values in by_problem(done, config.ks, judge).items():
        finite = values[np.isfinite(values)]
        low, high = bootstrap(finite, seed=config.seed) if len(set(finite)) > 1 else (None, None)
        out[name] = {"value": float(finite.mean()) if len(finite) else None, "low": low, "high": high}
    for name, n in missing(done).items():
        out[name] = {"value": n}
    return out


_NAMES = {"mean_length": "mean length", "clipped_ratio": "cut at max-tokens"}
_COUNTED = {
    "samples": "of all problems",
    "invalid": "samples, in no mean reward",
    "unjudged": "samples, counted as wrong",
}


def table(metrics: Mapping[str, Mapping[str, float | None]], config: EvalConfig, problems: int) -> str:
    """`summarize` for people."""
    n = config.sampler.group
    names = _NAMES | {"accuracy": config.accuracy_name}
    width = max(20, *(len(name) + 2 for name in metrics))
    lines = [f"{problems} problems, {n} samples each" if n > 1 else f"{problems} problems"]
    lines.append(f"{'':{width}}{'':>9}   95 % interval")
    for name, m in metrics.items():
        if name in _COUNTED:
            lines.append(f"{name:{width}}{m['value']:>9}   {_COUNTED[name]}")
            continue
        unit = " %" if _is_share(name) else ""
        lines.append(f"{names.get(name, name):{width}}{_shown(name, m['value']) + unit:>9}   {_interval(name, m)}")
    return "\n".join(lines)


def table_of_sets(sets: Mapping[str, Mapping[str, Any]], config: EvalConfig) -> str:
    """A row per set: the number of problems, and accuracy, pass@k and maj@k with 95 % intervals over problems.

    Args:
      sets: by name the ``problems``, how many, and their ``metrics`` (`summarize`). Without a judge, the mean reward is
        shown.
      config: how the samples were drawn.

    Example:
      >>> config = EvalConfig(sampler=SamplerConfig(group=4))
      >>> right, best = {"value": 0.5, "low": 0.4, "high": 0.6}, {"value": 1, "low": None, "high": None}
      >>> found = {"problems": 64, "metrics": {"accuracy": right, "pass@4": best}}
      >>> print(table_of_sets({"validation": found}, config))
      set         problems  avg@4                  pass@4
      validation        64  50.0 % (40.0 to 60.0)  100.0 % (all the same)
    """
    every = list(next(iter(sets.values()))["metrics"])
    has_accuracy = "accuracy" in every
    names = [name for name in every if (name.startswith(_OF_SETS) if has_accuracy else name == "reward")]
    rows = [["set", "problems", *(config.accuracy_name if name == "accuracy" else name for name in names)]]
    for set_name, found in sets.items():
        row = [set_name, str(found["problems"])]
        for name in names:
            metric = found["metrics"].get(name, {})
            value = _shown(name, metric.get("value"))
            row.append(f"{value}{' %' if _is_share(name) else ''} ({_interval(name, metric)})")
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [f"{x:>{w}}" if i == 1 else f"{x:{w}}" for i, (x, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


_OF_SETS = ("accuracy", "pass@", "maj@")
_SHARES = (*_OF_SETS, "clipped_ratio", *(f"episode/{name}" for name in ("calling", "failures", "malformed", "invalid")))


def _is_share(name: str) -> bool:
    return name.startswith(_SHARES)


def _shown(name: str, value: float | None) -> str:
    """A metric's value: shares in percent, lengths in tokens, rewards as they are."""
    if value is None:
        return "-"
    return f"{100 * value:.1f}" if _is_share(name) else f"{value:.1f}" if name == "mean_length" else f"{value:.3f}"


def _interval(name: str, metric: Mapping[str, float | None]) -> str:
    """A metric's interval."""
    if metric.get("value") is None:
        return "-"
    if metric["low"] is None:
        return "all the same"
    return f"{_shown(name, metric['low'])} to {_shown(name, metric['high'])}"


def headline(values: Mapping[str, float | None], config: EvalConfig) -> str:
    """The metrics of `means`, or of a line of ``metrics.jsonl``, in a few words.

    >>> config = EvalConfig(sampler=SamplerConfig(group=1, temperature=0.0))
    >>> headline({"eval/reward": 0.4531, "eval/accuracy": 0.4531}, config), headline({"eval/reward": None}, config)
    ('held-out reward 0.453 (greedy accuracy 45.3 %)', 'held-out reward -')
    >>> headline({"eval/reward": 0.533, "eval/invalid": 13.0, "eval/samples": 16.0}, config)
    'held-out reward 0.533 (3 of 16 have a reward)'
    """
    reward, accuracy, samples = (values.get(f"eval/{name}") for name in ("reward", "accuracy", "samples"))
    known = reward is not None and math.isfinite(reward)
    more = [] if accuracy is None else [f"{config.accuracy_name} {_shown('accuracy', accuracy)} %"]
    invalid, unjudged = (values.get(f"eval/{name}") or 0 for name in ("invalid", "unjudged"))
    if samples and invalid:
        more.append(f"{samples - invalid:.0f} of {samples:.0f} have a reward")
    if samples and unjudged and unjudged != invalid:
        more.append(f"{samples - unjudged:.0f} of {samples:.0f} are judged")
    text = f"held-out reward {_shown('reward', reward if known else None)}"
    return f"{text} ({'; '.join(more)})" if more else text


def report(lines: Sequence[Mapping[str, Any]], config: EvalConfig) -> str | None:
    """The held-out results of a run, from the lines of its ``metrics.jsonl``; None if there are none.

    >>> config = EvalConfig(sampler=SamplerConfig(group=1, temperature=0.0))
    >>> report([{"step": 0, "eval/reward": 0.5}, {"step": 1, "reward": 0.6}, {"step": 2, "eval/reward": 0.75}], config)
    'held-out reward 0.500 before (step 0), held-out reward 0.750 after (step 2)'
    """
    evals = [line for line in lines if "eval/reward" in line]
    if not evals:
        return None
    first, last = evals[0], evals[-1]
    return (
        f"{headline(first, config)} before (step {first['step']}), {headline(last, config)} after (step {last['step']})"
    )


def verdict(attempt: Attempt, sample: Sample) -> str:
    """A sample's result for people: right, wrong with the reference answer, or its reward if there is no judge; and why
    it has none.

    >>> sample = Sample(completion="2", answer="2", vote=None, correct=False, tokens=1, stopped=True)
    >>> failed = dataclasses.replace(sample, unjudged=True, missing={"exact": "error"})
    >>> attempt = Attempt(uid=0, prompt="1+1?", gold="2", samples=(sample, failed))
    >>> [verdict(attempt, s) for s in attempt.samples]
    ['wrong, gold 2', 'not judged: exact raised']
    """
    why = ", ".join(happened(name, reason) for name, reason in sample.missing.items())
    invalid = None if sample.episode is None else sample.episode.invalid
    if invalid is not None:
        why = happened("environment", invalid)
    if sample.correct is not None and not sample.unjudged and invalid is None:
        shown = "right" if sample.correct else f"wrong, gold {attempt.gold}"
        return f"{shown}; {why}" if why else shown  # of a reward other than the judge
    shown = "not judged" if sample.correct is not None else "no reward"
    if sample.correct is None and sample.reward is not None:
        shown = f"reward {sample.reward:g}"
    return f"{shown}: {why}" if why else shown
