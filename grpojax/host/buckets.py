"""Google Cloud Storage as a file system, by gcsfs. `grpojax.host.files` imports this module if a path is in a bucket.

gcsfs retries every request whose error may pass (408, 429, 500 to 504, torn connections), six times in all with pauses
of up to 16 s. An error that remains is an `OSError` that names the object. Nothing is cached between requests, since
other processes write here as well. The checksum of every written object is compared.
"""

import asyncio
import errno
import json
import logging
import os
import re
import urllib.parse
from collections.abc import Mapping
from typing import Any

import aiohttp  # pyrefly: ignore
import fsspec
import google.auth.exceptions  # pyrefly: ignore
import requests
from etils import epath
from fsspec import asyn
from gcsfs import core  # pyrefly: ignore
from gcsfs.retry import ChecksumError, HttpError  # pyrefly: ignore

_ERRORS = (
    HttpError,
    ChecksumError,
    ValueError,
    OSError,
    asyncio.TimeoutError,
    aiohttp.ClientError,
    requests.RequestException,
    google.auth.exceptions.GoogleAuthError,
)


class Bucket(core.GCSFileSystem):
    """The plain file system. Its errors name the object, and a folder exists once something is in it."""

    def __init__(self, **options: Any):
        options |= {"use_listings_cache": False, "consistency": "md5"}
        if os.environ.get("STORAGE_EMULATOR_HOST"):
            options.setdefault("token", "anon")
        super().__init__(**options)

    async def _call(self, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super()._call(method, path, *args, **kwargs)
        except FileNotFoundError:
            if re.search(r"bytes .*/\d+$", (kwargs.get("headers") or {}).get("Content-Range", "")):
                # The last part of an upload that may have ended but whose answer was lost. The caller compares
                # checksums.
                return {}, (await self._call("GET", "b/{}/o/{}", *_object(path)))[1]
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), _place(path, args, kwargs)) from None
        except FileExistsError:
            raise
        except _ERRORS as e:
            message = " ".join(str(e).split())[:300] or type(e).__name__
            raise OSError(errno.EIO, message, _place(path, args, kwargs)) from e

    call = asyn.sync_wrapper(_call)  # what files that are open ask by

    async def _isdir(self, path: str) -> bool:
        try:
            return (await self._info(path))["type"] == "directory"
        except (FileNotFoundError, NotADirectoryError):
            return False

    async def _mkdir(self, path: str, *args: Any, **kwargs: Any) -> None:
        """Does nothing: no bucket is made implicitly."""

    async def _makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing."""


def _object(address: str) -> tuple[str, str]:
    """Bucket and name in a request's address; empty if it has none."""
    parts = urllib.parse.urlsplit(address)
    if (found := re.search(r"/b/([^/]+)/o(?:/([^/]+))?$", parts.path)) is None:
        return "", ""
    name = found[2] or urllib.parse.parse_qs(parts.query).get("name", [""])[0]
    return found[1], urllib.parse.unquote(name) if found[2] else name


def _place(path: str, args: tuple[Any, ...], asked: Mapping[str, Any]) -> str:
    """The object that a request was for. Its name is in the address or, for a new object, in the content."""
    if args:
        return f"gs://{'/'.join(map(str, args[:2]))}"
    bucket, name = _object(path)
    if not name and (message := re.search(rb'"name": ("[^"]*")', bytes(asked.get("data") or b"")[:4096])):
        name = json.loads(message[1])
    return f"gs://{bucket}/{name}" if bucket else path


def register() -> None:
    """From here on epath, and so orbax, reads and writes ``gs://`` through this module."""
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # gcsfs also logs the errors that it raises
    for name in ("gs", "gcs"):
        fsspec.register_implementation(name, Bucket, clobber=True)


def system() -> Any:
    """The file system, which epath, and so orbax, uses too."""
    return Bucket(finalize_on_close=True)


def write(file: epath.Path, content: bytes) -> None:
    """One request, or one for every 50 MB."""
    try:
        system().pipe_file(str(file), content)
    except ChecksumError as e:
        raise OSError(errno.EIO, f"arrived damaged: {e}", str(file)) from None


def read(file: epath.Path) -> bytes:
    """One request."""
    return system().cat_file(str(file))


def move(folder: epath.Path, to: epath.Path) -> None:
    """Every object below ``folder`` goes below ``to``; an object takes the name ``to``."""
    bucket, start, target = system(), f"{folder}/".removeprefix("gs://"), f"{to}/".removeprefix("gs://")
    if bucket.isfile(str(folder)):
        return bucket.mv_file(start.removesuffix("/"), target.removesuffix("/"))
    old = [name for name in bucket.find(str(folder)) if name.startswith(start)]
    for name in old:
        bucket.mv_file(name, target + name.removeprefix(start))


def matches(pattern: str) -> list[str]:
    """The objects that match a glob, by name."""
    return sorted(f"gs://{name}" for name in system().glob(pattern.removeprefix("gs://")))


def exists(place: epath.Path) -> bool:
    """Whether the bucket of a path exists."""
    bucket = str(place).removeprefix("gs://").partition("/")[0]
    try:
        system().call("GET", "b/{}/o", bucket, maxResults=1)
    except FileNotFoundError:
        return False
    return True
