"""``grpojax sft`` and ``grpojax dpo``: supervised runs, on answers or on pairs of a better and a worse one."""

import argparse
from collections.abc import Callable
from typing import Any


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Their arguments."""
    command("sft", run_sft, "Trains on given answers, such as those of `grpojax traces`.", overrides=True)
    command("dpo", run_dpo, "Trains on pairs of a chosen and a rejected answer.", overrides=True)


def run_sft(args: argparse.Namespace) -> int:
    """Trains to the last step, or until it is told to stop."""
    from grpojax.run.finetune_recipe import load_sft

    return _run(args, load_sft)


def run_dpo(args: argparse.Namespace) -> int:
    """As `run_sft`."""
    from grpojax.run.finetune_recipe import load_dpo

    return _run(args, load_dpo)


def _run(args: argparse.Namespace, load: Callable[..., Any]) -> int:
    from grpojax.host import processes

    processes.start()
    config = load(args.config, args.overrides)
    from grpojax.run.finetune import FineTune

    FineTune(config).run()
    return 0
