"""``grpojax train``: a run of a recipe, or more of one."""

import argparse
import os
from collections.abc import Callable

TAKE_OVER = "break another process's claim on a run.dir in a bucket; only if that process is dead"


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Its arguments."""
    train = command("train", run, "Trains, or continues the run in run.dir.", overrides=True, joins=True)
    train.add_argument("--take-over", action="store_true", help=TAKE_OVER)


def run(args: argparse.Namespace) -> int:
    """Trains to the last step, or until it is stopped: 0 for finished, 75 for stopped and saved."""
    from grpojax.run import recipe

    config = recipe.load(args.config, args.overrides)
    from grpojax import train
    from grpojax.run.closing_report import check_learned, report

    opened = train.open_run(config, take_over=args.take_over)
    if not train.train(opened):
        return os.EX_TEMPFAIL
    report(opened)
    check_learned(opened)
    return 0
