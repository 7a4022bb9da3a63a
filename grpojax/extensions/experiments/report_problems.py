"""Methods compared on the same held-out problems: tests for each seed, rates by difficulty, and samples."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from grpojax.data.problems import numbered, sources
from grpojax.data.readers import HUB, SourceConfig
from grpojax.evaluation import Attempt, paired_test, verdict
from grpojax.evaluation.summary import EpisodeRecord
from grpojax.extensions.experiments import comparison
from grpojax.extensions.experiments.runs import MethodRuns, PastRun, setting
from grpojax.host.errors import UserError

# Columns of held-out data that say how hard a problem is; the first one that exists counts.
LEVELS = ("difficulty", "level", "steps", "part")
SAMPLES = 5  # prompts shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedTest:
    """Two methods on the problems of one seed, by `evaluation.paired_test`; ``p_corrected`` is over all rows."""

    method: str
    other: str
    seed: int
    problems: int
    difference: float
    low: float
    high: float
    better: int
    worse: int
    p: float
    p_corrected: float = math.nan


@dataclasses.dataclass(frozen=True, kw_only=True)
class LevelRates:
    """The rates of methods on the problems of one difficulty: mean over seeds and problems, None without any."""

    name: str
    problems: int
    rates: dict[str, float | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shown:
    """A prompt and, for each method, its first sample and how that was scored.

    Attributes:
      prompt, gold: of the problem.
      samples: by method, text and verdict.
      episodes: by method, the turns of a sample that has several.
    """

    prompt: str
    gold: str | None
    samples: dict[str, tuple[str, str]]
    episodes: dict[str, EpisodeRecord]


def attempts(run: PastRun) -> list[Attempt]:
    """The attempts of a finished run at its end (`PastRun.attempts`); none if they cannot be read."""
    try:
        return run.attempts if run.finished else []
    except UserError:
        return []


def _value(attempt: Attempt, kind: str) -> float:
    return attempt.accuracy if kind == "accuracy" else attempt.reward


def seed_tests(
    methods: Sequence[MethodRuns], pairs: Sequence[tuple[MethodRuns, MethodRuns]]
) -> tuple[list[SeedTest], str, list[str]]:
    """The tests of each pair of methods and seed, the value that they compare, and what could not be compared."""
    everything = [a for m in methods for run in m.runs for a in attempts(run)]
    kind = "accuracy" if everything and all(a.has_verdict for a in everything) else "reward"
    tests, notes = [], []
    for method, other in pairs:
        theirs = {run.seed: run for run in other.runs}
        for run in (r for r in method.runs if r.seed in theirs and r.path != theirs[r.seed].path):
            a, b = ({x.uid: x for x in attempts(r)} for r in (theirs[run.seed], run))
            if not a or not b:
                continue
            if a.keys() != b.keys() or any((x.prompt, x.gold) != (b[u].prompt, b[u].gold) for u, x in a.items()):
                notes.append(
                    f"{run.path}: not compared by problem, its problems are not those of {theirs[run.seed].path}"
                )
                continue
            values = np.array([[_value(x[u], kind) for u in sorted(a)] for x in (a, b)])
            values = values[:, np.isfinite(values).all(0)]
            if values.size:
                found = dataclasses.asdict(paired_test(*values))
                names = {"method": method.name, "other": other.name}
                tests.append(SeedTest(**names, seed=run.seed, problems=values.shape[1], **found))
    corrected = comparison.holm([t.p for t in tests])
    tests = [dataclasses.replace(t, p_corrected=p) for t, p in zip(tests, corrected, strict=True)]
    return tests, kind, notes


def levels(methods: Sequence[MethodRuns], kind: str) -> tuple[str | None, list[LevelRates]]:
    """The rates by difficulty, if the rows of the first run's held-out data have one and can still be read."""
    run = next((r for m in methods for r in m.runs if attempts(r)), None)
    column, level_of = _read_levels(run) if run else (None, {})
    if column is None:
        return None, []
    rates: dict[Any, dict[str, list[float]]] = {}
    problems: dict[Any, set[int]] = {}
    for method in methods:
        for run in method.runs:
            for attempt in attempts(run):
                level = level_of.get((attempt.uid, attempt.prompt))
                if level is not None and math.isfinite(value := _value(attempt, kind)):
                    rates.setdefault(level, {}).setdefault(method.name, []).append(value)
                    problems.setdefault(level, set()).add(attempt.uid)
    levels = []
    for level in sorted(rates, key=lambda x: (isinstance(x, str), x)):
        by_name = {m.name: float(np.mean(v)) if (v := rates[level].get(m.name)) else None for m in methods}
        levels.append(LevelRates(name=str(level), problems=len(problems[level]), rates=by_name))
    return (column, levels) if levels else (None, [])


def _read_levels(run: PastRun) -> tuple[str | None, dict[tuple[int, str], Any]]:
    """The column, and its value by number and text of the problem. It uses no network: only local files are read."""
    given = setting(run.config, "data.validation" if run.tested is None else "data.test")
    asked = setting(run.config, "data.prompt")
    found: dict[tuple[int, str], Any] = {}
    column = None
    try:
        listed = given if isinstance(given, list) else [given]
        each = [SourceConfig(**s) if isinstance(s, dict) else s for s in listed]
        of_files = sources([s for s in each if s])
        if any(s.path.startswith(HUB) or "://" in s.path for s in of_files):
            return None, {}
        rows = list(numbered(of_files, asked or "auto"))
    except (UserError, TypeError):
        return None, {}
    for uid, row, question in rows:
        if not isinstance(row, dict):
            continue
        column = column or next((c for c in LEVELS if isinstance(row.get(c), str | int)), None)
        text = question if isinstance(question, str | None) else question[-1]["content"]
        if column and isinstance(row.get(column), str | int) and text is not None:
            found[uid, text] = row[column]
    return column, found


def samples(methods: Sequence[MethodRuns], kind: str) -> list[Shown]:
    """The prompts on which the methods differ most, from the first of the seeds that most methods have."""
    seeds = [run.seed for m in methods for run in m.runs if attempts(run)]
    if not seeds:
        return []
    seed = max(sorted(set(seeds)), key=seeds.count)
    drawn = {m.name: {a.uid: a for a in attempts(r)} for m in methods for r in m.runs if r.seed == seed}
    drawn = {name: tried for name, tried in drawn.items() if tried}
    first = next(iter(drawn.values()))

    def same(uid: int) -> bool:
        return all(uid in x and x[uid].prompt == first[uid].prompt for x in drawn.values())

    def spread(uid: int) -> float:
        values = [v for x in drawn.values() if math.isfinite(v := _value(x[uid], kind))]
        return max(values) - min(values) if values else 0.0

    chosen = sorted((uid for uid in first if same(uid)), key=lambda uid: (-spread(uid), uid))[:SAMPLES]
    return [
        Shown(
            prompt=first[uid].prompt,
            gold=first[uid].gold,
            samples={n: (x[uid].samples[0].completion, verdict(x[uid], x[uid].samples[0])) for n, x in drawn.items()},
            episodes={n: e for n, x in drawn.items() if (e := x[uid].samples[0].episode) is not None},
        )
        for uid in chosen
    ]
