"""``grpojax plan``: what a recipe's programs need of chips that are not there."""

import argparse
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from grpojax.host.errors import UserError


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Its arguments."""
    plan = command("plan", run, "Says what a recipe's programs need of chips that are not there.", overrides=True)
    plan.add_argument("--topology", default="v5e:4x4", help="such as v5e:4x4, v5p:2x2x4, or h100:8 by its data sheet")
    plan.add_argument("--slices", type=int, default=1, help="so many of them; the mesh's data axis goes across")
    plan.add_argument("--recipe", choices=("train", "sft", "dpo"), default="train", help="which command it is for")
    plan.add_argument("--layers", type=int, help="layers to compile; the model's own number if left out")
    plan.add_argument("--price-per-hour", type=float, metavar="X", help="of one chip; the run's cost is told then")
    plan.add_argument("--search", action="store_true", help="look for the fastest settings of execution that fit")


def run(args: argparse.Namespace) -> int:
    """Prints the table of `grpojax.tools.planner`; 1 where a program does not fit."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # libtpu compiles, and nothing runs
    from grpojax.run import finetune_recipe, recipe
    from grpojax.tools import plan_chips, plan_estimate

    loaders = {"train": recipe.load, "sft": finetune_recipe.load_sft, "dpo": finetune_recipe.load_dpo}
    if args.recipe == "train" and not _has_rollout(args.config):
        raise UserError(f"{args.config} has no rollout: for a supervised recipe give --recipe sft or --recipe dpo")
    for name, least in (("layers", 1), ("slices", 1), ("price_per_hour", 0)):
        if (value := getattr(args, name)) is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be at least {least}")
    config = loaders[args.recipe](args.config, args.overrides)
    target = plan_chips.parse(args.topology, args.slices)
    if config.mesh.rollout and (args.search or target.by_sheet or args.slices > 1 or args.recipe != "train"):
        raise UserError(
            f"mesh.rollout={config.mesh.rollout}: chips set apart are planned for one slice of TPUs, and not searched "
            "for; set mesh.rollout=0, for as many chips as learn"
        )
    if not isinstance(config, recipe.Config):
        if args.search or target.by_sheet or args.price_per_hour is not None:
            raise UserError(
                f"--recipe {args.recipe}: is compiled for TPUs; --search, --price-per-hour and GPUs go with train"
            )
        return _supervised(args, config)
    if args.search:
        return _searched(args, config, target)
    if target.by_sheet:
        return _by_sheet(args, plan_estimate.of_recipe(config, target, layers=args.layers))
    return _compiled(args, config, target, _compiler(args)(config))


def _compiler(args: argparse.Namespace) -> Callable[[Any], Any]:
    """Compiles a recipe for what the arguments name."""
    from grpojax.tools import planner

    return functools.partial(planner.plan_recipe, topology=args.topology, slices=args.slices, layers=args.layers)


def _compiled(args: argparse.Namespace, config: Any, target: Any, reports: Any) -> int:
    """What the compiler said, for a TPU."""
    from grpojax.tools import plan_report, plan_run

    print(plan_report.format_table(reports))
    _tell_layers(args)
    if not all(r.fits for r in reports):
        return 1
    print(plan_run.format_bound(plan_run.bound(config, reports, target.chips), args.price_per_hour))
    return 0


def _by_sheet(args: argparse.Namespace, estimate: Any) -> int:
    """By data sheet and shapes alone, for a GPU."""
    from grpojax.tools import plan_estimate, plan_run

    print(plan_estimate.format_estimate(estimate))
    _tell_layers(args)
    if not estimate.fits:
        return 1
    print(plan_run.format_bound(estimate.run, args.price_per_hour))
    return 0


def _searched(args: argparse.Namespace, config: Any, target: Any) -> int:
    """The best settings, to paste, and their plan."""
    from grpojax.tools import plan_estimate, plan_search

    try:
        found = plan_search.search(config, target, compile_it=_compiler(args), say=_say, layers=args.layers)
    except plan_search.NothingFits as e:
        print(plan_estimate.format_estimate(e.least.estimate))
        _say(str(e))
        return 1
    print(found.candidate.overrides)
    if target.by_sheet:
        return _by_sheet(args, found.candidate.estimate)
    return _compiled(args, config, target, found.reports)


def _supervised(args: argparse.Namespace, config: Any) -> int:
    """Of a recipe without rollouts."""
    from grpojax.models import compute_of
    from grpojax.tools import plan_report, planner

    model = planner.shorter(config.model.path, args.layers)
    compute = compute_of(config.model, platform="tpu")
    reports = planner.plan_supervised(model, config, compute, topology=args.topology, slices=args.slices)
    print(plan_report.format_table(reports))
    _tell_layers(args)
    return int(not all(r.fits for r in reports))


def _tell_layers(args: argparse.Namespace) -> None:
    if args.layers is not None:
        print(f"all of this is of a model with {args.layers} layers")


def _say(text: str) -> None:
    """Progress, apart from what is piped on."""
    print(text, file=sys.stderr, flush=True)


def _has_rollout(path: str) -> bool:
    """Whether a recipe samples; what cannot be read is told of elsewhere."""
    from grpojax.host import settings

    try:
        return "rollout" in settings.read(path)
    except UserError:
        return True
