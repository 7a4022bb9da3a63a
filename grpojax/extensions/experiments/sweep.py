"""The runs of several methods with several seeds, and the comparisons of each method.

If the recipe has ``train.tokens``, all runs draw the same number of tokens, whatever a method drops, probes or compares
with, and schedules follow the share of these tokens. If it has ``train.steps``, all methods make the same number of
updates. Then a method that draws more a step (a filter) costs more, and the report says so.
"""

import dataclasses
import functools
import json
import math
import re
import sys
import typing
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from grpojax import variants
from grpojax.extensions.experiments import matching, power, sweeps
from grpojax.extensions.experiments.jobs import Job, JobsOutcome
from grpojax.extensions.experiments.sweeps import Compared, SweepRecord
from grpojax.host import settings
from grpojax.host.errors import UserError
from grpojax.records.method_diff import differences, in_a_line, label
from grpojax.run import recipe
from grpojax.run.trial import try_out

LEAST = 3  # rates to choose from, and seeds to choose by
_FIRST_RATE_SEED = 1000  # far from the seeds of a comparison, so that more of those do not change the choice

K = TypeVar("K", bound=Hashable)

_OF_CRITIC = re.compile(r"\s*critic\s*[.=]")  # an override


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweptMethod:
    """A method of a sweep.

    Attributes:
      given: a name, or a mapping with a name and options, as ``variant`` of a recipe.
      spec: the whole mapping, including options of the recipe and the command line that the method has.
      lacks: options of the recipe's or the command line's variant that the method does not have.
      config: its resolved recipe, with the highest seed of the runs, and the recipe's learning rate.
      overrides: overrides that turn the sweep's recipe into that one, except for seed and directory.
      control, baseline: labels of the methods it is compared with (`grpojax.extensions.experiments.sweeps.Compared`).
      has_control: whether its variant has a control, in the sweep or not.
    """

    given: str | Mapping[str, Any]
    spec: Mapping[str, Any]
    lacks: tuple[str, ...]
    config: Mapping[str, Any]
    overrides: tuple[str, ...]
    control: str | None = None
    baseline: str | None = None
    has_control: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """The runs of a sweep.

    Attributes:
      config: path of the recipe. The options of its variant go to every method that has them.
      overrides: settings that replace its own in every run; ``variant.x=y`` in every method that has the option x.
      variants: names, or mappings with a name and options, as ``variant`` of a recipe.
      seeds: seeds of the runs.
      folder: the folder of all files: ``sweep.json``, ``rates.json``, ``runs/METHOD_SEED``, ``rates/METHOD_RATE_SEED``,
        ``state/`` and ``cache/``.
      controls: whether the control of each method (`grpojax.variants.control`) is run too.
      rates: learning rates to choose from, for each method separately; if empty, the recipe's rate is taken.
      rate_count: number of seeds of the runs that decide the choice; None for `LEAST`.
      margin: kept in ``sweep.json`` for the report: differences within it count as none.
    """

    config: str
    overrides: tuple[str, ...] = ()
    variants: tuple[str | dict[str, Any], ...]
    seeds: Sequence[int]
    folder: Path
    controls: bool = False
    rates: tuple[float, ...] = ()
    rate_count: int | None = None
    margin: float | None = None

    def __post_init__(self) -> None:
        if not self.variants:
            raise UserError("--variants: give one at least, such as --variants grpo,dapo")
        own = ("variant.name", "train.seed", "run.dir", *(("optimizer.learning_rate",) if self.rates else ()))
        for text in self.overrides:
            key = text.partition("=")[0].strip()
            if taken := next((name for name in own if key == name or key.startswith(name + ".")), None):
                raise UserError(f"{text}: the sweep sets {taken} itself; leave it out")
            if key == "variant":
                raise UserError(f"{text}: the sweep sets the variant itself; give its options, as in variant.kl_coef=0")
        if self.rates:
            self._check_rates()
        elif self.rate_count is not None:
            raise UserError(f"--rate-seeds {self.rate_count}: goes with --rates")
        if self.margin is not None and not 0 < self.margin < math.inf:
            raise UserError(f"--margin {self.margin:g}: give a difference over 0, in units of the held-out value")

    def _check_rates(self) -> None:
        shown, rates = [f"{x:g}" for x in self.rates], sorted(self.rates)
        if any(not (0 < x < math.inf) for x in rates) or any(
            b < 1.1 * a for a, b in zip(rates, rates[1:], strict=False)
        ):
            raise UserError(
                f"--rates {','.join(shown)}: give numbers over 0, each a tenth larger than the next or more"
            )
        if len(shown) < LEAST:
            raise UserError(f"--rates {','.join(shown)}: give at least {LEAST}, or the best may lie outside")
        if self.rate_count is not None and self.rate_count < LEAST:
            raise UserError(f"--rate-seeds {self.rate_count}: give at least {LEAST}, or chance makes the choice")

    @functools.cached_property
    def rate_seeds(self) -> tuple[int, ...]:
        """Seeds of the runs by which learning rates are chosen. None is a seed of the comparison."""
        count = self.rate_count or LEAST
        free = (x for x in range(_FIRST_RATE_SEED, _FIRST_RATE_SEED + count + len(self.seeds)) if x not in self.seeds)
        return tuple(free)[:count]

    @functools.cached_property
    def _options(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The options of the recipe's variant, including the command line's, and the names of the latter."""
        texts = [text for text in self.overrides if text.strip().startswith("variant.")]
        variant = settings.read(self.config).get("variant", "grpo")
        tree, _ = settings.override({"variant": variant}, texts)
        options = dict(tree["variant"]) if isinstance(tree["variant"], Mapping) else {}
        asked = [text.partition("=")[0].strip().split(".")[1] for text in texts]
        return {k: x for k, x in options.items() if k not in ("name", "source")}, tuple(dict.fromkeys(asked))

    @functools.cached_property
    def methods(self) -> dict[str, SweptMethod]:
        """Every method by its label, including controls if they are asked for.

        Raises:
          UserError: a method occurs twice, one is not valid, or no method has an option of the command line.
        """
        found: dict[str, SweptMethod] = {}
        for given in self.variants:
            if (name := label(given)) in found:
                raise UserError(f"--variants: {name} occurs twice; give it once")
            found[name] = self._method(given)
        for option in self._options[1]:
            if all(option in method.lacks for method in found.values()):
                raise UserError(f"variant.{option}: none of the methods has this option; leave it out")
        of_grpo = [name for name, method in found.items() if method.spec["name"] == "grpo"]
        baseline = "grpo" if "grpo" in of_grpo else of_grpo[0] if of_grpo else None
        for name in list(found):
            control = self._control_of(name, found[name])
            found[name] = dataclasses.replace(
                found[name],
                baseline=None if baseline is None or _same(found[name], found[baseline]) else baseline,
                control=None if control is None else self._find(control, found),
                has_control=control is not None,
            )
        return found

    def _spec(self, given: str | Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """A variant with the recipe's and the command line's options, and the options that it does not have."""
        own = {"name": given} if isinstance(given, str) else dict(given)
        options = self._options[0]
        try:
            known = variants.parameters(own["name"])
        except ValueError as e:
            raise UserError(f"variant: {e}") from None
        spec = own | {k: x for k, x in options.items() if k in known and k not in own}
        return spec, tuple(k for k in options if k not in known)

    def _method(self, given: str | Mapping[str, Any]) -> SweptMethod:
        spec, lacks = self._spec(given)
        rest = [text for text in self.overrides if not text.strip().startswith("variant.")]
        made = f"variant={json.dumps(spec)}"
        overrides = (*(text for text in rest if not _OF_CRITIC.match(text)), made, "critic=null")
        highest = f"train.seed={max(*self.seeds, *self.rate_seeds)}", f"run.dir={json.dumps(str(self.folder))}"
        config = recipe.load(self.config, (*overrides, *highest))
        if config.method.variant.critic is not None:  # a section that only some of the methods have
            overrides = (*rest, made)
            config = recipe.load(self.config, (*overrides, *highest))
        try_out(config.method.variant, config.rollout)
        return SweptMethod(given=given, spec=spec, lacks=lacks, config=config.resolved(), overrides=overrides)

    def _control_of(self, of: str, method: SweptMethod) -> SweptMethod | None:
        """The control of a method; None if it has none, or if its mechanism is off already."""
        if (made := variants.control(method.spec["name"], **_typed(method.spec))) is None:
            return None
        name, options = made
        # Without the options that it has here anyway, so that its label is short, or equals that of a given method.
        own = dict(variants.parameters(name)) | _typed(self._spec(name)[0])
        options = {k: x for k, x in options.items() if own.get(k) != x}
        try:
            return self._method({"name": name, **options} if options else name)
        except UserError as e:
            if self.controls:
                raise UserError(f"--controls: that of {of}: {e}") from None
            return None

    def _find(self, control: SweptMethod, found: dict[str, SweptMethod]) -> str | None:
        """The label of a control among the methods. A missing one is added if controls are asked for, else None."""
        name = next((name for name, method in found.items() if _same(method, control)), None)
        if name is None and self.controls:
            name = label(control.given)
            found[name] = control
        return name

    def _job(self, kind: str, name: str, method: SweptMethod, **values: Mapping[str, Any]) -> Job:
        """One run: the method's recipe with other values, by section and name."""
        directory = self.folder / kind / name
        values = {**values, "run": {"dir": str(directory)}}
        config = {**method.config, **{section: {**method.config[section], **x} for section, x in values.items()}}
        given = [f"{section}.{key}={json.dumps(x)}" for section, own in values.items() for key, x in own.items()]
        command = (sys.executable, "-m", "grpojax.cli.main", "train", self.config, *method.overrides, *given)
        length = {"steps": config["train"]["steps"], "tokens": config["train"]["tokens"]}
        return Job(name=name, directory=directory, command=command, **length, config=config)

    def jobs(self, rates: Mapping[str, float] | None = None) -> dict[tuple[str, int], Job]:
        """All runs, by label and seed. Two methods with the same resolved recipe have the same job.

        They are sorted by seed, so that a sweep cut short has some seeds of every method.

        Args:
          rates: the learning rate of each method; those without one are left out. None takes the recipe's for all.
        """
        made = {}
        for seed in self.seeds:
            for name, method in self.methods.items():
                if rates is None or name in rates:
                    rate = {} if rates is None else {"optimizer": {"learning_rate": rates[name]}}
                    made[name, seed] = self._job("runs", f"{name}_{seed}", method, train={"seed": seed}, **rate)
        asked = next((text for text in self.overrides if _OF_CRITIC.match(text)), None)
        if asked is not None and all(job.config["critic"] is None for job in made.values()):
            raise UserError(f"{asked}: none of the methods has a critic; leave it out")
        return shared(made)

    def rate_job(self, name: str, rate: float, seed: int) -> Job:
        """A run of the full length by which a method's learning rate is chosen."""
        if not self.methods[name].config["data"]["validation"]:
            raise UserError("--rates chooses by held-out reward: give the recipe data.validation")
        values = {
            "train": {"seed": seed},
            "optimizer": {"learning_rate": rate},
            "profile": {"steps": None},
            "data": {"test": None},
        }
        return self._job("rates", f"{name}_{rate:g}_{seed}", self.methods[name], **values)


def record(sweep: Sweep, jobs: Mapping[tuple[str, int], Job], outcome: JobsOutcome | None = None) -> SweepRecord:
    """The content of ``sweep.json``, including the entries of earlier commands for the same folder.

    Args:
      sweep: the sweep.
      jobs: of `Sweep.jobs`.
      outcome: the outcome of the jobs; None before they are started.
    """
    methods = {
        name: Compared(variant=m.given, control=m.control, baseline=m.baseline) for name, m in sweep.methods.items()
    }
    runs: dict[str, dict[int, str]] = {}
    for (name, seed), job in jobs.items():
        runs.setdefault(name, {})[seed] = job.name
    new = SweepRecord(methods=methods, seeds=sweep.seeds, rates=sweep.rates, margin=sweep.margin, runs=runs)
    old = sweeps.read(sweep.folder) or new
    failed = dict(old.failed)
    if outcome is not None:
        done = {job.name for job in outcome.done}
        failed = {k: x for k, x in old.failed.items() if k not in done} | outcome.failed
    return SweepRecord(
        methods={**old.methods, **new.methods},
        seeds=sorted({*old.seeds, *new.seeds}),
        rates=new.rates or old.rates,
        margin=old.margin if new.margin is None else new.margin,
        runs={name: {**old.runs.get(name, {}), **runs.get(name, {})} for name in {**old.runs, **runs}},
        failed=failed,
    )


def identity(config: Mapping[str, Any]) -> str:
    """A text that two resolved recipes share if they compute the same. Directory and settings of execution are left
    out, and the variant is in its resolved form."""
    rest = {k: x for k, x in config.items() if k != "variant"}
    return json.dumps([_computed(rest), config["variant"].get("source")], sort_keys=True)


def _same(a: SweptMethod, b: SweptMethod) -> bool:
    return identity(a.config) == identity(b.config)


def _computed(tree: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """A tree without the settings of execution."""
    kept = {k: x for k, x in tree.items() if not f"{at}{k}.".startswith(recipe.EXECUTION)}
    return {k: _computed(x, f"{at}{k}.") if isinstance(x, Mapping) else x for k, x in kept.items()}


def shared(jobs: Mapping[K, Job]) -> dict[K, Job]:
    """The same jobs, with one for all that compute the same: the one whose directory exists, or else the first."""
    first: dict[str, Job] = {}
    keys = {k: identity(job.config) for k, job in jobs.items()}
    for k, job in jobs.items():
        kept = first.setdefault(keys[k], job)
        if job.directory.exists() and not kept.directory.exists():
            first[keys[k]] = job
    return {k: first[key] for k, key in keys.items()}


def unique(jobs: Mapping[Any, Job]) -> dict[str, Job]:
    """Each job once, by its name, in the order in which they came."""
    return {job.name: job for job in jobs.values()}


def introduction(sweep: Sweep, jobs: Mapping[tuple[str, int], Job], pilot: str | None = None) -> list[str]:
    """Notes on a sweep before it starts, in lines: how the methods differ, and what its seeds can show.

    Args:
      sweep: the sweep.
      jobs: of `Sweep.jobs`.
      pilot: folder of runs whose spread stands for that of the sweep's runs; None for none.
    """
    lines, seed = [], sweep.seeds[0]
    for name, method in sweep.methods.items():
        if method.lacks:
            lines.append(f"{name}: has no option {', '.join(method.lacks)}; it runs without")
        if jobs[name, seed].name != f"{name}_{seed}":
            lines.append(f"{name}: the same resolved recipe as {jobs[name, seed].name}, run once for both")
        if (other := method.control or method.baseline) is not None:
            lines += _pair(name, method, other, sweep.methods[other])
    return lines + _seeds(record(sweep, jobs), pilot)


def _pair(name: str, method: SweptMethod, other: str, against: SweptMethod) -> list[str]:
    """How a method differs from the one that it is compared with, and a warning if that is more than its mechanism."""
    a, b = against.config["method"], method.config["method"]
    if not (line := in_a_line(differences(a, b))):
        return [f"warning: {name} and {other} are the same under this recipe, whose settings give both the mechanism"]
    lines = [f"{name}, compared with {other}: {line}"]
    if found := matching.unmatched(a, b):
        each = ", ".join(f"{what} ({x}; {other} {y})" for what, (y, x) in found.items())
        remedy = ""
        if method.control is None and method.has_control:
            remedy = "; --controls adds a control with the same settings"
        lines.append(f"warning: {name} and {other} also differ in other settings: {each}{remedy}")
    return lines


def _seeds(record: SweepRecord, pilot: str | None) -> list[str]:
    """The differences that the seeds of a sweep can show."""
    count, seeds = max(len(record.comparisons), 1), len(record.seeds)
    least = power.smallest_difference(1.0, seeds, comparisons=count)
    if least is None:
        lines = ["warning: one seed gives no p-value; give at least --seeds 2, and more to show small differences"]
    else:
        lines = [
            f"seeds {seeds}, comparisons {count}: they show a difference of {least:.2g} times its spread between "
            "seeds, at 80 % power (paired t, 5 % over all comparisons)"
        ]
    if pilot is None:
        return lines
    found = power.read_pilot(pilot)
    how = "pairs of runs" if found.spread.paired else "runs of one method, as if unpaired"
    unfinished = f", {found.unfinished} not finished" if found.unfinished else ""
    difference = "" if least is None else f", so that is a difference of {found.spread.sd * least:.3g}"
    lines.append(
        f"{pilot}: a standard deviation is {found.spread.sd:.3g} of {found.metric} by {how} ({found.runs} runs"
        f"{unfinished}, {found.spread.freedom} degrees of freedom){difference}"
    )
    return lines


def _typed(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a variant as it takes them: `1e-4`, which is a text in YAML, becomes a number."""
    section = variants.section(spec["name"])
    kinds = typing.get_type_hints(section)
    given = [field.name for field in dataclasses.fields(section) if field.name in spec]
    some = dataclasses.make_dataclass("Options", [(name, kinds[name]) for name in given], frozen=True)
    built = settings.build(some, {name: spec[name] for name in given})
    return {name: getattr(built, name) for name in given}


def read_variants(text: str) -> tuple[str | dict[str, Any], ...]:
    """The variants in ``--variants``: names, or mappings as YAML, with commas between them.

    Example:
      >>> read_variants("grpo, {name: dapo, clip_high: 0.3}")
      ('grpo', {'name': 'dapo', 'clip_high': 0.3})
    """
    tree, _ = settings.override({}, [f"variants=[{text}]"])
    for variant in tree["variants"]:
        if not isinstance(variant, str) and not (isinstance(variant, dict) and isinstance(variant.get("name"), str)):
            raise UserError(f"--variants: {variant!r} is neither a name nor a mapping such as {{name: dapo, k: 1}}")
    return tuple(tree["variants"])


def read_seeds(text: str) -> tuple[int, ...]:
    """The seeds in ``--seeds``, which has their number (from 0 on), or the first and the last.

    Example:
      >>> read_seeds("3"), read_seeds("6-8")
      ((0, 1, 2), (6, 7, 8))
    """
    first, dash, last = text.partition("-")
    if not (first.isdecimal() and (last.isdecimal() if dash else True)):
        raise UserError(f"--seeds {text}: give how many, such as 5, or the first and the last, such as 5-9")
    found = tuple(range(int(first), int(last) + 1) if dash else range(int(first)))
    if not found:
        raise UserError(f"--seeds {text}: there are none; give how many, such as 5, or the first and the last")
    return found
