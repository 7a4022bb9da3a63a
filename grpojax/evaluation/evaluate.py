r"""How good a model is on held-out problems: pass@k, majority votes, intervals, paired tests, and the files of it.

What counts as right: the verdict of the first of the run's rewards that judges by a gold answer (``math_answer``,
``answer`` or ``choice``, with its options), or of `grpojax.rewards.check_answer` where a run has none. So an
evaluation looks for answers where the training did, and a reward for length or format is never taken for accuracy.
"""

import dataclasses
import fcntl
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from grpojax import data
from grpojax.host import settings
from grpojax.host.errors import UserError
from grpojax.host.files import write_json
from grpojax.programs import packing
from grpojax.programs.sampler import SamplerConfig
from grpojax.records import metrics as tracking
from grpojax.records.checkpoint import Checkpoints
from grpojax.rewards import RewardsConfig, answers, builtin
from grpojax.run.recipe import Config
from grpojax.types import Prompts, Rollout

# Over this many samples the counts of subsets pass the largest float64.
MOST_SAMPLES = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What an evaluation draws and reports.

    Attributes:
      sampler: how to draw; ``sampler.group`` is n, the samples of a problem.
      ks: the k of pass@k and maj@k, each at most n; empty takes n alone if n is over 1.
      limit: problems evaluated at most, the first of the data; 0 takes all.
      seed: of the draws and of the bootstrap.
      batch: completions sampled at a time, at least one problem's. It changes results by rounding only.
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
        if self.seed >= 2**31:
            raise UserError(f"seed={self.seed}: must be under 2^31")
        for name, least in {"limit": 0, "seed": 0, "batch": 1}.items():
            if getattr(self, name) < least:
                raise UserError(f"{name}={getattr(self, name)}: must be at least {least}")
        if not self.ks and n > 1:
            object.__setattr__(self, "ks", (n,))

    @classmethod
    def in_training(cls, config: Config) -> "EvalConfig":
        """What a run evaluates on its schedule."""
        sampler = SamplerConfig(
            group=config.train.eval_samples, max_tokens=config.rollout.max_tokens,
            temperature=config.train.eval_temperature, cache_dtype=config.rollout.cache_dtype,
        )  # fmt: skip
        return cls(sampler=sampler, limit=config.train.eval_limit)

    @property
    def accuracy_name(self) -> str:
        """What the share of right samples is called."""
        return "greedy accuracy" if self.sampler.temperature == 0 else f"avg@{self.sampler.group}"


# ------------------------------------------------------------------------------------------- pure functions


def pass_at_k(n, c, k: int) -> np.ndarray:
    """The chance that at least one of k samples is right, estimated from n samples of which c are right.

    ``1 - C(n-c, k) / C(n, k)``, the mean over all k-subsets of the n samples and unbiased (Chen et al.,
    arXiv:2107.03374, eq. 1), as the product ``1 - prod_j (n-c-j) / (n-j)`` over j < k, which cannot overflow.
    Drawing k of the n samples with replacement instead would give ``1 - (1 - c/n)^k``, which is biased low.

    Args:
      n, c: ``[...]`` counts, or numbers.
      k: at most every n.

    >>> float(pass_at_k(4, 1, 2)), pass_at_k(10, np.array([0, 5, 10]), 5).round(4).tolist()
    (0.5, [0.0, 0.996, 1.0])
    """
    n, c = np.broadcast_arrays(np.asarray(n, np.float64), np.asarray(c, np.float64))
    if k < 1 or (n < k).any() or (c < 0).any() or (c > n).any():
        raise ValueError(f"pass@{k} of n={n}, c={c}: needs 1 <= k <= n and 0 <= c <= n")
    j = np.arange(k)
    return 1.0 - np.prod(np.maximum(n[..., None] - c[..., None] - j, 0.0) / (n[..., None] - j), axis=-1)


def majority_at_k(votes: Sequence[Hashable | None], correct: Sequence[bool], k: int) -> float:
    """The chance that the most frequent answer of k samples is right, estimated from n samples.

    The mean over all k-subsets of the n samples, exactly: by number of votes that win, a polynomial whose
    coefficient of ``x^i`` counts the subsets of i samples. Nothing is drawn. A sample without an answer votes for
    nothing; if nothing has a vote, that is wrong. Answers that tie for the most votes share the verdict equally, as
    if one of them were drawn.

    Args:
      votes: ``[n]`` answers in one spelling, None for a sample without one.
      correct: ``[n]`` verdicts. Samples with the same vote have the same one as a rule; if not, their mean counts.
      k: at most n, which is at most 1000.

    >>> votes, correct = ["7", "7", "8", None], [True, True, False, False]
    >>> majority_at_k(votes, correct, 4), round(majority_at_k(votes, correct, 2), 4)  # of 6 pairs 3 are right, 2 tie
    (1.0, 0.6667)
    """
    n = len(votes)
    if not 1 <= k <= n <= MOST_SAMPLES or len(correct) != n:
        raise ValueError(f"maj@{k} of {n} votes, {len(correct)} verdicts: needs 1 <= k <= n <= {MOST_SAMPLES}")
    counts = Counter(v for v in votes if v is not None)
    right = {a: sum(c for v, c in zip(votes, correct, strict=True) if v == a) / m for a, m in counts.items()}
    choose = lambda m, upto: np.array([math.comb(m, i) for i in range(upto)], np.float64)  # noqa: E731
    times = lambda x, y: np.convolve(x, y)[: k + 1]  # noqa: E731

    total = 0.0
    for win in range(1, min(k, max(counts.values(), default=0)) + 1):
        able = [a for a, m in counts.items() if m >= win]
        # subsets[t][i]: those of i samples in which t answers have ``win`` votes and no answer more;
        # credit[t][i]: the same, each times the sum of its winners' verdicts.
        most = min(len(able), k // win)
        rest = np.zeros(k + 1)
        free = n - sum(counts[a] for a in able)
        rest[: free + 1] = choose(free, free + 1)[: k + 1]
        subsets = [rest] + [np.zeros(k + 1)] * most
        credit = [np.zeros(k + 1)] * (most + 1)
        for a in able:
            fewer = choose(counts[a], win)
            wins = np.zeros(win + 1)
            wins[win] = math.comb(counts[a], win)
            for t in range(most, -1, -1):
                credit[t] = times(credit[t], fewer)
                if t:
                    credit[t] = credit[t] + times(credit[t - 1] + right[a] * subsets[t - 1], wins)
                subsets[t] = times(subsets[t], fewer)
                if t:
                    subsets[t] = subsets[t] + times(subsets[t - 1], wins)
        total += sum(credit[t][k] / t for t in range(1, most + 1))
    return float(total / math.comb(n, k))


def bootstrap(values, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0) -> tuple[float, float]:
    """A percentile bootstrap interval of the mean of ``values [N]``, one value a problem.

    Problems are drawn with replacement, so the interval is about other problems of the same kind; samples of one
    problem stay together. Where all values are the same it has no width: ten of ten right says less than it shows.

    >>> tuple(round(x, 2) for x in bootstrap([0.0] * 50 + [1.0] * 50))
    (0.4, 0.6)
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or not len(values) or not 0 < confidence < 1:
        raise ValueError(f"bootstrap of shape {values.shape} at confidence={confidence}: needs [N] and (0, 1)")
    rng = np.random.default_rng(seed)
    at_a_time = max(1, 4_000_000 // len(values))
    means = [
        values[rng.integers(len(values), size=(min(at_a_time, resamples - i), len(values)))].mean(1)
        for i in range(0, resamples, at_a_time)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two models on the same problems.

    Attributes:
      difference: mean score of b less that of a.
      low, high: its interval, by a paired bootstrap.
      p: two-sided p-value of "their scores differ by chance alone".
      better, worse: problems on which b has the higher score, and the lower one.
    """

    difference: float
    low: float
    high: float
    p: float
    better: int
    worse: int


def paired_test(a, b, *, confidence: float = 0.95, seed: int = 0) -> Comparison:
    """Compares two models by their scores ``a [N]`` and ``b [N]`` on the same N problems.

    The p-value is that of the exact sign-flip permutation test: if the models were the same, each problem's
    difference would be as likely with the other sign, so p is the share of the 2^N signs with a mean at least as
    far from 0. With one sample a problem this is the exact McNemar test; unlike that, it also takes shares of n
    samples, and no table, normal limit or seed is behind it. The shares come from one Fourier transform of the
    product of cosines, the characteristic function of the sum; a p under 1e-12 is rounding and no more than small.
    Where scores have too many different denominators for that, p is the share of 20000 random signs instead.

    Args:
      a, b: scores that are fractions with denominators up to 1000, such as shares of n samples.
      confidence: of the interval (`bootstrap` of the differences).
      seed: of the interval.

    >>> c = paired_test([0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 1])
    >>> c.p, c.better, c.worse, round(c.difference, 3)  # five of five one way: 2 / 2^5
    (0.0625, 5, 0, 0.833)
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise ValueError(f"scores of shape {a.shape} and {b.shape}: needs the same [N]")
    low, high = bootstrap(b - a, confidence=confidence, seed=seed)
    units = math.lcm(*(_fraction(x).denominator for x in {*a.tolist(), *b.tolist()}))
    steps = np.rint(b * units).astype(np.int64) - np.rint(a * units).astype(np.int64)
    sizes, times = np.unique(np.abs(steps[steps != 0]), return_counts=True)
    p = 1.0
    if len(sizes):
        reach = int(sizes @ times)
        seen = abs(int(steps.sum()))
        if reach > 25_000_000:
            rng = np.random.default_rng(seed)
            drawn = [abs(int(steps @ rng.choice((-1, 1), len(steps)))) for _ in range(20_000)]
            p = (1 + sum(x >= seen for x in drawn)) / (1 + len(drawn))
        else:
            grid = 2 * reach + 1
            angles = 2 * np.pi * np.arange(reach + 1) / grid
            wave = np.ones(reach + 1)
            for size, m in zip(sizes, times, strict=True):
                wave *= np.cos(angles * size) ** m
            shares = np.fft.irfft(wave, grid)  # of the sum s at place s modulo grid
            tail = 2 * float(shares[seen : reach + 1].sum()) if seen else 1.0
            p = min(1.0, max(tail, 2.0 ** (1 - int(times.sum()))))
    return Comparison(
        difference=float((b - a).mean()), low=low, high=high, p=p, better=int((steps > 0).sum()),
        worse=int((steps < 0).sum()),
    )  # fmt: skip


def _fraction(score: float) -> Fraction:
    fraction = Fraction(score).limit_denominator(MOST_SAMPLES)
    if abs(float(fraction) - score) > 1e-9:
        raise ValueError(f"score {score}: must be a fraction with a denominator up to {MOST_SAMPLES}")
    return fraction


# ------------------------------------------------------------------------------------------------- verdicts


@dataclasses.dataclass(frozen=True)
class Judge:
    """Says whether a completion is right.

    Attributes:
      reward: one that judges by a gold answer.
    """

    reward: builtin.MathAnswer | builtin.Answer | builtin.Choice

    def check_gold(self, gold: str | None) -> None:
        """Raises `UserError` for a gold answer that cannot be judged by."""
        if gold is None:
            raise UserError("evaluation needs gold answers: give data.answer their column")
        self.reward.check_gold(gold)

    def correct(self, completion: str, gold: str) -> bool | None:
        """Whether the completion's answer is the gold one; None where that could not be computed."""
        if isinstance(self.reward, builtin.MathAnswer):  # may hang: verdict sees to that
            return answers.verdict(completion, gold, marker=self.reward.marker)
        return self.reward([""], [completion], [[]], gold=[gold]) == [1.0]

    def answer(self, completion: str) -> str | None:
        """The answer that the completion gives."""
        return answers.extract_answer(completion, self.reward.marker)

    def vote(self, completion: str) -> str | None:
        """That answer in one spelling, for `majority_at_k`: a letter, a normal form, or what `answers.ballot` makes of it.

        It does not look at the gold answer, which would join right votes where wrong ones stay apart.
        """
        if isinstance(self.reward, builtin.Choice):
            return next((c for c in self.reward.letters if self.correct(completion, c)), None)
        spelling = answers.ballot if isinstance(self.reward, builtin.MathAnswer) else answers.normal_form
        return spelling((self.answer(completion) or "")[:300]) or None


def judge_of(rewards: RewardsConfig) -> Judge:
    """The first reward that judges by a gold answer; ``math_answer`` as it comes where there is none."""
    for term in rewards.terms:
        known = builtin.REWARDS.get(term.name)
        if known is not None and issubclass(known, builtin.MathAnswer | builtin.Answer | builtin.Choice):
            return Judge(known(**term.options))
    return Judge(builtin.MathAnswer())


# ------------------------------------------------------------------------------------------------- attempts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One completion. ``tokens`` counts the end-of-sequence token; not ``stopped`` is cut at the longest length.

    ``unjudged`` has no verdict, since its comparison took too long or failed, and is not ``correct``.
    """

    completion: str
    answer: str | None
    vote: str | None
    correct: bool
    tokens: int
    stopped: bool
    unjudged: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """One problem and what the model made of it: a line of the per-problem file."""

    uid: int
    prompt: str
    gold: str | None
    samples: tuple[Sample, ...]

    @property
    def score(self) -> float:
        """Share of the samples that are right."""
        return sum(s.correct for s in self.samples) / len(self.samples)


def attempts(
    problems: Sequence[data.Problem], sample: Callable[[Prompts], Rollout], decode: Callable[[Sequence[int]], str],
    judge: Judge, *, size: int, max_prompt_tokens: int, start: int = 0,
) -> Iterator[list[Attempt]]:  # fmt: skip
    """Tries the problems; yields the attempts batch by batch.

    Args:
      problems: what to try.
      sample: prompts to a rollout ``[size, n, T]`` on the host.
      decode: token ids to text.
      judge: of the completions.
      size: problems at a time.
      max_prompt_tokens: as in the data's config.
      start: problems left out at the beginning. The batches are the same whatever was left out, so that a draw that
        hangs on rounding falls the same way.
    """
    longest = packing.bucket(max(len(p.ids) for p in problems), max_prompt_tokens)
    first = start // size * size
    for number, (batch, real) in enumerate(data.in_order(list(problems[first:]), size)):
        rollout = sample(data.to_prompts(batch, longest))
        skip = max(0, start - first - number * size)
        yield [_attempt(batch[i], rollout, i, decode, judge) for i in range(skip, real)]


def _attempt(problem: data.Problem, rollout: Rollout, i: int, decode, judge: Judge) -> Attempt:
    samples = []
    for ids, n, stopped in zip(rollout.tokens[i], rollout.lengths[i], rollout.stopped[i], strict=True):
        text = decode(ids[: int(n)].tolist())
        right = False if problem.gold is None else judge.correct(text, problem.gold)
        samples.append(
            Sample(
                completion=text,
                answer=judge.answer(text),
                vote=judge.vote(text),
                correct=right is True,
                unjudged=right is None,
                tokens=int(n),
                stopped=bool(stopped),
            )
        )
    return Attempt(uid=problem.uid, prompt=problem.prompt, gold=problem.gold, samples=tuple(samples))


def by_problem(done: Sequence[Attempt], ks: Sequence[int] = ()) -> dict[str, np.ndarray]:
    """Every metric as one value a problem, ``[N]``: its mean is the metric, and `bootstrap` gives the interval.

    ``accuracy`` is greedy accuracy, or avg@n of n samples; ``mean_length`` is in tokens, ``clipped_ratio`` the share
    of samples cut at the longest length; ``pass@k`` and, for k over 1, ``maj@k`` come with the ``ks``.
    """
    n = np.array([len(a.samples) for a in done])
    right = np.array([sum(s.correct for s in a.samples) for a in done])
    values = {
        "accuracy": right / n,
        "mean_length": np.array([np.mean([s.tokens for s in a.samples]) for a in done]),
        "clipped_ratio": np.array([np.mean([not s.stopped for s in a.samples]) for a in done]),
    }
    for k in ks:
        values[f"pass@{k}"] = pass_at_k(n, right, k)
        if k > 1:
            values[f"maj@{k}"] = np.array([
                majority_at_k([s.vote for s in a.samples], [s.correct for s in a.samples], k) for a in done
            ])  # fmt: skip
    return values


def summary(done: Sequence[Attempt], config: EvalConfig) -> dict[str, dict[str, float]]:
    """Each metric's ``value`` with ``low`` and ``high`` of its 95 % interval over problems.

    ``unjudged`` counts samples without a verdict, where there are any, and has a value alone.
    """
    out = {}
    for name, values in by_problem(done, config.ks).items():
        low, high = bootstrap(values, seed=config.seed)
        out[name] = {"value": float(values.mean()), "low": low, "high": high}
    if unjudged := sum(s.unjudged for a in done for s in a.samples):
        out["unjudged"] = {"value": unjudged}
    return out


def table(metrics: Mapping[str, Mapping[str, float]], config: EvalConfig, problems: int) -> str:
    """`summary` for people."""
    n = config.sampler.group
    names = {
        "accuracy": config.accuracy_name,
        "mean_length": "mean length",
        "clipped_ratio": "cut at max-tokens",
    }
    lines = [f"{problems} problems, {n} samples each" if n > 1 else f"{problems} problems"]
    lines.append(f"{'':20}{'':>9}   95 % interval")
    for name, m in metrics.items():
        if name == "unjudged":
            lines.append(f"{name:20}{m['value']:>9}   samples, counted as wrong")
            continue
        scale, unit = (1, "") if name == "mean_length" else (100, " %")
        value, low, high = (f"{scale * m[x]:.1f}" for x in ("value", "low", "high"))
        lines.append(f"{names.get(name, name):20}{value + unit:>9}   {low} to {high}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------- targets


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """What is evaluated.

    Attributes:
      recipe: its config; ``recipe.data.eval`` are the problems.
      run: run directory, or None for a Hugging Face folder.
      step: checkpoint of the run.
      out: where its evaluation goes by default.
    """

    recipe: Config
    run: Path | None
    step: int | None
    out: Path

    def settings(self, config: EvalConfig, judge: Judge, loaded: data.Problems) -> dict[str, Any]:
        """All that the results depend on, to within rounding; no paths, so that folders can be moved."""
        recipe = self.recipe
        chosen = loaded[: config.limit or None]
        model: dict[str, Any] = {
            "weights": _weights(data.locate(recipe.model.path)),
            "dtype": recipe.model.dtype,
        }
        if self.run is not None:
            model |= {"run": _digest((self.run / "config.json").read_bytes()), "step": self.step}
        return settings.to_dict({
            "model": model,
            "data": _fields(recipe.data, "train", "eval") | {
                "fingerprint": loaded.fingerprint, "problems": len(chosen),
                "tokens": _digest(*(repr(p.ids).encode() for p in chosen)),
            },
            "eval": _fields(config, "batch"),
            "judge": {type(judge.reward).__name__: judge.reward},
        })  # fmt: skip


# What is set where no run says otherwise.
_BARE = {
    "data": {"train": "-"}, "rewards": [{"name": "math_answer"}], "rollout": {"max_tokens": 512}, "train": {"steps": 1},
    "run": {"dir": "-"},
}  # fmt: skip
_OVERRIDES = ("model", "data", "rewards", "mesh")


def read_target(
    target: str, overrides: Sequence[str] = (), *, data_file: str | None = None, step: int | None = None, best: bool = False
) -> Target:  # fmt: skip
    """Reads what is to be evaluated.

    Args:
      target: run directory, Hugging Face folder or ``builtin:tiny``.
      overrides: ``a.b=c`` for the sections model, data, rewards and mesh.
      data_file: the problems, in place of ``data.eval``.
      step: checkpoint of a run; the newest if None.
      best: take the checkpoint with the highest ``eval/accuracy`` in the metrics; of equals, the newest.

    Raises:
      UserError: it is neither, it has no such checkpoint, or there are no problems.
    """
    for text in overrides:
        key = text.partition("=")[0].strip()
        if key.split(".")[0] not in _OVERRIDES or key in ("model", "model.path", "data.train"):
            raise UserError(
                f"override {text!r} says nothing to an evaluation; it takes options, model.*, data.*, rewards, mesh.*"
            )
    folder = data.locate(target)
    try:
        tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        tree = None
    if not isinstance(tree, dict):
        raise UserError(f"{target} is no run directory and no Hugging Face folder: no config.json can be read there")
    run = folder if {"model", "rollout", "run"} <= tree.keys() else None
    if run is None:
        tree = {**_BARE, "model": {"path": target}}
    if data_file is not None:
        overrides = [*overrides, f"data.eval={json.dumps(data_file)}"]
    tree, origins = settings.override(tree, overrides)
    recipe = settings.build(Config, tree, {"": str(folder / "config.json"), **origins})
    if not recipe.data.eval:
        raise UserError(f"{target} has no problems for evaluation; give --data FILE")
    if run is None:
        if step is not None or best:
            raise UserError(f"--step and --best are for a run directory, and {target} is none")
        name = Path(target.removeprefix(data.BUILTIN)).resolve().name
        return Target(recipe=recipe, run=None, step=None, out=Path("evaluations") / name)
    step = _pick_step(run, step, best)
    return Target(recipe=recipe, run=run, step=step, out=run / "eval" / f"step_{step}")


def _pick_step(run: Path, step: int | None, best: bool) -> int:
    folder, steps = run / "checkpoints", []
    if folder.is_dir():
        checkpoints = Checkpoints(folder)
        try:
            steps = checkpoints.steps()
        finally:
            checkpoints.close()
    if not steps:
        raise UserError(f"{run} has no checkpoint yet")
    if step is not None and step not in steps:
        raise UserError(f"{run} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    if best:
        name = "eval/accuracy"
        lines = [x for x in tracking.read_metrics(run) if x["step"] in steps and name in x]
        if not lines:
            raise UserError(f"--best: none of {run}'s checkpoints has an eval/accuracy; give --step")
        return max((x[name], x["step"]) for x in lines)[1]
    return steps[-1] if step is None else step


def _fields(config: Any, *but: str) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in but}


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:32]


def _weights(folder: Path) -> str:
    """Tells a folder's weights from others: names, sizes and the two ends of its safetensors files."""
    parts = []
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        with file.open("rb") as f:
            parts += [f"{file.name} {size}".encode(), f.read(1 << 20)]
            f.seek(max(0, size - (1 << 20)))
            parts.append(f.read(1 << 20))
    return _digest(*parts)


# --------------------------------------------------------------------------------------------------- files


def to_line(attempt: Attempt) -> str:
    """A line of the per-problem file, with its line break."""
    return json.dumps(dataclasses.asdict(attempt), ensure_ascii=False) + "\n"


def write(path: Path, done: Sequence[Attempt]) -> None:
    """Writes a whole per-problem file at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(map(to_line, done)), encoding="utf-8")
    os.replace(temporary, path)


def read(path: str | Path) -> list[Attempt]:
    """The attempts in a per-problem file, or in the folder of an evaluation; a torn last line is left out.

    Raises:
      UserError: no such file, or a line that is none of an evaluation's.
    """
    file = Path(path) / "problems.jsonl" if Path(path).is_dir() else Path(path)
    try:
        lines = file.read_bytes().split(b"\n")[:-1]
    except OSError as e:
        raise UserError(f"{file}: {e.strerror}; give the file or the folder of an evaluation") from None
    line_type, done = TypeAdapter(Attempt), []
    for number, line in enumerate(lines, 1):
        try:
            done.append(line_type.validate_json(line, strict=True))
            if not done[-1].samples:
                raise ValueError("no samples")
        except ValueError:  # pydantic's is one
            raise UserError(f"{file}:{number}: no line of an evaluation's per-problem file") from None
    return done


class Record:
    """The folder of an evaluation: ``settings.json``, ``problems.jsonl`` with a line a problem, ``summary.json``.

    For a ``with`` statement. Opening it again with the same settings goes on after the last whole line.

    Args:
      directory: new, or of an evaluation with the same settings.
      given: settings, whatever the results depend on, as plain JSON-able data.
      problems: all that are to be evaluated, in order.

    Raises:
      UserError: it holds something else, the settings differ, or another process writes there.
    """

    def __init__(self, directory: str | Path, given: Mapping[str, Any], problems: Sequence[data.Problem]):
        self.directory = Path(directory)
        self._settings, self._file = dict(given), None
        self._check()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_json(self.directory / "settings.json", self._settings)
            path = self.directory / "problems.jsonl"
            self._file = path.open("ab")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            whole = path.read_bytes().rfind(b"\n") + 1
            self._file.truncate(whole)
        except BlockingIOError:
            raise UserError(f"{self.directory}: another evaluation is writing there; wait for its end") from None
        except OSError as e:
            raise UserError(f"{self.directory}: {e.strerror}; give a folder that can be written as --out") from None
        self.done = read(path)
        if [a.uid for a in self.done] != [p.uid for p in problems[: len(self.done)]]:
            raise UserError(f"{path}: its lines are not those of the first problems; give another --out")

    def _is_fresh(self) -> bool:
        """An empty folder, or one left by a kill before the settings were there."""
        folder = self.directory
        return folder.is_dir() and all(file.name == "settings.json.tmp" for file in folder.iterdir())

    def _check(self) -> None:
        file = self.directory / "settings.json"
        if not file.exists():
            if self.directory.exists() and not self._is_fresh():
                raise UserError(f"{self.directory} exists and holds no evaluation; give another --out")
            return
        try:
            before = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise UserError(f"{file} cannot be read; give another --out") from None
        if differ := settings.diff(before, self._settings):
            raise UserError(
                f"{self.directory} holds an evaluation with other settings: {'; '.join(differ[:5])}"[:400]
                + "\ngive another --out, or the settings it was started with"
            )

    def append(self, batch: Sequence[Attempt]) -> None:
        """Writes a batch's lines in one piece, and waits until they are on disk."""
        assert self._file is not None
        try:
            self._file.write("".join(map(to_line, batch)).encode())
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as e:
            raise UserError(f"{self._file.name}: {e.strerror}; once that is mended, the same command goes on") from None
        self.done.extend(batch)

    def finish(self, metrics: Mapping[str, Any]) -> None:
        """Writes ``summary.json``."""
        write_json(self.directory / "summary.json", {
            "problems": len(self.done), "metrics": metrics, "settings": self._settings,
        })  # fmt: skip

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, *_) -> None:
        if self._file is not None:
            self._file.close()


def compare(a: str | Path, b: str | Path) -> str:
    """Compares two per-problem files of the same problems by the share of samples that are right; a small table.

    Raises:
      UserError: they are not of the same problems.
    """
    read_a, read_b = read(a), read(b)
    first, second = ({x.uid: x for x in done} for done in (read_a, read_b))
    for path, done, lines in ((a, first, read_a), (b, second, read_b)):
        if not done:
            raise UserError(f"{path}: no problems")
        if len(done) < len(lines):
            raise UserError(f"{path}: a problem stands in it twice; each of a data set has a number of its own")
    if first.keys() != second.keys():
        common = len(first.keys() & second.keys())
        raise UserError(
            f"{a} has {len(first)} problems, {b} {len(second)}, and {common} are in both; "
            "evaluate both on the same data with the same --limit"
        )
    for uid, x in first.items():
        if (x.prompt, x.gold) != (second[uid].prompt, second[uid].gold):
            raise UserError(f"problem {uid} is not the same in {a} and {b}; evaluate both on the same data")
    uids = sorted(first)
    scores = [np.array([done[uid].score for uid in uids]) for done in (first, second)]
    c = paired_test(*scores)
    p = f"{c.p:.3g}" if c.p >= 1e-9 else "under 1e-9"
    lines = [f"A = {a}", f"B = {b}", f"{len(uids)} problems in both"]
    for name, path, score in (("A", first, scores[0]), ("B", second, scores[1])):
        n = len(path[uids[0]].samples)
        kind = f"accuracy, avg@{n}" if n > 1 else "accuracy"
        lines.append(f"{name}  {kind:20}{100 * score.mean():6.1f} %")
    lines.append(
        f"B - A{'':18}{100 * c.difference:+6.1f} points   95 % interval {100 * c.low:+.1f} to {100 * c.high:+.1f}"
    )
    lines.append(f"B is better on {c.better} problems and worse on {c.worse}: p = {p} (sign-flip test)")
    return "\n".join(lines)
