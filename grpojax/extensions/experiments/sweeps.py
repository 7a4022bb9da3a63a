"""The record of a sweep, in two files of its folder: ``sweep.json`` and ``rates.json``.

``sweep.json``, as `write` makes it and `read` reads it::

    {"methods": {LABEL: {"variant": "dapo" or {"name": "dapo", "clip_high": 0.3},
                         "control": LABEL or null,
                         "baseline": LABEL or null}},
     "seeds": [0, 1, 2],
     "rates": [1e-4, 3e-4, 1e-3],
     "margin": 0.02 or null,
     "runs": {LABEL: {"0": "dapo-clip_high=0.3_0"}},
     "failed": {FOLDER: {"status": 1, "step": 4, "lines": ["..."]}}}

``runs`` names the folder of each run inside ``runs/``. Two methods with the same resolved recipe share a folder, which
has the name of one of them. So find the run of a method and a seed in this table, not by the folder's name.

If the sweep has searched for learning rates, there is ``rates.json``, as `write_rates` makes it and `read_rates` reads
it::

    {LABEL: {"asked": digest, "rate": 3e-4, "edge": null or "lowest" or "highest",
             "curve": [{"rate": 1e-4, "mean": 0.31, "values": {"1000": 0.30, "1001": 0.32, "1002": 0.0},
                        "failed": {"1002": {"status": 1, "step": 4, "lines": ["..."]}}}]}}
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from etils import epath

from grpojax.host import files
from grpojax.host.errors import UserError

T = TypeVar("T")

SWEEP, RATES = "sweep.json", "rates.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """How a run ended that did not reach its last step.

    Attributes:
      status: exit status of its process; negative for the signal that killed it, None if no run was made.
      step: the last step that it recorded.
      lines: the last lines that it printed.
    """

    status: int | None
    step: int
    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """A method of a sweep.

    Attributes:
      variant: its name, or a mapping with its name and options, as it was given to the sweep.
      control: label of the same method with its one mechanism off; None if the sweep has none.
      baseline: label of GRPO; None for GRPO itself, for a control that ``--controls`` added, and in a sweep without
        GRPO.
    """

    variant: str | Mapping[str, Any]
    control: str | None = None
    baseline: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepRecord:
    """``sweep.json``.

    Attributes:
      methods: the methods by label.
      seeds: seeds of the runs.
      rates: learning rates to choose from; empty for the recipe's own.
      margin: differences within it count as none in an equivalence test; None if none was given.
      runs: label -> seed -> folder inside ``runs/``.
      failed: folder -> how its run ended. A run that is started again and finishes is not in it.
    """

    methods: Mapping[str, Compared]
    seeds: Sequence[int]
    rates: Sequence[float] = ()
    margin: float | None = None
    runs: Mapping[str, Mapping[int, str]] = dataclasses.field(default_factory=dict)
    failed: Mapping[str, Failure] = dataclasses.field(default_factory=dict)

    @property
    def comparisons(self) -> list[tuple[str, str]]:
        """The pairs of each method with its control and with GRPO, one pair if these are the same.

        Example:
          >>> methods = {"a": Compared(variant="a", control="c", baseline="grpo"), "c": Compared(variant="c")}
          >>> SweepRecord(methods=methods, seeds=(0,)).comparisons
          [('a', 'c'), ('a', 'grpo')]
        """
        pairs = [(label, other) for label, m in self.methods.items() for other in (m.control, m.baseline)]
        return list(dict.fromkeys((label, other) for label, other in pairs if other is not None))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
    """The result of a method with one learning rate.

    Attributes:
      rate: the learning rate.
      mean: the mean of ``values``.
      values: seed -> last held-out reward; for a failed run the last one that it recorded, or 0.
      failed: seed -> how that run ended.
    """

    rate: float
    mean: float
    values: Mapping[int, float]
    failed: Mapping[int, Failure]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
    """A method's learning rate, and the results that it was chosen by.

    Attributes:
      asked: digest of the recipes of the search; a different digest makes a new search.
      rate: the chosen rate; None if no run had a held-out reward.
      edge: the end of the range at which the rate still is after all extensions; None if it is inside.
      curve: the results by rate, from low to high.
    """

    asked: str
    rate: float | None
    edge: str | None
    curve: Sequence[Rate]


def write(folder: epath.PathLike, record: SweepRecord) -> None:
    """Writes ``sweep.json``, whole or not at all."""
    files.write_json(files.path(folder) / SWEEP, dataclasses.asdict(record))


def read(folder: epath.PathLike) -> SweepRecord | None:
    """Reads ``sweep.json`` of a sweep's folder; None if there is none. Raises `UserError` for a broken one."""
    file = files.path(folder) / SWEEP
    return _read(file, _record) if file.exists() else None


def write_rates(folder: epath.PathLike, chosen: Mapping[str, Chosen]) -> None:
    """Writes ``rates.json``, whole or not at all."""
    tree = {label: dataclasses.asdict(each) for label, each in chosen.items()}
    files.write_json(files.path(folder) / RATES, tree)


def read_rates(folder: epath.PathLike) -> dict[str, Chosen]:
    """Reads a sweep's ``rates.json``, by label; empty if there is none. Raises `UserError` for a broken one."""
    file = files.path(folder) / RATES
    return _read(file, lambda tree: {label: _chosen(x) for label, x in tree.items()}) if file.exists() else {}


def _record(tree: Mapping[str, Any]) -> SweepRecord:
    return SweepRecord(
        methods={label: Compared(**m) for label, m in tree["methods"].items()},
        seeds=tuple(tree["seeds"]),
        rates=tuple(tree["rates"]),
        margin=tree["margin"],
        runs={label: _by_seed(each) for label, each in tree["runs"].items()},
        failed={name: _failure(x) for name, x in tree["failed"].items()},
    )


def _chosen(tree: Mapping[str, Any]) -> Chosen:
    curve = [
        Rate(
            rate=x["rate"],
            mean=x["mean"],
            values=_by_seed(x["values"]),
            failed={seed: _failure(f) for seed, f in _by_seed(x["failed"]).items()},
        )
        for x in tree["curve"]
    ]
    return Chosen(asked=tree["asked"], rate=tree["rate"], edge=tree["edge"], curve=tuple(curve))


def _by_seed(tree: Mapping[str, Any]) -> dict[int, Any]:
    return {int(seed): x for seed, x in tree.items()}


def _failure(tree: Mapping[str, Any]) -> Failure:
    return Failure(status=tree["status"], step=tree["step"], lines=tuple(tree["lines"]))


def _read(file: epath.Path, build: Callable[[Any], T]) -> T:
    try:
        return build(json.loads(files.read(file).decode()))
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as e:
        raise UserError(
            f"{file}: cannot be read ({type(e).__name__}: {e}); remove it, and start the sweep again"
        ) from e
