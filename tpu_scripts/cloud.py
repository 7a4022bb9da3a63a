"""Every call of ``gcloud``, and the meaning of its answers. Another way to get TPUs would replace only this file."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import time
from datetime import datetime
from typing import Any

from errors import Failure, Mistake, Passing
from settings import Settings

MISSING, PENDING, ACTIVE, GONE = "missing", "pending", "active", "gone"

# Of a request, and of a VM of a request that is ACTIVE itself: it will not come (back), and keeps its quota until it
# is deleted. Whatever is not here may still come.
_LOST_REQUEST = {"SUSPENDING", "SUSPENDED", "FAILED", "DELETING"}
_LOST_NODE = {"PREEMPTED", "TERMINATED", "STOPPED", "STOPPING", "DELETING", "HIDDEN", "HIDING"}

_MOST_SAID = 200  # letters of why a request is in its state

# What the errors of gcloud say, and for whom they are.
_NOT_FOUND = re.compile(r"NOT_FOUND|was not found|does not exist", re.I)
_EXISTS = re.compile(r"ALREADY_EXISTS|already exists", re.I)
_QUOTA = re.compile(r"RESOURCE_EXHAUSTED|quota limit|quota.*exceed|exceed.*quota|no more capacity|\"code\": 8\b", re.I)
_MISTAKE = re.compile(
    r"PERMISSION_DENIED|INVALID_ARGUMENT|UNAUTHENTICATED|SERVICE_DISABLED|has not been used in project"
    r"|active account|[Rr]eauthentication|unrecognized arguments|Invalid value|auth login|HTTPError 40[13]",
)


@dataclasses.dataclass(frozen=True, order=True)
class Worker:
    """A VM: which slice, which host of it. ``node`` is the slice's name."""

    slice: int
    index: int
    node: str
    name: str


@dataclasses.dataclass(frozen=True)
class Seen:
    """The state of the request with this name.

    Args:
      kind: MISSING; PENDING, it may come by itself; ACTIVE, every VM is there; GONE, it must be deleted before another
        request.
      detail: the states as the cloud names them, and its reason for the request's state.
      accelerator: the type of a slice.
      workers: the VMs, if it is ACTIVE.
      identity: differs between two creations.
      born: when the VMs were made, seconds since 1970; None without any.
    """

    kind: str
    detail: str
    accelerator: str = ""
    workers: tuple[Worker, ...] = ()
    identity: str = ""
    born: float | None = None


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer of a command: its status (124: it took too long) and its output."""

    code: int
    out: bytes
    err: str

    @property
    def said(self) -> str:
        """The last line of its errors that is not empty."""
        lines = [line.strip() for line in self.err.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")]
        return (errors or lines or [f"status {self.code}"])[-1]


@dataclasses.dataclass
class Cloud:
    """The request of an env file, its VMs and its bucket.

    Args:
      settings: the env file's settings.
      dry: print the commands and run none; `look` then returns ``pretend``.
    """

    settings: Settings
    dry: bool = False
    pretend: str = ACTIVE

    def look(self) -> Seen:
        """The present state. Raises Passing if the cloud does not answer."""
        s = self.settings
        told = self._describe("queued-resources", s.name)
        if self.dry:
            return self._pretended()
        if told is None:
            return Seen(MISSING, "no such request")
        state, why = told.get("state", {}).get("state", "unknown"), _why(told.get("state", {}))
        specs = told.get("tpu", {}).get("nodeSpec") or [{}]
        kind = specs[0].get("node", {}).get("acceleratorType", "")
        seen = Seen(PENDING, f"{state}: {why}" if why else state, kind)
        if state in _LOST_REQUEST:
            return dataclasses.replace(seen, kind=GONE)
        if state != "ACTIVE":
            return seen
        nodes = [self._describe("tpu-vm", node) for node in self.nodes()]
        return _with_nodes(seen, self.nodes(), nodes)

    def create(self) -> None:
        """Asks for the VMs. Raises Mistake, or Failure without quota. An existing request is kept."""
        s = self.settings
        several = ["--node-count", str(s.slices), "--node-prefix", s.name]
        command = ["compute", "tpus", "queued-resources", "create", s.name]
        command += several if s.slices > 1 else ["--node-id", s.name]
        command += ["--accelerator-type", s.accelerator.name]
        command += ["--runtime-version", s.runtime or s.accelerator.runtime]
        for flag in ("network", "subnetwork", "service_account"):
            value = getattr(s, flag)
            command += [f"--{flag.replace('_', '-')}", value] if value else []
        answer = self._gcloud(*command, *(["--spot"] if s.spot else []), *self._where(), seconds=3 * s.call_seconds)
        if answer.code and not _EXISTS.search(answer.err):
            raise _trouble(answer)

    def delete(self) -> None:
        """Asks to delete the request and its VMs; it takes minutes until they are gone. It may be missing."""
        command = ["compute", "tpus", "queued-resources", "delete", self.settings.name]
        answer = self._gcloud(*command, "--force", "--async", *self._where())
        if answer.code and not _NOT_FOUND.search(answer.err):
            raise _trouble(answer)

    def ssh(self, worker: Worker, command: str, stdin: bytes = b"", label: str = "", seconds: float = 0) -> Answer:
        """Runs a line of shell on a worker. The output may be ssh's own: look for the text that the line prints.

        Args:
          worker: the VM.
          command: a line for the worker's shell.
          stdin: its standard input.
          label: name of the input in a dry run.
          seconds: time until it counts as not answered.
        """
        flags = ["-oConnectTimeout=20", "-oBatchMode=yes", "-oServerAliveInterval=15", "-oServerAliveCountMax=4"]
        line = ["compute", "tpus", "tpu-vm", "ssh", worker.node, f"--worker={worker.index}", f"--command={command}"]
        line += [f"--ssh-flag={flag}" for flag in flags]
        return self._gcloud(*line, *self._where(), stdin=stdin, label=label, seconds=seconds)

    def copy_down(self, source: str, folder: str, exclude: str = "") -> None:
        """Copies a folder of the bucket to a local one, so that both are equal."""
        command = ["storage", "rsync", source, folder, "--recursive", *([f"--exclude={exclude}"] if exclude else [])]
        answer = self._gcloud(*command, "--project", self.settings.project, seconds=3600 * 6)
        if answer.code:
            missing = _NOT_FOUND.search(answer.err) or "did not match any objects" in answer.err
            raise Mistake(f"{source}: nothing there; give the run's folder") if missing else _trouble(answer)

    def nodes(self) -> list[str]:
        """The slices' names."""
        s = self.settings
        return [s.name] if s.slices == 1 else [f"{s.name}-{i}" for i in range(s.slices)]

    def _pretended(self) -> Seen:
        accelerator = self.settings.accelerator
        if self.pretend != ACTIVE:
            return Seen(self.pretend, "")
        whole = {"state": "READY", "networkEndpoints": [{}] * accelerator.hosts}
        return _with_nodes(Seen(ACTIVE, "ACTIVE", accelerator.name), self.nodes(), [whole] * self.settings.slices)

    def _where(self) -> list[str]:
        return ["--zone", self.settings.zone, "--project", self.settings.project]

    def _describe(self, what: str, name: str) -> dict[str, Any] | None:
        """None if there is none."""
        answer = self._gcloud("compute", "tpus", what, "describe", name, *self._where(), "--format=json")
        if self.dry or (answer.code and _NOT_FOUND.search(answer.err)):
            return None
        if answer.code:
            raise _trouble(answer)
        try:
            return json.loads(answer.out)
        except ValueError:
            raise Passing(f"gcloud's answer on {name} is no JSON") from None

    def _gcloud(self, *arguments: str, stdin: bytes = b"", label: str = "", seconds: float = 0) -> Answer:
        command = ["gcloud", *arguments, "--quiet"]
        if self.dry:
            print(shlex.join(command) + (f" < {label}" if label else ""), flush=True)
            return Answer(0, b"", "")
        return call(command, stdin, seconds or self.settings.call_seconds)


_calls: set[subprocess.Popen[bytes]] = set()


def end_calls() -> None:
    """Ends the running calls of all threads."""
    for process in list(_calls):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def call(command: list[str], stdin: bytes, seconds: float) -> Answer:
    """Runs a command, and ends it and its children if they take too long."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise Mistake("gcloud is not on PATH; install the Google Cloud CLI: https://cloud.google.com/sdk") from None
    _calls.add(process)
    try:
        out, err = process.communicate(stdin, timeout=seconds)
        return Answer(process.returncode, out, err.decode(errors="replace"))
    except subprocess.TimeoutExpired:
        return Answer(124, b"", f"no answer in {seconds:g} s")
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        _calls.discard(process)


def _with_nodes(seen: Seen, names: list[str], nodes: list[dict[str, Any] | None]) -> Seen:
    """Of an ACTIVE request and its slices."""
    states = ["MISSING" if node is None else node.get("state", "unknown") for node in nodes]
    detail = f"{seen.detail}, VMs {' '.join(states)}"
    there = [node for node in nodes if node is not None]
    if len(there) < len(nodes) or _LOST_NODE & set(states):
        return dataclasses.replace(seen, kind=GONE, detail=detail)
    if set(states) != {"READY"}:
        return dataclasses.replace(seen, detail=detail)
    workers = [
        Worker(s, i, name, f"worker{i}" if len(names) == 1 else f"slice{s}-worker{i}")
        for s, (name, node) in enumerate(zip(names, there))
        for i in range(len(node.get("networkEndpoints") or [{}]))
    ]
    made = [node.get("createTime", "") for node in there]
    identity = " ".join(node.get("id", "") + "@" + node.get("createTime", "") for node in there)
    born = min((_seconds(text) for text in made if text), default=None)
    return dataclasses.replace(seen, kind=ACTIVE, detail=detail, workers=tuple(workers), identity=identity, born=born)


def _why(state: dict[str, Any]) -> str:
    """What a request's state says beside its name, as in ``failedData: {error: {message: ...}}``; on a line, cut."""
    data = [value for key, value in state.items() if key.endswith("Data")]
    said = " ".join("; ".join(dict.fromkeys(_messages(data))).split())
    return said if len(said) <= _MOST_SAID else said[: _MOST_SAID - 3] + "..."


def _messages(told: Any) -> list[str]:
    """Each ``message``, however deep."""
    if isinstance(told, list):
        return [text for value in told for text in _messages(value)]
    if not isinstance(told, dict):
        return []
    own = told.get("message")
    return ([own] if isinstance(own, str) else []) + _messages(list(told.values()))


def _seconds(stamp: str) -> float:
    """Of a time as the cloud writes it, to the second: its nanoseconds are more than Python reads."""
    try:
        return datetime.fromisoformat(stamp[:19] + "+00:00").timestamp()
    except ValueError:
        return time.time()


def _trouble(answer: Answer) -> Exception:
    if _QUOTA.search(answer.err):
        return Failure(
            f"no quota or no capacity: {answer.said}; ask for more, or try another zone, a smaller TYPE or SPOT=true"
        )
    if _MISTAKE.search(answer.err) or _NOT_FOUND.search(answer.err):
        return Mistake(answer.said)
    return Passing(answer.said)
