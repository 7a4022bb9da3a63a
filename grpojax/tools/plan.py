"""``grpojax plan``: what a recipe's programs need of a TPU slice that is not there."""

import argparse
import os
from collections.abc import Callable

from grpojax.host.errors import UserError


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Its arguments."""
    plan = command("plan", run, "Compiles a recipe's programs for a TPU slice that is not there.", overrides=True)
    plan.add_argument("--topology", default="v5e:4x4", help="such as v5e:4x4 or v5p:2x2x4")
    plan.add_argument("--layers", type=int, help="layers to compile; the model's own number if left out")


def run(args: argparse.Namespace) -> int:
    """Prints the table of `grpojax.tools.planner`."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # libtpu compiles, and nothing runs
    import dataclasses

    from grpojax import data
    from grpojax.models import compute_of, hf
    from grpojax.run import critic, recipe
    from grpojax.tools import plan_report, planner

    config = recipe.load(args.config, args.overrides)
    model = hf.read_config(data.locate(config.model.path))
    if args.layers is not None:
        if args.layers < 1:
            raise UserError(f"--layers {args.layers}: must be at least 1")
        model = dataclasses.replace(model, num_layers=args.layers)
    compute, own, learned = compute_of(config.model, platform="tpu"), config.own_critic, config.method.variant.critic
    planned = None
    if own is not None and learned is not None:
        described = critic.critic_model(own, model, compute, learned)
        planned = planner.PlannedCritic(described, own.optimizer, own.warmup_steps > 0)
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
        minibatches=config.train.minibatches,
        microbatches=config.train.microbatches,
        critic=planned,
    )
    print(plan_report.format_table(reports))
    return 0
