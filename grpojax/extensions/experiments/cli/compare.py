"""``grpojax compare``: two evaluations of the same problems."""

import argparse
from collections.abc import Callable


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds the command and its arguments."""
    parser = command("compare", run, "Compares two evaluations of the same problems by a paired test.")
    parser.add_argument("a", metavar="A", help="per-problem file, or the folder of an evaluation")
    parser.add_argument("b", metavar="B", help="the same for the other model")


def run(args: argparse.Namespace) -> int:
    """Prints the comparison."""
    from grpojax.records import evaluations

    print(evaluations.compare(args.a, args.b))
    return 0
