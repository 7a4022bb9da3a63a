"""``grpojax train``: a run of a recipe, or more of one."""

import argparse
from collections.abc import Callable


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Its arguments."""
    command("train", run, "Trains, or goes on with the run in run.dir.", overrides=True)


def run(args: argparse.Namespace) -> int:
    """Trains to the last step, or until it is told to stop."""
    from grpojax.host import processes
    from grpojax.run import recipe

    processes.start()
    config = recipe.load(args.config, args.overrides)
    from grpojax.run.trainer import Trainer

    trainer = Trainer(config)
    if trainer.run():
        trainer.report()
    return 0
