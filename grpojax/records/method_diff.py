"""How two resolved methods differ. A method is a plain tree, as under ``method`` in ``config.json``."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

Differences = dict[str, tuple[Any, Any]]
LONGEST_LABEL = 120  # characters of a method in a directory's name, which may have 255
_SECTIONS = ("critic", "filter", "retire", "sample_allocation")


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Differences:
    """Differences between two results of `grpojax.run.run_method.describe`: dotted name to both values.

    None means that a method lacks the entry. The advantage chains are compared step by step. If both have a step, a
    differing argument is named by step and argument, with its values as text. A step that only one of them has is
    listed as a whole. An option that is also a field of the objective is listed once, as the objective's.

    Example:
      >>> a = {"objective": {"aggregate": "sequence_mean"}, "advantage": "center(by=group) | scale(ddof=1)"}
      >>> b = {"objective": {"aggregate": "sequence_sum"}, "advantage": "center(by=group) | scale(ddof=0) | floor(x=0)"}
      >>> for name, (one, other) in differences(a, b).items():
      ...     print(f"{name}: {one} -> {other}")
      advantage.scale.ddof: 1 -> 0
      advantage.floor: None -> floor(x=0)
      objective.aggregate: sequence_mean -> sequence_sum
    """
    found: Differences = {}
    one, other = _flat(a), _flat(b)
    for name in sorted(one.keys() | other.keys()):
        if name == "advantage":
            found |= _of_chains(one.get(name) or "", other.get(name) or "")
        elif one.get(name) != other.get(name):
            found[name] = one.get(name), other.get(name)
    objectives = a.get("objective", {}).keys() | b.get("objective", {}).keys()
    return {name: pair for name, pair in found.items() if name.removeprefix("options.") not in objectives}


def without_repeats(found: Differences) -> Differences:
    """The independent differences of two methods: `differences` without those that follow from another one.

    For the same variant with two sets of options, it keeps the options that differ and leaves out what they change in
    the chain. For two variants, it keeps the steps and terms that differ and leaves out the options that set these. A
    critic, a filter or a rule for solved prompts counts as one difference.

    Example:
      >>> without_repeats({"options.eta": (1.0, None), "advantage.nthr.eta": ("1.0", "None")})
      {'options.eta': (1.0, None)}
      >>> without_repeats({"variant": ("grpo", "mine"), "options.c": (None, 1), "advantage.fail": (None, "fail(c=1)")})
      {'advantage.fail': (None, 'fail(c=1)')}
    """
    follows = "advantage", "critic", "objective.surrogate"
    options = {name: pair for name, pair in found.items() if name.startswith("options.")}
    things: Differences = {}
    for name, (a, b) in found.items():
        kind, _, part = name.partition(".")
        if kind in ("options", "variant", "needs") or ("variant" not in found and options and name.startswith(follows)):
            continue
        if kind in _SECTIONS and part:
            before = things.get(kind, (None, None))
            things[kind] = _joined(before[0], part, a), _joined(before[1], part, b)
        else:
            things[name] = a, b
    if "variant" in found and things:
        shown = [f"({name.rpartition('.')[2]}={a}, {a}, {b}" for name, (a, b) in things.items()]
        options = {
            name: pair
            for name, pair in options.items()
            if None not in pair and not any(f"{mark}{_argument(name)}=" in x for x in shown for mark in "( ")
        }
    return things | options


def in_a_line(found: Differences) -> str:
    """The result of `without_repeats` on `differences`, joined by "; ": ``name: of a -> of b``; empty if nothing is
    left.

    If only one of the methods has a section, its functions are named without their arguments.

    Example:
      >>> in_a_line({"options.c": (0.0, 1.0), "advantage.fail.c": ("0.0", "1.0")})
      'options.c: 0.0 -> 1.0'
      >>> in_a_line({"variant": ("grpo", "token_critic"), "critic.loss": (None, "BiasLoss(l2=0.0, normalise=sum)")})
      'critic: none -> loss=BiasLoss'
    """
    lines = []
    for name, pair in without_repeats(found).items():
        texts = ["none" if x is None else str(x) for x in pair]
        if name in _SECTIONS and None in pair:
            texts = [_without_arguments(x) for x in texts]
        lines.append(f"{name}: {' -> '.join(texts)}")
    return "; ".join(lines)


def _without_arguments(text: str) -> str:
    while (shorter := re.sub(r"\([^()]*\)", "", text)) != text:
        text = shorter
    return text


def _argument(option: str) -> str:
    """The name of an option in the text of a step or a surrogate."""
    return option.removeprefix("options.").removeprefix("clip_").removeprefix("ratio_")


def _joined(before: str | None, name: str, value: Any) -> str | None:
    if value is None:
        return before
    return ", ".join(filter(None, (before, f"{name}={value}")))


def equal_options(stored: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> set[str]:
    """The options whose value is the same in both, given or by default.

    Example:
      >>> equal_options({"options": {"eps": 1e-4, "ddof": 1}}, {"options": {"eps": 1e-4, "ddof": 0}})
      {'eps'}
    """
    one, other = ({} if tree is None else tree.get("options", {}) for tree in (stored, now))
    return {name for name in one if name in other and one[name] == other[name]}


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens two levels of names into one. A list is one value."""
    flat = {}
    for key, value in tree.items():
        flat |= {f"{key}.{name}": x for name, x in value.items()} if isinstance(value, Mapping) else {key: value}
    return flat


def _of_chains(a: str, b: str) -> Differences:
    """Compares chains; steps of the same name are compared in their order."""
    one, other = (_steps(chain) for chain in (a, b))
    found: Differences = {}
    for key in one | other:
        name = f"advantage.{key[0]}"
        (before, text), (after, other_text) = one.get(key, ({}, None)), other.get(key, ({}, None))
        if text is None or other_text is None:
            found[name] = text, other_text
            continue
        for argument in before | after:
            if before.get(argument) != after.get(argument):
                found[f"{name}.{argument}"] = before.get(argument), after.get(argument)
    orders = [[key for key in steps if key in one and key in other] for steps in (one, other)]
    if orders[0] != orders[1]:
        found["advantage"] = tuple(", ".join(name for name, _ in order) for order in orders)  # pyrefly: ignore
    return found


def _steps(chain: str) -> dict[tuple[str, int], tuple[dict[str, str], str]]:
    """The steps in order: a step's name, and its number among those of that name, to its arguments and its text."""
    steps: dict[tuple[str, int], tuple[dict[str, str], str]] = {}
    for step in _split(chain, " | "):
        name, arguments, text = _call(step)
        steps[name, sum(key[0] == name for key in steps)] = arguments, text
    return steps


def _call(text: str) -> tuple[str, dict[str, str], str]:
    """Name, arguments and text of a step ``name(a=1, b=2)``, or of the step of the rewards, ``reward=name(...)``."""
    name, bracket, inside = text.partition("(")
    if not (bracket and text.endswith(")")) or not name:
        return text, {}, text
    pairs = (part.partition("=") for part in _split(inside[:-1], ", "))
    return name.removeprefix("reward="), {key: value for key, _, value in pairs if key}, text


def _split(text: str, by: str) -> list[str]:
    """Splits a text at separators that are outside of brackets."""
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0 and text.startswith(by, i):
            parts.append(text[start:i])
            start = i + len(by)
    return [*parts, text[start:]] if text else []


def label(variant: str | Mapping[str, Any]) -> str:
    """A method's part of a directory's name.

    Example:
      >>> label("my_variants:mine"), label({"name": "dapo", "clip_high": 0.3})
      ('my_variants-mine', 'dapo-clip_high=0.3')
    """
    given = {"name": variant} if isinstance(variant, str) else variant
    text = "-".join([given["name"], *(f"{k}={v}" for k, v in given.items() if k != "name")])
    text = re.sub(r"[^\w.=+-]+", "-", text)
    if len(text) <= LONGEST_LABEL:
        return text
    return f"{text[:LONGEST_LABEL]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
