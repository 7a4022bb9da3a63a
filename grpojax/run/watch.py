"""Watches a run's metrics, warns, and can stop the run.

An alarm rings once per run. The line of ``metrics.jsonl`` for that step has its name after `KEY`, with the value 1.
"""

import dataclasses
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from grpojax.evaluation import Judge
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.run import alarms
from grpojax.run.alarms import FAIL, INVALID, READS, REWARD, RIGHT, SAID, SAME, Limits
from grpojax.run.run_state import State
from grpojax.run.sections import TrainConfig
from grpojax.run.store import Store

KEY = "watch/"


class Watch:
    """Warns once of each kind of trouble.

    Args:
      directory: the run's directory, for the hint to its samples.
      limits: when it rings.
      judge: says which reward marks right samples; None without one.
      problems: number of held-out problems.
      comparable: whether the prompts of all steps are alike, so that their rewards can be compared.
      uniform: whether groups with equal rewards teach something, too; asked when it matters.
      errors: what rewards said of the first sample that was invalid, by "name/reason"; it grows with the run.
      stops: whether an alarm stops the run.

    Attributes:
      rings: the alarms that the last values have set off, and the message of each.
    """

    def __init__(
        self,
        directory: epath.Path,
        limits: Limits = Limits(),  # noqa: B008
        *,
        judge: Judge | None = None,
        problems: int = 0,
        comparable: bool = True,
        uniform: Callable[[], bool] = lambda: False,
        errors: Mapping[str, str] = types.MappingProxyType({}),
        stops: bool = False,
    ):
        self._directory, self.limits, self._problems, self._uniform = directory, limits, problems, uniform
        self.stops, self._errors = stops, errors
        self._rewards = [REWARD, *([f"rewards/{judge.metric}/mean"] if judge else [])] if comparable else []
        self._tracks = {name: alarms.Track(limits) for name in (*READS, *self._rewards)}
        self._rung: set[str] = set()
        self.rings: dict[str, str] = {}

    @property
    def all_invalid(self) -> bool:
        """Whether there were steps, but none of their samples had a valid reward."""
        return self._tracks[INVALID].count > 0 and self._tracks[INVALID].least >= 1

    def replay(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Takes in the metrics of earlier steps, so that a resumed run rings like one that never stopped."""
        for line in lines:
            self._add(line)
            self._rung |= {name.removeprefix(KEY) for name in line if name.startswith(KEY)}

    def note(self, number: int, values: Mapping[str, float]) -> dict[str, float]:
        """Takes in the metrics of a step or of an evaluation. Returns the alarms that ring now, as metrics.

        Args:
          number: the step.
          values: its metrics.
        """
        self._add(values)
        found = alarms.ringing(
            self._tracks,
            self.limits,
            values,
            rewards=self._rewards,
            problems=self._problems,
            errors=self._errors,
        )
        fresh = {name: figures for name, figures in found.items() if name not in self._rung}
        if alarms.DIFFERENCES & fresh.keys() and self._uniform():
            self._rung |= alarms.DIFFERENCES  # they mean nothing in such a run
            fresh = {name: figures for name, figures in fresh.items() if name not in self._rung}
        self.rings = {name: f"{SAID[name][0]}: {x}; {SAID[name][1]}" for name, x in fresh.items()}
        self._rung |= fresh.keys()
        for name, ring in self.rings.items():
            log.warning("step %d: %s: %s, or look at the samples: grpojax show %s", number, name, ring, self._directory)
        return {f"{KEY}{name}": 1.0 for name in self.rings}

    def _add(self, values: Mapping[str, Any]) -> None:
        for name, track in self._tracks.items():
            x = values.get(name)
            if x is not None and name in (FAIL, RIGHT):  # a group whose rewards differ still teaches something
                x = min(x, values.get(SAME) or 0.0)
            if x is not None and math.isfinite(x):
                track.add(float(x))


def replay(watch: Watch, store: Store, lines: Sequence[Mapping[str, Any]]) -> None:
    """Passes the recorded metrics of finished steps to the watch; evaluations only with unchanged settings."""
    asked = bool(lines) and store.run_directory.changed(("train.eval_", "evaluate", "rewards"))
    watch.replay(x for x in lines if not (asked and "eval/reward" in x))


def heed(watch: Watch, number: int, store: Store, state: State, *, ends: bool) -> State:
    """Acts on an alarm: keeps the best, or else the newest, checkpoint from before it. Returns the state with
    the alarm; `stop` ends a run whose alarm asks for that.

    Alarms within a window of the previous one belong to the same collapse, and share the first one's checkpoint.

    Args:
      watch: the watch that has just noted metrics, which rings.
      number: the step.
      store: of the run.
      state: of the run; its ``alarm`` says what rang.
      ends: whether this was the last step, after which there is nothing to stop.
    """
    stop = watch.stops and not ends
    before = state.alarm
    if before is None or number - before["step"] > watch.limits.window:
        store.wait()
        before = {"checkpoint": store.checkpoints.good(before=number)}
        store.checkpoints.keeping.held = before["checkpoint"]
    name, ring = next(iter(watch.rings.items()))
    alarm = {**before, "step": number, "stopped": f"step {number}: {name}: {ring}" if stop else None}
    return dataclasses.replace(state, alarm=alarm)


def stop(store: Store, state: State) -> None:
    """Raises `UserError` if an alarm has rung that stops the run."""
    if state.alarm is not None and state.alarm["stopped"]:
        raise UserError(_stopped(store, state.alarm))


def resume(store: Store, state: State, train: TrainConfig) -> State:
    """Restores the effects of `heed` in a resumed run. Returns its state, in which no alarm stops it.

    Args:
      store: of the run.
      state: the state in the newest checkpoint.
      train: says what an alarm does.

    Raises:
      UserError: an alarm has stopped the run, and would stop it again.
    """
    if (alarm := state.alarm) is None:
        return state
    store.checkpoints.keeping.held = alarm["checkpoint"]
    if train.on_collapse == "stop":
        stop(store, state)
    return dataclasses.replace(state, alarm={**alarm, "stopped": None})


def _stopped(store: Store, alarm: Mapping[str, Any]) -> str:
    good, run = alarm["checkpoint"], store.directory
    remedy = "no checkpoint is from before it: give a new run train.checkpoint_every"
    if good is not None:
        remedy = f"a new run can start from before it: grpojax export {run} --step {good} --to FOLDER"
    return f"{run} stopped at {alarm['stopped']}\n{remedy}; train.on_collapse=warn goes on from here as it is"
