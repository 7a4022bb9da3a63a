"""How programs are jitted, what is logged while they compile, and where they are kept for the next start."""

import concurrent.futures
import contextlib
import errno
import functools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from grpojax.host import files
from grpojax.host.console import log
from grpojax.host.errors import UserError

AUTO = "auto"
OWN_BYTES = 8 * 2**30  # the most that the user's own folder may hold when a process starts

# Settings of jax: keep every program, since a start compiles a hundred small ones. An environment variable of the same
# name in capitals wins.
_KEEP_ALL = {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}

_COMPILES = "/jax/core/compile/"  # jax's events: a function is traced, lowered and compiled
_BACKEND = _COMPILES + "backend_compile_duration"


class _Here(threading.local):
    """What the log needs to know of this thread's compile.

    Attributes:
      found: whether the compile cache had the program.
      over: set once the run that asked for the program is over; None in threads that compile for no run.
    """

    found = False
    over: threading.Event | None = None

    def reports(self, name: str) -> bool:
        """Whether the log says that ``name`` compiles here."""
        return name in _programs and not (self.over and self.over.is_set())


_programs: set[str] = set()  # names of all that `program` has made
_here, _lock, _under_way = _Here(), threading.Lock(), 0


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


def program(
    name: str,
    function: Callable[..., Any],
    *,
    donate: Sequence[int] = (),
    static: Sequence[str] = (),
    options: dict[str, Any] | None = None,
    out_shardings: Any = None,
) -> Callable[..., Any]:
    """A program of a run: ``function``, jitted under a name. The log reports when it compiles.

    Args:
      name: its name in profiles and in the log.
      function: a pure function of arrays.
      donate: positions of arguments whose memory the program takes over.
      static: names of keyword arguments for whose values it is compiled anew.
      options: options for XLA (`quick_options`). No other jitted function may call a program that has options.
      out_shardings: shardings of the results; None leaves them to XLA.

    Example:
      >>> import jax.numpy as jnp
      >>> double = program("double", lambda x: 2 * x)
      >>> double(jnp.arange(3)).tolist()
      [0, 2, 4]
    """

    @functools.wraps(function)
    def named(*args: Any, **given: Any) -> Any:
        return function(*args, **given)

    named.__name__ = name
    _programs.add(name)
    placed = {} if out_shardings is None else {"out_shardings": out_shardings}
    return jax.jit(
        named, donate_argnums=tuple(donate), static_argnames=tuple(static), compiler_options=options, **placed
    )


class CompileAhead:
    """Compiles programs in threads, one for each core, before they are called. A call waits only for its own program.

    This changes when a program compiles, but not what runs. Every process compiles for itself, so that several hosts
    need not agree on the order. Concurrent compiles add up in host memory.

    Args:
      calls: programs from `program`, each with shapes of its arguments, in the order in which they will be called.

    Example:
      >>> import jax.numpy as jnp
      >>> double = program("double", lambda x: 2 * x)
      >>> run = CompileAhead([(double, (jax.ShapeDtypeStruct((3,), jnp.int32),))])
      >>> run(double, jnp.arange(3)).tolist()
      [0, 2, 4]
    """

    def __init__(self, calls: Iterable[tuple[Any, tuple[Any, ...]]] = ()):
        # The compiler releases Python's lock, so that each thread has a core.
        self._pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="compile")
        self._closed = threading.Event()
        self._left = {
            _shapes(program, args): self._pool.submit(self._compile, program, args) for program, args in calls
        }

    def __call__(self, program: Any, *args: Any) -> Any:
        """``program(*args)``, once it is compiled for these shapes. A failed compile raises here."""
        compiles = self._left.pop(_shapes(program, args), None) if self._left else None
        if compiles is None or compiles.cancel():  # a canceled one was still waiting: the call compiles it itself
            return program(*args)
        _kept = compiles.result()  # jax may drop the program before the call unless something refers to it
        return program(*args)

    def close(self) -> None:
        """Starts no further compile. Running compiles end by themselves, and the log no longer reports them."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, program: Any, args: tuple[Any, ...]) -> Any:
        _here.over = self._closed
        lowered = program.lower(*args)
        return lowered, None if self._closed.is_set() else lowered.compile()


def _shapes(program: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    leaves, tree = jax.tree.flatten(args)
    return program, tree, *((np.shape(x), str(getattr(x, "dtype", type(x)))) for x in leaves)


def compiling() -> bool:
    """Whether any thread is tracing or compiling a function at the moment."""
    return _under_way > 0


def _started(event: str, value: float, *, fun_name: str = "", **_: Any) -> None:
    global _under_way
    if event.startswith(_COMPILES):
        with _lock:
            _under_way += 1
    if event == _BACKEND and _here.reports(name := _name(fun_name)):
        _here.found = False
        log.info("compiling %s", name)


def _ended(event: str, duration_secs: float, *, fun_name: str = "", **_: Any) -> None:
    global _under_way
    if event.startswith(_COMPILES):
        with _lock:
            _under_way = max(0, _under_way - 1)
    if event == _BACKEND and _here.reports(name := _name(fun_name)):
        what = f"read {name} from the compile cache" if _here.found else f"compiled {name}"
        log.info("%s in %.1f s", what, duration_secs)


def _noted(event: str, **_: Any) -> None:
    if event.endswith("/cache_hits"):
        _here.found = True


def _name(fun_name: str) -> str:
    """The name of a function; jax reports ``update`` as ``jit(update)`` when it compiles it."""
    return fun_name.removeprefix("jit(").removesuffix(")")


jax.monitoring.register_scalar_listener(_started)
jax.monitoring.register_event_duration_secs_listener(_ended)
jax.monitoring.register_event_listener(_noted)


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


def quick_options(platform: str | None = None) -> dict[str, Any] | None:
    """Options for XLA for an update or for scores, in the form that ``jax.jit`` takes; None keeps XLA's defaults.

    With these options a program for a CPU compiles in about half of the time and in less memory. It runs as fast, but
    for a model of a million weights it is a few percent slower. Rollouts are compiled without them, since their many
    small loops would run a fifth slower. No other jitted function may call one that has options.

    Args:
      platform: platform to compile for; None is jax's default.

    Returns:
      The options that ``XLA_FLAGS`` does not set already. None if there are none, and on platforms other than a CPU.

    Example:
      >>> quick_options("tpu") is None
      True
    """
    if (platform or jax.default_backend()) != "cpu":
        return None
    options: dict[str, Any] = {"xla_backend_optimization_level": 1}
    if jax.__version_info__ < (0, 11):  # later versions of XLA have only one emitter of loops
        options["xla_cpu_use_fusion_emitters"] = False
    given = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if name not in given} or None


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
