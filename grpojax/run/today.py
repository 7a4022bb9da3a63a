"""The day that a chat template writes, which stays the same for a whole run."""

import dataclasses
import datetime
import json
from typing import Any, TypeVar

from etils import epath

from grpojax import data
from grpojax.host import files, processes

T = TypeVar("T")


def with_day(recipe: T, tokenizer: Any, run_dir: epath.PathLike | None = None) -> T:
    """The recipe with the day that its prompts state, if its chat template writes one.

    Every process must call it. The day is the recipe's own, or else the one on which the run in ``run_dir`` was
    started, or else the first process's today.

    Args:
      recipe: has a section ``data`` with ``today`` and ``template``.
      tokenizer: the model's.
      run_dir: directory of a run, new or to be resumed; None if there is no run.
    """
    section: Any = getattr(recipe, "data")  # noqa: B009  recipes of several classes
    day = _started(run_dir) or datetime.date.today().isoformat()
    day = processes.meet(day)[0]  # also if it is not used: all processes must come here
    if section.today is not None or section.template == "plain" or not data.writes_day(tokenizer):
        return recipe
    section = dataclasses.replace(section, today=datetime.date.fromisoformat(day))
    return dataclasses.replace(recipe, data=section)  # pyrefly: ignore


def _started(run_dir: epath.PathLike | None) -> str | None:
    """The day that a run was started with, from its config.json."""
    if run_dir is None:
        return None
    try:
        stored = json.loads((files.path(run_dir) / "config.json").read_text())
        return stored["data"]["today"]
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or it is refused later
        return None
