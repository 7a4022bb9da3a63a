"""The whole state of a run on disk, through orbax: asynchronous, atomic, restorable onto another mesh.

Weights, optimiser state and a JSON record are separate items. Orbax writes into a temporary directory and renames it
when all is there, so a save that was cut short is never seen by a restore.
"""

import dataclasses
import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx

from grpojax.host import processes as hosts
from grpojax.host.errors import UserError
from grpojax.types import TrainState

logging.getLogger("absl").setLevel(logging.ERROR)


class SaveError(Exception):
    """A checkpoint could not be written; the ones before it are untouched."""


class Checkpoints:
    """Checkpoints of one run directory.

    Args:
      directory: where they live.
      keep: how many of the newest stay.
      best: name of a metric whose largest value's checkpoint stays as well; None for none.
    """

    def __init__(self, directory: str | Path, *, keep: int = 2, best: str | None = None):
        self.directory = Path(directory).absolute()
        self._keep, self._best = keep, best
        self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        policy, best = ocp.checkpoint_managers.LatestN(self._keep), self._best
        if best is not None:
            policy = ocp.checkpoint_managers.AnyPreservationPolicy([
                policy,
                ocp.checkpoint_managers.BestN(
                    get_metric_fn=lambda m: m.get(best, float("-inf")), n=1, keep_checkpoints_without_metrics=False
                ),
            ])  # fmt: skip
        return ocp.CheckpointManager(
            self.directory,
            item_names=("params", "opt_state", "meta"),
            options=ocp.CheckpointManagerOptions(preservation_policy=policy, cleanup_tmp_directories=True),
        )

    def latest(self) -> int | None:
        """The newest complete checkpoint's step."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def best(self) -> int | None:
        """The step with the largest value of the best metric; None where none was measured."""
        return self._manager.best_step()

    def save(self, step: int, state: TrainState, meta: dict[str, Any], metrics: dict[str, float] | None = None) -> None:
        """Starts a save of the state after ``step`` steps; the arrays are copied before it returns.

        Raises `SaveError` where this save, or the one before it that was still under way, could not be written.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(nnx.to_pure_dict(state.params)),
                    opt_state=ocp.args.StandardSave(_pure(state)),
                    meta=ocp.args.JsonSave(meta),
                ),
                metrics=metrics,
            )
        except Exception as e:
            self._recover(e)

    def wait(self) -> None:
        """Until the save in flight is on disk; raises `SaveError` if it cannot get there."""
        try:
            self._manager.wait_until_finished()
        except Exception as e:
            self._recover(e)

    def _recover(self, error: Exception):
        """A manager whose save failed is not used again: what comes next gets a new one."""
        try:
            self._manager.close()
        except Exception as e:
            logging.getLogger("grpojax").debug("closing after a failed save: %s", e)
        try:
            self._manager = self._open()
        except OSError as e:
            raise SaveError(f"{self.directory}: {e}") from error
        raise SaveError(f"{self.directory}: {type(error).__name__}: {error}") from error

    def restore_newest(self, abstract: TrainState) -> tuple[TrainState, dict[str, Any], list[int]]:
        """The newest checkpoint that can be read, and the steps of those that could not.

        They are moved aside, to ``broken/`` beside the checkpoints, so that their steps can be saved again.
        """
        broken: list[int] = []
        first: Exception | None = None
        for step in reversed(self.steps()):
            try:
                state, meta = self.restore(abstract, step)
            except Exception as e:
                first = first or e
                broken.append(step)
                continue
            for bad in broken if hosts.is_first() else ():
                aside = self.directory.parent / "broken" / str(bad)
                aside.parent.mkdir(exist_ok=True)
                shutil.rmtree(aside, ignore_errors=True)
                shutil.move(self.directory / str(bad), aside)
            if broken:
                self._manager.reload()
            return state, meta, broken
        raise UserError(f"{self.directory}: no checkpoint can be read; the newest: {first}") from first

    def restore(self, abstract: TrainState, step: int | None = None) -> tuple[TrainState, dict[str, Any]]:
        """The state and its record, laid out as ``abstract`` says (any mesh)."""
        step = self.latest() if step is None else step
        if step is None or step not in self._manager.all_steps():
            raise UserError(f"{self._manager.directory}: no checkpoint{'' if step is None else f' of step {step}'}")
        got = self._manager.restore(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardRestore(nnx.to_pure_dict(abstract.params)),
                opt_state=ocp.args.StandardRestore(_pure(abstract)),
                meta=ocp.args.JsonRestore(),
            ),
        )
        leaves = jax.tree.leaves(got["opt_state"])
        rest = jax.tree.unflatten(jax.tree.structure((abstract.step, abstract.opt_state)), leaves)
        return dataclasses.replace(
            abstract, params=_with_values(abstract.params, got["params"]), step=rest[0], opt_state=rest[1]
        ), got["meta"]

    def restore_params(self, abstract_params, step: int | None = None):
        """Only the weights."""
        step = self.latest() if step is None else step
        if step is None or step not in self._manager.all_steps():
            raise UserError(f"{self._manager.directory}: no checkpoint{'' if step is None else f' of step {step}'}")
        args = ocp.args.Composite(params=ocp.args.StandardRestore(nnx.to_pure_dict(abstract_params)))
        return _with_values(abstract_params, self._manager.restore(step, args=args)["params"])

    def close(self) -> None:
        try:
            self._manager.close()
        except Exception as e:
            raise SaveError(f"{self.directory}: {type(e).__name__}: {e}") from e


def _pure(state: TrainState) -> dict[str, Any]:
    """Step and optimiser state as a flat dict: optax's own containers are no part of the format."""
    leaves = jax.tree.leaves((state.step, state.opt_state))
    return {f"{i:04d}": leaf for i, leaf in enumerate(leaves)}


def _with_values(params, values):
    return jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(values))
