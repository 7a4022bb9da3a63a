"""``grpojax displacement``: which methods make right answers less likely."""

import argparse
from collections.abc import Callable

from grpojax.host.errors import UserError


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Its arguments."""
    text = "Takes one update on each question alone and tells which methods make its right answers less likely."
    displacement = command("displacement", run, text, overrides=True)
    displacement.add_argument("--methods", default="grpo,nthr", metavar="A,B", help="variants to compare")
    displacement.add_argument("--questions", type=int, default=15, help="questions with right and wrong samples")
    displacement.add_argument("--rollouts", type=int, default=20, help="rollouts to find them in, at most")
    displacement.add_argument("--epsilon", type=float, default=0.0, help="nats up to which a change is a displacement")
    displacement.add_argument("--top", type=int, default=10, help="questions that the rankings are compared on")


def run(args: argparse.Namespace) -> int:
    """Prints the table of `grpojax.tools.question_updates`."""
    for name in ("questions", "rollouts", "top"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} {getattr(args, name)}: must be at least 1")
    methods = [name.strip() for name in args.methods.split(",") if name.strip()]
    if not methods:
        raise UserError(f"--methods {args.methods!r}: name at least one variant")
    from grpojax.tools import question_updates

    recipes = {name: question_updates.recipe_of(args.config, args.overrides, name) for name in methods}
    found = question_updates.measure(recipes, questions=args.questions, rollouts=args.rollouts)
    print(question_updates.format_table(found, epsilon=args.epsilon, top=args.top))
    return 0
