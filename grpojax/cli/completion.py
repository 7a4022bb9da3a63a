"""``grpojax completion``: shell scripts that complete commands, options, names of recipes, and files."""

import argparse
from collections.abc import Callable

_HOW = """bash: eval "$(grpojax completion bash)" in ~/.bashrc. zsh: the same with zsh in ~/.zshrc, after compinit.
fish: grpojax completion fish > ~/.config/fish/completions/grpojax.fish. Print it again after an update of grpojax."""

# The functions for a recipe: the names of those that ship, and files. There is one word on each line, since file names
# may have spaces.
_RECIPES = {
    "bash": """_grpojax_recipe_file() {{
  local IFS=$'\\n'
  compgen -W '{names}' -- "$1"
  compgen -f -- "$1"
}}""",
    "zsh": """_grpojax_recipe_file() {{
  compadd -- {names}
  _files
}}""",
    "fish": """function _grpojax_recipe_file
  string split ' ' -- '{names}'
  __fish_complete_path (commandline -ct)
end""",
}


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Its arguments."""
    completion = command("completion", run, "Prints a script with which a shell's tab key completes grpojax.")
    completion.epilog = _HOW
    completion.add_argument("shell", choices=tuple(_RECIPES), help="the shell")


def run(args: argparse.Namespace) -> int:
    """Prints the script."""
    import shtab

    from grpojax.host import shipped

    names = ("\n" if args.shell == "bash" else " ").join(shipped.names())
    call = "(_grpojax_recipe_file)" if args.shell == "fish" else "_grpojax_recipe_file"
    recipe = {args.shell: call, "preamble": {args.shell: _RECIPES[args.shell].format(names=names)}}
    # argparse has no public list of a parser's arguments.
    (commands,) = (a.choices for a in args.parser._actions if isinstance(a, argparse._SubParsersAction))
    for action in (a for sub in commands.values() for a in sub._actions):
        if action.dest == "config":
            action.complete = recipe
        elif action.choices is None and action.nargs != 0:
            action.complete = shtab.FILE
    print(shtab.complete(args.parser, args.shell))
    return 0
