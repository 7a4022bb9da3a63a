"""A YAML file, or one over another, plus ``a.b=c`` overrides, turned into frozen dataclasses.

The classes are plain stdlib dataclasses. A field's type says what it takes, and ``Literal`` offers a choice. The
class's ``__post_init__`` checks the ranges of numbers, by `grpojax.host.errors.require`, and conditions across fields,
for which it raises a `ValueError`. This module walks dataclasses, lists, dicts and unions itself and leaves every other
type to pydantic. Pydantic could walk these too. But unless it is strict, it takes ``true`` for 1 and "yes" for
``true``, and a strict one takes neither a mapping for a section nor "7" for a number. It accepts infinity and keys that
are numbers in an ``Any``. For a wrong union, it reports the errors of every member. For an unknown key, it does not
name the known ones.
"""

import dataclasses
import difflib
import functools
import itertools
import operator
import re
import reprlib
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from grpojax.host import shipped
from grpojax.host.console import log
from grpojax.host.errors import UserError

T = TypeVar("T")
Key = tuple[Any, ...]  # the path of a value: ("rewards", 0, "weight")


def load(cls: type[T], path: str | Path, overrides: Iterable[str] = ()) -> T:
    """Reads ``path``, applies the overrides in order and builds a ``cls``.

    ``base: FILE`` at the top level, a path from the file's own folder, names a file that this one changes. That file
    may have a base too. For a recipe that ships, the name replaces the path (`grpojax.host.shipped`). Mappings are
    merged key by key, and anything else is replaced as a whole. So is a mapping with another ``name``, and one below a
    section with another ``path``, such as a source of data: their other keys belonged to the old one. A section is not:
    ``model: {path: OTHER}`` keeps the base's ``model.dtype``. An empty mapping takes the place of what is there.

    Args:
      cls: a frozen dataclass.
      path: a YAML file with a mapping at its top level, or the name of a recipe that ships.
      overrides: texts ``a.b=c``; ``c`` is YAML, and a part of the key may be an index into a list.

    Raises:
      UserError: ``cls`` does not take a file, an override or a value.
    """
    tree, origins = _read(shipped.find(path), ())
    tree, overridden = override(tree, overrides)
    for key in overridden:
        origins = _forget(origins, key)
    return build(cls, tree, {**origins, **overridden})


def read(path: str | Path) -> dict[Any, Any]:
    """A file merged over its bases, as plain data. Raises `UserError` if it cannot be read."""
    return _read(shipped.find(path), ())[0]


def override(tree: Any, overrides: Iterable[str]) -> tuple[Any, dict[str, str]]:
    """A copy of ``tree`` with the overrides applied in order, and the origins of the values that they set, for `build`.

    A mapping is merged as one of a file is over its base (`load`): ``rollout={group: 8}`` keeps ``rollout.prompts``.
    If an override has a key below a text at the top level, the text is taken as the name of a mapping; a list there is
    taken as its ``terms``.

    Raises:
      UserError: an override cannot be read, or has no place.

    Example:
      >>> override({"variant": "dapo"}, ["variant.clip_high=0.3"])[0]
      {'variant': {'name': 'dapo', 'clip_high': 0.3}}
      >>> override({"rewards": [{"name": "answer"}]}, ["rewards.timeout_s=30"])[0]
      {'rewards': {'terms': [{'name': 'answer'}], 'timeout_s': 30}}
    """
    origins = {}
    for text in overrides:
        dotted, equals, value = text.partition("=")
        keys = dotted.strip().split(".")
        where = f"override {text!r}"
        if not equals or not all(keys):
            raise UserError(f"{where}: expected key=value, such as train.steps=100")
        hint = f"a text with such characters needs quotes: {dotted}='\"...\"'"
        try:
            read = _parse(value, where)
        except UserError as e:
            raise UserError(_one_line(f"{e}; {hint}")) from None
        if comment := _comment(value):
            raise UserError(_one_line(f"{where}: {comment!r} would be a comment; {hint}"))
        if len(keys) > 1 and isinstance(tree, dict):
            keys, tree = _with_names(tree, keys)
        *at, last = keys
        before = origins
        over, origins = _merge({last: _value_at(tree, keys)}, {last: read}, tuple(at), "the command line", before)
        if lost := next((name for name in before if name not in origins), None):
            log.warning("%s replaces all of %s, and so %s, which an override before it sets", where, dotted, lost)
        tree = _replace(tree, keys, over[last], where)
    return tree, origins


def _value_at(node: Any, keys: Sequence[str]) -> Any:
    """The value at ``keys``, or None if there is none."""
    for key in keys:
        if isinstance(node, list):
            node = dict(zip(map(str, range(len(node))), node, strict=True))
        node = node.get(key) if isinstance(node, dict) else None
    return node


def _with_names(tree: dict[Any, Any], keys: list[str]) -> tuple[list[str], dict[Any, Any]]:
    """A key and the tree that it is for, with a mapping where the tree has its short form: its name, or its terms."""
    first, second, *rest = keys
    match tree.get(first):
        case str(name):
            return keys, {**tree, first: {"name": name}}
        case list(terms) if not second.lstrip("-").isdigit():
            return keys, {**tree, first: {"terms": terms}}
        case {"terms": list()} if second.isdigit():
            return [first, "terms", second, *rest], tree
    return keys, tree


def _comment(text: str) -> str:
    """What YAML takes for a comment at the end of a text."""
    tokens = [t for t in yaml.scan(text) if not isinstance(t, yaml.BlockEndToken | yaml.StreamEndToken)]
    rest = text[tokens[-1].end_mark.index :].strip()
    return rest if rest.startswith("#") else ""


def build(
    cls: type[T],
    mapping: Mapping[str, Any],
    origins: Mapping[str, str] | None = None,
    *,
    recipe: type | None = None,
) -> T:
    """Builds a ``cls`` from a mapping.

    Where a number is wanted, a string that reads as a number counts as one. But a boolean is never a number, a number
    is never a string, and every number is finite.

    Args:
      cls: a frozen dataclass. If it has a static method ``settings_of``, that removes stored entries from the mapping
        that are not settings.
      mapping: the values, as YAML gives them.
      origins: dotted path -> where the values at and below it came from; ``""`` is the root.
      recipe: the class of the whole recipe if ``cls`` is a part of it. The error for a key that another part has names
        that key.

    Raises:
      UserError: names the first problem and counts the others.
    """
    walk = _Walk(cls, origins or {}, recipe or cls)
    if settings_of := getattr(cls, "settings_of", None):
        mapping = settings_of(mapping)
    config = walk.visit(cls, mapping, ())
    if walk.problems:
        first, *others = walk.problems
        raise UserError(first + (f" (and {len(others)} more)" if others else ""))
    return config


def to_dict(config: Any) -> dict[str, Any]:
    """The config as plain JSON-able data, from which `build` makes an equal one."""
    return TypeAdapter(Any).dump_python(config, mode="json")


def diff(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Differences between two results of `to_dict`: sorted lines ``train.steps: 10 -> 20``."""
    return sorted(_differences(a, b, ()))


def _read(path: Path, above: tuple[Path, ...]) -> tuple[dict[Any, Any], dict[str, str]]:
    """A file merged over its base, and the origins of its values; ``above`` are the files whose bases led here."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        wanted = f"{above[-1]}: base: " if above else ""
        problem = getattr(error, "strerror", None) or "not a UTF-8 text file"
        meant = f"; did you mean {', '.join(close)}?" if (close := shipped.close_to(path)) else ""
        names = f"\n`grpojax recipes` lists those that ship{meant}" if isinstance(error, FileNotFoundError) else ""
        raise UserError(f"{wanted}{path}: {problem}{names}") from None
    tree = _parse(text, str(path))
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected a mapping at the top level, got {_show(tree)}")
    if "base" not in tree:
        return tree, {"": str(path)}
    tree = dict(tree)
    base = tree.pop("base")
    if not isinstance(base, str) or not base:
        raise UserError(f"{path}: base={_show(base)}: expected the path of a file, from this one's folder, or a name")
    if path.resolve() in [file.resolve() for file in above]:
        raise UserError(f"{path}: base: a recipe cannot be its own base: {' -> '.join(map(str, (*above, path)))}")
    under, origins = _read(shipped.find(base, path.parent), (*above, path))
    return _merge(under, tree, (), str(path), origins)


def _merge(
    under: Mapping[Any, Any], over: Mapping[Any, Any], at: Key, file: str, origins: dict[str, str]
) -> tuple[dict[Any, Any], dict[str, str]]:
    """Merges ``over``, from ``file``, key by key over ``under``, both at the path ``at``; adds to the origins."""
    merged = dict(under)
    for key, value in over.items():
        old, path = merged.get(key), (*at, key)
        both = isinstance(old, dict) and isinstance(value, dict) and value
        if both and _same(old, value, "name") and (not at or _same(old, value, "path")):
            merged[key], origins = _merge(old, value, path, file, origins)
        else:
            merged[key], origins = value, {**_forget(origins, _dotted(path)), _dotted(path): file}
    return merged, origins


def _same(under: Mapping[Any, Any], over: Mapping[Any, Any], key: str) -> bool:
    """Whether two mappings have not each a value of its own for the key."""
    return under.get(key, over.get(key)) == over.get(key, under.get(key))


def _forget(origins: Mapping[str, str], path: str) -> dict[str, str]:
    """The origins without those below ``path``, whose value has been replaced."""
    return {place: origin for place, origin in origins.items() if not place.startswith(f"{path}.")}


class _Absent:
    def __repr__(self) -> str:
        return "(absent)"


_ABSENT = _Absent()


def _differences(a: Any, b: Any, path: Key) -> Iterator[str]:
    if isinstance(a, list) and isinstance(b, list):
        a, b = dict(enumerate(a)), dict(enumerate(b))
    if isinstance(a, dict) and isinstance(b, dict):
        for key in a.keys() | b.keys():
            yield from _differences(a.get(key, _ABSENT), b.get(key, _ABSENT), (*path, key))
    elif a != b or isinstance(a, bool) != isinstance(b, bool):
        yield f"{_dotted(path)}: {a!r} -> {b!r}"


class _Loader(yaml.SafeLoader):
    """Refuses a key that occurs twice in a mapping; in PyYAML the last one wins. Numbers are nearly those of YAML 1.2:
    ``1e-5`` is one, ``010`` is ten, ``1:30`` is a text. In PyYAML they are a text, 8 and 90. A date is a text too."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key.value!r} occurs twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int | float | str:
        text = node.value.replace("_", "")
        if ":" in text:
            return node.value
        if node.tag.endswith(":float"):
            return self.construct_yaml_float(node)
        return int(text) if re.fullmatch(r"[-+]?[0-9]+", text) else self.construct_yaml_int(node)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if not tag.endswith(":timestamp")]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.[0-9][0-9_]*|[0-9][0-9_]*(\.[0-9_]*)?)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)
for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_number)


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark, error.problem
        line = f", line {mark.line + 1}" if mark else ""
    except Exception as error:  # PyYAML's constructors leak other errors: KeyError for "!!bool x", ValueError, ...
        line, problem = "", error
    hint = "; a text with a backslash goes into single quotes" if "escape" in str(problem) else ""
    raise UserError(_one_line(f"{where}{line}: invalid YAML: {problem}{hint}"))


def _replace(node: Any, keys: Sequence[str], value: Any, where: str) -> Any:
    """A copy of ``node`` with ``value`` at ``keys``. Nothing changes in place, since YAML aliases share nodes."""
    if not keys:
        return value
    key, *rest = keys
    if node is None:
        node = {}
    if isinstance(node, dict):
        return {**node, key: _replace(node.get(key), rest, value, where)}
    if not isinstance(node, list):
        raise UserError(f"{where}: no key {key!r} in {_show(node)}")
    index = next((i for i in range(len(node)) if str(i) == key), None)
    if index is None:
        raise UserError(f"{where}: no index {key!r} in a list of {len(node)}")
    return [*node[:index], _replace(node[index], rest, value, where), *node[index + 1 :]]


_UNIONS = (Union, types.UnionType)
_PYDANTIC = ConfigDict(allow_inf_nan=False, extra="forbid")
_SHAPE_NAMES = {dict: "a mapping", list: "a list"}


class _Walk:
    """Builds values by their types and collects their errors. If there are any, the built values must not be used."""

    def __init__(self, root: type, origins: Mapping[str, str], recipe: type):
        self.root, self.origins, self.recipe = root, origins, recipe
        self.problems: list[str] = []

    def visit(self, tp: Any, value: Any, path: Key) -> Any:
        shape = _shape_of(value)
        if tp is Any and shape:
            tp = shape
        origin, args = typing.get_origin(tp) or tp, typing.get_args(tp)
        if shape not in _shapes(tp):
            return self.leaf(tp, value, path)
        if origin in _UNIONS:
            return self.closest([m for m in args if shape in _shapes(m)], value, path)
        if dataclasses.is_dataclass(origin):
            return self.section(origin, value, path)
        if origin is dict:
            of_key, of_value = args or (str, Any)
            keys = [self.visit(of_key, k, (*path, "<key>")) for k in value]
            values = [self.visit(of_value, v, (*path, k)) for k, v in value.items()]
            return dict(zip(keys, values, strict=True))
        if origin is tuple and args and args[-1] is not ...:
            if len(value) != len(args):
                return self.refuse(value, path, f"expected a list of {len(args)}")
        else:
            args = itertools.repeat(args[0] if args else Any)
        return origin(self.visit(t, v, (*path, i)) for i, (t, v) in enumerate(zip(args, value, strict=False)))

    def section(self, cls: type, value: Mapping[Any, Any], path: Key) -> Any:
        before = len(self.problems)
        fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
        hints = typing.get_type_hints(cls, include_extras=True)
        for key in value:
            if key not in fields:
                at = (*path, key)
                unknown = self.unknown(at, value[key], fields)
                self.problems.append(_one_line(f"{_dotted(at)}{self.origin(at)}: {unknown}"))
        values = {}
        for name, field in fields.items():
            if name in value:
                values[name] = self.visit(hints[name], value[name], (*path, name))
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                self.problems.append(f"{_dotted((*path, name))} is required")
        if len(self.problems) > before:
            return None
        try:
            return cls(**values)
        except ValueError as error:
            self.problems.append(f"{_dotted(path)}: {error}" if path else str(error))

    def unknown(self, path: Key, value: Any, fields: Iterable[str]) -> str:
        """The error for a key that a section does not have, with the key that was probably meant.

        Args:
          path: path of the key.
          value: value of the key, which may be a section of another trainer.
          fields: the keys that the section has.
        """
        from grpojax.host import other_trainers

        dotted = _dotted(path)
        for name in (dotted, *(_dotted((*path, *below)) for below in _leaves(value))):
            for meant in other_trainers.keys_for(name):
                if all(_has(self.root, key.split(".")) for key in meant.keys):
                    named = "this" if name == dotted else name
                    return f"{named} is {meant.trainers} name; {meant.remedy}"
        if elsewhere := _elsewhere(self.recipe, path[-1]):
            return f"unknown key; did you mean {' or '.join(map(repr, elsewhere))}?"
        known = f"; known keys: {', '.join(fields)}"
        return f"unknown key{_did_you_mean(path[-1], fields) or known}"

    def closest(self, members: Sequence[Any], value: Any, path: Key) -> Any:
        """Builds the member of a union that has the fewest errors for ``value``."""
        trials = []
        for member in members:
            walk = _Walk(self.root, self.origins, self.recipe)
            trials.append((walk.visit(member, value, path), walk.problems))
        result, problems = min(trials, key=lambda trial: len(trial[1]))
        self.problems += problems
        return result

    def leaf(self, tp: Any, value: Any, path: Key) -> Any:
        """Validates a value that does not have the form of a section, list or dict in ``tp``."""
        if isinstance(value, int | float) and not abs(value) <= sys.float_info.max:  # also nan and 16**5000
            return self.refuse(value, path, "expected a finite number")
        members = typing.get_args(tp) if typing.get_origin(tp) in _UNIONS else (tp,)
        simple = tuple(m for m in members if not _shapes(m))
        if value == "None" and types.NoneType in members:
            return self.refuse(value, path, "write null")
        messages = []
        if simple:
            adapter = TypeAdapter(functools.reduce(operator.or_, simple), config=_PYDANTIC)
            try:
                result = adapter.validate_python(value, strict=isinstance(value, bool) or None)
            except ValidationError as error:
                messages = [e["msg"] for e in error.errors()]
            else:
                if isinstance(result, bool) == isinstance(value, bool):
                    return result
                messages = [f"Input should be a valid {'boolean' if isinstance(result, bool) else 'number'}"]
        messages += [f"Input should be {_SHAPE_NAMES[s]}" for s in _shapes(tp)]
        hint = self.quoted(path) if str in simple and isinstance(value, int | float) else ""
        return self.refuse(value, path, _expectation(messages) + hint + _did_you_mean(value, _choices(tp)))

    def quoted(self, path: Key) -> str:
        """How to give the value at ``path`` as a text, where YAML reads a number or a boolean; empty for no YAML."""
        origin, own = self.origin(path), isinstance(path[-1], str) and path[-1] != "<key>"
        if "command line" in origin and own:
            return f"; in quotes it is one: {_dotted(path)}='\"...\"'"
        return origin and "; in quotes it is one" + (f': {path[-1]}: "..."' if own else "")

    def refuse(self, value: Any, path: Key, reason: str) -> None:
        where = f"{_dotted(path)}{'=' if path else ''}{_show(value)}{self.origin(path)}"
        self.problems.append(_one_line(f"{where}: {reason}"))

    def origin(self, path: Key) -> str:
        """The origin of the value at ``path``, for a message; empty if it is not known."""
        below = [place for place in self.origins if place.startswith(f"{_dotted(path)}.")]
        places = (_dotted(path), *below, *(_dotted(path[:n]) for n in range(len(path) - 1, -1, -1)))
        return next((f" (from {self.origins[p]})" for p in places if p in self.origins), "")


def _leaves(value: Any) -> Iterator[Key]:
    """The dotted keys below a mapping."""
    for key, below in value.items() if isinstance(value, Mapping) else ():
        deeper = list(_leaves(below))
        yield from ((key, *rest) for rest in deeper) if deeper else [(key,)]


def _sections(tp: Any) -> Iterator[type]:
    """The dataclasses that a type is or, if it is a union, may be; not those in lists and mappings."""
    if dataclasses.is_dataclass(tp) and isinstance(tp, type):
        yield tp
    elif typing.get_origin(tp) in _UNIONS:
        for member in typing.get_args(tp):
            yield from _sections(member)


def _keys(section: type) -> dict[str, Any]:
    """The keys of a section and their types."""
    hints = typing.get_type_hints(section)
    return {field.name: hints[field.name] for field in dataclasses.fields(section) if field.init}


def _has(section: type, keys: Sequence[str]) -> bool:
    """Whether a recipe has a dotted key. A mapping that is not a section may have any key."""
    hint = _keys(section).get(keys[0])
    inner = list(_sections(hint))
    return hint is not None and (len(keys) == 1 or not inner or any(_has(each, keys[1:]) for each in inner))


def _elsewhere(root: type, name: Any) -> list[str]:
    """The dotted keys of a recipe that end in this name and are nearest to the top."""
    level: list[tuple[str, type]] = [("", root)]
    while level:
        below = [
            (f"{prefix}{key}", inner)
            for prefix, section in level
            for key, hint in _keys(section).items()
            for inner in (*_sections(hint), None)
        ]
        if found := [key for key, inner in below if inner is None and key.rpartition(".")[2] == name]:
            return found
        level = [(f"{key}.", inner) for key, inner in below if inner is not None]
    return []


def _shape_of(value: Any) -> type | None:
    return dict if isinstance(value, Mapping) else list if isinstance(value, list | tuple) else None


def _shapes(tp: Any) -> tuple[type, ...]:
    """The forms, out of dict and list, of a type that `_Walk` enters itself."""
    origin, args = typing.get_origin(tp) or tp, typing.get_args(tp)
    if origin is Annotated:
        raise TypeError(f"{tp}: a setting's range belongs into __post_init__, by grpojax.host.errors.require")
    if origin in _UNIONS:
        return tuple(s for m in args for s in _shapes(m))
    if origin is dict or dataclasses.is_dataclass(origin):
        return (dict,)
    return (list,) if origin in (list, tuple) else ()


def _choices(tp: Any) -> list[Any]:
    """The values of every ``Literal`` in a type."""
    args = typing.get_args(tp)
    return list(args) if typing.get_origin(tp) is Literal else [c for a in args for c in _choices(a)]


_PLAIN = {
    ", (unable|got) .*": "",
    "^a valid integer": "an integer",
    "^a valid boolean": "true or false",
    "^a valid date.*": "a date such as 2026-01-31",
    "^a valid ": "a ",
}


def _expectation(messages: Sequence[str]) -> str:
    """Pydantic's messages about the members of a union, in one phrase."""
    start = "Input should be "
    wanted = [m.removeprefix(start) for m in messages if m.startswith(start)]
    if not wanted:
        return messages[0].removeprefix("Value error, ")
    return "expected " + " or ".join(dict.fromkeys(map(_plain, wanted)))


def _plain(text: str) -> str:
    for pattern, shorter in _PLAIN.items():
        text = re.sub(pattern, shorter, text)
    return text


def _did_you_mean(word: Any, known: Iterable[Any]) -> str:
    names = [k for k in known if isinstance(k, str)]
    close = difflib.get_close_matches(word, names, n=1) if isinstance(word, str) else None
    return f"; did you mean {close[0]!r}?" if close else ""


def _dotted(path: Key) -> str:
    return ".".join(k if isinstance(k, str) else _show(k) for k in path)


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def _show(value: Any) -> str:
    shown = reprlib.Repr()
    shown.maxstring = shown.maxother = 80
    try:
        return shown.repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return "..."
