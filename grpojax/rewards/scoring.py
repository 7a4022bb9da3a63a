"""The rewards of a batch: cheap ones here, those that may hang in workers, and what becomes of those that fail."""

import dataclasses
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import numpy as np

from grpojax.host import console
from grpojax.host.errors import UserError
from grpojax.rewards import answers, builtin, pool, sandbox, worker
from grpojax.rewards.reward_config import RewardConfig, RewardsConfig, named_functions
from grpojax.rewards.worker import REASONS, RewardOutcome, SampleTexts, happened

log = logging.getLogger("grpojax")

# Most samples in a job, and the share of the time limit that a job should take.
LARGEST_JOB, SHARE = 16, 0.1
IMPORT_TIMEOUT_S = 300.0
# Seconds without any sample done after which the log says what is waited for.
NOTICE_S = 3.0

# (form, prompts' ids [N], completions' ids [N]) -> texts [N]
Read = Callable[[str, Sequence[Sequence[int]], Sequence[Sequence[int]]], list[str]]


@dataclasses.dataclass(frozen=True)
class RewardScores:
    """The rewards of N samples.

    Attributes:
      total: ``[N]`` float32, the weighted sum; NaN where a reward that counts is invalid.
      by_name: ``[N]`` float32 of each reward as it came, NaN where it is invalid.
      reasons: ``[N]`` int8 of each reward: why it is invalid, as an index of `worker.REASONS`; -1 where it is valid.
      step_rewards: ``[N, T]`` float32, the weighted sum of what steps got that end at a token, NaN where none ends; T
        covers the last end. They are not in ``total``; ``by_name`` has their mean. None where no sample has steps.
      stepped: the rewards with a weight that gave rewards to steps.
    """

    total: np.ndarray
    by_name: dict[str, np.ndarray]
    reasons: dict[str, np.ndarray]
    step_rewards: np.ndarray | None = None
    stepped: tuple[str, ...] = ()

    @property
    def invalid(self) -> dict[str, int]:
        """How many rewards were invalid, by "name/reason"; only those over 0."""
        counts = Counter(f"{name}/{REASONS[i]}" for name, codes in self.reasons.items() for i in codes if i >= 0)
        return dict(counts)


@dataclasses.dataclass
class _Job:
    """Samples that a worker judges together.

    Attributes:
      term: which reward.
      indices: the samples.
      attempt: 1, or 2 after a worker died.
      twice: whether a single sample is given twice, as long as it is not known that the reward gives a value for each
        (`grpojax.rewards.worker.judge`).
    """

    term: int
    indices: list[int]
    attempt: int
    twice: bool = False


class PendingScores:
    """Rewards under way; `result` waits for them."""

    def __init__(self, rewards: "Rewards", samples: SampleTexts, group: int, texts: Mapping[str, Sequence[str]]):
        self._rewards, self._group = rewards, group
        # Each reward gets the texts that it asks for.
        self._samples = [
            samples._replace(completions=list(texts[c.text])) if c.text in texts else samples
            for c in rewards.config.terms
        ]
        self._outcomes: list[list[RewardOutcome | None]] = [rewards.at_once(t, s) for t, s in enumerate(self._samples)]
        self._jobs: dict[Future, _Job] = {}
        for t, outcomes in enumerate(self._outcomes):
            open_ = [i for i, o in enumerate(outcomes) if o is None]
            size = rewards.job_size(t)
            for start in range(0, len(open_), size):
                self._submit(_Job(t, open_[start : start + size], 1))
        self._scores: RewardScores | None = None

    def _submit(self, job: _Job) -> None:
        config, samples = self._rewards.config.terms[job.term], self._samples[job.term].take(job.indices)
        options = builtin.freeze(config.options)
        job.twice = self._rewards.count_is_open(job.term)
        self._jobs[self._rewards.workers.submit(worker.judge, config.name, options, samples, job.twice)] = job

    def _say_if_late(self) -> None:
        if not wait(self._jobs, timeout=NOTICE_S, return_when=FIRST_COMPLETED).done:
            late: Counter[str] = Counter()
            for job in self._jobs.values():
                late[self._rewards.config.terms[job.term].metric] += len(job.indices)
            samples = ", ".join(f"{n} of {name}" for name, n in late.items())
            log.info("waiting for rewards: %s (rewards.timeout_s=%g)", samples, self._rewards.config.timeout_s)

    def result(self) -> RewardScores:
        """The rewards, once all are there."""
        while self._jobs:
            self._say_if_late()
            future = self._rewards.workers.next_done(list(self._jobs))
            job = self._jobs.pop(future)
            if isinstance(error := future.exception(), UserError):  # it says what to do, and would fail again
                raise error
            reason = pool.failure(future)
            if reason is not None:
                self._rewards.workers.end_orphans()
            n = len(job.indices)
            if reason is None:
                outcomes, seconds = future.result()
                self._rewards.note_pace(job.term, seconds / (max(2, n) if job.twice else n))
                reasons = {o.reason for o in outcomes}
                if "count" not in reasons and reasons != {"error"}:
                    self._rewards.close_count(job.term)
                for i, outcome in zip(job.indices, outcomes, strict=True):
                    self._outcomes[job.term][i] = outcome
            elif n > 1:  # one of them is to blame
                for i in job.indices:
                    self._submit(_Job(job.term, [i], job.attempt))
            elif job.twice:  # it was given twice, which may be too much where once is not
                self._rewards.close_count(job.term)
                self._submit(job)
            elif reason != "timeout" and job.attempt == 1:  # maybe the worker's fault
                self._submit(_Job(job.term, job.indices, 2))
            else:
                detail = {
                    "timeout": f"it took over rewards.timeout_s={self._rewards.config.timeout_s:g}",
                    "memory": f"it took over rewards.memory_mb={self._rewards.config.memory_mb}",
                    "crash": f"its worker died: {future.exception()}",
                }.get(reason, f"its worker was lost: {future.exception()}")
                reason = "crash" if reason == "broken" else reason
                self._outcomes[job.term][job.indices[0]] = RewardOutcome(float("nan"), reason, detail)
        if self._scores is None:
            outcomes = [[o for o in of_term if o is not None] for of_term in self._outcomes]
            self._scores = self._rewards.combine(outcomes, self._group)
        return self._scores


class Rewards:
    """A run's rewards. Close it, or use it in a ``with`` statement: it may own worker processes.

    Args:
      config: the section of a recipe, or only its rewards.
      read: makes the texts of rewards whose ``text`` is not "completion", as `grpojax.data.Tokenize.read` does.

    Attributes:
      first_errors: by "name/reason", what was said of the first sample of this process that was invalid so.

    Raises:
      UserError: a function cannot be imported.

    >>> with Rewards([RewardConfig(name="answer"), RewardConfig(name="answer_format", weight=0.1)]) as rewards:
    ...     scores = rewards(["1+1?"] * 2, ["#### 2", "two"], [[5, 6], [7]], {"gold": ["2", "2"]})
    >>> scores.by_name["answer"].tolist(), scores.total.tolist()[1]
    ([1.0, 0.0], 0.0)
    """

    def __init__(self, config: RewardsConfig | Sequence[RewardConfig], *, read: Read | None = None):
        if not isinstance(config, RewardsConfig):
            config = RewardsConfig(terms=tuple(config))
        self.config, self._read = config, read
        self.terms = [builtin.make(c.name, c.options) if c.name in builtin.REWARDS else None for c in config.terms]
        # The text of each token, as the column ``pieces``.
        both = zip(config.terms, self.terms, strict=True)
        self.needs_pieces = any(c.pieces or (term is not None and term.needs_pieces) for c, term in both)
        self._pace: dict[int, float] = {}
        self.first_errors: dict[str, str] = {}
        self._workers: pool.WorkerPool | None = None
        paths = [c.name for c, t in zip(config.terms, self.terms, strict=True) if t is None]
        for path in paths:  # logged before any of their code runs
            log.info("rewards run the function %s", path)
        if any(t is None or t.isolated for t in self.terms):
            maths = any(isinstance(t, builtin.MathAnswer) for t in self.terms)
            self._workers = pool.WorkerPool(
                count=config.workers,
                timeout_s=config.timeout_s,
                memory_mb=config.memory_mb,
                functions=paths,
                preload=["math_verify"] if maths else [],
                first=console.never_fail,
            )
        self._open_counts = {t for t, term in enumerate(self.terms) if term is None}
        self._probes: dict[int, sandbox.Probe] = {}
        for t in sorted(self._open_counts):
            found = self._probes[t] = _probe(self.workers, config.terms[t])
            if found.problem:
                self.close()
                raise UserError(f"reward {config.terms[t].name!r} {' '.join(found.problem.split())}")

    @property
    def workers(self) -> pool.WorkerPool:
        """The processes; only for rewards that need some."""
        assert self._workers is not None
        return self._workers

    def submit(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        tokens: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        *,
        group: int = 1,
        texts: Mapping[str, Sequence[str]] | None = None,
    ) -> PendingScores:
        """Starts the rewards of N samples; workers go on with them while the caller does something else.

        Args:
          prompts, completions: ``[N]`` texts.
          tokens: ``[N]`` sampled ids.
          columns: ``[N]`` values each, of the data's columns and ``gold``.
          group: samples of one prompt, which stand together.
          texts: ``[N]`` each, the completions by `RewardConfig.text` for the rewards that ask for it (`texts`).
        """
        n, texts = len(completions), texts or {}
        if missing := sorted({c.text for c in self.config.terms} - {"completion", *texts}):
            raise ValueError(f"a reward asks for text={missing[0]!r}, which was not given")
        wrong = {
            k: len(v) for k, v in {"prompts": prompts, "tokens": tokens, **texts, **columns}.items() if len(v) != n
        }
        if wrong or n % group:
            raise ValueError(f"{n} completions in groups of {group}, but {wrong or 'that leaves a rest'}")
        self.check_columns(columns)
        lists = {name: list(values) for name, values in columns.items()}
        samples = SampleTexts(list(prompts), list(completions), list(map(list, tokens)), lists)
        return PendingScores(self, samples, group, texts)

    def texts(self, prompts: Sequence[Sequence[int]], rows: Sequence[Sequence[int]]) -> dict[str, list[str]]:
        """Completions as the rewards ask for them, by `RewardConfig.text`; plain ones are not among them.

        Args:
          prompts: ``[N]``, the ids of each one's prompt.
          rows: ``[N]``, their ids, without the token that ended them.
        """
        forms = sorted({c.text for c in self.config.terms} - {"completion"})
        if forms and self._read is None:
            raise UserError(f"a reward has text={forms[0]!r}, and there is no tokenizer here to read tokens with")
        return {form: self._read(form, prompts, rows) for form in forms} if self._read is not None else {}

    def notes(self, special: Collection[str], tail: str) -> list[str]:
        """Lines on rewards that look for text which they do not get.

        Args:
          special: texts of the special tokens.
          tail: what prompts end with of the answer.

        Example:
          >>> with Rewards([RewardConfig(name="answer", options={"marker": "<a>"})]) as rewards:
          ...     rewards.notes(["<a>", "</a>"], "")
          ["reward answer looks for '<a>', a special token, which its texts are without: set text: with_special_tokens"]
        """
        lines = []
        for config, term in zip(self.config.terms, self.terms, strict=True):
            wanted = term.looks_for() if term is not None else ""
            tags = [tag for tag in re.findall(r"<[^<>]+>|\[[^\[\]]+\]", tail) if tag in wanted]
            lost = sorted(token for token in special if token in wanted)
            has_tail = config.text in ("with_prompt_tail", "with_both")
            has_special = config.text in ("with_special_tokens", "with_both")
            if tags and not has_tail:
                form = "with_both" if has_special or lost else "with_prompt_tail"
                lines.append(
                    f"reward {config.metric} looks for {tags[0]!r}, which the prompt ends with already, so that no "
                    f"completion begins with it: set text: {form}"
                )
            elif lost and not has_special:
                lines.append(
                    f"reward {config.metric} looks for {lost[0]!r}, a special token, which its texts are without: set "
                    f"text: {'with_both' if has_tail else 'with_special_tokens'}"
                )
            # What a function looks for is unknown.
            pairs = sorted(t for t in special if re.fullmatch(r"<\w[\w:]+>", t) and f"</{t[1:]}" in special)
            if term is None and pairs and not has_special:
                lines.append(
                    f"reward {config.metric} gets completions without {', '.join(pairs)}, which are special tokens; "
                    "text: with_special_tokens keeps them"
                )
            if term is None and tail and not has_tail:
                lines.append(
                    f"reward {config.metric} gets completions without {tail!r}, which the prompt ends with; "
                    "text: with_prompt_tail adds it"
                )
            if has_tail and not tail:
                lines.append(f"reward {config.metric}: text={config.text}, but prompts end with nothing of the answer")
        return lines

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        tokens: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        *,
        group: int = 1,
        texts: Mapping[str, Sequence[str]] | None = None,
    ) -> RewardScores:
        """The rewards of N samples: `submit` and its result."""
        return self.submit(prompts, completions, tokens, columns, group=group, texts=texts).result()

    @property
    def compares(self) -> bool:
        """Whether a built-in reward compares answers with gold ones. Functions of a user may take any text for gold."""
        return any(term is not None and term.needs_gold for term in self.terms)

    def check_gold(self, gold: str | None) -> None:
        """Raises `UserError` for a gold answer, or None for none at all, that a reward cannot judge by."""
        for config, term in zip(self.config.terms, self.terms, strict=True):
            if term is not None and term.needs_gold:
                if gold is None:
                    raise UserError(f"reward {config.name!r} needs gold answers: give data.answer their column")
                term.check_gold(gold)
                if isinstance(term, builtin.Marked) and not _can_match(term, gold):
                    raise UserError(
                        f"gold answer {gold[:80]!r}: no completion that marks it is right by the reward {config.name!r}"
                        f"{'' if term.marker is None else f' with marker {term.marker!r}'}"
                    )

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raises `UserError` where a function asks for a column that is not there, has one among its first three
        parameters, or has an option with the name of one, which would be given in its place. An option is what the
        recipe sets, and what has a default in the function other than None.

        Args:
          columns: of the data; ``gold`` is always there.
        """
        there = {*columns, "gold"}
        given = there | {"pieces"} if self.needs_pieces else there
        for t, probe in self._probes.items():
            term = self.config.terms[t]
            if twice := [name for name in probe.first if name in given]:
                raise UserError(
                    f"reward {term.name!r} has {twice[0]!r}, which is a column, among its first three parameters: "
                    f"these get prompts, completions and tokens\nwrite (prompts, completions, tokens, {twice[0]}, "
                    "**columns), or give the parameter another name"
                )
            if missing := [name for name in probe.columns if name not in given]:
                remedy = f"give options.{missing[0]}, or such a column; the answer by data.answer is also 'gold'"
                if missing[0] == "pieces":
                    remedy = "set pieces: true next to the reward's name"
                have = ", ".join(sorted(there - {"gold"})) or "none"
                name = next((short for short, at in named_functions().items() if at == term.name), term.name)
                raise UserError(f"reward {name!r} asks for {missing[0]!r}; the data has {have:.400}\n{remedy}")
            clash = sorted(there & {*term.options} | there & {*probe.options} - {"gold", "pieces"})
            if clash:
                raise UserError(
                    f"reward {term.name!r} has an option {clash[0]!r}, and the data has a column {clash[0]!r}: the "
                    "function would get the column in place of the option\nrename one of them, or list in data.columns "
                    "what the rewards need; a keyword that asks for a column has no default, or None"
                )

    def asks_for(self, column: str) -> bool:
        """Whether a function has a keyword for a column, without a default or with None."""
        return any(column in (*probe.columns, *probe.optional) for probe in self._probes.values())

    def count_is_open(self, t: int) -> bool:
        """Whether a function is yet to return the right number of values for several samples."""
        return t in self._open_counts

    def close_count(self, t: int) -> None:
        """Takes note that it has, or that nothing more can be found out."""
        self._open_counts.discard(t)

    def at_once(self, t: int, samples: SampleTexts) -> list[RewardOutcome | None]:
        """Outcomes of a reward that need no worker; None for those that do."""
        term, n = self.terms[t], len(samples.completions)
        if term is None:
            return [None] * n
        if not term.isolated:
            return list(worker.outcomes_of(worker.call(term, samples), samples.tokens))
        gold = samples.columns.get("gold", [None] * n)
        known = [term.at_once(text, g) for text, g in zip(samples.completions, gold, strict=True)]
        return [None if v is None else RewardOutcome(v) for v in known]

    def job_size(self, t: int) -> int:
        """Samples in a job: few enough that together they stay far from the time limit of one."""
        pace = self._pace.get(t)
        if pace is None:
            return LARGEST_JOB // 2
        return int(min(max(SHARE * self.config.timeout_s / max(pace, 1e-9), 1), LARGEST_JOB))

    def note_pace(self, t: int, seconds: float) -> None:
        """Takes note of the seconds that a sample took."""
        self._pace[t] = 0.9 * self._pace.get(t, seconds) + 0.1 * seconds

    def combine(self, outcomes: list[list[RewardOutcome]], group: int) -> RewardScores:
        """Outcomes ``[terms][N]`` as arrays; shows each kind of failure once."""
        by_name: dict[str, np.ndarray] = {}
        reasons: dict[str, np.ndarray] = {}
        for config, values in zip(self.config.terms, outcomes, strict=True):
            for outcome in values:
                kind = f"{config.metric}/{outcome.reason}"
                if outcome.reason and kind not in self.first_errors:
                    detail = outcome.detail.rstrip()
                    self.first_errors[kind] = detail.rpartition("\n")[2]  # of a traceback the error
                    what = happened(config.metric, outcome.reason)
                    log.warning("reward %s; such samples are left out, and later ones not shown\n%s", what, detail)
            by_name[config.metric] = np.array([o.value for o in values], np.float32)
            codes = [REASONS.index(o.reason) if o.reason else -1 for o in values]
            reasons[config.metric] = np.array(codes, np.int8)
        terms = self.config.terms
        counted = {c.metric: _outcome_part(by_name[c.metric], o) for c, o in zip(terms, outcomes, strict=True)}
        if self.config.combine == "normalize":
            counted = {name: normalize(values, group) for name, values in counted.items()}
        steps, stepped = step_rewards(terms, outcomes)
        return RewardScores(weighted_sum(terms, counted), by_name, reasons, steps, stepped)

    def close(self) -> None:
        """Ends the worker processes."""
        if self._workers is not None:
            self._workers.close()

    def __enter__(self) -> "Rewards":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _probe(workers: pool.WorkerPool, term: RewardConfig) -> sandbox.Probe:
    """What is known of a reward function before it is called."""
    future = workers.submit(sandbox.probe, term.name, list(term.options), timeout_s=IMPORT_TIMEOUT_S)
    # The workers import it before they take a job, so the job's own limit does not cover that.
    done, _ = wait([future], timeout=IMPORT_TIMEOUT_S)
    if not done:
        return sandbox.Probe(f"is not imported after {IMPORT_TIMEOUT_S:g} s")
    return sandbox.Probe(f"cannot be imported: {e}") if (e := future.exception()) else future.result()


def weighted_sum(terms: Sequence[RewardConfig], by_name: Mapping[str, np.ndarray]) -> np.ndarray:
    """``Σ weight · reward`` over the rewards with a weight, float32 of the shape that they have; NaN where one is NaN.

    >>> terms = [RewardConfig(name="answer"), RewardConfig(name="format", options={"pattern": "x"}, weight=0.5)]
    >>> weighted_sum(terms, {"answer": np.float32([1, 0]), "format": np.float32([1, np.nan])}).tolist()
    [1.5, nan]
    """
    total = np.zeros_like(by_name[terms[0].metric])
    for term in terms:
        if term.weight:
            total = total + np.float32(term.weight) * by_name[term.metric]
    return total


def _can_match(term: builtin.Marked, gold: str) -> bool:
    """Whether a completion that marks the gold answer itself is right: a marker ends with its line, a box by braces."""
    bare = answers.bare(gold)
    lines, boxes = f"{term.marker or answers.MARKERS[0]} {bare}", f"\\boxed{{{bare}}}"
    boxed = (term.marker or "").startswith("\\boxed")
    written = [boxes] if boxed else [lines] if term.marker else [lines, boxes]
    return any(term([""], [text], [[]], gold=[gold])[0] == 1.0 for text in written)


def _outcome_part(values: np.ndarray, outcomes: Sequence[RewardOutcome]) -> np.ndarray:
    """Without what steps got, which is not of the sample as a whole."""
    return np.where([o.steps is not None for o in outcomes], np.float32(0), values)


def step_rewards(
    terms: Sequence[RewardConfig], outcomes: Sequence[Sequence[RewardOutcome]]
) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Outcomes ``[terms][N]`` as ``RewardScores.step_rewards`` and ``RewardScores.stepped``."""
    with_steps = [
        (c, [(i, o.steps) for i, o in enumerate(of_term) if o.steps is not None])
        for c, of_term in zip(terms, outcomes, strict=True)
        if c.weight
    ]
    stepped = tuple(c.metric for c, found in with_steps if found)
    if not stepped:
        return None, ()
    ends = [(i, end - 1, c.weight * value) for c, found in with_steps for i, steps in found for end, value in steps]
    out = np.full((len(outcomes[0]), 1 + max((t for _, t, _ in ends), default=0)), np.nan, np.float32)
    for i, t, value in ends:
        out[i, t] = value if np.isnan(out[i, t]) else out[i, t] + value
    return out, stepped


def normalize(values: np.ndarray, group: int, eps: float = 1e-4) -> np.ndarray:
    """Each valid value ``[N]`` minus its group's mean, over its group's standard deviation (ddof 1) plus ``eps``.

    A group whose valid values are all the same gives 0; NaN stays NaN.

    >>> normalize(np.array([1, 0, 0, 0, 3, 3, np.nan, 3], np.float32), 4).round(3).tolist()
    [1.5, -0.5, -0.5, -0.5, 0.0, 0.0, nan, 0.0]
    """
    x = values.reshape(-1, group).astype(np.float64)
    valid = np.isfinite(x)
    filled = np.where(valid, x, 0.0)
    n = valid.sum(1, keepdims=True)
    mean = filled.sum(1, keepdims=True) / np.maximum(n, 1)
    centred = np.where(valid, x - mean, 0.0)
    std = np.sqrt((centred**2).sum(1, keepdims=True) / np.maximum(n - 1, 1))
    out = centred / (std + eps)  # float32 values sum exactly in float64, so equal ones centre to 0
    return np.where(valid, out, np.nan).reshape(-1).astype(np.float32)
