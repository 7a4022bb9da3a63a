"""Actions on all workers at once: setup, starting a command, asking for its state, stopping it."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bundle import Bundle
from cloud import Cloud, Worker
from errors import Failure, Mistake, Passing

MOST = 65536  # bytes of a log that `job.sh` gives at a time
_MARK = b"grpojax: "
_AT_ONCE = 16  # calls of gcloud, each a Python of its own
_DRY = {"which": "unprepared", "start": "started", "poll": "exited 0", "signal": "signalled", "send": "sent"}


@dataclasses.dataclass(frozen=True)
class Report:
    """The state of a command on a worker.

    Args:
      state: unprepared (no setup), absent (never started), running, exited, or lost (no answer).
      code: its status, if it exited; 137 if it was killed and left none.
      log: new bytes of its log.
      why: the reason, if it is lost.
    """

    state: str
    code: int = 0
    log: bytes = b""
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Fleet:
    """The workers of the present VMs.

    Args:
      cloud: the calls to the cloud.
      workers: all of them.
      say: prints a line for the user.
    """

    cloud: Cloud
    workers: tuple[Worker, ...]
    say: Callable[[str], None]

    def setup(self, bundle: Bundle, again: bool = False) -> str:
        """Sends the bundle and installs it where needed. Returns the digest of the packages, the same on all workers.

        Raises:
          Failure: an installation failed, or the workers differ.
        """
        first = [w for w in self.workers if w.index == 0]
        rest = [w for w in self.workers if w.index != 0]
        # The first call to a slice may put one's key there, which several at once would do over each other.
        found = {w: self._tell(w, "which") for w in first}
        found.update(self._all(rest, lambda w: self._tell(w, "which")))
        todo = [w for w, (reply, _) in found.items() if again or reply.split()[:2] != ["prepared", bundle.name]]
        if todo:
            self._install(bundle, todo)
        if self.cloud.dry:
            return ""
        replies = self._all(self.workers, lambda w: self._tell(w, "which"))
        other = [w for w, (reply, _) in replies.items() if reply.split()[:2] != ["prepared", bundle.name]]
        if other:
            raise Failure(f"an earlier setup ended on {_names(other)}; run setup once more")
        packages = {w.name: reply.split()[-1] for w, (reply, _) in replies.items()}
        if len(set(packages.values())) > 1:
            told = ", ".join(f"{name} {word}" for name, word in packages.items())
            raise Failure(f"the workers have different packages ({told}); run setup --again")
        return next(iter(packages.values()))

    def start(self, attempt: int, command: Sequence[str]) -> None:
        """Starts a command on every worker, independent of this connection. Doing so again changes nothing.

        Raises:
          Mistake: another command is running, or a worker is not set up.
        """
        replies = self._all(self.workers, lambda w: self._tell(w, "start", str(attempt), *command))
        for worker, (reply, _) in replies.items():
            if reply == "unprepared":
                raise Mistake(f"{worker.name} is not set up; run setup")
            if reply.startswith("busy"):
                raise Mistake(f"{worker.name} is busy with {reply[5:]}; see it to its end with watch, or run stop")

    def poll(self, attempt: int, offsets: dict[str, int]) -> dict[Worker, Report]:
        """The command's state on each worker, and its logs from these bytes on."""
        return dict(zip(self.workers, self._map(self.workers, lambda w: self._report(w, attempt, offsets))))

    def signal(self, attempt: int, name: str) -> None:
        """Sends TERM or KILL to the command on every worker that can be reached."""

        def told(worker: Worker) -> None:
            with contextlib.suppress(Passing):
                self._tell(worker, "signal", str(attempt), name)

        self._map(self.workers, told)

    def _install(self, bundle: Bundle, todo: list[Worker]) -> None:
        place, job = f"grpojax/bundles/{bundle.name}", f"setup-{time.time_ns()}"
        self.say(f"sending {len(bundle.packed) / 2**20:.1f} MiB to {_names(todo)}, and installing")
        self._all(todo, lambda w: self._send(w, place, bundle.packed))
        script = ["sh", f"{place}/setup.sh", bundle.name, *bundle.arguments]
        jobs = {}
        for worker, (reply, _) in self._all(todo, lambda w: self._tell(w, "start", job, *script, place=place)).items():
            jobs[worker] = reply[5:] if reply.startswith("busy setup-") else job  # one of before is still at it
            if reply.startswith("busy") and jobs[worker] == job:
                raise Mistake(f"{worker.name} is busy with {reply[5:]}; see it to its end with watch, or run stop")
        failed = self._follow(jobs, place)
        if failed:
            raise Failure(f"setup failed on {_names(failed)}, lines above; the same command again goes on from there")

    def _follow(self, jobs: dict[Worker, str], place: str) -> list[Worker]:
        """Waits for the installations; those that failed, their last lines said."""
        settings, failed, heard = self.cloud.settings, [], time.monotonic()
        while jobs:
            try:
                replies = self._all(list(jobs), lambda w: self._tell(w, "poll", jobs[w], "0", place=place))
                heard = time.monotonic()
            except Passing:
                if time.monotonic() - heard > settings.grace_seconds:
                    raise
                replies = {}
            for worker, (reply, log) in replies.items():
                if reply == "running":
                    continue
                del jobs[worker]
                if reply != "exited 0":
                    failed.append(worker)
                    for line in log.decode(errors="replace").splitlines()[-10:]:
                        self.say(f"[{worker.name}] {line}")
            if jobs:
                time.sleep(settings.poll_seconds / 3)
        return failed

    def _send(self, worker: Worker, place: str, packed: bytes) -> tuple[str, bytes]:
        line = (
            f"umask 077; mkdir -p grpojax/bundles && cat >{place}.tgz && [ $(wc -c <{place}.tgz) -eq {len(packed)} ]"
            f" && rm -rf {place} && mkdir {place} && tar xzf {place}.tgz -C {place} && rm {place}.tgz"
            " && echo grpojax: sent"
        )
        return self._ask(worker, "send", line, packed)

    def _tell(self, worker: Worker, *arguments: str, place: str = "grpojax/current") -> tuple[str, bytes]:
        """What `job.sh` answers: the line, and what follows it."""
        line = f"if [ -e {place} ]; then exec sh {place}/job.sh {quoted(arguments)}; else echo grpojax: unprepared; fi"
        return self._ask(worker, arguments[0], line)

    def _ask(self, worker: Worker, verb: str, line: str, stdin: bytes = b"") -> tuple[str, bytes]:
        """Twice, if ssh breaks: all that is asked here may be asked again."""
        for last in (False, True):
            # The seconds are for a slow line: 1 MiB of them more each.
            seconds = self.cloud.settings.call_seconds + len(stdin) / 2**20
            answer = self.cloud.ssh(worker, line, stdin, "PACKED" if verb == "send" else "", seconds)
            if self.cloud.dry:
                return _DRY[verb], b""
            _, mark, rest = (b"\n" + answer.out).partition(b"\n" + _MARK)
            if mark:
                reply, _, body = rest.partition(b"\n")
                return reply.decode(errors="replace").strip(), body
            if last:
                raise Passing(f"{worker.name}: {answer.said}")
        raise AssertionError

    def _report(self, worker: Worker, attempt: int, offsets: dict[str, int]) -> Report:
        try:
            reply, log = self._tell(worker, "poll", str(attempt), str(offsets.get(worker.name, 0)))
        except Passing as error:
            return Report("lost", why=str(error))
        state, _, code = reply.partition(" ")
        return Report("exited", 137, log) if state == "died" else Report(state, int(code or 0), log)

    def _map(self, workers: Sequence[Worker], function: Callable[[Worker], Any]) -> list[Any]:
        pool = ThreadPoolExecutor(1 if self.cloud.dry else _AT_ONCE)
        try:
            return list(pool.map(function, workers))
        finally:
            pool.shutdown(wait=False)  # after Ctrl-C nobody waits for what hangs

    def _all(self, workers: Sequence[Worker], function: Callable[[Worker], Any]) -> dict[Worker, Any]:
        """Of each worker, tried on all before the first that is out of reach is told."""

        def caught(worker: Worker) -> Any:
            try:
                return function(worker)
            except Passing as error:
                return error

        results = self._map(workers, caught)
        lost = [str(r) for r in results if isinstance(r, Passing)]
        if lost:
            raise Passing("; ".join(lost))
        return dict(zip(workers, results))


def quoted(arguments: Sequence[str]) -> str:
    """The words quoted for the worker's shell."""
    return " ".join(shlex.quote(a) for a in arguments)


def _names(workers: Sequence[Worker]) -> str:
    return ", ".join(w.name for w in sorted(workers))
