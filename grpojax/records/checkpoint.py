"""The whole state of a run on disk, through orbax: asynchronous, atomic, restorable onto another mesh.

Every role of the state is an item or two of its own: what learns has weights (``policy_params``) and the rest
(``policy_opt_state``), what is frozen has weights alone; beside them is a JSON record. Orbax writes into a temporary
directory and renames it when all is there, so a save that was cut short is never seen by a restore.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax
import orbax.checkpoint as ocp
from etils import epath
from flax import nnx

from grpojax.host import files, processes
from grpojax.host.errors import UserError
from grpojax.types import TrainState

logging.getLogger("absl").setLevel(logging.ERROR)

# Of what a checkpoint holds. 1 had one network, without a role; its weights can still be read.
FORMAT = 2
_OLD_PARAMS = "params"


class _OtherFormat(UserError):
    """What another version of this package wrote."""


class SaveError(Exception):
    """A checkpoint could not be written; the ones before it are untouched."""


def check_format(directory: epath.PathLike) -> None:
    """Raises `UserError` for checkpoints of a format that a run cannot go on from."""
    if any(files.path(directory).glob(f"[0-9]*/{_OLD_PARAMS}")):
        raise UserError(
            f"{directory}: checkpoints of format 1, which kept one network without a role; this version goes on with "
            f"format {FORMAT}\nexport its policy (grpojax export RUN --to FOLDER) and start a new run from that folder"
        )


class Checkpoints:
    """Checkpoints of one run directory.

    Args:
      directory: where they live.
      keep: how many of the newest stay.
      best: name of a metric whose largest value's checkpoint stays as well; None for none.
      read_only: change nothing, not even what a save under way has left there.

    Attributes:
      held: a step whose checkpoint stays whatever comes; None for none.
    """

    def __init__(self, directory: epath.PathLike, *, keep: int = 2, best: str | None = None, read_only: bool = False):
        self.directory = files.absolute(directory)
        self._keep, self._best, self._read_only = keep, best, read_only
        self.held: int | None = None
        self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        if self._read_only:
            options = ocp.CheckpointManagerOptions(read_only=True)
            return ocp.CheckpointManager(self.directory, options=options)
        best, policies = self._best, list[Any]((ocp.checkpoint_managers.LatestN(self._keep), _Held(self)))
        if best is not None:
            best_one = ocp.checkpoint_managers.BestN(
                get_metric_fn=lambda m: m.get(best, float("-inf")), n=1, keep_checkpoints_without_metrics=False
            )
            policies.append(best_one)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy(policies),
            # Without it metrics are not written, and a run that goes on would not know its best.
            best_fn=None if best is None else lambda m: m.get(best, float("-inf")),
            cleanup_tmp_directories=True,
            # A directory that cannot be made must raise in the save; in orbax's threads it would leave others waiting.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        return ocp.CheckpointManager(self.directory, options=options)

    def latest(self) -> int | None:
        """The newest complete checkpoint's step."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, the oldest first."""
        return sorted(self._manager.all_steps())

    def good(self) -> int | None:
        """The step of the best checkpoint, or of the newest where nothing says which is best."""
        best = None if self._best is None else self._manager.best_step()
        return self.latest() if best is None else best

    def save(
        self, step: int, state: Mapping[str, Any], meta: Mapping[str, Any], metrics: dict[str, float] | None = None
    ) -> None:
        """Starts a save of the state after ``step`` steps; the arrays are copied before it returns.

        Args:
          step: its number.
          state: by role, a `TrainState` or plain weights.
          meta: a JSON record.
          metrics: what the best checkpoint is told by.

        Raises:
          SaveError: this save, or the one before it that was still under way, could not be written.
        """
        items: dict[str, Any] = {name: ocp.args.StandardSave(x) for name, x in _items(state).items()}
        try:
            files.make_folder(self.directory)
            record = ocp.args.JsonSave({**meta, "format": FORMAT})
            self._manager.save(step, args=ocp.args.Composite(**items, meta=record), metrics=metrics)
        except Exception as e:
            self._recover(e)

    def wait(self) -> None:
        """Until the save in flight is on disk; raises `SaveError` if it cannot get there."""
        try:
            self._manager.wait_until_finished()
        except Exception as e:
            self._recover(e)

    def _recover(self, error: Exception) -> NoReturn:
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

    def restore_newest(self, abstract: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
        """The newest checkpoint that can be read, and the steps of those that could not.

        They are moved aside, to ``broken/`` beside the checkpoints, so that their steps can be saved again.
        """
        broken: list[int] = []
        first: Exception | None = None
        for step in reversed(self.steps()):
            try:
                state, meta = self.restore(abstract, step)
            except _OtherFormat:
                raise
            except Exception as e:
                first = first or e
                broken.append(step)
                continue
            for bad in broken if processes.is_first() else ():
                aside = self.directory.parent / "broken" / str(bad)
                files.move(self.directory / str(bad), aside)
            if broken:
                self._manager.reload()
            return state, meta, broken
        raise UserError(f"{self.directory}: no checkpoint can be read; the newest: {first}") from first

    def restore(self, abstract: Mapping[str, Any], step: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state and its record, laid out as ``abstract`` says (any mesh).

        Args:
          abstract: by role, of `grpojax.programs.state.abstract_state`.
          step: the newest if None.

        Raises:
          UserError: there is no such checkpoint, it has other roles, or it is of another format.
        """
        step = _existing(self._manager, step)
        there = {p.name for p in (self.directory / str(step)).iterdir() if p.is_dir()} - {"metrics", "meta"}
        wanted = _items(abstract)
        if absent := sorted(wanted.keys() - there):
            # A torn item raises from orbax; a whole role that was never saved is another recipe's.
            if not any(name.startswith(absent[0].partition("_")[0]) for name in there):
                raise UserError(f"{self.directory}: the checkpoint of step {step} has no {', '.join(absent)}")
        items: dict[str, Any] = {name: ocp.args.StandardRestore(x) for name, x in wanted.items()}
        got = self._manager.restore(step, args=ocp.args.Composite(**items, meta=ocp.args.JsonRestore()))
        if (found := got["meta"].get("format")) != FORMAT:
            raise _OtherFormat(
                f"{self.directory}: checkpoints of format {found}; this version goes on with format {FORMAT}"
            )
        return {role: _rebuild(role, x, got) for role, x in abstract.items()}, got["meta"]

    def restore_params(self, abstract_params: Any, step: int | None = None, role: str = "policy") -> Any:
        """Only the weights of a role; of an older format, those of its one network."""
        step = _existing(self._manager, step)
        name = f"{role}_params"
        if (self.directory / str(step) / _OLD_PARAMS).is_dir():
            name = _OLD_PARAMS
        args = ocp.args.Composite(**{name: ocp.args.StandardRestore(_plain(abstract_params))})
        return _with_values(abstract_params, self._manager.restore(step, args=args)[name])

    def close(self) -> None:
        """Waits for the save in flight, and lets go."""
        try:
            self._manager.close()
        except Exception as e:
            raise SaveError(f"{self.directory}: {type(e).__name__}: {e}") from e


@dataclasses.dataclass(frozen=True)
class _Held(ocp.checkpoint_managers.PreservationPolicy):
    """Preserves `Checkpoints.held`."""

    of: Checkpoints

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        return [c.step == self.of.held for c in checkpoints]


def _existing(manager: ocp.CheckpointManager, step: int | None) -> int:
    """The step of a checkpoint that is there: the newest if None."""
    found = manager.latest_step() if step is None else step
    if found is None or found not in manager.all_steps():
        raise UserError(f"{manager.directory}: no checkpoint{'' if step is None else f' of step {step}'}")
    return found


def _items(state: Mapping[str, Any]) -> dict[str, Any]:
    """Item name to a plain tree. Step and optimiser state are a flat dict: optax's own containers are no part of the
    format."""
    items = {}
    for role, x in state.items():
        learns = isinstance(x, TrainState)
        items[f"{role}_params"] = _plain(x.params if learns else x)
        if learns:
            leaves = jax.tree.leaves((x.step, x.opt_state))
            items[f"{role}_opt_state"] = {f"{i:04d}": leaf for i, leaf in enumerate(leaves)}
    return items


def _plain(params: Any) -> Any:
    return nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params


def _rebuild(role: str, abstract: Any, got: Any) -> Any:
    """A role's state in the containers of its description."""
    if not isinstance(abstract, TrainState):
        return _with_values(abstract, got[f"{role}_params"])
    leaves = jax.tree.leaves(got[f"{role}_opt_state"])
    step, opt_state = jax.tree.unflatten(jax.tree.structure((abstract.step, abstract.opt_state)), leaves)
    params = _with_values(abstract.params, got[f"{role}_params"])
    return dataclasses.replace(abstract, step=step, params=params, opt_state=opt_state)


def _with_values(params: Any, values: Any) -> Any:
    return jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(values))
