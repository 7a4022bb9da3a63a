"""How two resolved methods differ: plain trees, as ``config.json`` has one under ``method``."""

import difflib
import json
from collections.abc import Mapping
from typing import Any

Differences = dict[str, tuple[Any, Any]]


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Differences:
    """Where two results of `grpojax.run.method.describe` differ: dotted name to the values of both.

    None stands for what a method does not have. Of the advantage chain the steps are compared one by one: an argument
    of a step that both have is named by step and argument, its values as text, and a step that only one has is there
    as a whole. An option that is also a field of the objective is there once, as the objective's.

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
    """The things that two methods differ in: of `differences` without what only says one of them again.

    Those are the name, what it needs of a trainer, and an option that the chain, the objective or the critic shows as
    well. A critic, a filter or a rule for solved prompts is one thing.

    Example:
      >>> found = {"options.eta": (1.0, None), "advantage.nthr.eta": ("1.0", "None"), "variant": ("a", "b")}
      >>> without_repeats(found)
      {'advantage.nthr.eta': ('1.0', 'None')}
    """
    things: Differences = {}
    for name, (a, b) in found.items():
        kind, _, part = name.partition(".")
        if kind in ("critic", "filter", "retire", "plan"):
            before = things.get(kind, (None, None))
            things[kind] = tuple(_joined(x, part, y) for x, y in zip(before, (a, b), strict=True))  # pyrefly: ignore
        elif kind in ("advantage", "objective"):
            things[name] = a, b
    shown = [f"({name.rpartition('.')[2]}={a}, {a}, {b}" for name, (a, b) in things.items()]
    for name, pair in found.items():
        option = name.removeprefix("options.")
        argument = option.removeprefix("clip_").removeprefix("ratio_")
        said = any(f"({argument}=" in x or f" {argument}=" in x for x in shown)
        # Of two variants, one has options that the other lacks: what they set is in the chain, or is one thing with it.
        foreign = "variant" in found and None in pair and bool(things)
        if option != name and not said and not foreign:
            things[name] = pair
    return things


def _joined(before: str | None, name: str, value: Any) -> str | None:
    if value is None:
        return before
    return ", ".join(filter(None, (before, f"{name}={value}")))


def changes(stored: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> Differences:
    """Where a method is another now than when it was stored; none where either is unknown.

    What the stored one does not mention is new since: an option, a term or an argument of a step, which by default
    changes nothing. A step, a filter or a network that is new does change something.

    Example:
      >>> stored = {"options": {"eps": 1e-4}, "advantage": "scale(eps=0.0001)"}
      >>> now = {"options": {"eps": 1e-6, "new": 0}, "advantage": "scale(eps=1e-06, new=0)"}
      >>> changes(stored, now)
      {'options.eps': (0.0001, 1e-06), 'advantage.scale.eps': ('0.0001', '1e-06')}
    """
    if stored is None or now is None:
        return {}
    found = differences(stored, now)
    known = _flat(stored)
    new = ("options.", "objective.")
    kept = {k: v for k, v in found.items() if not (k.startswith(new) and k not in known)}
    kept = {k: v for k, v in kept.items() if not (k.count(".") > 1 and v[0] is None)}
    return dict(sorted(kept.items(), key=lambda item: not item[0].startswith("options.")))


def explain(changed: Differences, now: Mapping[str, Any]) -> tuple[str, str]:
    """What `changes` has found, the first by its name and both values, and what brings the stored method back.

    An option that has changed can be given as it was. What no option sets needs the version that had it.

    Example:
      >>> now = {"options": {"eps": 1e-6}}
      >>> explain({"options.eps": (0.0001, 1e-06), "advantage.scale.eps": ("0.0001", "1e-06")}, now)
      ('variant.eps was 0.0001, is 1e-06 now', 'set variant.eps=0.0001')
      >>> explain({"advantage.to_tokens": (None, "to_tokens()")}, now)[0]
      'advantage.to_tokens was None, is to_tokens() now'
    """
    options = now.get("options", {})
    given, others = {}, {}
    for name, (before, after) in changed.items():
        kind, _, option = name.partition(".")
        if kind in ("options", "objective") and option in options:
            given[f"variant.{option}"] = before, after
        else:
            others[name] = before, after
    # An argument in the text of the chain or of the surrogate is what an option has set; a step by itself is not.
    follows = [name for name in others if name == "objective.surrogate" or name.count(".") > 1]
    listed = {name: pair for name, pair in (given | others).items() if not (given and name in follows)}
    said = [f"{name} was {before}, is {after} now" for name, (before, after) in listed.items()]
    text = said[0] + (f" (and {len(said) - 1} more)" if len(said) > 1 else "")
    if listed.keys() - given.keys():
        return text, "go on with the version of grpojax that it was started with"
    return text, f"set {' '.join(f'{name}={json.dumps(before)}' for name, (before, _) in given.items())}"


def equal_options(stored: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> set[str]:
    """The options whose value is the same in both, given or by default.

    Example:
      >>> equal_options({"options": {"eps": 1e-4, "ddof": 1}}, {"options": {"eps": 1e-4, "ddof": 0}})
      {'eps'}
    """
    one, other = ({} if tree is None else tree.get("options", {}) for tree in (stored, now))
    return {name for name in one if name in other and one[name] == other[name]}


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Two levels of names to one. A list is one value."""
    flat = {}
    for key, value in tree.items():
        flat |= {f"{key}.{name}": x for name, x in value.items()} if isinstance(value, Mapping) else {key: value}
    return flat


def _of_chains(a: str, b: str) -> Differences:
    one, other = ([_call(step) for step in _split(chain, " | ")] for chain in (a, b))
    found: Differences = {}
    names = [name for name, _, _ in one], [name for name, _, _ in other]
    for kind, i, i_end, j, j_end in difflib.SequenceMatcher(None, *names, autojunk=False).get_opcodes():
        if kind != "equal":
            found |= {f"advantage.{name}": (text, None) for name, _, text in one[i:i_end]}
            for name, _, text in other[j:j_end]:
                found[f"advantage.{name}"] = found.get(f"advantage.{name}", (None,))[0], text
            continue
        for (name, before, _), (_, after, _) in zip(one[i:i_end], other[j:j_end], strict=True):
            for key in before | after:
                if before.get(key) != after.get(key):
                    found[f"advantage.{name}.{key}"] = before.get(key), after.get(key)
    return found


def _call(text: str) -> tuple[str, dict[str, str], str]:
    """Name, arguments and text of a step ``name(a=1, b=2)``; that of the rewards, ``reward=name(...)``, too."""
    name, bracket, inside = text.partition("(")
    if not (bracket and text.endswith(")")) or not name:
        return text, {}, text
    pairs = (part.partition("=") for part in _split(inside[:-1], ", "))
    return name.removeprefix("reward="), {key: value for key, _, value in pairs if key}, text


def _split(text: str, by: str) -> list[str]:
    """The parts of a text between separators that stand in no brackets."""
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0 and text.startswith(by, i):
            parts.append(text[start:i])
            start = i + len(by)
    return [*parts, text[start:]] if text else []
