"""``grpojax recipes``: the recipes that ship, and one of them to copy and change."""

import argparse
import re
import textwrap
from collections.abc import Callable

from grpojax.host.errors import UserError


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Its arguments."""
    text = "Lists the recipes that ship, which other commands take by name, or prints one to copy and change."
    recipes = command("recipes", run, text)
    recipes.add_argument("config", nargs="?", metavar="NAME", help="print this one, such as variants/dapo > mine.yaml")


def run(args: argparse.Namespace) -> int:
    """Prints the list, or the file."""
    from grpojax.host import shipped

    names = shipped.names()
    if args.config is None:
        width = max(map(len, names))
        for name in names:
            print(f"{name:<{width}}  {_about(shipped.text_of(name))}".rstrip())
    elif args.config in names:
        print(shipped.text_of(args.config), end="")
    else:
        meant = f"; did you mean {', '.join(close)}?" if (close := shipped.close_to(args.config)) else ""
        raise UserError(f"{args.config}: no recipe of that name ships\n`grpojax recipes` lists them{meant}")
    return 0


def _about(text: str) -> str:
    """The first sentence of the comment at its head, cut to a line."""
    head = re.match(r"(?:#.*\n)*", text)
    comment = " ".join(line.removeprefix("#") for line in (head[0] if head else "").splitlines())
    return textwrap.shorten(re.split(r"(?<!Dr)(?<=\.)\s", comment.strip())[0], 110, placeholder=" ...")
