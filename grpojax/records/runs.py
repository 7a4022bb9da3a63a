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
from grpojax.host import files, settings
from grpojax.host.errors import UserError
from grpojax.records import evaluations
from grpojax.records.metrics import read_metrics

# What tells apart the runs of one method.
_APART = ("train.seed", "run.", "tracking.", "compile_cache", "profile.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One run directory.

    Attributes:
      path: the directory.
      config: the recipe, as plain data.
      lines: of ``metrics.jsonl``.
    """

    path: epath.Path
    config: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]]

    @property
    def seed(self) -> int:
        """Of the data's order and of all draws."""
        return int(setting(self.config, "train.seed") or 0)

    @functools.cached_property
    def done(self) -> int:
        """Steps recorded."""
        return max((line["step"] for line in self.lines), default=0)

    @property
    def finished(self) -> bool:
        """Whether the last step of the recipe is recorded, and held-out problems after it where there are any."""
        evaluated = not setting(self.config, "data.validation") or self._last_evaluated() == self.done
        return self.share >= 1 and evaluated

    @property
    def share(self) -> float:
        """Of the whole run, by steps or by sampled tokens, what is recorded; 0 where it cannot be told."""
        steps, tokens = setting(self.config, "train.steps"), setting(self.config, "train.tokens")
        if steps:
            return self.done / steps
        return (self.last("sampled_tokens") or 0.0) / tokens if tokens else 0.0

    def state(self) -> str:
        """What became of it, in a few words."""
        if not self.lines:
            return "no step recorded"
        steps, tokens = setting(self.config, "train.steps"), setting(self.config, "train.tokens")
        said = f"{self.done} of {steps} steps"
        if not steps and tokens:
            said = f"{self.done} steps, {self.last('sampled_tokens') or 0:.0f} of {tokens} tokens"
        if self._last_evaluated() is None:
            said += ", no held-out problems"
        return said if self.finished else f"{said}, not finished"

    def _last_evaluated(self) -> int | None:
        return max((line["step"] for line in self.lines if "eval/reward" in line), default=None)

    def last(self, metric: str) -> float | None:
        """What was last recorded as a metric; None where that is null."""
        values = [line[metric] for line in self.lines if metric in line]
        return float(values[-1]) if values and _is_number(values[-1]) else None

    @functools.cached_property
    def attempts(self) -> list[Attempt]:
        """Of its last evaluation; empty where there is none. Raises `UserError` for a file that cannot be read."""
        step = self._last_evaluated()
        file = self.path / "eval" / f"step_{step}.jsonl"
        return evaluations.read(file) if step is not None and file.exists() else []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """Runs that differ in their seed alone, as far as the report is concerned.

    Attributes:
      name: short, and unlike every other.
      values: the settings that make it what it is, by dotted name.
      runs: by seed.
    """

    name: str
    values: Mapping[str, Any]
    runs: tuple[Run, ...]

    @property
    def told(self) -> tuple[Run, ...]:
        """The runs that curves are of: those that are finished, or all where none is."""
        return tuple(r for r in self.runs if r.finished) or self.runs

    def twin(self) -> str | None:
        """What its variant equals with the one update a rollout that it takes (`variants.twin_at_one_update`)."""
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


def setting(config: Mapping[str, Any], dotted: str) -> Any:
    """The value of a setting by its dotted name; None where there is none."""
    node: Any = config
    for key in dotted.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def variant_of(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and options of a recipe's variant."""
    given = config.get("variant", "grpo")
    options = dict(given) if isinstance(given, Mapping) else {"name": given}
    return str(options.pop("name", "grpo")), options


def differences(a: Run, b: Run) -> list[str]:
    """Settings in which two runs differ, less seed, directory and what is recorded."""
    return [line for line in settings.diff(a.config, b.config) if not line.startswith(_APART)]


def read_runs(paths: Iterable[epath.PathLike]) -> tuple[list[Run], list[str]]:
    """Reads run directories, folders of such, and the folders of sweeps, which have them in ``runs``.

    Returns:
      The runs, and a line for each directory that is none, or a supervised one, and so is left out.

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
            runs.append(Run(path=path, config=config, lines=read_metrics(path)))
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


def by_method(runs: Sequence[Run], by: Sequence[str] = ("variant",)) -> list[Method]:
    """Sorts runs by the settings that ``by`` names, in the order in which they came.

    Raises:
      UserError: no run has such a setting, or a method has two runs of one seed.
    """
    for name in by:
        if all(setting(run.config, name) is None for run in runs):
            raise UserError(f"--by {name}: no run has this setting; such as --by optimizer.learning_rate")
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps(_values(run, by), sort_keys=True), []).append(run)
    names = _names([_values(group[0], by) for group in groups.values()])
    methods = []
    for name, group in zip(names, groups.values(), strict=True):
        ordered = sorted(group, key=lambda run: run.seed)
        for a, b in zip(ordered, ordered[1:], strict=False):
            if a.seed == b.seed:
                apart = [line.partition(":")[0] for line in differences(a, b)]
                remedy = f"--by {apart[0]} tells them apart" if apart else "give one of them"
                raise UserError(f"{a.path} and {b.path} are both {name} with seed {a.seed}; {remedy}")
        methods.append(Method(name=name, values=_values(group[0], by), runs=tuple(ordered)))
    return methods


def _values(run: Run, by: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for dotted in by:
        if dotted == "variant":
            name, options = variant_of(run.config)
            values |= {"variant": name} | {f"variant.{k}": v for k, v in sorted(options.items())}
        else:
            values[dotted] = setting(run.config, dotted)
    return values


def _names(each: Sequence[Mapping[str, Any]]) -> list[str]:
    """The shortest names that tell the methods apart: the variant, and the settings in which others of it differ."""
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
