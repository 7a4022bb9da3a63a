"""Environments that work, and some that do what they must not."""

import asyncio
import builtins
import ctypes
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter as Counts
from typing import ClassVar, Literal


class Counter:
    """Counts."""

    deterministic = True

    def reset(self, start: int = 0, **columns):
        self.total = start
        self.done = False
        return f"at {start}"

    def add(self, a: int) -> int:
        """Adds to the count.

        Args:
            a: what to add
        """
        self.total += a
        self.done = self.total >= 100
        return self.total

    async def later(self, a: int) -> int:
        """Adds to the count, after a while.

        Args:
            a: what to add
        """
        await asyncio.sleep(0.01)
        return self.add(a)

    def get_reward(self) -> float:
        return float(self.total)


class Forgetful(Counter):
    """Does not say that it is deterministic."""

    deterministic = False


class Liar(Counter):
    """Says that it is deterministic, and is not."""

    def add(self, a: int) -> str:
        """Adds to the count.

        Args:
            a: what to add
        """
        return f"{super().add(a)} {random.random()} {os.getpid()}"


class Misbehaves(Counter):
    """Does whatever it is told to."""

    def do(self, what: Literal["sleep", "exit", "crash", "segfault", "print", "long", "bytes", "none", "raise",
                               "object", "memory", "fork", "leave", "spoil", "end_server", "len", "text",
                               "parts", "loop", "alarm"]) -> object:  # fmt: skip
        """Does something.

        Args:
            what: it does
        """
        if what == "sleep":
            time.sleep(100)
        elif what == "exit":
            sys.exit(3)
        elif what == "crash":
            os._exit(3)
        elif what == "segfault":
            ctypes.string_at(0)
        elif what == "print":
            while True:
                print("x" * 1000)
        elif what == "long":
            return "é" * 1_000_000
        elif what == "bytes":
            return b"\xff\x00abc"
        elif what == "raise":
            raise ValueError("no such thing")
        elif what == "object":
            return _Odd()
        elif what == "memory":
            return len(bytearray(2**40))
        elif what == "fork":
            return os.fork()
        elif what == "leave":
            os._exit(0)
        elif what == "spoil":
            os.lseek = None
        elif what == "end_server":
            os.kill(os.getppid(), signal.SIGKILL)
        elif what == "len":
            builtins.len = lambda x: 0
        elif what == "text":
            return _Text("7")
        elif what == "parts":
            return (str(i) for i in range(3))
        elif what == "loop":
            asyncio.get_event_loop().close()
        elif what == "alarm":
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        return None

    async def later(self, a: int) -> int:
        """Waits, and doubles.

        Args:
            a: what to double
        """
        await asyncio.sleep(0.3)
        return 2 * a


class Adversary(Misbehaves):
    """Does worse, and does not state that it is deterministic."""

    deterministic = False

    def do(self, what: str) -> int:
        """Does something.

        Args:
            what: it does
        """
        if what == "base":
            raise _Uncommon("neither an exception nor an exit")
        if what == "lie":
            return {"a": [self]}
        if what == "chat":
            print("said\n" * 50)
            return 1
        if what == "leave":
            subprocess.Popen(["sleep", STAYS])
            os._exit(0)
        return super().do(what)


BEHAVIOURS = ("sleep", "exit", "crash", "segfault", "print", "long", "bytes", "none", "raise", "object", "memory",
              "fork", "base", "lie", "chat", "leave")  # fmt: skip
STAYS = "98765.4"  # seconds of a program that `Adversary` leaves behind
behaved = Counts[str]()


def behaviour_in(text):
    """Adds, or does one of `BEHAVIOURS`; counts them."""
    from grpojax.extensions.episodes.calls import Call  # not at the top: every worker would import it

    number = zlib.crc32(text.encode())
    if number % 2:
        return [Call("add", {"a": number % 7})]
    what = BEHAVIOURS[number // 2 % len(BEHAVIOURS)]
    behaved[what] += 1
    return [Call("do", {"what": what})]


class _Uncommon(BaseException):
    pass


class _Text(str):
    """Cannot be read by the process that did not make it."""

    def __reduce__(self):
        return os._exit, (9,)


class _Odd:
    def __str__(self):
        return 3


class Prints(Counter):
    def add(self, a: int) -> int:
        """Adds to the count.

        Args:
            a: what to add
        """
        print("x" * 9000)
        return super().add(a)


class PrintsAround(Counter):
    """At its reset and for its reward, as many bytes as the columns say."""

    def reset(self, at_reset: int = 0, at_reward: int = 0, **columns):
        print("x" * at_reset)
        self.at_reward = at_reward
        return super().reset()

    def get_reward(self) -> float:
        print("x" * self.at_reward)
        return 1.0


class SlowAtFirst(Counter):
    """Takes long for the first instance of a process."""

    _made: ClassVar[list[str]] = []

    def __init__(self, pause: float):
        if not self._made:
            time.sleep(pause)
        self._made.append("one")


class SlowAtReset(Counter):
    def reset(self, **columns):
        time.sleep(60)


class Unpicklable(Counter):
    def reset(self, **columns):
        self.function = lambda: None


class NeedsBoard:
    def reset(self, board: str):
        self.board = board

    def look(self) -> str:
        """Shows the board."""
        return self.board


class FailsAtReset:
    """Where there is a question."""

    def reset(self, question=None):
        if question is not None:
            raise RuntimeError(f"no {question}")
        return "no question"


class NoReset:
    def look(self) -> str:
        """Looks."""
        return ""


class Undescribed:
    def reset(self):
        pass

    def add(self, a):
        return a


class WithOptions(Counter):
    def __init__(self, factor: int = 1):
        self.factor = factor

    def times(self, a: int) -> int:
        """Multiplies.

        Args:
            a: by this, and the factor
        """
        return a * self.factor


def double(x: float) -> float:
    """Doubles a number.

    Args:
        x: the number
    """
    return 2 * x


double.deterministic = True


def connects(port: int) -> str:
    """Connects to a port of this machine.

    Args:
        port: its number
    """
    import socket

    with socket.create_connection(("127.0.0.1", port), timeout=2):
        return "connected"


def totals(prompts, completions, tokens, *, environments, **columns):
    """What instances of `Counter` have counted."""
    return [float(instance.total) for instance in environments]


class Wraps:
    """Passes on what it does not have, as many wrappers do: it cannot be unpickled."""

    def __init__(self):
        self.inner = Counter()

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def reset(self, **columns):
        return self.inner.reset()


class Returns:
    """``reset`` returns what its option says."""

    def __init__(self, value=None):
        self.value = value

    def reset(self, **columns):
        return self.value

    @property
    def state(self):
        raise RuntimeError("there is none before reset")

    def look(self) -> str:
        """Looks."""
        return "nothing"

    see = look


def _renamed(method):
    def wrapper(self) -> str:
        """Does something."""
        return method(self)

    return wrapper


class Renamed(Returns):
    """A decorator gives two methods one name."""

    @_renamed
    def one(self):
        return "one"

    @_renamed
    def two(self):
        return "two"


class Called:
    """Could be called as a function could."""

    def __call__(self):
        return "called"


called = Called()
