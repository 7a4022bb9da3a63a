"""``grpojax plan``: the memory and time that a recipe needs on a machine that you do not have."""

import argparse
import os
from collections.abc import Callable
from typing import Any

from grpojax.host.errors import UserError


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Its arguments."""
    plan = command(
        "plan",
        run,
        "Reports the memory and the least time of a recipe on a machine that you do not have.",
        overrides=True,
    )
    plan.add_argument(
        "--topology", default="v5e:4x4", help="the chips, such as v5e:4x4, v5p:2x2x4, or h100:8 by its data sheet"
    )
    plan.add_argument(
        "--slices", type=int, default=1, help="number of such slices; the mesh's data axis goes across them"
    )
    plan.add_argument(
        "--recipe", choices=("train", "sft", "dpo"), default="train", help="the command that the recipe is for"
    )
    plan.add_argument("--layers", type=int, help="number of layers to compile; the model's by default")


def run(args: argparse.Namespace) -> int:
    """Prints the table of `grpojax.tools.planner`; 1 if a program does not fit."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # libtpu compiles, and nothing runs
    from grpojax.run import finetune_recipe, recipe
    from grpojax.tools import plan_chips

    loaders = {"train": recipe.load, "sft": finetune_recipe.load_sft, "dpo": finetune_recipe.load_dpo}
    if args.recipe == "train" and not _has_rollout(args.config):
        raise UserError(f"{args.config} has no rollout: for a supervised recipe give --recipe sft or --recipe dpo")
    for name in ("layers", "slices"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UserError(f"--{name} {value}: must be at least 1")
    config = loaders[args.recipe](args.config, args.overrides)
    target = plan_chips.parse(args.topology, args.slices)
    if config.mesh.rollout and (target.by_sheet or args.slices > 1 or args.recipe != "train"):
        raise UserError(
            f"mesh.rollout={config.mesh.rollout}: chips that only sample are planned for one slice of TPUs; set "
            "mesh.rollout=0, for as many chips as learn"
        )
    if not isinstance(config, recipe.Config):
        if target.by_sheet:
            raise UserError(f"--recipe {args.recipe} is compiled for TPUs; for GPUs only --recipe train is estimated")
        return _supervised(args, config)
    return _estimated(args, config, target) if target.by_sheet else _compiled(args, config, target)


def _compiled(args: argparse.Namespace, config: Any, target: Any) -> int:
    """The plan for a TPU, by its compiler."""
    from grpojax.tools import plan_report, plan_run, planner

    reports = planner.plan(config, topology=args.topology, slices=args.slices, layers=args.layers)
    print(plan_report.format_table(reports))
    _tell_layers(args)
    if not all(r.fits for r in reports):
        return 1
    print(plan_run.format_bound(plan_run.bound(config, reports, target.chips)))
    return 0


def _estimated(args: argparse.Namespace, config: Any, target: Any) -> int:
    """The estimate for a GPU, by data sheet and shapes."""
    from grpojax.tools import plan_estimate, plan_run

    estimate = plan_estimate.of_recipe(config, target, layers=args.layers)
    print(plan_estimate.format_estimate(estimate))
    _tell_layers(args)
    if not estimate.fits:
        return 1
    print(plan_run.format_bound(estimate.run))
    return 0


def _supervised(args: argparse.Namespace, config: Any) -> int:
    """Plans a recipe without rollouts."""
    from grpojax.tools import plan_report, planner

    model = planner.shorter(config.model.path, args.layers)
    reports = planner.plan_supervised(config, model, topology=args.topology, slices=args.slices)
    print(plan_report.format_table(reports))
    _tell_layers(args)
    return int(not all(r.fits for r in reports))


def _tell_layers(args: argparse.Namespace) -> None:
    if args.layers is not None:
        print(f"all numbers are for a model with {args.layers} layers")


def _has_rollout(path: str) -> bool:
    """Whether a recipe samples; a recipe that cannot be read is an error elsewhere."""
    from grpojax.host import settings

    try:
        return "rollout" in settings.read(path)
    except UserError:
        return True
