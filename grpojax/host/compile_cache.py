"""Where compiled programs are kept for the next start."""

import contextlib
import errno
import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from grpojax.host import files
from grpojax.host.console import log
from grpojax.host.errors import UserError

AUTO = "auto"
OWN_BYTES = 8 * 2**30  # the most that the user's own folder may hold when a process starts

# Settings of jax: keep every program, since a start compiles a hundred small ones. An environment variable of the same
# name in capitals wins.
_KEEP_ALL = {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}


def cache_folder(place: str | None, run_dir: str | os.PathLike[str] | None = None) -> str | None:
    """The folder that compiled programs are kept in; None if they are not kept.

    Args:
      place: "auto", a folder (local or ``gs://``), or None. "auto" is ``grpojax/compile`` in ``XDG_CACHE_HOME`` or in
        ``~/.cache``. If ``run_dir`` is in a bucket, or there are several processes, "auto" is ``compile_cache`` next to
        ``run_dir`` instead; only the first process writes there.
      run_dir: folder of the run; None outside of a run.

    Example:
      >>> cache_folder(None), cache_folder("/fast/cache"), cache_folder("auto", "gs://bucket/runs/first")
      (None, '/fast/cache', 'gs://bucket/runs/compile_cache')
    """
    if place != AUTO:
        return None if place is None else str(files.path(place))
    if run_dir is not None and (jax.process_count() > 1 or str(run_dir).startswith("gs://")):
        return str(files.path(run_dir).parent / "compile_cache")
    own = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return str(Path(own) / "grpojax" / "compile")


def keep_compiled(place: str | None = AUTO, run_dir: str | os.PathLike[str] | None = None) -> None:
    """Makes jax keep everything that it compiles from now on, and read it at the next start.

    The folder is ``JAX_COMPILATION_CACHE_DIR`` if that is set, and otherwise follows from ``place`` (`cache_folder`).

    Several processes on CPUs keep nothing (`grpojax.host.processes.start`). A process also keeps nothing if it cannot
    make the folder of "auto". The user's own folder is trimmed if it holds more than `OWN_BYTES`; other folders are
    never trimmed.

    Raises:
      UserError: ``place`` is a folder that cannot be made or written.
    """
    if not jax.config.values["jax_enable_compilation_cache"]:
        return
    for name, value in _KEEP_ALL.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    folder = cache_folder(place, run_dir)
    if folder is not None:
        try:
            files.make_folder(folder)
            if not files.in_bucket(folder) and not os.access(folder, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as e:
            why = f"{folder} cannot be made or written: {' '.join(str(e.strerror or e).split())[:200]}"
            if place != AUTO:
                raise UserError(f"compile_cache={why}") from None
            log.warning("nothing that is compiled is kept: %s; give compile_cache another folder, or null", why)
            folder = None
        if folder is not None and folder == cache_folder(AUTO):
            _trim(Path(folder))
        if folder is not None and files.in_bucket(folder):  # XLA writes its own files to disks only
            jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    if folder != jax.config.values["jax_compilation_cache_dir"]:
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()  # otherwise jax keeps using its first folder


def _trim(folder: Path) -> None:
    """If a folder holds more than `OWN_BYTES`, removes the least recently used programs, down to half of that.

    jax has a limit of its own, but it reads the dates of all entries for each entry that it writes, and stops writing
    if one entry has no date.
    """
    programs = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith("-cache"):
                with contextlib.suppress(FileNotFoundError):  # another process trims as well
                    found = entry.stat()
                    programs.append((max(found.st_atime, found.st_mtime), found.st_size, entry.path))
    left = sum(size for _, size, _ in programs)
    if left <= OWN_BYTES:
        return
    for _, size, path in sorted(programs):
        if left <= OWN_BYTES // 2:
            return
        with contextlib.suppress(OSError):
            os.unlink(path)
            left -= size
