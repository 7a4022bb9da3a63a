"""``grpojax completion``: shell scripts that complete commands, options, names of recipes, and files."""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

_HOW = """bash: eval "$(grpojax completion bash)" in ~/.bashrc. zsh: the same with zsh in ~/.zshrc, after compinit.
fish: grpojax completion fish > ~/.config/fish/completions/grpojax.fish. Print it again after an update of grpojax."""

# zsh runs it too, with its own functions for such scripts. There is one word on each line, since file names may have
# spaces.
_BASH = """\
_grpojax() {
  local IFS=$'\\n' word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" command= words= files=yes i
  local recipes='RECIPES'
  for ((i = 1; i < COMP_CWORD; i++)); do
    case "${COMP_WORDS[i]}" in -*) ;; *) command="${COMP_WORDS[i]}"; break ;; esac
  done
  case "$command" in
COMMANDS
  esac
  case "$command $before" in
VALUES
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  [ -z "$files" ] || COMPREPLY+=($(compgen -f -- "$word"))
}
complete -o filenames -F _grpojax grpojax"""


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Its arguments."""
    completion = command("completion", run, "Prints a script with which a shell's tab key completes grpojax.")
    completion.epilog = _HOW
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")


def run(args: argparse.Namespace) -> int:
    """Prints the script."""
    from grpojax.host import shipped

    # argparse has no public list of a parser's arguments.
    (commands,) = (a.choices for a in args.parser._actions if isinstance(a, argparse._SubParsersAction))
    shown = {name: [a for a in sub._actions if a.help != argparse.SUPPRESS] for name, sub in commands.items()}
    if args.shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    print("\n".join(_fish(shown, shipped.names())) if args.shell == "fish" else _bash(shown, shipped.names()))
    return 0


_Commands = Mapping[str, Sequence[argparse.Action]]  # a command's arguments


def _bash(commands: _Commands, recipes: Sequence[str]) -> str:
    begin = [_case("", commands, files=False)]
    for name, actions in commands.items():
        words, files = _words(actions, ["$recipes"])
        begin.append(_case(name, [*words, *(o for a in actions for o in a.option_strings)], files=files))
    takes = [(f"{name} {o}", a) for name, actions in commands.items() for a in actions for o in a.option_strings]
    values = [_case(place, a.choices or (), files=not a.choices) for place, a in takes if a.nargs != 0]
    parts = {"RECIPES": recipes, "COMMANDS": begin, "VALUES": values}
    script = _BASH
    for place, lines in parts.items():
        script = script.replace(place, "\n".join(lines))
    return script


def _case(pattern: str, words: Iterable[str], *, files: bool) -> str:
    lines = "\n".join(words)
    return f"""    "{pattern}") words="{lines}" files={"yes" if files else ""} ;;"""


def _words(actions: Sequence[argparse.Action], recipes: Sequence[str]) -> tuple[list[str], bool]:
    """The words that a command takes besides its options, and whether it takes files."""
    positional = [a for a in actions if not a.option_strings]
    words = [w for a in positional for w in (recipes if a.dest == "config" else a.choices or ())]
    return words, any(not a.choices for a in positional)


def _fish(commands: _Commands, recipes: Sequence[str]) -> Iterator[str]:
    for name, actions in commands.items():
        yield f"complete -c grpojax -n __fish_use_subcommand -f -a {name}"
        after = f"complete -c grpojax -n '__fish_seen_subcommand_from {name}'"
        words, files = _words(actions, recipes)
        yield f"{after}{'' if files else ' -f'} -a '{' '.join(words)}'"
        for action in actions:
            takes = f"-x -a '{' '.join(action.choices)}'" if action.choices else "" if action.nargs == 0 else "-r"
            for option in action.option_strings:
                kind = "-l" if option.startswith("--") else "-s"
                about = (action.help or "").replace("\\", "\\\\").replace("'", "\\'")
                yield f"{after} {kind} {option.lstrip('-')} {takes} -d '{about}'"
