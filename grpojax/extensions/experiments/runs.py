"""Finished and unfinished runs read back from their directories, and sorted by method."""

import dataclasses
import functools
import inspect
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from grpojax import variants
from grpojax.evaluation import Attempt
from grpojax.extensions.experiments import sweeps
from grpojax.extensions.experiments.sweeps import SweepRecord
from grpojax.host import claims, files, settings
from grpojax.host.errors import UserError
from grpojax.records import evaluations, method_diff
from grpojax.records.metrics import read_metrics

# Settings in which two runs of one method may differ.
_OWN = ("train.seed", "run.", "tracking.", "compile_cache", "profile.")
FINISHED, FAILED, UNFINISHED = "finished", "failed", "unfinished"
# Reasons of failed runs that may have been killed from outside.
NO_REASON, SIGNAL = "its process left no reason; it was killed or crashed", "killed by signal"
STARTED_AGAIN = 75  # exit status of a run that asks to be started again


@dataclasses.dataclass(frozen=True, kw_only=True)
class PastRun:
    """One run directory.

    Attributes:
      path: the directory.
      config: the recipe, as plain data.
      lines: of ``metrics.jsonl``.
      failure: how its process ended, if the sweep that started it recorded a failure.
    """

    path: epath.Path
    config: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]]
    failure: sweeps.Failure | None = None

    @property
    def seed(self) -> int:
        """The seed of the data's order and of all draws."""
        return int(setting(self.config, "train.seed") or 0)

    @functools.cached_property
    def done(self) -> int:
        """Steps recorded."""
        return max((line["step"] for line in self.lines), default=0)

    @property
    def finished(self) -> bool:
        """Whether the last step of the recipe is recorded, and the evaluations after it if there are held-out sets."""
        evaluated = not setting(self.config, "data.validation") or self.evaluated == self.done
        tested = not setting(self.config, "data.test") or self.tested == self.done
        return self.share >= 1 and evaluated and tested

    @functools.cached_property
    def ending(self) -> tuple[str, str]:
        """How it ended (`FINISHED`, `FAILED` or `UNFINISHED`), and why.

        A run is unfinished if it has no step, if its process still goes on, or if it was stopped and has saved. Any
        other run that is short of its last step has failed, even if its process left no reason, as when it is killed.
        """
        if self.finished:
            return FINISHED, ""
        if _in_use(self.path):
            return UNFINISHED, "it goes on"
        if (self.path / "failed").exists():
            return FAILED, str(_json(self.path / "failed").get("reason", ""))
        if (self.path / "stopped").exists() or (self.failure and self.failure.status == STARTED_AGAIN):
            return UNFINISHED, "it was stopped, and can go on"
        if self.failure is not None:
            status = self.failure.status or 0
            last = self.failure.lines[-1] if self.failure.lines else f"exit status {status}"
            return FAILED, f"{SIGNAL} {-status}" if status < 0 else last
        return (FAILED, self._symptom()) if self.done else (UNFINISHED, "no step is recorded")

    def _symptom(self) -> str:
        """The reason why there is no further step, as the last one shows it."""
        last = {name: x for line in self.lines if line["step"] == self.done for name, x in line.items()}
        if last.get("skipped_updates"):
            return "the gradient was not finite"
        alarms = [name.removeprefix("watch/") for name in last if name.startswith("watch/") and last[name]]
        if alarms and setting(self.config, "train.on_collapse") == "stop":
            return f"stopped by the alarm {alarms[0]}"
        return NO_REASON

    def value(self, metric: str) -> float | None:
        """Its result: the last value of a held-out metric, or None for an unfinished run.

        A failed run counts as 0, whatever its policy was before (`of_failed`).
        """
        kind = self.ending[0]
        if kind != FAILED:
            return self.last(metric) if kind == FINISHED else None
        for name in (metric, metric.replace("test/", "eval/", 1)):  # the test set is read only at the end
            if numbers := [line[name] for line in self.lines if _is_number(line.get(name))]:
                return of_failed(float(numbers[-1]))
        return 0.0

    @property
    def share(self) -> float:
        """The recorded share of the whole run, by steps or by sampled tokens; 0 if it is unknown."""
        steps, tokens = setting(self.config, "train.steps"), setting(self.config, "train.tokens")
        if steps:
            return self.done / steps
        return (self.last("sampled_tokens") or 0.0) / tokens if tokens else 0.0

    def state(self) -> str:
        """Its progress and how it ended, in a few words."""
        kind, why = self.ending
        if not self.lines:
            return "no step recorded" + (f", failed: {why}" if kind == FAILED else "")
        steps, tokens = setting(self.config, "train.steps"), setting(self.config, "train.tokens")
        progress = f"{self.done} of {steps} steps"
        if not steps and tokens:
            progress = f"{self.done} steps, {self.last('sampled_tokens') or 0:.0f} of {tokens} tokens"
        if self.evaluated is None:
            progress += ", no held-out problems"
        return progress if kind == FINISHED else f"{progress}, {kind}: {why}"

    @property
    def evaluated(self) -> int | None:
        """The last step after which the validation set was evaluated."""
        return max((line["step"] for line in self.lines if "eval/reward" in line), default=None)

    @property
    def tested(self) -> int | None:
        """The step after which the test set was read."""
        return max((line["step"] for line in self.lines if "test/reward" in line), default=None)

    def last(self, metric: str) -> float | None:
        """The last recorded value of a metric; None if that is null."""
        values = [line[metric] for line in self.lines if metric in line]
        return float(values[-1]) if values and _is_number(values[-1]) else None

    @functools.cached_property
    def attempts(self) -> list[Attempt]:
        """The attempts on the test set, or else those of the last evaluation; empty if there are none. Raises
        `UserError` for a file that cannot be read."""
        name, step = ("eval", self.evaluated) if self.tested is None else ("test", self.tested)
        file = self.path / name / f"step_{step}.jsonl"
        return evaluations.read(file) if step is not None and file.exists() else []


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodRuns:
    """Runs that the report takes to differ only in their seed.

    Attributes:
      name: a short name, different from every other.
      values: the settings that define the method, by dotted name.
      runs: by seed.
    """

    name: str
    values: Mapping[str, Any]
    runs: tuple[PastRun, ...]

    @property
    def ended(self) -> tuple[PastRun, ...]:
        """The runs that count in results and curves: those that are finished or failed."""
        return tuple(r for r in self.runs if r.ending[0] != UNFINISHED)

    @property
    def drawn(self) -> tuple[PastRun, ...]:
        """The runs that curves show: those that `ended`, or all if none has."""
        return self.ended or self.runs

    def twin(self) -> str | None:
        """The variant that its own equals at one update a rollout (`variants.twin_at_one_update`), if it takes one."""
        config = self.runs[0].config
        updates = [setting(config, f"train.{name}") or 1 for name in ("ppo_epochs", "minibatches")]
        if math.prod(updates) > 1:
            return None
        name, options = variant_of(config)
        if variants.is_path(name):  # its code is not run for a report
            return None
        try:
            required = {k: 1.0 for k, v in variants.parameters(name).items() if v is inspect.Parameter.empty}
            return variants.twin_at_one_update(variants.get(name, **(required | options)))
        except (ValueError, TypeError):  # of another version
            return None

    def differences(self) -> list[str]:
        """Settings other than the seed that are not the same in all of its runs."""
        return list(dict.fromkeys(line for run in self.runs[1:] for line in differences(self.runs[0], run)))


def of_failed(last: float) -> float:
    """The result of a run that failed, whose last value was ``last``: 0, or its last value if that is less.

    It has brought no policy. Its last value would be that of the untrained policy if it failed early, and a method that
    breaks would count as one that learns nothing.

    Example:
      >>> of_failed(0.25), of_failed(-1.5)
      (0.0, -1.5)
    """
    return min(last, 0.0)


def setting(config: Mapping[str, Any], dotted: str) -> Any:
    """The value of a setting by its dotted name; None if there is none."""
    node: Any = config
    for key in dotted.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def variant_of(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and options of a recipe's variant."""
    given = config.get("variant", "grpo")
    options = dict(given) if isinstance(given, Mapping) else {"name": given}
    return str(options.pop("name", "grpo")), options


def differences(a: PastRun, b: PastRun) -> list[str]:
    """Settings in which two runs differ, except for seed, directory and recording. For two methods, these are the
    options, and the differences of advantage and objective that follow from them."""
    trees = [dict(x.config) for x in (a, b)]
    resolved = [tree.pop("method", None) for tree in trees]
    lines = [line for line in settings.diff(*trees) if not line.startswith(_OWN)]
    if all(isinstance(x, Mapping) for x in resolved):
        found = method_diff.differences(*resolved)
        lines = [line for line in lines if not line.startswith("variant")]
        return [f"{name}: {_text(x)} -> {_text(y)}" for name, (x, y) in found.items()] + lines
    return lines


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _in_use(path: epath.Path) -> bool:
    """Whether a process holds the run's directory."""
    place = path / "lock"
    if files.in_bucket(place):
        return place.exists()  # a holder removes it at its end
    try:
        claims.check(path)
    except UserError:
        return True
    return False


def _json(file: epath.Path) -> dict[str, Any]:
    try:
        tree = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}


def read_sweep(paths: Iterable[epath.PathLike]) -> tuple[SweepRecord, epath.Path] | None:
    """The record of a sweep and its folder, if that is the only path; None otherwise.

    Raises:
      UserError: it cannot be read.
    """
    folders = list(map(files.path, paths))
    record = sweeps.read(folders[0]) if len(folders) == 1 else None
    return None if record is None else (record, folders[0])


def of_sweep(record: SweepRecord, folder: epath.Path, runs: Sequence[PastRun]) -> tuple[list[MethodRuns], list[str]]:
    """The methods of a sweep by their labels. Two methods may have the same runs.

    Args:
      record: the record of the sweep.
      folder: the folder of the sweep.
      runs: the runs in it.

    Returns:
      The methods that have runs, and notes on runs that are missing or do not belong to the sweep.
    """
    by_name = {run.path.name: run for run in runs if run.path.parent == folder / "runs"}
    by_name = {name: dataclasses.replace(run, failure=record.failed.get(name)) for name, run in by_name.items()}
    found, notes, used = [], [], set()
    for label in record.methods:
        names = record.runs.get(label, {}).values()
        used |= set(names)
        if missing := [name for name in names if name not in by_name]:
            notes.append(f"{label}: {len(missing)} of its {len(names)} runs have not been started")
        if own := sorted((by_name[name] for name in names if name in by_name), key=lambda run: run.seed):
            found.append(MethodRuns(name=label, values=_values(own[0], ("variant",)), runs=tuple(own)))
    others = [run for run in runs if run.path.name not in used or run.path.name not in by_name]
    notes += [f"{run.path}: left out, sweep.json does not have it" for run in others]
    if not found:
        raise UserError(f"{folder}: none of the runs of its sweep.json is there; start the sweep again")
    return found, notes


def control_of(method: MethodRuns, among: Sequence[MethodRuns]) -> MethodRuns | None:
    """The control of a method (`variants.control`) among other methods: the one with its name and all of its options.

    None if the variant has no control, if there is no such method, or if the runs' config.json has no ``method``.
    """
    tree = method.runs[0].config.get("method")
    if not isinstance(tree, Mapping) or variants.is_path(str(tree["variant"])):
        return None
    try:
        control = variants.control(str(tree["variant"]), **tree["options"])
        if control is None:
            return None
        defaults = {k: v for k, v in variants.parameters(control[0]).items() if v is not inspect.Parameter.empty}
    except (ValueError, TypeError):  # of another version
        return None
    options = json.loads(json.dumps({**defaults, **control[1]}, default=str))

    def is_control(other: MethodRuns) -> bool:
        its = other.runs[0].config.get("method")
        return isinstance(its, Mapping) and (its["variant"], its["options"]) == (control[0], options)

    return next((other for other in among if other is not method and is_control(other)), None)


def read_runs(paths: Iterable[epath.PathLike]) -> tuple[list[PastRun], list[str]]:
    """Reads run directories, folders of run directories, and folders of sweeps, which have them in ``runs``.

    Returns:
      The runs, and a line for each directory that is left out because it is no run, or a supervised one.

    Raises:
      UserError: a path does not exist, or there is no run at all.
    """
    runs, notes = [], []
    for path in _folders(paths):
        try:
            config = json.loads((path / "config.json").read_text())
            if not isinstance(config, dict):
                raise ValueError("it is no recipe")
            if "rollout" not in config:
                notes.append(f"{path}: left out, a supervised run")
                continue
            runs.append(PastRun(path=path, config=config, lines=read_metrics(path)))
        except (OSError, ValueError) as e:
            reason = e.strerror if isinstance(e, OSError) else e
            notes.append(f"{path}: left out, its config.json cannot be read: {reason}")
    if not runs:
        why = f" ({notes[0]})" if notes else ""
        raise UserError(f"no runs: give run directories, which have a config.json, or a folder of them{why}")
    return runs, notes


def _folders(paths: Iterable[epath.PathLike]) -> list[epath.Path]:
    found = []
    for path in map(files.path, paths):
        if not path.is_dir():
            raise UserError(f"{path} is no directory; give the directory of a run, or a folder of runs")
        if (path / "config.json").exists():
            found.append(path)
        else:
            found += _inside(path) or _inside(path / "runs") or [path]
    return list(dict.fromkeys(found))


def _inside(path: epath.Path) -> list[epath.Path]:
    return sorted(p for p in files.listing(path) if (p / "config.json").exists()) if path.is_dir() else []


def by_method(runs: Sequence[PastRun], by: Sequence[str] = ("variant",)) -> list[MethodRuns]:
    """Groups runs by the settings that ``by`` names, in the order of the runs.

    Raises:
      UserError: no run has such a setting, or a method has two runs of one seed.
    """
    for name in by:
        if all(setting(run.config, name) is None for run in runs):
            raise UserError(f"--by {name}: no run has this setting; such as --by optimizer.learning_rate")
    groups: dict[str, list[PastRun]] = {}
    for run in runs:
        groups.setdefault(json.dumps(_values(run, by), sort_keys=True), []).append(run)
    names = _names([_values(group[0], by) for group in groups.values()])
    methods = []
    for name, group in zip(names, groups.values(), strict=True):
        ordered = sorted(group, key=lambda run: run.seed)
        for a, b in zip(ordered, ordered[1:], strict=False):
            if a.seed == b.seed:
                differing = [line.partition(":")[0] for line in differences(a, b)]
                remedy = f"--by {differing[0]} separates them" if differing else "give one of them"
                raise UserError(f"{a.path} and {b.path} are both {name} with seed {a.seed}; {remedy}")
        methods.append(MethodRuns(name=name, values=_values(group[0], by), runs=tuple(ordered)))
    return methods


def _values(run: PastRun, by: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for dotted in by:
        if dotted == "variant":
            name, options = variant_of(run.config)
            values |= {"variant": name} | {f"variant.{k}": v for k, v in sorted(options.items())}
        else:
            values[dotted] = setting(run.config, dotted)
    return values


def _names(each: Sequence[Mapping[str, Any]]) -> list[str]:
    """The shortest names that differ between methods: the variant, and settings in which methods with it differ."""
    names = []
    for values in each:
        alike = [other for other in each if other.get("variant") == values.get("variant")]
        differing = [k for k in values if k != "variant" and any(other.get(k) != values[k] for other in alike)]
        if not differing and "variant" not in values:
            differing = list(values)
        shown = [f"{k.rpartition('.')[2]}={_short(values[k])}" for k in differing]
        names.append(" ".join([values["variant"], *shown] if "variant" in values else shown))
    return [name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names, 1)]


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
