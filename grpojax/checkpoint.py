"""The whole state of a run on disk, through orbax: asynchronous, atomic, restorable onto another mesh.

Weights, optimiser state and a JSON record are separate items. Orbax writes into a temporary directory and renames it
when all is there, so a save that was cut short is never seen by a restore.
"""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx

from grpojax.errors import UserError
from grpojax.types import TrainState

logging.getLogger("absl").setLevel(logging.ERROR)


class Checkpoints:
    """Checkpoints of one run directory.

    Args:
      directory: where they live.
      keep: how many of the newest stay.
      best: name of a metric whose largest value's checkpoint stays as well; None for none.
    """

    def __init__(self, directory: str | Path, *, keep: int = 2, best: str | None = None):
        policy = ocp.checkpoint_managers.LatestN(keep)
        if best is not None:
            policy = ocp.checkpoint_managers.AnyPreservationPolicy([
                policy,
                ocp.checkpoint_managers.BestN(
                    get_metric_fn=lambda m: m.get(best, float("-inf")), n=1, keep_checkpoints_without_metrics=False
                ),
            ])  # fmt: skip
        self._manager = ocp.CheckpointManager(
            Path(directory).absolute(),
            item_names=("params", "opt_state", "meta"),
            options=ocp.CheckpointManagerOptions(preservation_policy=policy, cleanup_tmp_directories=True),
        )

    def latest(self) -> int | None:
        """The newest complete checkpoint's step."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def save(
        self, step: int, state: TrainState, meta: dict[str, Any], metrics: dict[str, float] | None = None
    ) -> None:
        """Starts a save of the state after ``step`` steps; the arrays are copied before it returns."""
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(nnx.to_pure_dict(state.params)),
                opt_state=ocp.args.StandardSave(_pure(state)),
                meta=ocp.args.JsonSave(meta),
            ),
            metrics=metrics,
        )

    def restore(self, abstract: TrainState, step: int | None = None) -> tuple[TrainState, dict[str, Any]]:
        """The state and its record, laid out as ``abstract`` says (any mesh)."""
        step = self.latest() if step is None else step
        if step is None or step not in self._manager.all_steps():
            raise UserError(
                f"{self._manager.directory}: no checkpoint{'' if step is None else f' of step {step}'}"
            )
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
            raise UserError(
                f"{self._manager.directory}: no checkpoint{'' if step is None else f' of step {step}'}"
            )
        args = ocp.args.Composite(params=ocp.args.StandardRestore(nnx.to_pure_dict(abstract_params)))
        return _with_values(abstract_params, self._manager.restore(step, args=args)["params"])

    def wait(self) -> None:
        """Until the save in flight is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()


def _pure(state: TrainState) -> dict[str, Any]:
    """Step and optimiser state as a flat dict: optax's own containers are no part of the format."""
    leaves = jax.tree.leaves((state.step, state.opt_state))
    return {f"{i:04d}": leaf for i, leaf in enumerate(leaves)}


def _with_values(params, values):
    return jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(values))
