"""``grpojax displacement``: which methods make right answers less likely."""

import argparse
from collections.abc import Callable

from grpojax.host.errors import UserError

_METHODS = (
    "what to compare: variants, mappings such as {name: nthr, eta: 0}, or recipe files, of which the variant is taken"
)


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Its arguments."""
    text = "Takes one update on each question alone and tells which methods make its right answers less likely."
    displacement = command("displacement", run, text, overrides=True)
    displacement.add_argument("--methods", default="grpo,nthr", metavar="A,B", help=_METHODS)
    text = "adds the control of each method that has one: the same with its one mechanism off"
    displacement.add_argument("--controls", action="store_true", help=text)
    displacement.add_argument("--questions", type=int, default=15, help="questions with right and wrong samples")
    displacement.add_argument("--rollouts", type=int, default=20, help="rollouts to find them in, at most")
    displacement.add_argument("--epsilon", type=float, default=0.0, help="nats up to which a change is a displacement")
    displacement.add_argument("--top", type=int, default=10, help="questions that the rankings are compared on")


def run(args: argparse.Namespace) -> int:
    """Prints the table of `grpojax.tools.question_updates`."""
    for name in ("questions", "rollouts", "top"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} {getattr(args, name)}: must be at least 1")
    from grpojax.tools import question_updates

    methods = question_updates.read_methods(args.methods)
    recipes = question_updates.recipes_of(args.config, args.overrides, methods, controls=args.controls)
    for line in question_updates.mismatches(args.config, args.overrides, methods, recipes):
        print(line)
    found = question_updates.measure(recipes, questions=args.questions, rollouts=args.rollouts)
    print(question_updates.format_table(found, epsilon=args.epsilon, top=args.top))
    return 0
