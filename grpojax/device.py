"""The devices of a run behind three verbs: `Real.put` brings arrays there, `Real.call` runs a `Program`, `Real.get`
brings results back.

Several processes, each with some of the devices, run the same code in the same order. Only this module knows how an
array of the host gets to the devices of all of them, and back.
"""

import concurrent.futures
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from grpojax import sharding
from grpojax.host.console import log

Axes = tuple[str | None, ...]

# Logical axes of an array's first dimensions (`grpojax.sharding.TRAIN`); the other dimensions are not cut.
SHARD: Axes = ("shard",)  # prompts and samples ``[P, ...]``
ROWS: Axes = (None, "shard")  # rows of an update ``[M, B, ...]``
WHOLE: Axes = ()  # the same on every device

_COMPILES = "/jax/core/compile/"  # jax's events: a function is traced, lowered and compiled
_BACKEND = _COMPILES + "backend_compile_duration"


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A function of arrays, jitted under a name. The log reports when it compiles.

    Attributes:
      name: its name in profiles and in the log. The log does not report a program without one.
      fn: a pure function of arrays.
      donate: positions of arguments whose memory the program takes over.
      out: ``out(*args)`` says where the results lie on a mesh: shardings, one for each result or for a part of their
        tree, and None for what XLA may lay out. ``args`` are arrays or shapes; it is asked once, at the first call.
        None on one device.
      options: options for XLA (`quick_options`). No other jitted function may call a program that has options.
      flops: ``flops(prompts, samples)``: FLOPs of a call for prompts of these numbers of tokens ``[n]``, each with
        samples of these ``[n, G]``; None where they are not known or do not count.
      made_up: ``made_up(results, longest)``: shapes of its results with arrays of the host in place of some, for `Dry`.
        None gives zeros.

    Example:
      >>> import jax.numpy as jnp
      >>> double = Program("double", lambda x: 2 * x)
      >>> double(jnp.arange(3)).tolist()
      [0, 2, 4]
    """

    name: str
    fn: Callable[..., Any]
    _: dataclasses.KW_ONLY
    donate: tuple[int, ...] = ()
    out: Callable[..., Any] | None = None
    options: Mapping[str, Any] | None = None
    flops: Callable[[Any, Any], float] | None = None
    made_up: Callable[[Any, bool], Any] | None = None
    _made: list[Any] = dataclasses.field(default_factory=list, repr=False)
    _making: Any = dataclasses.field(default_factory=threading.RLock, repr=False)  # a thread may compile it ahead

    def __post_init__(self):
        if self.name:
            _names.add(self.name)

    def jitted(self, *args: Any) -> Any:
        """The jitted function, made for the first ``args`` that it is called with."""
        with self._making:
            if not self._made:
                placed = {} if self.out is None else {"out_shardings": self.out(*args)}
                options = None if self.options is None else dict(self.options)
                self._made.append(
                    jax.jit(_named(self.name, self.fn), donate_argnums=self.donate, compiler_options=options, **placed)
                )
            return self._made[0]

    def __call__(self, *args: Any) -> Any:
        return self.jitted(*args)(*args)

    def lower(self, *args: Any) -> Any:
        """As of a jitted function."""
        return self.jitted(*args).lower(*args)

    def trace(self, *args: Any) -> Any:
        """As of a jitted function."""
        return self.jitted(*args).trace(*args)


def _named(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def named(*args: Any) -> Any:
        return fn(*args)

    named.__name__ = name or getattr(fn, "__name__", "unnamed")
    return named


class Device(Protocol):
    """One device or a mesh of them."""

    mesh: Mesh | None

    def put(self, tree: Any, axes: Axes = SHARD) -> Any:
        """Arrays of the host, the same on every process, on the devices.

        Args:
          tree: the arrays.
          axes: logical axes of the first dimensions of each.
        """
        ...

    def call(self, program: Program, *args: Any) -> Any:
        """Dispatches a program. Its results may still be computed when this returns."""
        ...

    def get(self, tree: Any) -> Any:
        """Waits for arrays of the devices, and returns them on the host; whole, on every process."""
        ...


class Real:
    """The devices that are there.

    Args:
      mesh: their mesh; None for a single one.
      alone: that single device; None takes the first of this process.

    Attributes:
      mesh: as above.

    Example:
      >>> device = Real()
      >>> double = Program("double", lambda x: 2 * x)
      >>> device.get(device.call(double, device.put(np.arange(3)))).tolist()
      [0, 2, 4]
    """

    def __init__(self, mesh: Mesh | None = None, alone: jax.Device | None = None):
        self.mesh = mesh
        self._place = None if mesh is not None else SingleDeviceSharding(alone or jax.local_devices()[0])
        # On several CPU devices, programs in flight at the same time would receive each other's messages.
        self._one_at_a_time = mesh is not None and mesh.devices.flat[0].platform == "cpu"
        self._ahead: CompileAhead | None = None

    def put(self, tree: Any, axes: Axes = SHARD) -> Any:
        """See `Device`. On a single device arrays are bound to it, so that a program is compiled once for them and for
        restored ones, which are bound as well."""
        if self.mesh is None:
            return jax.device_put(tree, self._place)
        return jax.tree.map(functools.partial(_put, placed=sharding.named(self.mesh, axes)), tree)

    def call(self, program: Program, *args: Any) -> Any:
        """See `Device`. If the program compiles ahead (`compile_ahead`), this waits for that."""
        out = program(*args) if self._ahead is None else self._ahead(program, *args)
        return jax.block_until_ready(out) if self._one_at_a_time else out

    def get(self, tree: Any) -> Any:
        """See `Device`. All copies are under way before it waits for the first."""
        for x in jax.tree.leaves(tree):
            if isinstance(x, jax.Array) and x.is_fully_addressable:
                x.copy_to_host_async()
        return jax.tree.map(_get, tree)

    def compile_ahead(self, calls: Iterable[tuple[Program, tuple[Any, ...], str]]) -> None:
        """Starts to compile programs in threads (`CompileAhead`). It takes the calls in a thread as well."""
        self._ahead = CompileAhead(calls)

    def close(self) -> None:
        """Starts no further compile."""
        if self._ahead is not None:
            self._ahead.close()


class Dry:
    """Devices that compute nothing: a step on them tells which programs it calls, and with what.

    `put` and `call` give shapes, placed as arrays would be. `get` gives zeros, or what a program has made up for its
    results (`Program.made_up`).

    Args:
      mesh: as of `Real`. Its devices need not be there.
      alone: as of `Real`.
      longest: whether made-up samples are as long as they may be. Otherwise they are as short.

    Attributes:
      mesh, longest: as above.
      calls: the programs that were called and their arguments, with shapes in place of arrays of the devices.

    Example:
      >>> device = Dry()
      >>> double = Program("double", lambda x: 2 * x)
      >>> device.get(device.call(double, device.put(np.ones(3, np.int32)))).tolist()
      [0, 0, 0]
      >>> [(program.name, x.shape) for program, (x,) in device.calls]
      [('double', (3,))]
    """

    def __init__(self, mesh: Mesh | None = None, alone: jax.Device | None = None, *, longest: bool = True):
        self.mesh, self.longest, self.calls = mesh, longest, list[tuple[Program, tuple[Any, ...]]]()
        # By the identity of a shape, which is kept so that no other takes its place.
        self._made_up = dict[int, tuple[Any, np.ndarray]]()
        self._place = None if mesh is not None else SingleDeviceSharding(alone or jax.local_devices()[0])

    def put(self, tree: Any, axes: Axes = SHARD) -> Any:
        """See `Device`."""
        return shapes(tree, self._place or sharding.named(self.mesh, axes))

    def call(self, program: Program, *args: Any) -> Any:
        """Notes the call."""
        self.calls.append((program, args))
        shape = program.jitted(*args).eval_shape(*args)
        if self._place is not None:
            out = shapes(shape, self._place)
        else:
            whole = sharding.named(self.mesh, WHOLE)
            at = whole if program.out is None else program.out(*args)
            out = jax.tree.map(lambda place, part: shapes(part, place or whole), at, shape, is_leaf=lambda x: x is None)
        if program.made_up is not None:
            for x, value in zip(*map(jax.tree.leaves, (out, program.made_up(shape, self.longest))), strict=True):
                if isinstance(value, np.ndarray):
                    self._made_up[id(x)] = x, value
        return out

    def get(self, tree: Any) -> Any:
        """See `Device`."""

        def of_host(x: Any) -> np.ndarray:
            known = self._made_up.get(id(x))
            return np.broadcast_to(np.zeros((), x.dtype), x.shape) if known is None else known[1]

        return jax.tree.map(of_host, tree)


def shapes(tree: Any, placed: Sharding | None) -> Any:
    """A tree's shapes and dtypes, all placed in the same way."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=placed), tree)


def _put(x: Any, placed: NamedSharding | None) -> Any:
    if jax.process_count() == 1 or placed is None:
        return jax.device_put(x, placed)
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, placed, lambda index: x[index])


def _get(x: Any) -> Any:
    if not isinstance(x, jax.Array):
        return x
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return multihost_utils.process_allgather(x, tiled=True)


def places(tree: Any) -> Any:
    """Where arrays lie, for a `Program.out` whose results lie where an argument did."""
    return jax.tree.map(lambda x: x.sharding, tree)


def cut(mesh: Mesh | None, axes: Axes) -> Callable[..., Any] | None:
    """A `Program.out` whose results are all cut along these axes; None on one device."""
    placed = sharding.named(mesh, axes)
    return None if placed is None else lambda *args: placed


class CompileAhead:
    """Compiles programs in threads, one for each core, before they are called. A call waits only for its own program.

    This changes when a program compiles, but not what runs. Every process compiles for itself, so that several hosts
    need not agree on the order. Concurrent compiles add up in host memory.

    Args:
      calls: programs, each with shapes of its arguments and with what the log says behind its name, in the order in
        which they will be called. They are taken in a thread. If that raises, no further program compiles ahead.

    Example:
      >>> import jax.numpy as jnp
      >>> double = Program("double", lambda x: 2 * x)
      >>> run = CompileAhead([(double, (jax.ShapeDtypeStruct((3,), jnp.int32),), " for three numbers")])
      >>> run(double, jnp.arange(3)).tolist()
      [0, 2, 4]
    """

    def __init__(self, calls: Iterable[tuple[Program, tuple[Any, ...], str]]):
        # The compiler releases Python's lock, so that each thread has a core.
        self._pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="compile")
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._left = dict[Any, tuple[concurrent.futures.Future[Any], str]]()
        self._called: set[Any] | None = set()  # while the calls are taken
        self._pool.submit(self._take, calls)

    def _take(self, calls: Iterable[tuple[Program, tuple[Any, ...], str]]) -> None:
        try:
            for program, args, note in calls:
                key = _shapes(program, args)
                with self._lock:
                    if self._closed.is_set():
                        return
                    if self._called is not None and key not in self._called and key not in self._left:
                        self._left[key] = self._pool.submit(self._compile, program, args, note), note
        except Exception:  # the run itself says what is wrong, where it is
            log.debug("what would compile ahead is not known", exc_info=True)
        finally:
            with self._lock:
                self._called = None

    def __call__(self, program: Program, *args: Any) -> Any:
        """``program(*args)``, once it is compiled for these shapes. A failed compile raises here."""
        found = None
        if self._left or self._called is not None:
            key = _shapes(program, args)
            with self._lock:
                found = self._left.pop(key, None)
                if self._called is not None:
                    self._called.add(key)
        if found is None:
            return program(*args)
        compiles, _here.note = found
        try:
            # One that was still waiting is canceled: the call compiles it itself. Otherwise jax may drop the program
            # before the call unless something refers to it.
            _kept = None if compiles.cancel() else compiles.result()
            return program(*args)
        finally:
            _here.note = ""

    def close(self) -> None:
        """Starts no further compile. Running compiles end by themselves, and the log no longer reports them."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, program: Program, args: tuple[Any, ...], note: str) -> Any:
        _here.over, _here.note = self._closed, note
        lowered = program.lower(*args)
        return lowered, None if self._closed.is_set() else lowered.compile()


def _shapes(program: Program, args: tuple[Any, ...]) -> tuple[Any, ...]:
    leaves, tree = jax.tree.flatten(args)
    return program, tree, *((np.shape(x), str(getattr(x, "dtype", type(x)))) for x in leaves)


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


# ------------------------------------------------------------------------------------------- what the log says


class _Here(threading.local):
    """What the log needs to know of this thread's compile.

    Attributes:
      found: whether the compile cache had the program.
      note: what the log says behind its name.
      over: set once the run that asked for the program is over; None in threads that compile for no run.
    """

    found, note = False, ""
    over: threading.Event | None = None

    def reports(self, name: str) -> bool:
        """Whether the log says that ``name`` compiles here."""
        return name in _names and not (self.over and self.over.is_set())


_names: set[str] = set()  # of all programs
_here, _lock, _under_way = _Here(), threading.Lock(), 0


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
        log.info("compiling %s%s", name, _here.note)


def _ended(event: str, duration_secs: float, *, fun_name: str = "", **_: Any) -> None:
    global _under_way
    if event.startswith(_COMPILES):
        with _lock:
            _under_way = max(0, _under_way - 1)
    if event == _BACKEND and _here.reports(name := _name(fun_name)):
        name += _here.note
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
