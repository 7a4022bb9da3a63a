"""Allows one process at a time to write in a folder: by a lock if it is local, otherwise by an object.

The object ``lock`` in a bucket is made, renewed and removed on condition of its generation, so that one of two
processes finds the other's object. It names its holder, who renews it every minute. A holder that was silent for ten
minutes counts as dead; before that, only ``--take-over`` breaks the claim. A holder that loses its claim ends at once,
since the folder is no longer its own.
"""

import contextlib
import datetime
import email.utils
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, Literal

from etils import epath

from grpojax.host import files, internals
from grpojax.host.console import log, tell
from grpojax.host.errors import UserError

RENEW_S = 60.0
SILENT_S = 600.0


def end(content: str) -> None:
    """Ends this process without any further write."""
    tell(content)
    internals.exit_at_once(2)


@contextlib.contextmanager
def hold(folder: epath.PathLike, *, take_over: bool = False, lost: Callable[[str], None] = end) -> Iterator[None]:
    """Inside the context, the folder is this process's.

    Args:
      folder: an existing local folder, or one in a bucket.
      take_over: break another process's claim in a bucket. A local lock is never broken, since it ends with its
        process.
      lost: called in another thread when another process has taken the claim.

    Raises:
      UserError: another process holds it.
    """
    place = files.path(folder) / "lock"
    if files.in_bucket(place):
        with _in_bucket(place, take_over, lost):
            yield
        return
    with _locked(place, "a", fcntl.LOCK_EX):
        yield


def check(folder: epath.PathLike, *, take_over: bool = False) -> None:
    """Raises `UserError` if `hold` would now, but holds nothing. A command calls it to fail before any work is done."""
    place = files.path(folder) / "lock"
    if not files.in_bucket(place):
        if place.exists():
            with _locked(place, "r", fcntl.LOCK_SH):
                return
    elif not take_over:
        _Claim(place).check()


@contextlib.contextmanager
def _locked(place: epath.Path, mode: Literal["a", "r"], kind: int) -> Iterator[None]:
    try:
        lock = place.open(mode)
    except OSError as e:
        raise UserError(f"{place} cannot be opened: {e.strerror}; give this run another run.dir") from None
    with lock:
        try:
            missing = lock_file(lock, kind)
        except BlockingIOError:
            raise UserError(f"{place.parent} is in use by another process; give this run another run.dir") from None
        if missing and kind == fcntl.LOCK_EX:  # a check that holds nothing says nothing
            log.warning("%s cannot be locked (%s): a second run there would not be noticed", place.parent, missing)
        yield


def lock_file(file: IO[Any], kind: int = fcntl.LOCK_EX) -> str | None:
    """Locks an open file until it is closed; why not, if its file system has no locks, such as Lustre without
    ``-o flock``.

    Raises:
      BlockingIOError: another process has locked it.
    """
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as e:
        return e.strerror
    return None


@contextlib.contextmanager
def _in_bucket(place: epath.Path, take_over: bool, lost: Callable[[str], None]) -> Iterator[None]:
    claim, done = _Claim(place), threading.Event()
    claim.take(take_over)

    def renew() -> None:
        heard = time.monotonic()
        while not done.wait(RENEW_S):
            try:
                if (taker := claim.renew()) is not None:
                    if not done.is_set():
                        lost(f"{place.parent} was taken over by {taker}; this process ends")
                    return
                heard = time.monotonic()
            except Exception as e:  # storage is away; the next renewal that works finds out
                silent = time.monotonic() - heard
                log.warning("the claim on %s was not renewed for %.0f s: %s", place.parent, silent, e)

    thread = threading.Thread(target=renew, name="claim", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        claim.release()


class _Claim:
    """The lock object, and its generation that this process wrote last."""

    def __init__(self, place: epath.Path):
        from google.api_core import exceptions  # pyrefly: ignore
        from google.auth.exceptions import DefaultCredentialsError  # pyrefly: ignore
        from google.cloud import storage  # pyrefly: ignore
        from google.cloud.storage.retry import DEFAULT_RETRY  # pyrefly: ignore

        self._place, self._nonce, self._retry = place, secrets.token_hex(8), DEFAULT_RETRY
        self._taken, self._absent = exceptions.PreconditionFailed, exceptions.NotFound
        self._failed, self._generation = (exceptions.GoogleAPIError, OSError), 0
        bucket, _, name = str(place).removeprefix("gs://").partition("/")
        try:
            self._blob: Any = storage.Client(project=None).bucket(bucket).blob(name)
        except DefaultCredentialsError:
            raise UserError(f"{place}: no credentials; gcloud auth application-default login gives some") from None

    def take(self, take_over: bool) -> None:
        """Writes the object; raises `UserError` if another process holds it, or if the bucket cannot be written."""
        with self._announced():
            self._generation = self._take(take_over)

    def check(self) -> None:
        """Raises `UserError` if another process holds it, or if the bucket cannot be read."""
        with self._announced():
            before, generation, silent = self._read(datetime.datetime.now(datetime.UTC))
            if generation:
                self._refuse(before, silent)

    @contextlib.contextmanager
    def _announced(self) -> Iterator[None]:
        try:
            yield
        except self._failed as e:
            raise UserError(f"{self._place.parent} cannot be claimed: {' '.join(str(e).split())[:300]}") from None

    def _refuse(self, before: Mapping[str, Any], silent: float) -> None:
        if silent < SILENT_S:
            raise UserError(
                f"{self._place.parent} is in use by {before.get('holder')}; it was last seen {silent:.0f} s ago; "
                "give this run another run.dir\nif that process is surely dead, use --take-over; "
                f"a claim expires by itself after {SILENT_S / 60:g} minutes"
            )

    def _take(self, take_over: bool) -> int:
        before: dict[str, Any] = {}
        generation = 0
        for _ in range(5):
            try:
                return self._write(generation)
            except self._taken as e:
                first = before.get("nonce")
                before, generation, silent = self._read(_time_of(e))
            holder = before.get("holder")
            if before.get("nonce") == self._nonce:  # the answer to an earlier attempt was lost
                return generation
            if generation and not take_over:
                self._refuse(before, silent)
            if first is None and generation:
                log.warning("%s is taken over from %s", self._place.parent, holder)
            elif first not in (None, before.get("nonce")) and generation:
                break
        raise UserError(f"{self._place.parent}: {before.get('holder')} was quicker, and has claimed it")

    def renew(self) -> str | None:
        """Renews the claim; returns the process that holds it instead, or None."""
        try:
            self._generation = self._write(self._generation)
        except self._taken as e:
            now, generation, _ = self._read(_time_of(e))
            if now.get("nonce") != self._nonce:
                return str(now.get("holder", "another process, which has let go of it again"))
            self._generation = generation
        return None

    def release(self) -> None:
        """Removes the claim. If that fails, another process can take it once it is old enough."""
        try:
            if self.renew() is None:
                self._blob.delete(if_generation_match=self._generation, retry=self._retry)
        except (self._absent, self._taken):
            pass
        except Exception as e:
            log.warning("the claim on %s could not be released: %s", self._place.parent, e)

    def _write(self, generation: int) -> int:
        """Replaces the object if it has this generation (0: if there is no object); returns the new generation."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        content = {"holder": f"{socket.gethostname()}:{os.getpid()}", "nonce": self._nonce, "renewed": now}
        self._blob.upload_from_string(json.dumps(content) + "\n", if_generation_match=generation, retry=self._retry)
        return int(self._blob.generation)

    def _read(self, now: datetime.datetime) -> tuple[dict[str, Any], int, float]:
        """The object's content, generation and age in seconds; generation 0 if there is none any more."""
        blob = self._blob.bucket.get_blob(self._blob.name)
        if blob is None:
            return {}, 0, 0.0
        try:
            content = json.loads(blob.download_as_bytes(retry=self._retry))
        except self._absent:
            return {}, 0, 0.0
        except ValueError:
            content = {}
        age = (now - blob.updated).total_seconds()
        return content if isinstance(content, dict) else {}, int(blob.generation), max(0.0, age)


def _time_of(error: Any) -> datetime.datetime:
    """The time at which storage refused, by its own clock: this machine's may be wrong, and must not break a claim."""
    date = getattr(error.response, "headers", {}).get("Date")
    return email.utils.parsedate_to_datetime(date) if date else datetime.datetime.now(datetime.UTC)
