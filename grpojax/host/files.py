"""Files, local and in buckets: writes that appear whole or not at all, parts of files, and background writes.

gcsfs retries the errors of a bucket that may pass (`grpojax.host.buckets`). An error that remains names the file.
"""

import concurrent.futures
import contextlib
import errno
import functools
import importlib.util
import json
import os
import queue
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from etils import epath

from grpojax.host.console import log
from grpojax.host.errors import UserError, check_path

# All machines access buckets in the same way (`grpojax.host.buckets`), whether tensorflow is installed or not.
os.environ.setdefault("EPATH_USE_TF", "false")

T = TypeVar("T")
_AT_ONCE = 32  # requests for whole files
PART = 16 * 2**20  # bytes of a request for a part of a file
_PARTS_AT_ONCE = 8
_SHORT = 3  # times that an answer may be shorter than its stated length


def path(place: str | os.PathLike[str]) -> epath.Path:
    """A file or folder: a local one (``~`` is the user's home), or one in a bucket (``gs://bucket/folder``).

    Raises:
      UserError: the scheme is another one, the packages that read buckets are not installed, or no file can have this
        path.

    Example:
      >>> str(path("runs") / "first")
      'runs/first'
      >>> path("s3://bucket/runs")
      Traceback (most recent call last):
      grpojax.host.errors.UserError: s3://bucket/runs: s3:// is not supported; give a local path or gs://...
    """
    text = os.fspath(place)
    scheme, colon, rest = text.partition("://")
    if colon and scheme != "gs":
        shown = f"{text}: {scheme}" if text.isprintable() else f"{text!r}: {scheme!r}"
        raise UserError(f"{shown}:// is not supported; give a local path or gs://...")
    if colon:
        if not rest.partition("/")[0]:
            raise UserError(f"{text} names no bucket; give gs://bucket/folder")
        try:
            _know_buckets()
        except ImportError as e:
            raise UserError(f"{text}: a bucket needs {e}: pip install 'grpojax[gcs]'") from None
    elif re.match(r"gs:/", text):
        raise UserError(f"{text}: give gs://bucket/folder, with two slashes")
    if variable := re.search(r"(^|/)\$\w+|\$[A-Z_][A-Z0-9_]*\b|\$\{[^}]*\}?", text):
        name = variable[0].lstrip("/")
        raise UserError(f"{text}: variables such as {name} are not read here; give the path itself")
    if not colon:
        check_path(text := os.path.expanduser(text))
    return epath.Path(text)


def in_bucket(place: str | os.PathLike[str]) -> bool:
    """Whether a path is in a bucket."""
    return os.fspath(place).startswith("gs://")


def absolute(place: str | os.PathLike[str]) -> epath.Path:
    """As `path`; a local path is made absolute."""
    return path(place) if in_bucket(place) else path(place).absolute()


def local(place: str | os.PathLike[str], what: str) -> Path:
    """A path on this machine; for any other it raises `UserError`, which names ``what``."""
    if "://" in os.fspath(place):
        raise UserError(f"{what}={os.fspath(place)!r}: give a local path here")
    return Path(path(place))


@functools.cache
def _know_buckets() -> None:
    """From here on ``gs://`` is read and written; raises `ImportError` with the missing packages."""
    try:
        absent = [name for name in ("gcsfs", "google.cloud.storage") if importlib.util.find_spec(name) is None]
    except ModuleNotFoundError:
        absent = ["google.cloud.storage"]
    if absent:
        raise ImportError(" and ".join(absent))
    from grpojax.host import buckets

    buckets.register()


# ---------------------------------------------------------------------------------------------- files


def write(file: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file whole or not at all; raises `OSError`. The folder of a local file must exist."""
    file = path(file)
    if in_bucket(file):  # an object is not visible before it is complete
        from grpojax.host import buckets

        return buckets.write(file, content)
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_bytes(content)
    temporary.replace(file)


def write_json(file: str | os.PathLike[str], value: Any) -> None:
    """Writes a file whole or not at all."""
    write(file, (json.dumps(value, indent=2) + "\n").encode())


def read(file: str | os.PathLike[str]) -> bytes:
    """The content of a file; raises `OSError`."""
    place = path(file)  # raises with the name of the extra that a bucket needs, if it is not installed
    if in_bucket(file):
        from grpojax.host import buckets

        return buckets.read(place)
    return Path(place).read_bytes()


def read_all(found: Iterable[epath.Path]) -> list[bytes]:
    """The contents of several files; in a bucket, many are read at a time."""
    return _each(read, found)


def remove_all(found: Iterable[epath.Path]) -> None:
    """Removes files, in a bucket many at a time. A missing file is no error."""
    _each(lambda file: file.unlink(missing_ok=True), found)


def _each(do: Callable[[epath.Path], T], found: Iterable[epath.Path]) -> list[T]:
    these = list(found)
    if len(these) < 2 or not in_bucket(these[0]):
        return [do(file) for file in these]
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(do, these))


# ---------------------------------------------------------------------------------------------- parts of files


@contextlib.contextmanager
def naming(place: str | os.PathLike[str]) -> Iterator[None]:
    """Inside the context, any error of storage becomes a `UserError` that names the path."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{os.fspath(place)} does not exist") from None
    except Exception as e:  # other errors than `OSError` come from below gcsfs
        message = " ".join(str(getattr(e, "strerror", None) or e or type(e).__name__).split())[:200]
        raise UserError(f"{os.fspath(place)} cannot be read: {message}") from e


def size(file: str | os.PathLike[str]) -> int:
    """Size of a file in a bucket, in bytes."""
    with naming(file):
        return int(_system(file).info(os.fspath(file))["size"])


def _system(file: str | os.PathLike[str]) -> Any:
    path(file)  # registers buckets
    from grpojax.host import buckets

    return buckets.system()


def read_part(file: str | os.PathLike[str], start: int, stop: int) -> np.ndarray:
    """The bytes ``[start, stop)`` of a file in a bucket, as uint8, by several requests of `PART` bytes at a time."""
    whole, source = np.empty(stop - start, np.uint8), _system(file)

    def part(at: int) -> None:
        end = min(at + PART, stop)
        whole[at - start : end - start] = np.frombuffer(_part(source, os.fspath(file), at, end), np.uint8)

    with naming(file):
        if stop - start <= PART:
            part(start)
            return whole
        with concurrent.futures.ThreadPoolExecutor(_PARTS_AT_ONCE) as pool:
            list(pool.map(part, range(start, stop, PART)))
    return whole


def _part(source: Any, file: str, start: int, stop: int) -> bytes:
    if start == stop:
        return b""
    for _ in range(_SHORT):
        content = source.cat_file(file, start=start, end=stop)
        if len(content) == stop - start:
            return content
    raise OSError(f"bytes {start} to {stop} are incomplete")


# ---------------------------------------------------------------------------------------------- in the background


class Uploads:
    """Writes and removes whole files in the given order: files of a bucket in a thread, local files at once.

    A request to a bucket that finally fails is a warning. If storage is slower than the run for long, the run waits.

    Args:
      ahead: number of requests that may be queued.
    """

    def __init__(self, ahead: int = 64):
        self._queue: queue.Queue[tuple[epath.Path, Callable[[], None]] | None] = queue.Queue(ahead)
        self._thread: threading.Thread | None = None

    def write(self, file: epath.Path, content: bytes) -> None:
        """As the function `write`; raises `OSError` for a local file."""
        self._in_turn(file, functools.partial(write, file, content))

    def remove(self, file: epath.Path) -> None:
        """Removes a file, which may be missing; raises `OSError` for a local one."""
        self._in_turn(file, functools.partial(file.unlink, missing_ok=True))

    def _in_turn(self, file: epath.Path, act: Callable[[], None]) -> None:
        if not in_bucket(file):
            return act()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
            self._thread.start()
        self._queue.put((file, act))

    def wait(self) -> None:
        """Waits until all that was given is done or has failed."""
        self._queue.join()

    def close(self) -> None:
        """Waits, and ends the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            file, act = job
            try:
                act()
            except Exception as e:
                log.warning("%s could not be written: %s", file, e)
            finally:
                self._queue.task_done()
        self._queue.task_done()


# ---------------------------------------------------------------------------------------------- folders


def make_folder(folder: str | os.PathLike[str]) -> None:
    """Makes a local folder and its parents; in a bucket there is nothing to make. Raises `OSError`."""
    folder = path(folder)
    if not in_bucket(folder):
        return folder.mkdir(parents=True, exist_ok=True)
    from grpojax.host import buckets

    if not buckets.exists(folder):
        raise FileNotFoundError(errno.ENOENT, "there is no such bucket", str(folder))


def listing(folder: str | os.PathLike[str]) -> list[epath.Path]:
    """The names in a folder; empty if it does not exist."""
    try:
        return sorted(place for place in path(folder).iterdir() if place != path(folder))  # it may list itself
    except FileNotFoundError:
        return []


def matches(pattern: str) -> list[str]:
    """The files of a bucket that match a glob, by name."""
    path(pattern)
    from grpojax.host import buckets

    return buckets.matches(pattern)


def move(folder: str | os.PathLike[str], to: str | os.PathLike[str]) -> None:
    """Moves a folder or a file to another path, and replaces anything there. In a bucket, each file takes one request.

    Both paths are local, or both are in the same bucket.
    """
    folder, to = path(folder), path(to)
    to.rmtree(missing_ok=True)
    if in_bucket(folder):
        from grpojax.host import buckets

        return buckets.move(folder, to)
    to.parent.mkdir(parents=True, exist_ok=True)
    folder.rename(to)
