"""``grpojax compare``: two evaluations of the same problems against each other."""

import argparse
from collections.abc import Callable


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Its arguments."""
    compare = command("compare", run, "Compares two evaluations of the same problems by a paired test.")
    compare.add_argument("a", metavar="A", help="per-problem file, or the folder of an evaluation")
    compare.add_argument("b", metavar="B", help="the same of the other model")


def run(args: argparse.Namespace) -> int:
    """Prints the comparison."""
    from grpojax.evaluation import evaluate

    print(evaluate.compare(args.a, args.b))
    return 0
