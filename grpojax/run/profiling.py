"""A trace of chosen steps, for TensorBoard's profile page."""

import dataclasses
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax

from grpojax.host import files
from grpojax.host.console import log
from grpojax.host.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Which steps of a run are traced.

    Attributes:
      steps: first and last step of the trace, which goes to ``profile`` in the run directory; None traces nothing.
        Step 1 compiles. From step 3 on, steps are alike.
    """

    steps: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and not 1 <= self.steps[0] <= self.steps[1]:
            raise UserError(f"steps={list(self.steps)}: give the first and the last step, such as [5, 8]")

    def check(self, steps: int | None) -> None:
        """Raises `UserError` if the run ends before the trace; None means that its length is not known."""
        if self.steps is not None and steps is not None and self.steps[1] > steps:
            raise UserError(f"profile.steps={list(self.steps)}: the run has {steps} steps")


class Profile:
    """Starts and stops the trace so that it has whole steps: at its start and end, the loop waits for the devices.

    A trace that fails does not disturb the run.

    Args:
      config: which steps.
      run_dir: the run's directory, local or in a bucket. Of several processes each writes ``profile/process_N`` there.
    """

    def __init__(self, config: ProfileConfig, run_dir: str | os.PathLike[str]):
        several = f"process_{jax.process_index()}" * (jax.process_count() > 1)
        self._steps, self._to = config.steps, files.path(run_dir) / "profile" / several
        self._here: Path | None = None  # where the trace under way is written
        self._step: Any = None

    def begin(self, number: int, state: Any) -> None:
        """Call it before any work of a step is dispatched; ``state`` is the state that earlier steps still work on."""
        if self._steps is None:
            return
        first, last = self._steps
        if number > last:
            log.warning(
                "profile.steps=%s are over, since the run is at step %d: nothing is traced", [first, last], number
            )
            self._steps = None
        elif number >= first:
            if self._here is None:
                jax.block_until_ready(state)
                self._start()
            self._step = jax.profiler.StepTraceAnnotation("step", step_num=number)
            self._step.__enter__()

    def end(self, number: int, state: Any) -> None:
        """Call it when all work of a step is dispatched."""
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
        if self._steps is not None and number >= self._steps[1]:
            jax.block_until_ready(state)
            self.close()

    def close(self) -> None:
        """Writes the trace, even if the run ends before the last traced step."""
        here, self._here = self._here, None
        if here is None:
            return
        self._steps = None
        try:
            jax.profiler.stop_trace()
            if here != Path(self._to):
                for file in (f for f in sorted(here.rglob("*")) if f.is_file()):
                    files.write(self._to / file.relative_to(here).as_posix(), file.read_bytes())
                shutil.rmtree(here, ignore_errors=True)
            log.info("wrote the trace to %s: tensorboard --logdir %s", self._to, self._to)
        except Exception as e:  # disk full, storage away, or any error of the profiler
            log.warning("the trace could not be written: %s", " ".join(str(e).split())[:300])

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every call of the interpreter would drown the rest
        try:
            remote = files.in_bucket(self._to)
            self._here = Path(tempfile.mkdtemp(prefix="grpojax-profile-") if remote else self._to)
            jax.profiler.start_trace(self._here, profiler_options=options)
        except Exception as e:  # another trace is under way
            self._here = self._steps = None
            log.warning("nothing is traced: %s", " ".join(str(e).split())[:300])
