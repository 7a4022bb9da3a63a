"""A queue of runs, each in its own process. It is resumable, uses one or more devices, and stops like one run."""

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from grpojax.extensions.experiments.sweeps import Failure
from grpojax.host import preemption
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.host.files import write_json
from grpojax.records.metrics import read_metrics

LAST_LINES = 8  # of a failed run's output
_LOOK_S = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A run to start or resume.

    Attributes:
      name: name of its directory.
      directory: ``run.dir``.
      command: the command that starts or resumes it.
      steps, tokens: the length of the whole run, by one of them.
      config: its resolved recipe; a run that is done counts as done only for this recipe.
    """

    name: str
    directory: Path
    command: tuple[str, ...]
    steps: int | None = None
    tokens: int | None = None
    config: Mapping[str, Any]

    def done(self) -> tuple[int, float]:
        """Number of steps that it has recorded, and their share of the whole run."""
        lines = read_metrics(self.directory)
        steps = max((line["step"] for line in lines), default=0)
        if self.steps is not None:
            return steps, steps / self.steps
        sampled = max((line.get("sampled_tokens", 0.0) for line in lines), default=0.0)
        return steps, sampled / self.tokens if self.tokens else 0.0

    def in_use(self) -> bool:
        """Whether another process works on it, such as one that a killed sweep has left behind."""
        try:
            with (self.directory / "lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # the directory does not exist yet
            return False
        return False


@dataclasses.dataclass(kw_only=True)
class JobsOutcome:
    """The outcome of the jobs.

    Attributes:
      done: jobs that are finished, now or before.
      failed: name -> how the job ended.
      stopped: whether the queue had to stop before all jobs were done.
    """

    done: list[Job] = dataclasses.field(default_factory=list)
    failed: dict[str, Failure] = dataclasses.field(default_factory=dict)
    stopped: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Running:
    job: Job
    process: subprocess.Popen
    output: TextIO
    started: float
    slot: int
    first: float  # the share of the run that was done before


class Queue:
    """Runs jobs, one at a time or one a device.

    Args:
      folder: the folder of the sweep. Its ``state/`` has each run's output and the list of finished ones.
      environment: environment of the processes.
      devices: numbers of devices. A process sees only its own device. If empty, one process at a time sees all.
      at_once: runs on each device at a time. They share its memory, and the cores of the processor, evenly.
      tell_s: seconds between progress lines.

    Raises:
      UserError: ``environment`` has no such device.
    """

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        devices: Sequence[str] = (),
        *,
        at_once: int = 1,
        tell_s: float = 60.0,
    ):
        self.folder, self._environment, self._tell_s = folder, environment, tell_s
        each: list[str | None] = list(devices) or [None]
        self._slots = each * at_once
        self._alone = {device: visible_device(device, environment) for device in self._slots}
        if at_once > 1 and "XLA_PYTHON_CLIENT_MEM_FRACTION" not in environment:
            for seen in self._alone.values():
                seen["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{0.9 / at_once:.3f}"
        self._running: list[_Running] = []
        self._stopping = 0  # the signal that came
        self._made, self._seconds = 0.0, 0.0  # for the runs that ended: share of a whole run, and time

    def run(self, jobs: Sequence[Job]) -> JobsOutcome:
        """Runs all jobs that are not done. A run that fails does not stop the others. SIGINT and SIGTERM stop each run
        after its step. The same happens if one run was stopped itself, as by a cloud's notice."""
        outcome, waiting = JobsOutcome(), []
        (self.folder / "state").mkdir(parents=True, exist_ok=True)
        for job in jobs:
            (outcome.done if self.is_done(job) else waiting).append(job)
        if outcome.done:
            log.info("%d of %d runs are done already", len(outcome.done), len(jobs))
        announced = False
        with self._signals():
            last_line = time.monotonic()
            while self._running or (waiting and not self._stopping):
                self._fill(waiting)
                if waiting and not self._running and not self._stopping and not announced:
                    log.info("%s is in use by another process; waiting until it ends", waiting[0].name)
                    announced = True
                for ended in [r for r in self._running if r.process.poll() is not None]:
                    self._end(ended, outcome, waiting, len(jobs))
                if self._running and time.monotonic() - last_line >= self._tell_s:
                    last_line = time.monotonic()
                    self._tell(waiting)
                time.sleep(_LOOK_S)
        outcome.stopped = self._stopping != 0
        return outcome

    def is_done(self, job: Job) -> bool:
        """Whether a run of exactly this recipe is finished."""
        try:
            of_this = json.loads(self._file(job, ".json").read_text(encoding="utf-8")) == _plain(job.config)
            return of_this and job.done()[1] >= 1
        except (OSError, ValueError):
            return False

    def _file(self, job: Job, ending: str) -> Path:
        return self.folder / "state" / f"{job.directory.parent.name}.{job.name}{ending}"

    def _fill(self, waiting: list[Job]) -> None:
        """Starts jobs on the devices that are free."""
        free = set(range(len(self._slots))) - {r.slot for r in self._running}
        for slot in sorted(free):
            device = self._slots[slot]
            job = next((job for job in waiting if not job.in_use()), None)
            if job is None or self._stopping:
                return
            waiting.remove(job)
            steps, first = job.done()
            output = self._file(job, ".log").open("w", encoding="utf-8")
            # In a session of its own: Ctrl-C is passed on once, and the terminal does not send it as well.
            process = subprocess.Popen(
                job.command,
                env={**self._environment, **self._alone[device]},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            _share_cores(process.pid, slot, len(self._slots))
            where = "" if device is None else f" on device {device}"
            log.info("%s: started%s%s", job.name, where, f" again after step {steps}" if steps else "")
            self._running.append(
                _Running(job=job, slot=slot, process=process, output=output, started=time.monotonic(), first=first)
            )
            if self._stopping:  # the signal came while the process was being made: it was not in the list yet
                process.send_signal(self._stopping)

    def _end(self, ended: _Running, outcome: JobsOutcome, waiting: Sequence[Job], count: int) -> None:
        self._running.remove(ended)
        ended.output.close()
        job, seconds = ended.job, time.monotonic() - ended.started
        steps, share = job.done()
        self._made, self._seconds = self._made + max(0.0, share - ended.first), self._seconds + seconds
        if ended.process.returncode == 0 and share >= 1:
            write_json(self._file(job, ".json"), _plain(job.config))
            outcome.done.append(job)
            through = f"{len(outcome.done) + len(outcome.failed)}/{count}"
            log.info("%s: done in %s  (%s, left %s)", job.name, _duration(seconds), through, self._left(waiting))
        elif self._stopping or ended.process.returncode == os.EX_TEMPFAIL:
            log.info("%s: stopped at step %d", job.name, steps)
            if not self._stopping:  # its machine goes away, and with it all of them
                self._stop(signal.SIGTERM)
        else:
            text = self._file(job, ".log").read_text(encoding="utf-8", errors="replace")
            lines = tuple(text.splitlines()[-LAST_LINES:]) or ("it printed nothing",)
            outcome.failed[job.name] = Failure(status=ended.process.returncode, step=steps, lines=lines)
            log.warning("%s: failed with status %d; its last lines:", job.name, ended.process.returncode)
            for line in lines:
                log.warning("  %s", line)

    def _tell(self, waiting: Sequence[Job]) -> None:
        each = "  ".join(f"{r.job.name} {min(1.0, r.job.done()[1]):.0%}" for r in self._running)
        log.info("%s  %d waiting, left %s", each, len(waiting), self._left(waiting))

    def _left(self, waiting: Sequence[Job]) -> str:
        """The remaining time at the pace so far."""
        made, seconds = self._made, self._seconds
        remaining = sum(max(0.0, 1 - job.done()[1]) for job in waiting)
        for r in self._running:
            now = r.job.done()[1]
            made, seconds = made + max(0.0, now - r.first), seconds + time.monotonic() - r.started
            remaining += max(0.0, 1 - now)
        return _duration(remaining * seconds / made / len(self._slots)) if made else "unknown"

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Inside the context, a first SIGTERM, SIGINT or SIGHUP stops every run after its step, and a second one at
        once."""
        with preemption.handling(self._on_signal, signal.SIGTERM, signal.SIGINT):
            yield

    def _on_signal(self, number: int, frame: Any) -> None:
        if not self._stopping:
            log.info("%s: each run stops after its step; again to stop at once", signal.Signals(number).name)
        self._stop(number)

    def _stop(self, number: int) -> None:
        self._stopping = number
        for r in self._running:
            if r.process.poll() is None:
                r.process.send_signal(number)


def visible_device(device: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to an environment so that a process sees only one accelerator, of any kind; empty for None.

    Args:
      device: its number among the devices that ``environment`` makes visible.
      environment: the other variables of the process.

    Raises:
      UserError: fewer devices are visible.

    Example:
      >>> visible_device("1", {})["CUDA_VISIBLE_DEVICES"], visible_device(None, {})
      ('1', {})
      >>> visible_device("1", {"CUDA_VISIBLE_DEVICES": "4,6"})["CUDA_VISIBLE_DEVICES"]
      '6'
    """
    if device is None:
        return {}
    one = {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1"}
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS"):
        one[name] = device
        if name in environment:
            seen = [x.strip() for x in environment[name].split(",") if x.strip()]
            if int(device) >= len(seen):
                given = f"{name}={environment[name]}"
                raise UserError(
                    f"--devices {device}: {given} has {len(seen)}, counted from 0; give one of those, or unset it"
                )
            one[name] = seen[int(device)]
    return one


def _share_cores(pid: int, slot: int, slots: int) -> None:
    """Gives the process in a slot its part of the processor's cores, if the system can and there are enough."""
    if slots == 1 or not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if mine := cores[slot * len(cores) // slots : (slot + 1) * len(cores) // slots]:
        with contextlib.suppress(OSError):  # it has ended already
            os.sched_setaffinity(pid, mine)


def _plain(config: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(config))


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"
