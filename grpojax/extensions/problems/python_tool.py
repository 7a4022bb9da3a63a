"""Python programs that the policy writes, each run in a process of its own (`grpojax.host.isolation`)."""

import ast

from grpojax.host import isolation
from grpojax.host.errors import UserError

# Names of the last value's program.
_SHOW = "__import__('sys').displayhook"


class Python:
    """A Python sandbox: an environment with one tool. No call knows of another.

    Args:
      seconds: after this time a program is ended.
      memory: MiB of address space of a program.
      output_bytes: how much of a program's output is shown.
      network: whether programs may use the network. ``environment.network`` must allow it too.

    Raises:
      UserError: without ``network``, and the system cannot close a program off.
    """

    stateless = True

    def __init__(self, seconds: float = 5.0, memory: int = 512, output_bytes: int = 8192, network: bool = False):
        if not network and not isolation.programs_can_be_closed_off():
            raise UserError(
                "environment python: this system has no user, mount and process namespaces to close programs off\n"
                "set network: true in its options to run programs with your rights"
            )
        self._limits = {"seconds": seconds, "memory_mb": memory, "output_bytes": output_bytes, "network": network}

    def reset(self, **columns: object) -> None:
        """Nothing: each program begins anew."""

    def python(self, code: str) -> str:
        """Runs a Python program and shows what it prints, and the value of its last line.

        Args:
            code: the program; it has no network, and keeps nothing for the next call
        """
        ran = isolation.run_python(shows_last(code), **self._limits)
        if ran.status is None:
            return f"{ran.output}\n[ended after {self._limits['seconds']:g} s]".lstrip()
        if ran.status and not ran.output:
            return f"[ended with exit status {ran.status}]"
        return ran.output.rstrip() or "[no output]"


def shows_last(code: str) -> str:
    """A program that shows the value of its last line if that is an expression, as an interpreter does.

    Example:
      >>> shows_last("x = 3"), shows_last("x = 3; x  # it")
      ('x = 3', "x = 3; __import__('sys').displayhook(x)\\n")
    """
    try:
        tree = ast.parse(code)
        if not tree.body or not isinstance(last := tree.body[-1], ast.Expr):
            return code
        shown = f"{_SHOW}({ast.unparse(last.value)})\n".encode(errors="surrogatepass")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code  # it says itself what is wrong with it
    lines = code.encode(errors="surrogatepass").splitlines(keepends=True)
    before = b"".join(lines[: last.lineno - 1]) + lines[last.lineno - 1][: last.col_offset]
    return (before + shown).decode(errors="surrogatepass")
