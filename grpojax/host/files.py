"""Places, local and in buckets, and files that appear whole or not at all."""

import json
import os
from typing import Any

from etils import epath

from grpojax.host.errors import UserError


def path(place: str | os.PathLike[str]) -> epath.Path:
    """A file or folder: a local one, or one of a bucket (``gs://bucket/folder``).

    Raises:
      UserError: a scheme that is neither.

    Example:
      >>> str(path("gs://bucket/runs") / "first")
      'gs://bucket/runs/first'
      >>> path("s3://bucket/runs")
      Traceback (most recent call last):
      grpojax.host.errors.UserError: s3://bucket/runs: s3:// is not read or written here; give a local path or gs://...
    """
    text = os.fspath(place)
    scheme, colon, _ = text.partition("://")
    if colon and scheme != "gs":
        raise UserError(f"{text}: {scheme}:// is not read or written here; give a local path or gs://...")
    return epath.Path(text)


def write_json(file: epath.PathLike, value: Any) -> None:
    """Writes a file whole or not at all."""
    file = path(file)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    temporary.replace(file)
