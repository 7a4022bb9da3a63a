"""The keys of TRL, verl and Tunix next to ours: one table, for ``docs/start/coming_from.md`` and for errors.

If an unknown key is another trainer's, the error names our key (`keys_for`). Nothing else reads the table.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

TRAINERS = {"trl": "TRL", "verl": "verl", "tunix": "Tunix"}
_CODE = r"`([^`]+)`"
_KEY = r"[a-z_0-9]+(?:\.[a-z_0-9]+)*"

Row = Mapping[
    str, str
]  # one setting in each trainer, as Markdown: "ours", and "trl", "verl", "tunix" where they have it


@functools.cache
def tables() -> Mapping[str, Sequence[Row]]:
    """The tables by title; the file says what a cell has."""
    file = Path(__file__).parents[1] / "assets" / "other_trainers.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8"))


@dataclasses.dataclass(frozen=True)
class Meant:
    """Our keys for another trainer's key.

    Attributes:
      trainers: which trainers have it, such as "TRL's and Tunix's".
      keys: ours; none if there are none.
      remedy: what to do, in words.
    """

    trainers: str
    keys: tuple[str, ...]
    remedy: str


def keys_for(name: str) -> Iterator[Meant]:
    """Our keys for another trainer's, by the last part of its name, from each row that has it and names ours otherwise.

    There may be several, each for another kind of run: an earlier one is of fewer runs.

    Example:
      >>> next(keys_for("beta"))
      Meant(trainers="TRL's and Tunix's", keys=('variant.kl_coef',), remedy='set variant.kl_coef')
      >>> next(keys_for("epsilon")).remedy
      'set variant.clip_low and variant.clip_high'
      >>> next(keys_for("actor_rollout_ref.rollout.n")).remedy
      'set rollout.group'
      >>> [meant.keys for meant in keys_for("num_train_epochs")]
      [('train.epochs',), ('train.steps',)]
    """
    last = name.rpartition(".")[2]
    for row in (row for rows in tables().values() for row in rows):
        found = {field: code for field in TRAINERS for code in _codes(row.get(field, "")) if _last(code) == last}
        codes = [*_codes(row["ours"], " and ")]
        if not found or last in map(_last, codes):
            continue
        whose = " and ".join(f"{TRAINERS[field]}'s" for field in found)
        if not codes:
            yield Meant(whose, (), f"leave it out: {row['ours']}")
            continue
        keys = tuple(re.match(_KEY, code)[0] for code in codes)  # pyrefly: ignore
        field, given = next(iter(found.items()))
        other = " (another number, see docs/start/coming_from.md)" if "÷" in row[field] else ""
        yield Meant(whose, keys, f"set {' and '.join(keys if '=' in given else codes)}{other}")


def _codes(cell: str, joined: str = ", | or ") -> Iterator[str]:
    """The keys that a cell starts with, ``joined`` by one of these."""
    start = re.match(rf"{_CODE}(?:(?:{joined}){_CODE})*", cell)
    return (code for code in re.findall(_CODE, start[0] if start else "") if re.match(_KEY + r"(?![\w(])", code))


def _last(code: str) -> str:
    found = re.match(_KEY, code)
    return found[0].rpartition(".")[2] if found else ""


def markdown(title: str) -> str:
    """A table of `tables` as Markdown."""
    lines = ["| grpojax | TRL | verl | Tunix |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row.get(field, '-') for field in ('ours', *TRAINERS))} |" for row in tables()[title]]
    return "\n".join(lines)
