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
OWN_BYTES = 8 * 2**30  # that the user's own folder may have when a process starts

# jax's settings: every program is worth a file, since a start has a hundred small ones. A variable in capitals wins.
_KEEP_ALL = {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}

_COMPILES = "/jax/core/compile/"  # jax's events: a function is traced, lowered and compiled
_BACKEND = _COMPILES + "backend_compile_duration"


class _Here(threading.local):
    """Whether what this thread compiles was found in the compile cache."""

    found = False


_programs: set[str] = set()  # names of all that `program` has made
_here, _lock, _under_way = _Here(), threading.Lock(), 0


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


def program(
    name: str,
    function: Callable[..., Any],
    *,
    donate: Sequence[int] = (),
    static: Sequence[str] = (),
    options: dict[str, Any] | None = None,
    out_shardings: Any = None,
) -> Callable[..., Any]:
    """A program of a run: ``function``, jitted under a name. While it compiles, the log says so.

    Args:
      name: what profiles and the log call it.
      function: pure, of arrays.
      donate: positions of arguments whose memory it takes over.
      static: names of keyword arguments that it compiles anew for.
      options: XLA's (`quick_options`); such a program is called by no other jitted function.
      out_shardings: of what it returns; None leaves them to XLA.

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

    It changes when a program compiles, and not what runs. Every process compiles for itself, so that several hosts need
    not agree on the order. The compiles that run at the same time need their host memory at the same time.

    Args:
      calls: programs of `program`, each with shapes of its arguments, in the order in which they will be called.

    Example:
      >>> import jax.numpy as jnp
      >>> double = program("double", lambda x: 2 * x)
      >>> run = CompileAhead([(double, (jax.ShapeDtypeStruct((3,), jnp.int32),))])
      >>> run(double, jnp.arange(3)).tolist()
      [0, 2, 4]
    """

    def __init__(self, calls: Iterable[tuple[Any, tuple[Any, ...]]] = ()):
        # The compiler runs without Python's lock, so that each thread has a core.
        self._pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="compile")
        self._left = {_shapes(program, args): self._pool.submit(_compile, program, args) for program, args in calls}

    def __call__(self, program: Any, *args: Any) -> Any:
        """``program(*args)``, once it is compiled for these shapes; what fails to compile raises here."""
        compiles = self._left.pop(_shapes(program, args), None) if self._left else None
        if compiles is None or compiles.cancel():  # a canceled one was still waiting: the call compiles it itself
            return program(*args)
        _kept = compiles.result()  # jax may drop the program before the call unless something refers to it
        return program(*args)

    def close(self) -> None:
        """Starts no other compile; those under way end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _compile(program: Any, args: tuple[Any, ...]) -> Any:
    lowered = program.lower(*args)
    return lowered, lowered.compile()


def _shapes(program: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    leaves, tree = jax.tree.flatten(args)
    return program, tree, *((np.shape(x), str(getattr(x, "dtype", type(x)))) for x in leaves)


def compiling() -> bool:
    """Whether a function is being traced or compiled at the moment, by any thread."""
    return _under_way > 0


def _started(event: str, value: float, *, fun_name: str = "", **_: Any) -> None:
    global _under_way
    if event.startswith(_COMPILES):
        with _lock:
            _under_way += 1
    if event == _BACKEND and (name := _name(fun_name)) in _programs:
        _here.found = False
        log.info("compiling %s", name)


def _ended(event: str, duration_secs: float, *, fun_name: str = "", **_: Any) -> None:
    global _under_way
    if event.startswith(_COMPILES):
        with _lock:
            _under_way = max(0, _under_way - 1)
    if event == _BACKEND and (name := _name(fun_name)) in _programs:
        what = f"read {name} from the compile cache" if _here.found else f"compiled {name}"
        log.info("%s in %.1f s", what, duration_secs)


def _noted(event: str, **_: Any) -> None:
    if event.endswith("/cache_hits"):
        _here.found = True


def _name(fun_name: str) -> str:
    """jax has ``update`` as ``jit(update)`` where it compiles it."""
    return fun_name.removeprefix("jit(").removesuffix(")")


jax.monitoring.register_scalar_listener(_started)
jax.monitoring.register_event_duration_secs_listener(_ended)
jax.monitoring.register_event_listener(_noted)


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

    On a CPU a program with them compiles in about half of the time and in less memory. It runs as fast; that of a model
    of a million weights is a few percent slower. Rollouts are compiled without them: their many small loops would run a
    fifth slower. A function with options is called by no other jitted one.

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
