"""``grpojax plan``: what a recipe's programs need of a TPU slice that is not there."""

import argparse
import os
from collections.abc import Callable

from grpojax.host.errors import UserError


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Its arguments."""
    plan = command("plan", run, "Compiles a recipe's programs for a TPU slice that is not there.", overrides=True)
    plan.add_argument("--topology", default="v5e:4x4", help="such as v5e:4x4 or v5p:2x2x4")
    plan.add_argument("--recipe", choices=("train", "sft", "dpo"), default="train", help="which command it is for")
    plan.add_argument("--layers", type=int, help="layers to compile; the model's own number if left out")


def run(args: argparse.Namespace) -> int:
    """Prints the table of `grpojax.tools.planner`."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # libtpu compiles, and nothing runs
    import dataclasses

    from grpojax import data
    from grpojax.models import compute_of, hf
    from grpojax.run import critic, finetune_recipe, held_out, recipe, teacher
    from grpojax.tools import plan_report, planner

    loaders = {"train": recipe.load, "sft": finetune_recipe.load_sft, "dpo": finetune_recipe.load_dpo}
    if args.recipe == "train" and not _has_rollout(args.config):
        raise UserError(f"{args.config} has no rollout: for a supervised recipe give --recipe sft or --recipe dpo")
    config = loaders[args.recipe](args.config, args.overrides)
    model = hf.read_config(data.locate(config.model.path))
    shorter = {} if args.layers is None else {"num_layers": args.layers}
    if args.layers is not None and args.layers < 1:
        raise UserError(f"--layers {args.layers}: must be at least 1")
    model = dataclasses.replace(model, **shorter)
    if not isinstance(config, recipe.Config):
        compute = compute_of(config.model, platform="tpu")
        print(plan_report.format_table(planner.plan_supervised(model, config, compute, topology=args.topology)))
        return 0
    compute, own, learned = compute_of(config.model, platform="tpu"), config.own_critic, config.method.variant.critic
    planned = None
    if own is not None and learned is not None:
        described = critic.critic_model(own, model, compute, learned)
        planned = planner.PlannedCritic(described, own.optimizer, own.warmup_steps > 0)
    taught_by = config.method.variant.options.get("teacher")
    reports = planner.plan(
        model,
        prompts=config.rollout.prompts,
        prompt_tokens=config.data.max_prompt_tokens,
        sampling=config.rollout,
        topology=args.topology,
        mesh=config.mesh,
        compute=compute,
        objective=config.method.variant.objective,
        optimizer=config.optimizer,
        critic=planned,
        method=config.method,
        teacher=None if taught_by is None else dataclasses.replace(teacher.read_shape(taught_by), **shorter),
        train=config.train,
        evaluation=held_out.config_of(config) if config.data.eval else None,
    )
    print(plan_report.format_table(reports))
    return 0


def _has_rollout(path: str) -> bool:
    """Whether a recipe samples; what cannot be read is told of elsewhere."""
    from grpojax.host import settings

    try:
        return "rollout" in settings.read(path)
    except UserError:
        return True
