"""The whole state of a run on disk, through orbax: asynchronous, atomic, restorable onto another mesh.

Each role of the state has one or two items of its own. A network that learns has its weights (``policy_params``) and
the rest (``policy_opt_state``); a frozen network has only weights. A JSON record is saved with them. Orbax writes into
a temporary directory and renames it once it is complete, so a restore never sees a save that was cut short.

If there are several processes, each saves its part, and a save that fails on one fails on all
(`grpojax.host.processes.Meeting`). `grpojax.records.keeping` decides which checkpoints stay.
"""

import asyncio
import contextlib
import dataclasses
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath
from flax import nnx
from jax.sharding import SingleDeviceSharding

from grpojax.host import files, processes
from grpojax.host.errors import UserError
from grpojax.records.keeping import Keeping
from grpojax.types import TrainState

T = TypeVar("T")


def _quieten() -> None:
    """Leaves it to `SaveError` to say why a save failed. Orbax logs the traceback of each of its threads, asyncio those
    of orbax's other tasks, and tensorstore prints one for each write that ends after orbax's event loop."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").addFilter(lambda record: "orbax" not in record.getMessage())
    before = sys.unraisablehook

    def hook(args: Any) -> None:
        # From an event loop's method at the outermost: what called it is no Python.
        trace = args.exc_traceback
        if trace is None or trace.tb_frame.f_code is not asyncio.BaseEventLoop.call_soon_threadsafe.__code__:
            before(args)

    sys.unraisablehook = hook


_quieten()


class SaveError(Exception):
    """A checkpoint could not be written; the ones before it are untouched."""


class Checkpoints:
    """Checkpoints of one run directory.

    Args:
      directory: where they live.
      keep: how many of the newest stay.
      best: name of a metric whose largest value's checkpoint stays as well; None for none.
      read_only: change nothing, not even the files that a save under way has left there.

    Attributes:
      keeping: which checkpoints stay, and which is the best.
    """

    def __init__(self, directory: epath.PathLike, *, keep: int = 2, best: str | None = None, read_only: bool = False):
        self.directory = files.absolute(directory)
        self.keeping = Keeping(self.directory.parent / "scores.json", keep=keep, best=best)
        self._meeting = processes.meeting()
        self._manager = _manager_of(self.directory, None if read_only else self.keeping)

    def latest(self) -> int | None:
        """The newest complete checkpoint's step."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, the oldest first."""
        return sorted(self._manager.all_steps())

    def good(self, before: int | None = None) -> int | None:
        """The step of the best checkpoint, or of the newest one if no score says which is best.

        Args:
          before: considers only checkpoints of earlier steps.
        """
        return self.keeping.good([step for step in self.steps() if before is None or step < before])

    def score(self, step: int, scores: Mapping[str, float]) -> None:
        """Keeps the score of that step's checkpoint, and forgets the scores of checkpoints that are gone.

        Raises:
          OSError: the first process could not write the score, so only this run knows it.
        """
        self.keeping.score(step, scores, there=self.steps())

    def save(
        self, step: int, state: Mapping[str, Any], meta: Mapping[str, Any], *, evaluation_follows: bool = False
    ) -> None:
        """Starts a save of the state after ``step`` steps. It copies the arrays before it returns.

        Args:
          step: its number.
          state: by role, a `TrainState` or plain weights.
          meta: a JSON record.
          evaluation_follows: whether an evaluation of this state follows. Until the next save, the checkpoint to go
            back to stays.

        Raises:
          SaveError: on all processes, if one of them could not write this save, or the save before it, which was still
            under way.
        """
        items: dict[str, Any] = {name: ocp.args.StandardSave(x) for name, x in _items(state).items()}
        record = ocp.args.JsonSave(meta)
        self.keeping.awaited = step if evaluation_follows else None

        def save() -> None:
            files.make_folder(self.directory)
            self._manager.save(step, args=ocp.args.Composite(**items, meta=record))

        self._or_recover(save)

    def reload(self) -> None:
        """Looks again at what is there, after the directory was removed or moved away."""
        files.make_folder(self.directory)
        self._manager.reload()

    def wait(self) -> None:
        """Waits until the save in flight is on disk; raises `SaveError` on all processes if it fails on one."""
        self._or_recover(lambda: self._manager.wait_until_finished())

    def _or_recover(self, act: Callable[[], None]) -> None:
        """Acts on all processes. If a save failed on one, a new manager replaces this one, which is not used again."""
        try:
            self._meeting.together(act)
        except Exception as error:
            message = str(error) if isinstance(error, processes.PeerError) else f"{type(error).__name__}: {error}"
            with contextlib.suppress(Exception):
                self._manager.close()
            self._meeting.anew()

            def open_again() -> None:
                self._manager = _manager_of(self.directory, self.keeping)

            try:
                self._meeting.together(open_again)
            except (OSError, processes.PeerError) as e:
                self._meeting.anew()
                raise SaveError(f"{self.directory}: {e}") from error
            raise SaveError(f"{self.directory}: {message}") from error

    def restore_newest(self, abstract: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[int]] | None:
        """The newest checkpoint that all processes can read, and the steps of those that some process could not read.

        The unreadable ones are moved to ``broken/``, next to the checkpoints, so that their steps can be saved again.
        Returns None if there is no checkpoint at all.
        """
        broken: list[int] = []
        first: Exception | None = None

        def move_aside() -> None:
            for step in broken if processes.is_first() else ():
                files.move(self.directory / str(step), self.directory.parent / "broken" / str(step))

        for step in reversed(self._meeting.of_first(self.steps())):
            try:
                state, meta = self._meeting.together(lambda step=step: self.restore(abstract, step))
            except Exception as e:
                first = first or e
                broken.append(step)
                self._meeting.anew()
                continue
            self._meeting.together(move_aside)
            if broken:
                self._manager.reload()
            return state, meta, broken
        if first is None:
            return None
        raise UserError(f"{self.directory}: no checkpoint can be read; the newest: {first}") from first

    def restore(self, abstract: Mapping[str, Any], step: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state and its record. The state is laid out as ``abstract`` says, on any mesh.

        Args:
          abstract: the results of `grpojax.programs.state.abstract_state`, by role.
          step: the newest if None.

        Raises:
          UserError: there is no such checkpoint, or it has other roles.
        """
        step = _existing(self._manager, step)
        there = {p.name for p in (self.directory / str(step)).iterdir() if p.is_dir()} - {"metrics", "meta"}
        wanted = _items(abstract)
        if absent := sorted(wanted.keys() - there):
            # Orbax raises for a torn item. If a whole role was never saved, the checkpoint is of another recipe.
            role = absent[0].removesuffix("_params").removesuffix("_opt_state")
            if not any(name in (f"{role}_params", f"{role}_opt_state") for name in there):
                raise UserError(f"{self.directory}: the checkpoint of step {step} has no {', '.join(absent)}")
        items: dict[str, Any] = {name: ocp.args.StandardRestore(_placed(x)) for name, x in wanted.items()}
        got = self._manager.restore(step, args=ocp.args.Composite(**items, meta=ocp.args.JsonRestore()))
        return {role: _rebuild(role, x, got) for role, x in abstract.items()}, got["meta"]

    def restore_params(self, abstract_params: Any, step: int | None = None, role: str = "policy") -> Any:
        """Only the weights of a role."""
        step, name = _existing(self._manager, step), f"{role}_params"
        args = ocp.args.Composite(**{name: ocp.args.StandardRestore(_placed(_plain(abstract_params)))})
        return _with_values(abstract_params, self._manager.restore(step, args=args)[name])

    def close(self) -> None:
        """Waits for the save in flight, and releases the directory."""
        try:
            self._manager.close()
        except Exception as e:
            raise SaveError(f"{self.directory}: {type(e).__name__}: {e}") from e


def _manager_of(directory: epath.Path, keeping: Keeping | None) -> ocp.CheckpointManager:
    """Orbax's manager for a run's checkpoints; with None it changes nothing."""
    if keeping is None:
        return ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(read_only=True))
    options = ocp.CheckpointManagerOptions(
        preservation_policy=_Staying(keeping),
        cleanup_tmp_directories=True,
        # If the directory cannot be made, the save must raise. An error in orbax's threads would leave other processes
        # waiting.
        async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
    )
    return ocp.CheckpointManager(directory, options=options)


@dataclasses.dataclass(frozen=True)
class _Staying(ocp.checkpoint_managers.PreservationPolicy):
    """`Keeping.staying` behind orbax's interface."""

    keeping: Keeping

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        staying = self.keeping.staying([c.step for c in checkpoints])
        return [c.step in staying for c in checkpoints]


def _existing(manager: ocp.CheckpointManager, step: int | None) -> int:
    """The step of an existing checkpoint: the newest one if None."""
    found = manager.latest_step() if step is None else step
    if found is None or found not in manager.all_steps():
        raise UserError(f"{manager.directory}: no checkpoint{'' if step is None else f' of step {step}'}")
    return found


def _items(state: Mapping[str, Any]) -> dict[str, Any]:
    """Plain trees by item name. Step and optimiser state are a flat dict, so optax's containers are not stored."""
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


def _placed(tree: Any) -> Any:
    """Shapes that say where their arrays lie: on the first device where they did not. Orbax would otherwise take the
    devices that saved the arrays, which may not be there."""
    here = SingleDeviceSharding(jax.local_devices()[0])

    def placed(x: Any) -> Any:
        free = isinstance(x, jax.ShapeDtypeStruct) and x.sharding is None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) if free else x

    return jax.tree.map(placed, tree)


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
