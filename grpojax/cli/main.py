"""The command line: arguments in, exit status out. Each command is a file of this folder, or of an extension's ``cli``.

To add one, write a file with ``register(command)``, which says its name, its line of help and its arguments, and
``run(args)``, which does it and returns the exit status; then list it in `COMMANDS`, or in the extension's
`grpojax.extension.Names`. Nothing heavy is imported before the arguments are known to be right: a command's file
imports such modules inside its functions.
"""

import argparse
import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator

from grpojax import extension
from grpojax.cli import bench, completion, env, evaluate, export, recipes, sample, show, train
from grpojax.host import console
from grpojax.host.errors import UserError

# Those of the core; extensions have others (`grpojax.extension.Names.commands`).
COMMANDS = (train, evaluate, sample, show, export, bench, recipes, env, completion)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        """Prints one line; argparse would print the whole usage first."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _width() -> int:
    """Columns of help. argparse would ask again for every argument, through a module that is slow to import."""
    try:
        return int(os.environ.get("COLUMNS") or os.get_terminal_size().columns) - 2
    except (ValueError, OSError):  # no number, no terminal
        return 78


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    layout = functools.partial(argparse.HelpFormatter, width=_width())
    about_all = "Group-based reinforcement learning of language models."
    whole = _Parser(prog="grpojax", description=about_all, formatter_class=layout)
    whole.set_defaults(parser=whole)  # `grpojax completion` reads it
    whole.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str,
        run: Callable[[argparse.Namespace], int],
        text: str,
        *,
        overrides: bool = False,
        joins: bool = False,
        about: tuple[str, str] = ("config", "YAML recipe"),
    ) -> argparse.ArgumentParser:
        """Adds a command. With ``overrides`` it takes what ``about`` names, and settings for that.

        A command that ``joins`` runs on every host of several, and its processes find each other before it begins.
        """
        sub = commands.add_parser(name, help=text, description=text, formatter_class=layout)
        sub.set_defaults(run=run, joins=joins)
        sub.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        if overrides:
            sub.add_argument(about[0], help=about[1])
            replace = f"settings that replace the {about[0]}'s"
            sub.add_argument("overrides", nargs="*", metavar="a.b=c", default=[], help=replace)
        return sub

    for module in (*COMMANDS, *map(extension.imported, extension.words("commands").values())):
        module.register(command)
    return whole


@contextlib.contextmanager
def _company(args: argparse.Namespace) -> Iterator[None]:
    """Inside, a command is joined with its other processes. If one of them ends or gets SIGTERM, all end."""
    if not args.joins:
        yield
        return
    from grpojax.host import preemption

    with preemption.ending():
        from grpojax.host import processes

        processes.join()
        # Set again, as jax takes over SIGTERM when it joins. Set before the search for devices, as one host may fail in
        # it while the others wait.
        with preemption.ending(), processes.watched():
            processes.start()
            yield


def main(argv: list[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: the arguments; the process's own if left out.

    Returns:
      The exit status: 0 for finished, 75 for a run that was stopped and has saved, 2 for a user's
      mistake, 130 when interrupted at once, 1 when what it prints cannot be written (a run goes on without), a run of
      a sweep failed, or for any other failure.
    """
    console.prepare_streams()
    whole = parser()
    args, rest = whole.parse_known_args(argv)
    # argparse ends a list of positionals at the first option; settings may stand after options too.
    if wrong := [a for a in rest if a.startswith("-") or not hasattr(args, "overrides")]:
        whole.error(f"unrecognized arguments: {' '.join(wrong)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    from grpojax.host import startup

    try:
        startup.prepare()
        with _company(args):
            status = args.run(args)
        return status if _printed("") else 1
    except UserError as e:
        if args.debug:
            raise
        console.tell(str(e))
        return e.status
    except KeyboardInterrupt:
        return 130
    except OSError:
        if _printed("\n"):  # so it was another file
            raise
        return 1


def _printed(more: str) -> bool:
    """Whether all that was printed, and more, is out. If the reader is gone, as of `grpojax show RUN | head`, nothing
    is said."""
    try:
        print(end=more, flush=True)
    except OSError as e:
        console.drop(sys.stdout)
        if not isinstance(e, BrokenPipeError):
            console.tell(f"standard output cannot be written: {e.strerror}")
        return False
    return True


def process() -> None:
    """Runs a command and ends the process with its status.

    A thread may still compile a program for a run that is over, and Python would wait for it: on a TPU a minute or
    more, for nothing. Several processes end together in any case, and leave each other in order. wandb sends the last
    of a run when Python ends, and is waited for.
    """
    status = main()
    jax, device = sys.modules.get("jax"), sys.modules.get("grpojax.device")
    waits = "wandb" in sys.modules or jax is None or device is None or jax.process_count() > 1
    if not waits and device.compiling():
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    process()
