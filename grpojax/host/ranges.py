"""Parts of files in buckets. Of a local file the system maps what is asked for; here each part is a request.

Errors that may pass are tried again by gcsfs, six times with growing pauses. What remains names the file.
"""

import concurrent.futures
import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from grpojax.host import files
from grpojax.host.errors import UserError

PART = 16 * 2**20  # bytes of a request
AT_ONCE = 8  # requests
_SHORT = 3  # times that an answer may be shorter than it says it is


@contextlib.contextmanager
def naming(place: str | os.PathLike[str]) -> Iterator[None]:
    """Inside, whatever storage raises is a `UserError` that names the place."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{os.fspath(place)} does not exist") from None
    except Exception as e:  # what is not an `OSError` comes from below gcsfs
        said = " ".join(str(getattr(e, "strerror", None) or e or type(e).__name__).split())[:200]
        raise UserError(f"{os.fspath(place)} cannot be read: {said}") from e


def size(file: str | os.PathLike[str]) -> int:
    """Of a file in a bucket, in bytes."""
    with naming(file):
        return int(_system(file).info(os.fspath(file))["size"])


def _system(file: str | os.PathLike[str]) -> Any:
    files.path(file)  # knows buckets from here on
    from grpojax.host import buckets

    return buckets.system()


def read(file: str | os.PathLike[str], start: int, stop: int) -> np.ndarray:
    """The bytes ``[start, stop)`` of a file in a bucket, as uint8; many parts of `PART` bytes at a time."""
    whole, source = np.empty(stop - start, np.uint8), _system(file)

    def part(at: int) -> None:
        end = min(at + PART, stop)
        whole[at - start : end - start] = np.frombuffer(_part(source, os.fspath(file), at, end), np.uint8)

    with naming(file):
        if stop - start <= PART:
            part(start)
            return whole
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(part, range(start, stop, PART)))
    return whole


def _part(source: Any, file: str, start: int, stop: int) -> bytes:
    if start == stop:
        return b""
    for _ in range(_SHORT):
        content = source.cat_file(file, start=start, end=stop)
        if len(content) == stop - start:
            return content
    raise OSError(f"bytes {start} to {stop} are not all there")
