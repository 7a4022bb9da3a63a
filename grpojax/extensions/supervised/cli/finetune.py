"""``grpojax sft`` and ``grpojax dpo``: supervised runs, on answers or on pairs of a better and a worse one."""

import argparse
import os
from collections.abc import Callable
from typing import Any

from grpojax.cli.train import TAKE_OVER


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Their arguments."""
    sft = command(
        "sft", run_sft, "Trains on given answers, such as those of `grpojax traces`.", overrides=True, joins=True
    )
    dpo = command("dpo", run_dpo, "Trains on pairs of a chosen and a rejected answer.", overrides=True, joins=True)
    for parser in (sft, dpo):
        parser.add_argument("--take-over", action="store_true", help=TAKE_OVER)


def run_sft(args: argparse.Namespace) -> int:
    """Trains to the last step, or until it is stopped: 0 for finished, 75 for stopped and saved."""
    from grpojax.extensions.supervised.finetune_recipe import load_sft

    return _run(args, load_sft)


def run_dpo(args: argparse.Namespace) -> int:
    """As `run_sft`."""
    from grpojax.extensions.supervised.finetune_recipe import load_dpo

    return _run(args, load_dpo)


def _run(args: argparse.Namespace, load: Callable[..., Any]) -> int:
    config = load(args.config, args.overrides)
    from grpojax.extensions.supervised.finetune import open_finetune
    from grpojax.train import train

    return 0 if train(open_finetune(config, take_over=args.take_over)) else os.EX_TEMPFAIL
