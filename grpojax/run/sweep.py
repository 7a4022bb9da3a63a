"""Several methods by several seeds: which runs that makes, and which learning rate each method gets.

Where the recipe has ``train.tokens``, all runs draw as many tokens, whatever a method drops, probes or compares with,
and its schedules follow the share of them. Where it has ``train.steps``, each method updates as often, and one that
draws more a step (a filter) costs more: the report says so.
"""

import dataclasses
import hashlib
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpojax.host import settings
from grpojax.host.console import log
from grpojax.host.errors import UserError, require
from grpojax.host.files import write_json
from grpojax.records.metrics import read_metrics
from grpojax.run import recipe
from grpojax.run.jobs import Job, Outcome, Queue

LONGEST_LABEL = 120  # characters of a method in the name of a directory, which may have 255


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is to be compared.

    Attributes:
      config: path of the recipe.
      overrides: settings that replace its own in every run.
      variants: names, or mappings with a name and options, as ``variant`` of a recipe.
      seeds: of the runs.
      folder: where everything goes: ``runs/METHOD_SEED``, ``rates/METHOD_RATE``, ``state/`` and ``cache/``.
      rates: learning rates to choose from, for each method by itself; none takes the recipe's.
      rate_share: of the recipe's steps or tokens, what the runs that the choice is made by have.
    """

    config: str
    overrides: tuple[str, ...] = ()
    variants: tuple[str | dict[str, Any], ...]
    seeds: Sequence[int]
    folder: Path
    rates: tuple[float, ...] = ()
    rate_share: float = 0.25

    def __post_init__(self) -> None:
        require(self, rate_share="(0, 1]")
        if self.rate_share != type(self).rate_share and not self.rates:
            raise UserError(f"--rate-share {self.rate_share:g}: goes with --rates")
        if not self.variants:
            raise UserError("--variants: give one at least, such as --variants grpo,dapo")
        own = ("variant", "train.seed", "run.dir", *(("optimizer.learning_rate",) if self.rates else ()))
        for text in self.overrides:
            key = text.partition("=")[0].strip()
            if taken := next((name for name in own if key == name or key.startswith(name + ".")), None):
                raise UserError(f"{text}: the sweep sets {taken} itself; leave it out")
        if len(set(self.rates)) < len(self.rates) or any(not (0 < x < math.inf) for x in self.rates):
            raise UserError(f"--rates {','.join(f'{x:g}' for x in self.rates)}: give different numbers over 0")

    @property
    def rates_seed(self) -> int:
        """Of the runs that learning rates are chosen by: no other run has it."""
        return max(self.seeds) + 1

    def methods(self) -> dict[str, str]:
        """The name of each method's directories, and the override that makes it; raises for one that is there twice."""
        found: dict[str, str] = {}
        for variant in self.variants:
            name, value = label(variant), f"variant={json.dumps(variant)}"
            if name in found:
                raise UserError(f"--variants: {name} is there twice; give it once")
            found[name] = value
        return found

    def job(self, kind: str, name: str, *overrides: str) -> Job:
        """One run; raises `UserError` where its recipe is not right."""
        directory = self.folder / kind / name
        given = (*self.overrides, *overrides, f"run.dir={json.dumps(str(directory))}")
        config = recipe.load(self.config, (*given, "critic=null"))
        if config.method.variant.critic is None:  # a section for those of the methods that have one
            given = (*given, "critic=null")
        else:
            config = recipe.load(self.config, given)
        command = (sys.executable, "-m", "grpojax.tools.cli", "train", self.config, *given)
        length = {"steps": config.train.steps, "tokens": config.train.tokens}
        return Job(name=name, directory=directory, command=command, **length, config=config.resolved())

    def jobs(self, rates: Mapping[str, float] | None = None) -> list[Job]:
        """All runs, seed by seed, so that a sweep cut short has some seeds of every method.

        Args:
          rates: the learning rate of each method; those without one are left out. None takes the recipe's for all.
        """
        methods = self.methods()
        made = [
            self.job("runs", f"{name}_{seed}", value, f"train.seed={seed}", *_rate(rates, name))
            for seed in self.seeds
            for name, value in methods.items()
            if rates is None or name in rates
        ]
        asked = next((text for text in self.overrides if re.match(r"\s*critic\b", text)), None)
        if asked is not None and all(job.config["critic"] is None for job in made):
            raise UserError(f"{asked}: none of the methods has a critic; leave it out")
        return made

    def rate_jobs(self) -> dict[str, dict[float, Job]]:
        """By method and rate, the runs that the choice is made by: shorter, and of a seed that no other run has."""
        first = next(iter(self.methods().values()))
        run_dir = f"run.dir={json.dumps(str(self.folder))}"
        config = recipe.load(self.config, (*self.overrides, first, run_dir, "critic=null"))
        if not config.data.validation:
            raise UserError("--rates chooses by held-out reward: give the recipe data.validation")
        train, warmup = config.train, config.optimizer.warmup_steps
        if train.steps is None:
            length = f"train.tokens={max(1, round((train.tokens or 0) * self.rate_share))}"
        else:
            steps = max(1, round(train.steps * self.rate_share))
            length = f"train.steps={steps}"
            if warmup >= steps * train.updates_a_rollout:
                raise UserError(
                    f"--rate-share {self.rate_share:g}: {steps} steps end before optimizer.warmup_steps={warmup}; give "
                    "more, or a shorter warmup"
                )
        extra = (f"train.seed={self.rates_seed}", length, "profile.steps=null")
        return {
            name: {
                x: self.job("rates", f"{name}_{x:g}", value, *extra, f"optimizer.learning_rate={x!r}")
                for x in self.rates
            }
            for name, value in self.methods().items()
        }


def _rate(rates: Mapping[str, float] | None, name: str) -> list[str]:
    return [] if rates is None else [f"optimizer.learning_rate={rates[name]!r}"]


def read_variants(text: str) -> tuple[str | dict[str, Any], ...]:
    """What ``--variants`` says: names, or mappings as YAML, with commas between them.

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
    """What ``--seeds`` says: how many, from 0 on, or the first and the last.

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


def label(variant: str | Mapping[str, Any]) -> str:
    """A method's part of a directory's name.

    Example:
      >>> label("my_variants:mine"), label({"name": "dapo", "clip_high": 0.3})
      ('my_variants-mine', 'dapo-clip_high=0.3')
    """
    given = {"name": variant} if isinstance(variant, str) else variant
    text = "-".join([given["name"], *(f"{k}={v}" for k, v in given.items() if k != "name")])
    text = re.sub(r"[^\w.=+-]+", "-", text)
    if len(text) <= LONGEST_LABEL:
        return text
    return f"{text[:LONGEST_LABEL]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def run(sweep: Sweep, queue: Queue) -> Outcome:
    """Chooses learning rates where there are some to choose from, and makes the runs that are not made yet.

    Raises:
      UserError: a recipe is not right; nothing has been started then.
    """
    jobs = sweep.jobs()  # all recipes are looked at before anything starts
    if not sweep.rates:
        return queue.run(jobs)
    chosen, outcome = choose_rates(sweep, queue)
    if outcome.stopped:
        return outcome
    made = queue.run(sweep.jobs(chosen))
    made.failed = outcome.failed | made.failed
    return made


def choose_rates(sweep: Sweep, queue: Queue) -> tuple[dict[str, float], Outcome]:
    """The learning rate of each method with the highest last held-out reward; of equal ones the smallest.

    Each method has as many runs of the same length. A choice, once made, is kept in ``rates.json``, so that a sweep
    that is started again goes on with it; not one made without a run that failed, which is tried again then. A method
    none of whose runs has a held-out reward is left out, said, and counted among what failed.
    """
    by_method = sweep.rate_jobs()
    kept_in = sweep.folder / "rates.json"
    kept, unkept = _read(kept_in), {}
    asked = {
        name: {"seed": sweep.rates_seed, "runs": [job.config for job in jobs.values()]}
        for name, jobs in by_method.items()
    }
    asked = json.loads(json.dumps(asked))
    open_ones = [name for name in by_method if kept.get(name, {}).get("asked") != asked[name]]
    # By rate, so that where several run at once the first of a method has compiled what the others find in the cache.
    outcome = queue.run([by_method[name][x] for x in sweep.rates for name in open_ones])
    if outcome.stopped:
        return {}, outcome
    for name in open_ones:
        jobs = by_method[name]
        rewards = {x: r for x, job in jobs.items() if job in outcome.done and (r := last_reward(job)) is not None}
        if not rewards:
            log.warning("%s: no learning rate gave a held-out reward; its runs are left out", name)
            kept.pop(name, None)
            outcome.failed[name] = ["no learning rate gave a held-out reward"]
            continue
        best = min(rewards, key=lambda x: (-rewards[x], x))
        choice = {"asked": asked[name], "rate": best, "rewards": {f"{x:g}": r for x, r in rewards.items()}}
        if any(job.name in outcome.failed for job in jobs.values()):
            unkept[name] = choice
            continue
        kept[name] = choice
        write_json(kept_in, kept)
    made = kept | unkept
    chosen = {name: made[name]["rate"] for name in by_method if name in made}
    for name, rate in chosen.items():
        each = ", ".join(f"{x} {r:.3f}" for x, r in made[name]["rewards"].items())
        edge = "; it is at the end of the range" if len(sweep.rates) > 2 and rate in _ends(sweep.rates) else ""
        log.info(
            "%s: learning rate %g, by held-out reward after %.0f %% of a run, seed %d: %s%s",
            name,
            rate,
            100 * sweep.rate_share,
            sweep.rates_seed,
            each,
            edge,
        )
    return chosen, outcome


def last_reward(job: Job) -> float | None:
    """The held-out reward of a run's last evaluation; None where it has none, whatever those before it had."""
    rewards = [line["eval/reward"] for line in read_metrics(job.directory) if "eval/reward" in line]
    return rewards[-1] if rewards else None


def _ends(rates: Sequence[float]) -> Iterable[float]:
    return min(rates), max(rates)


def _read(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
