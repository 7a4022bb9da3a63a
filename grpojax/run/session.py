"""A run as something that lives on a disk and may be stopped: its directory, its saves, and the signals it obeys."""

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax

from grpojax.host import processes
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.programs.compiling import keep_compiled
from grpojax.programs.policy import Policy
from grpojax.programs.state import abstract_state, decoder_network
from grpojax.records.checkpoint import Checkpoints, SaveError
from grpojax.records.directory import RunDirectory
from grpojax.run.profiling import Profile, ProfileConfig
from grpojax.run.sections import RunConfig


class Keeps(Protocol):
    """The section that says how many checkpoints stay."""

    @property
    def keep(self) -> int: ...


class Recipe(Protocol):
    """What a session reads of a recipe, whatever it trains by."""

    @property
    def run(self) -> RunConfig: ...

    @property
    def train(self) -> Keeps: ...

    @property
    def compile_cache(self) -> str | None: ...

    @property
    def profile(self) -> ProfileConfig: ...

    def resolved(self) -> dict[str, Any]: ...

    def may_differ(self, name: str) -> bool: ...


class Session:
    """The directory of a run with its checkpoints, and what its process keeps of what it compiles.

    Args:
      config: the recipe.

    Raises:
      UserError: the directory holds something else than this run.
    """

    def __init__(self, config: Recipe):
        self.config, self.directory = config, Path(config.run.dir)
        self.record = RunDirectory(self.directory, config.resolved(), config.may_differ)
        if processes.is_first():
            self.record.check()
        keep_compiled(config.compile_cache, config.run.dir)
        self.profile = Profile(config.profile, config.run.dir)
        self.save_s = 0.0  # seconds spent on saves since it was last set to 0
        self._problem: str | None = None
        self._stop = False

    def claim(self, held: contextlib.ExitStack, fingerprints: Mapping[str, str | None]) -> None:
        """Makes the directory this run's until ``held`` lets go; checks that the data is what it was."""
        if processes.is_first():
            self.record.claim(held)
            self.record.check_data(fingerprints)
            if not self.record.started:
                self.record.write()

    def settle(self) -> None:
        """Once nothing can be refused any more: says with which other settings the run goes on, and keeps them."""
        if processes.is_first():
            self.record.write()

    def open(self, held: contextlib.ExitStack, best: str | None) -> None:
        """Opens the checkpoints; ``best`` is the metric whose largest value's stays."""
        self.checkpoints = Checkpoints(self.directory / "checkpoints", keep=self.config.train.keep, best=best)
        held.callback(_close, self)

    def restore(self, abstract: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """State and record of the newest checkpoint that can be read; None in a new run."""
        if self.checkpoints.latest() is None:
            return None
        state, meta, broken = self.checkpoints.restore_newest(abstract)
        for number in broken:
            log.warning("the checkpoint of step %d cannot be read; moved to %s", number, self.directory / "broken")
        log.info("resumed %s at step %d", self.directory, meta["step"])
        return state, meta

    # ---------------------------------------------------------------------------------------------- saves

    def save(self, state: Mapping[str, Any], meta: Mapping[str, Any], metrics: dict[str, float] | None = None) -> None:
        """Starts a save. One that fails costs nothing but itself: the run goes on, and the next one tries again."""
        started = time.perf_counter()
        try:
            finite = {name: x for name, x in (metrics or {}).items() if math.isfinite(x)}
            self.checkpoints.save(meta["step"], state, dict(meta), finite or None)
            self._problem = None
        except SaveError as e:
            self._note(e)
        self.save_s += time.perf_counter() - started

    def wait(self) -> None:
        """Until what was saved last is on disk."""
        try:
            self.checkpoints.wait()
        except SaveError as e:
            self._note(e)

    def _note(self, error: SaveError) -> None:
        self._problem = " ".join(str(error).split())[:300]
        log.warning("a save failed; the checkpoints before it are untouched: %s", self._problem)

    def check_saved(self) -> None:
        """Raises `UserError` where the last save failed."""
        self.wait()
        if self._problem:
            raise UserError(
                f"the last save failed: {self._problem}\n"
                f"see to it and run the same command: it goes on from step {self.checkpoints.latest() or 0}"
            )

    # -------------------------------------------------------------------------------------------- signals

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Inside, SIGTERM and SIGINT ask the run to stop after its step; a second one stops at once."""
        handlers = {s: signal.signal(s, self._on_signal) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for s, handler in handlers.items():
                signal.signal(s, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._stop:
            raise KeyboardInterrupt
        self._stop = True
        log.info("%s: saving after this step; again to stop at once", signal.Signals(number).name)

    def stopping(self) -> bool:
        """Whether any process of the run was asked to stop; all of them must ask together."""
        return processes.any_of(self._stop)


@contextlib.contextmanager
def enough_memory(done: Callable[[], int], remedies: str) -> Iterator[None]:
    """Inside, memory that runs out is a `UserError` with the ``remedies``; ``done`` steps are behind the run."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as e:
        if not isinstance(e, MemoryError) and "RESOURCE_EXHAUSTED" not in str(e):
            raise
        raise UserError(f"out of memory after step {done()}: {remedies}\n{' '.join(str(e).split())[:300]}") from e


def _close(session: Session) -> None:
    session.profile.close()
    try:
        session.checkpoints.close()
    except SaveError as e:
        log.warning("%s", e)


def load_policy_params(policy: Policy, run_dir: str | Path, step: int | None = None) -> Any:
    """The policy's weights in a run's checkpoint (the newest, or the given step), laid out as ``policy`` is."""
    _, network = decoder_network(policy.config, None, policy.mesh)
    abstract = abstract_state({"policy": network}, policy.mesh)["policy"]
    checkpoints = Checkpoints(Path(run_dir) / "checkpoints", read_only=True)
    try:
        return checkpoints.restore_params(abstract, step)
    finally:
        checkpoints.close()
