"""``grpojax bench``: where the time of a recipe's step goes."""

import argparse
from collections.abc import Callable


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Its arguments."""
    bench = command("bench", run, "Measures where the time of a recipe's step goes.", overrides=True)
    bench.add_argument("--steps", type=int, default=5, help="timed steps; the median is reported")
    bench.add_argument("--full-length", action="store_true", help="ignore end-of-sequence tokens")
    bench.add_argument("--json", metavar="FILE", help="also write the figures there")


def run(args: argparse.Namespace) -> int:
    """Prints the table of `grpojax.tools.benchmark`."""
    from grpojax.run import recipe
    from grpojax.tools import benchmark

    config = recipe.load(args.config, args.overrides)
    benchmark.run(config, steps=args.steps, full_length=args.full_length, json_path=args.json)
    return 0
