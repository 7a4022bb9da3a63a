"""``grpojax plan``: the memory and time that a recipe needs on a machine that you do not have."""

import argparse
import os
from collections.abc import Callable
from typing import Any

from grpojax import extension
from grpojax.host.errors import UserError

ALL = "all"  # as ``--models``: every published one


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Its arguments."""
    plan = command(
        "plan",
        run,
        "Reports the memory and the least time of a recipe on a machine that you do not have.",
        overrides=True,
    )
    plan.add_argument(
        "--topology", help="the chips, such as v5e:4x4 (the default), v5p-32, or h100:8 by its data sheet"
    )
    plan.add_argument(
        "--slices", type=int, default=1, help="number of such slices; the mesh's data axis goes across them"
    )
    plan.add_argument(
        "--recipe",
        choices=("train", *extension.words("recipes")),
        default="train",
        help="the command that the recipe is for",
    )
    plan.add_argument("--layers", type=int, help="number of layers to compile; the model's by default")
    plan.add_argument(
        "--models",
        metavar="A,B",
        help="print what fits what, by shapes: a row for each of these models, published ones by name or folders; "
        f"{ALL} for every published one",
    )
    plan.add_argument("--devices", metavar="A,B", help="the chips of that table, such as v5e-8,h100,rtx4090")
    plan.add_argument("--json", action="store_true", help="that table as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the table of `grpojax.extensions.plan.planner`, or that of `grpojax.extensions.plan.plan_table`; 1 if a
    program of a recipe does not fit."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # libtpu compiles, and nothing runs
    from grpojax.extensions.plan import plan_chips
    from grpojax.run import recipe
    from grpojax.run.trial import try_out

    if args.models or args.devices or args.json:
        return _table(args)
    kind = None if args.recipe == "train" else extension.load("recipes", args.recipe, f"--recipe {args.recipe}")
    if args.recipe == "train" and not _has_rollout(args.config):
        raise UserError(f"{args.config} has no rollout: for a supervised recipe give --recipe sft or --recipe dpo")
    for name in ("layers", "slices"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UserError(f"--{name} {value}: must be at least 1")
    config = (recipe if kind is None else kind).load(args.config, args.overrides)
    if kind is None:
        try_out(config.method.variant, config.rollout)
    target = plan_chips.parse(args.topology or "v5e:4x4", args.slices)
    if config.mesh.rollout and (target.by_sheet or args.slices > 1 or args.recipe != "train"):
        raise UserError(
            f"mesh.rollout={config.mesh.rollout}: chips that only sample are planned for one slice of TPUs; set "
            "mesh.rollout=0, for as many chips as learn"
        )
    if kind is not None:
        if target.by_sheet:
            raise UserError(f"--recipe {args.recipe} is compiled for TPUs; for GPUs only --recipe train is estimated")
        return _other(args, kind, config, target)
    return _estimated(args, config, target) if target.by_sheet else _compiled(args, config, target)


def _table(args: argparse.Namespace) -> int:
    """What fits what."""
    from grpojax.extensions.plan import plan_shapes, plan_table
    from grpojax.run import recipe

    if not args.models or not args.devices:
        missing = "--devices v5e-8,h100" if args.models else f"--models Qwen2.5-7B,Qwen3-8B or --models {ALL}"
        raise UserError(f"a table of models and devices needs both; add {missing}")
    if args.topology or args.slices != 1 or args.layers is not None or args.recipe != "train":
        raise UserError("--models and --devices go without --topology, --slices, --layers, --recipe; leave these out")
    models = plan_shapes.SHAPES if args.models == ALL else args.models.split(",")
    config = recipe.load(args.config, args.overrides)
    cells = plan_table.cells(config, [*models], args.devices.split(","))
    print(plan_table.as_json(cells) if args.json else plan_table.format_cells(cells))
    return 0


def _compiled(args: argparse.Namespace, config: Any, target: Any) -> int:
    """The plan for a TPU, by its compiler."""
    from grpojax.extensions.plan import plan_report, plan_run, plan_shapes, planner

    model = plan_shapes.shape_of(config.model.path, args.layers)
    how = {"topology": target.topology, "slices": args.slices}
    calls, reports = planner.plan(config, model=model, layers=args.layers, **how)
    print(plan_report.format_table(reports))
    _tell_layers(args)
    fits = all(r.fits for r in reports)
    if fits:
        print(plan_run.format_bound(plan_run.bound(config, calls, reports, target.chips)))
    else:
        _tell_split(config, target, model)
    _tell_longest(config, target, model)
    return int(not fits)


def _estimated(args: argparse.Namespace, config: Any, target: Any) -> int:
    """The estimate for a GPU, by data sheet and shapes."""
    from grpojax.extensions.plan import plan_estimate, plan_run, plan_shapes

    model = plan_shapes.shape_of(config.model.path, args.layers)
    estimate = plan_estimate.of_recipe(config, target, model=model)
    print(plan_estimate.format_estimate(estimate))
    _tell_layers(args)
    if estimate.fits:
        print(plan_run.format_bound(estimate.run))
    else:
        _tell_split(config, target, model)
    _tell_longest(config, target, model)
    return int(not estimate.fits)


def _other(args: argparse.Namespace, kind: Any, config: Any, target: Any) -> int:
    """Plans a recipe without rollouts."""
    from grpojax.extensions.plan import plan_report, plan_shapes, planner

    model = plan_shapes.shape_of(config.model.path, args.layers)
    reports = planner.plan_other(kind, config, model, topology=target.topology, slices=args.slices)
    print(plan_report.format_table(reports))
    _tell_layers(args)
    return int(not all(r.fits for r in reports))


def _tell_split(config: Any, target: Any, model: Any) -> None:
    """Names a mesh and micro-batches of the same chips with which a recipe fits, or else settings that change more."""
    from grpojax.extensions.plan import plan_search

    try:
        own = plan_search.own(config, target, model)
        found = plan_search.best(config, target, model, under=own.needs)
    except UserError:  # the recipe has programs that are not estimated
        return
    if found.fits and found.needs < own.needs:
        print(f"by shapes it fits with {found.settings} ({found.needs:.1f} GiB)")
    elif not found.fits:
        for setting, fit in plan_search.changes(config, target, model):
            print(f"by shapes it would fit with {setting} {fit.settings} ({fit.needs:.1f} GiB)")


def _tell_layers(args: argparse.Namespace) -> None:
    if args.layers is not None:
        print(f"all numbers are for a model with {args.layers} layers")


def _tell_longest(config: Any, target: Any, model: Any) -> None:
    """The longest completion that fits, by shapes, or why it is not known."""
    from grpojax.extensions.plan import plan_search

    try:
        found = plan_search.longest(config, target, model)
    except UserError as e:
        print(f"longest completion that fits: not estimated: {e}")
        return
    tokens = f"{found.tokens} tokens" if found.tokens else f"none of {plan_search.STEP} tokens or more"
    print(f"longest completion that would fit, by shapes: {tokens} ({found.why}); rollout.max_tokens sets it")


def _has_rollout(path: str) -> bool:
    """Whether a recipe samples; a recipe that cannot be read is an error elsewhere."""
    from grpojax.host import settings

    try:
        return "rollout" in settings.read(path)
    except UserError:
        return True
