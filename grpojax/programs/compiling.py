"""Says what compiles, and keeps what was compiled for the next start."""

import concurrent.futures
import contextlib
import errno
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from grpojax.host import files
from grpojax.host.console import log
from grpojax.host.errors import UserError

AUTO = "auto"
OWN_BYTES = 8 * 2**30  # that the user's own folder may have when a process starts

# jax's settings: every program is worth a file, since a start has a hundred small ones. A variable in capitals wins.
_KEEP_ALL = {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}

_events: Counter[str] = Counter()  # that jax tells of its cache
jax.monitoring.register_event_listener(lambda event, **_: _events.update([event.rpartition("/")[2]]))


def cache_folder(place: str | None, run_dir: str | os.PathLike[str] | None = None) -> str | None:
    """The folder that compiled programs are kept in; None for none.

    Args:
      place: "auto", a folder (local or ``gs://``), or None. "auto" is ``grpojax/compile`` in ``XDG_CACHE_HOME``, or in
        ``~/.cache``; and ``compile_cache`` beside ``run_dir`` where that is in a bucket, or there are several
        processes: of those only the first writes what it compiled.
      run_dir: of the run, if it is one.

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
    """Has jax keep all that it compiles from here on, and take it from there at the next start.

    ``JAX_COMPILATION_CACHE_DIR`` says where, if it is set, and ``place`` otherwise, as in `cache_folder`.

    On CPUs several processes keep nothing (`grpojax.host.processes.start`); nor does one that can make no folder for
    "auto". The user's own folder is cut back where it has grown over `OWN_BYTES`; other folders are left as they are.

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
        compilation_cache.reset_cache()  # it stays with its first folder otherwise


def quick_options(platform: str | None = None) -> dict[str, Any] | None:
    """XLA's options for an update or for scores, as ``jax.jit`` takes them; None for XLA's own.

    On a CPU these compile in about half of the time and in less memory, and run as fast, or of a model of a million
    weights a few percent slower; a rollout, whose many small loops would run a fifth slower, is left alone. A function
    with options is called by no other jitted one.

    Args:
      platform: compiled for; None is jax's default.

    Returns:
      None but on a CPU; of the options those that ``XLA_FLAGS`` leaves open.

    Example:
      >>> quick_options("tpu") is None
      True
    """
    if (platform or jax.default_backend()) != "cpu":
        return None
    options: dict[str, Any] = {"xla_backend_optimization_level": 1}
    if jax.__version_info__ < (0, 11):  # from then on XLA has one emitter of loops
        options["xla_cpu_use_fusion_emitters"] = False
    given = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if name not in given} or None


def _trim(folder: Path) -> None:
    """Where a folder holds more than `OWN_BYTES`, removes what was longest not used, down to half of that.

    jax has a limit of its own, which reads every entry's dates for each that it writes, and writes no more once one
    has none.
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


class Programs:
    """Calls jitted functions and says when one compiles: which, for what shapes, and how long its first call took.

    Attributes:
      compiling: whether one does.
      others: from the arguments of a call to those, or their shapes, with which the same function will be called later;
        it is compiled for all of them at once.
    """

    def __init__(self):
        self._seen: set[Any] = set()
        self.compiling = False
        self.others: Callable[[tuple[Any, ...]], Sequence[tuple[Any, ...]]] = _no_others

    def __call__(self, name: str, function: Callable[..., Any], *args, static: Any = None):
        """``function(*args)``; ``static`` is what it was made with beyond its arguments and compiles anew for."""
        made_for = name, static, _dtypes(args[0])  # float32 weights, and those of a reference
        if (key := (*made_for, _shapes(args))) in self._seen:
            return function(*args)
        self._seen.add(key)
        others = [other for other in self.others(args) if (*made_for, _shapes(other)) not in self._seen]
        self._seen |= {(*made_for, _shapes(other)) for other in others}
        for each in (args, *others):
            log.info("compiling %s %s", name, max(_shapes(each), key=len, default=""))
        start, hits, misses = time.perf_counter(), _events["cache_hits"], _events["cache_misses"]
        self.compiling = True
        try:
            # The compiler leaves Python alone, so that a thread for each program is a core for each.
            with concurrent.futures.ThreadPoolExecutor(max(1, len(others))) as pool:
                beside = [pool.submit(function.lower(*other).compile) for other in others]  # type: ignore[attr-defined]
                out = jax.block_until_ready(function(*args))
                for compiled in beside:
                    compiled.result()
        finally:
            self.compiling = False
        kept = _events["cache_hits"] > hits and _events["cache_misses"] == misses
        seconds = time.perf_counter() - start
        log.info("%s %s: first call %.1f s", "read from the compile cache" if kept else "compiled", name, seconds)
        return out


def _shapes(args: tuple[Any, ...]) -> tuple[str, ...]:
    """Of all but a function's first argument, which are the weights."""
    return tuple(str(getattr(x, "shape", x)) for x in jax.tree.leaves(args[1:]))


def _dtypes(weights: Any) -> frozenset[str]:
    return frozenset(str(x.dtype) for x in jax.tree.leaves(weights) if hasattr(x, "dtype"))


def _no_others(args: tuple[Any, ...]) -> Sequence[tuple[Any, ...]]:
    """Whatever a program is called with later has these shapes."""
    return ()
