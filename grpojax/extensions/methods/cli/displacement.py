"""``grpojax displacement``: which methods make right answers less likely."""

import argparse
from collections.abc import Callable

from grpojax.host.errors import UserError

_METHODS = (
    "what to compare: variants, mappings such as {name: nthr, eta: 0}, or recipe files, of which the variant is taken"
)


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Its arguments."""
    text = "Takes one update on each question by itself, and reports which methods make its right answers less likely."
    displacement = command("displacement", run, text, overrides=True)
    displacement.add_argument("--methods", default="grpo,nthr", metavar="A,B", help=_METHODS)
    text = "adds the control of each method that has one: the same with its one mechanism off"
    displacement.add_argument("--controls", action="store_true", help=text)
    displacement.add_argument(
        "--questions", type=int, default=15, help="number of questions with right and wrong samples"
    )
    displacement.add_argument("--rollouts", type=int, default=20, help="most rollouts that they are looked for in")
    displacement.add_argument(
        "--epsilon", type=float, default=0.0, help="a change of at most this many nats is a displacement"
    )
    text = "questions that the rankings are compared on, at most a fifth of all; a fifth by default"
    displacement.add_argument("--top", type=int, default=None, help=text)
    displacement.add_argument(
        "--json", metavar="FILE", help="also write the numbers of every question to this JSON file"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the table of `grpojax.extensions.methods.question_updates`, and writes its numbers if it is asked to."""
    for name in ("questions", "rollouts", "top"):
        if (given := getattr(args, name)) is not None and given < 1:
            raise UserError(f"--{name} {given}: must be at least 1")
    if args.top is not None and args.top > max(args.questions // 5, 1):
        raise UserError(
            f"--top {args.top} of --questions {args.questions}: rankings that have nothing in common would share "
            f"{min(args.top / args.questions, 1.0):.0%}; give --top {max(args.questions // 5, 1)} or less, or "
            f"--questions {5 * args.top}"
        )
    from grpojax.extensions.methods import question_updates
    from grpojax.host import files

    methods = question_updates.read_methods(args.methods)
    recipes = question_updates.recipes_of(args.config, args.overrides, methods, controls=args.controls)
    for line in question_updates.mismatches(args.config, args.overrides, methods, recipes):
        print(line)
    found = question_updates.measure(recipes, questions=args.questions, rollouts=args.rollouts)
    step = question_updates.step_of(recipes[next(iter(methods))].optimizer)
    print(question_updates.format_table(found, epsilon=args.epsilon, top=args.top))
    print(step)
    if args.json:
        try:
            files.write_json(args.json, {"step": step, **question_updates.to_json(found)})
        except OSError as e:
            raise UserError(f"{e.filename}: {e.strerror}; give another --json") from None
        print(f"wrote {args.json}")
    return 0
