"""A run on disk: its directory, claimed for it, and its checkpoints."""

import contextlib
import json
import math
import time
from collections.abc import Mapping
from typing import Any, Protocol

import jax
from etils import epath

from grpojax.host import agreement, files, processes, settings
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.programs import policy_state
from grpojax.programs.adapter import joined
from grpojax.programs.policy import Policy, model_facts, weights_digest
from grpojax.programs.state import abstract_state
from grpojax.records import metrics
from grpojax.records.checkpoint import Checkpoints, SaveError
from grpojax.records.directory import RunDirectory, check_base
from grpojax.records.metrics import TrackingConfig
from grpojax.run import recorder
from grpojax.run.profiling import ProfileConfig
from grpojax.run.run_state import State
from grpojax.run.sections import RunConfig


class Schedule(Protocol):
    """The section that says when a run is evaluated, saved and stopped, and how many checkpoints stay."""

    @property
    def keep(self) -> int: ...

    @property
    def eval_every(self) -> int: ...

    @property
    def checkpoint_every(self) -> int: ...

    @property
    def checkpoint_minutes(self) -> float: ...

    @property
    def hang_policy(self) -> str: ...

    @property
    def log_every(self) -> int: ...

    @property
    def max_skipped(self) -> int: ...


class Recipe(Protocol):
    """The sections of a recipe that every run has."""

    @property
    def run(self) -> RunConfig: ...

    @property
    def train(self) -> Schedule: ...

    @property
    def compile_cache(self) -> str | None: ...

    @property
    def profile(self) -> ProfileConfig: ...

    @property
    def tracking(self) -> TrackingConfig: ...

    def resolved(self) -> dict[str, Any]: ...

    def may_differ(self, name: str) -> bool: ...


class Store:
    """The directory of a run with its checkpoints.

    Args:
      config: the recipe.
      take_over: break another process's claim on a directory in a bucket.

    Raises:
      UserError: the directory holds something other than this run.

    Attributes:
      save_s: seconds spent on saves since it was last set to 0.
      wandb: the run of Weights & Biases that gets its metrics too; None for none.
      problem: why the last save failed; None if it did not.
      lost: whether the directory was removed or moved away during the run.
      together: whether all processes are known to be at the same point. Otherwise the checkpoints cannot be closed.
    """

    def __init__(self, config: Recipe, *, take_over: bool = False):
        self.config, self.directory, self._take_over = config, files.path(config.run.dir), take_over
        self.run_directory = RunDirectory(
            self.directory,
            config.resolved(),
            config.may_differ,
            read=lambda stored: settings.build(type(config), stored).resolved(),
        )
        if processes.is_first():
            self.run_directory.check(take_over=take_over)
        self.save_s, self.wandb = 0.0, None
        self.problem: str | None = None
        self.lost = False
        self.together = jax.process_count() == 1

    def claim(self, held: contextlib.ExitStack, fingerprints: Mapping[str, str | None]) -> None:
        """Claims the directory for this run until ``held`` releases it; checks that the data has not changed."""
        facts = model_facts(given := self.config.resolved())
        agreement.agree(config=given, data=dict(fingerprints), **facts)
        if processes.is_first():
            self.run_directory.claim(held, take_over=self._take_over)
            if not self.run_directory.started:
                self.run_directory.write()  # first: it shows a later start that the folder is a run's
            self.run_directory.check_data(fingerprints)
            if given["model"]["adapter"] is not None:
                name = given["model"]["path"]
                check_base(self.directory, facts["weights"][name], name, keep=not self.run_directory.has_steps)
            if project := self.config.tracking.wandb:
                self.wandb = metrics.start_wandb(project, self.directory)
                held.callback(self._finish_wandb, self.wandb)
        processes.prove_shared(self.directory)

    @staticmethod
    def _finish_wandb(run: Any) -> None:
        with recorder.optional("Weights & Biases"):
            run.finish()

    def settle(self, finished: bool) -> None:
        """Logs and stores the changed settings of a resumed run. Call it once nothing can be refused any more."""
        if processes.is_first():
            self.run_directory.write()
            self.run_directory.goes_on(finished=finished)

    def open(self, held: contextlib.ExitStack, best: str | None) -> None:
        """Opens the checkpoints; ``best`` is the metric whose largest value's stays."""
        self.checkpoints = Checkpoints(self.directory / "checkpoints", keep=self.config.train.keep, best=best)
        held.callback(self._close)

    def restore(self, abstract: Mapping[str, Any]) -> tuple[dict[str, Any], State] | None:
        """Weights by role and the rest of the state, from the newest checkpoint that all processes can read.

        None in a new run.
        """
        restored = self.checkpoints.restore_newest(abstract)
        if restored is None:
            return None
        weights, record, broken = restored
        for number in broken:
            log.warning("the checkpoint of step %d cannot be read; moved to %s", number, self.directory / "broken")
        state = State.of(record)
        log.info("resumed %s at step %d", self.directory, state.step)
        return weights, state

    @property
    def gone(self) -> bool:
        """Whether this process writes to the directory, and it was removed or moved away: what is written is lost."""
        return processes.is_first() and self.run_directory.gone

    def make_again(self) -> bool:
        """Whether the directory is gone; it then has nothing but the recipe again. All processes call it."""
        gone = processes.any_of(self.gone)
        if gone:
            self.lost = True
            self.wait()  # for a save under way, which may fail
            try:
                if processes.is_first():
                    self.run_directory.make_again()
                self.checkpoints.reload()
            except OSError as e:
                log.warning("%s cannot be made again: %s", self.directory, e)
        return gone

    # ---------------------------------------------------------------------------------------------- saves

    def save(self, networks: Mapping[str, Any], state: State, *, evaluation_follows: bool = False) -> None:
        """Starts to write a checkpoint. An error is noted, not raised: the run goes on, and the next save tries again.

        Args:
          networks: those that are saved, by role; of one that learns weights, optimiser state and step
            (`grpojax.types.TrainState`).
          state: its other fields are saved.
          evaluation_follows: whether an evaluation of this state follows, which may show that it is bad.
        """
        started = time.perf_counter()
        self.wait()  # for the previous save: if that fails, it must not look like a failure of this one
        try:
            self.checkpoints.save(state.step, networks, state.saved(), evaluation_follows=evaluation_follows)
            self.problem = None
        except SaveError as e:
            self._note(e)
        self.save_s += time.perf_counter() - started

    def score(self, step: int, scores: Mapping[str, float]) -> None:
        """Stores the score of that step's checkpoint, by which the best one is chosen."""
        try:
            self.checkpoints.score(step, {name: x for name, x in scores.items() if math.isfinite(x)})
        except OSError as e:
            log.warning("the scores of step %d are not kept: %s", step, e)

    def wait(self) -> None:
        """Waits until the last save is on disk."""
        try:
            self.checkpoints.wait()
        except SaveError as e:
            self._note(e)

    def _note(self, error: SaveError) -> None:
        said = " ".join(str(error).split())
        self.problem = said if len(said) <= 300 else f"{said[:150]} ... {said[-150:]}"  # the reason comes last
        log.warning("a save failed; the checkpoints before it are untouched: %s", self.problem)

    def _close(self) -> None:
        if not self.together:
            return  # closing would wait for the others
        try:
            self.checkpoints.close()
        except SaveError as e:
            log.warning("%s", e)


def newest_step(run_dir: epath.PathLike) -> int:
    """The step of a run's newest checkpoint. If there are several processes, all must call it, and all get the step
    that the first sees: while the run goes on, another process may see a later one.

    Raises:
      UserError: there is none.
    """
    directory = files.path(run_dir) / "checkpoints"
    checkpoints = Checkpoints(directory, read_only=True)
    try:
        step = json.loads(processes.meet(json.dumps(checkpoints.latest()))[0])
    finally:
        checkpoints.close()
    if step is None:
        raise UserError(f"{directory}: no checkpoint")
    return step


def load_policy_params(policy: Policy, run_dir: epath.PathLike, step: int) -> Any:
    """The policy's weights from a run's checkpoint of a step, laid out like ``policy``. Weights that ``policy`` has
    loaded become the base of adapters, or else are dropped.

    Raises:
      UserError: there is no such checkpoint, or its adapters have another base than the loaded one.
    """
    if policy.adapter is not None:
        check_base(files.path(run_dir), weights_digest(policy.folder), policy.folder)
    network = policy_state.networks(policy.shape, None)["policy"]
    abstract = abstract_state({"policy": network}, policy.mesh)["policy"]
    base, policy.params = policy.params, None
    checkpoints = Checkpoints(files.path(run_dir) / "checkpoints", read_only=True)
    try:
        learned = checkpoints.restore_params(abstract, step)
    finally:
        checkpoints.close()
    return learned if policy.adapter is None else joined(base, learned)
