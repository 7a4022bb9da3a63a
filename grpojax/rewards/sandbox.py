"""A worker process and what may be done in it: no jax, no Ctrl-C, a limit to its memory."""

import asyncio
import builtins
import contextlib
import functools
import importlib
import inspect
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

from grpojax.host import isolation
from grpojax.host.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")

_here = {"worker": False}

# Exit status of a worker that ran out of memory: its next sample gets a fresh one.
OUT_OF_MEMORY = 87
# Exit status of a worker in which our own code fails, as after a tool replaced what that calls.
SPOILED = 88
PF_EXITING = 4  # of a process that ends, in <linux/sched.h>
_BUILTINS = {name: value for name, value in vars(builtins).items() if name != "_"}  # as in a fresh process


def in_worker() -> bool:
    """Whether this process is a worker, which may be stopped at any time."""
    return _here["worker"]


def start(
    memory_mb: int,
    functions: Sequence[str],
    network: bool,
    first: Callable[[], object] | None,
    contained: bool,
    started: Any,
    ready: Any,
) -> None:
    """Prepares this process: no jax on an accelerator, no Ctrl-C, the functions imported, and then the memory limit.

    It leads a process group of its own, so that what it starts can be ended with it.

    Args:
      memory_mb, functions, network, first: as in `pool.Workers`.
      contained: whether what it starts ends with it even if that has left the group (`isolation.contain`).
      started: a queue that gets this process's id.
      ready: a semaphore that it releases in the end.
    """
    os.setpgid(0, 0)
    started.put(os.getpid())
    os.environ["JAX_PLATFORMS"] = "cpu"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # for the programs that this one starts
    multiprocessing.current_process().daemon = False  # so that it may start some
    _here["worker"] = True
    _end_with_parent()
    if contained:
        isolation.contain()
    if not network:
        isolation.cut_network()
    if first is not None:
        first()
    _open_loop()  # a client that a module makes while it is imported may bind to it
    for path in functions:
        with contextlib.suppress(BaseException):  # `probe` reports it, or the samples do
            imported(path)
    if memory_mb:
        _limit_memory(memory_mb)
    ready.release()


def _end_with_parent() -> None:
    """Has the kernel end this process when the one that started it is gone, even from inside a long call (Linux).

    The pipe to the parent closes then. The fork server is no help: it stays as long as one of its processes. No process
    can ignore SIGKILL, as it can the SIGIO that the kernel sends by itself.
    """
    parent = multiprocessing.parent_process()
    if sys.platform != "linux" or parent is None:
        return
    import fcntl

    fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(parent.sentinel, fcntl.F_GETFL)
    fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)
    if multiprocessing.connection.wait([parent.sentinel], timeout=0):
        os._exit(1)  # it was gone before


def _limit_memory(megabytes: int) -> None:
    """Allows that much address space over what is mapped already."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    used = 0
    with contextlib.suppress(OSError):
        with open("/proc/self/statm", encoding="ascii") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
    with contextlib.suppress(ValueError, OSError, OverflowError):  # a lower limit is in force
        resource.setrlimit(resource.RLIMIT_AS, (used + megabytes * 2**20,) * 2)


@functools.cache
def imported(path: str) -> Callable[..., Any]:
    """The function behind ``package.module:function``."""
    name, _, function = path.partition(":")
    module = importlib.import_module(name)
    if not hasattr(module, function):  # the file shows it if an installed module has the name of the user's own
        raise AttributeError(f"{getattr(module, '__file__', None) or name} has no {function!r}")
    return getattr(module, function)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all calls in this process, so that clients' connections stay open between them."""
    return asyncio.new_event_loop()


def _open_loop() -> None:
    """Makes the loop the one of this thread: another one if a user's function has closed it."""
    if _loop().is_closed():
        _loop.cache_clear()
    asyncio.set_event_loop(_loop())


def call(function: Callable[..., Any], /, *args: Any, **keywords: Any) -> Any:
    """What a user's function returns, awaited if it is asynchronous."""
    process = os.getpid()
    if in_worker():  # elsewhere the loop of the thread is not ours to choose, as in a notebook
        _open_loop()
    try:
        value = function(*args, **keywords)
        if inspect.isawaitable(value):

            async def finish():
                return await value

            value = _loop().run_until_complete(finish())
        return value
    finally:
        if os.getpid() != process:  # the function has forked, and this is its copy of the worker
            os._exit(0)


def job(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a job of a function of ours that catches what a user's code raises.

    If it raises nevertheless, or the fork server was ended meanwhile, or a built-in function was replaced, the worker
    ends, and a fresh one takes its place. Otherwise later jobs would pay for it. So would they for an alarm that a
    user's code has left on.
    """
    end, stop_alarm = os._exit, getattr(signal, "setitimer", lambda *_: None)  # a tool may replace them

    @functools.wraps(function)
    def run(*args: P.args, **keywords: P.kwargs) -> R:
        server = os.getppid()
        try:
            value = function(*args, **keywords)
            stop_alarm(signal.ITIMER_REAL, 0)
            if os.getppid() == server and not _is_ending(server) and _BUILTINS.items() <= builtins.__dict__.items():
                return value
        except UserError as e:
            raise UserError(*map(str, e.args)) from None  # a subclass may not be known to the run's process
        except BaseException:
            pass
        end(SPOILED)

    return run


def _is_ending(process: int) -> bool:
    """Whether a process has got a signal that ends it (Linux)."""
    if sys.platform != "linux":
        return False
    with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    flags, pending = int(fields[6]), int(fields[28])
    return bool(flags & PF_EXITING or pending & 1 << signal.SIGKILL - 1)


class Probe(NamedTuple):
    """What is known of a reward function before it is called.

    Attributes:
      problem: why it cannot be one, or does not take the options given; "" where it can.
      options: its keywords that have a default other than None. Without a default, or with None, a keyword asks for a
        column of the data.
      columns: its parameters after the first three that have no default and get no option: it cannot be called
        without these columns.
      optional: those of which None is the default, and which get no option: it gets these columns where they are there.
      first: its first three parameters, which are given by position.
    """

    problem: str
    options: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    first: tuple[str, ...] = ("prompts", "completions", "tokens")


def probe(path: str, options: Sequence[str]) -> Probe:
    """Looks at the function behind ``path``, which is to get these options."""
    module, _, function = path.partition(":")
    if module.endswith(".py"):
        file = module.removeprefix("./")
        name = f"{file.removesuffix('.py').replace('/', '.')}:{function or 'FUNCTION'}"
        here = not file.startswith(("/", "..", "~"))
        return Probe(
            f"cannot be imported: write {name}"
            if here
            else "cannot be imported: give MODULE:FUNCTION, with the module's folder in PYTHONPATH"
        )
    try:
        function = imported(path)
    except BaseException as e:
        return Probe(f"cannot be imported: {type(e).__name__}: {e}")
    if not callable(function) or inspect.isclass(function):
        return Probe("is no function")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # some that are written in C have none
        return Probe("has no signature: give a Python function")
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = {p.name: p.default for p in (*positional[3:], *(p for p in parameters if p.kind == p.KEYWORD_ONLY))}
    if len(positional) < 3 or not any(p.kind == p.VAR_KEYWORD for p in parameters):
        remedy = ": add `tokens` as the third parameter" if len(positional) == 2 else ""
        return Probe(f"must take (prompts, completions, tokens, **columns){remedy}")
    if unknown := sorted(set(options) - set(named)):
        return Probe(f"takes no option {unknown[0]!r}")
    with_default = [n for n, x in named.items() if x is not None and x is not inspect.Parameter.empty]
    needed = [n for n, x in named.items() if x is inspect.Parameter.empty and n not in options]
    optional = [n for n, x in named.items() if x is None and n not in options]
    first = tuple(p.name for p in positional[:3] if p.kind == p.POSITIONAL_OR_KEYWORD)
    return Probe("", tuple(with_default), tuple(needed), tuple(optional), first)
