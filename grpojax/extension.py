"""The ring around the core: which words lead to an extension, and how one is found.

The core imports no extension. A word of a user leads to it: a command, a section of a recipe, a need of a variant, the
scheme of generated problems. Each extension lists its words in a `Names`, and is imported when one of them is used.

A folder of ``grpojax/extensions/`` has its `Names` in ``__init__.py``, under ``NAMES``. It may be deleted: then its
words are unknown, and the rest works. Another package names its own as an entry point of the group
``grpojax.extensions``::

    [project.entry-points."grpojax.extensions"]
    luck = "my_package:NAMES"
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from grpojax.host.errors import UserError

GROUP = "grpojax.extensions"
OPEN = ("", "rollout")  # where a recipe takes sections of any extension: beside its own, and below this key
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
    """The words that lead to an extension, each with the import path ``module:object`` of what it stands for.

    Attributes:
      commands: of ``grpojax``: a module with ``register`` and ``run``, as `grpojax.cli.main` asks for. The path is that
        of a module.
      sections: of a recipe, by their key such as ``rollout.curriculum``: the section's frozen dataclass. The recipe
        then has this key, which is None by default (`with_sections`).
      needs: of a variant: the part that supplies it (`grpojax.run.parts.part.Part`).
      settings: of a recipe, such as ``rollout.ahead`` or the key of a section: the part that carries it out, if it is
        set (`grpojax.run.parts.of`); for ``model.adapter`` the `grpojax.programs.adapter.Adapter`.
      recipes: recipes of other commands than ``train``: how such a recipe is read and what it runs
        (`grpojax.run.dry.RecipeKind`).
      families: of models, by their ``model_type``: the `grpojax.models.hf.family.Family`.
      formats: of numbers in a rollout, such as ``int8``: the `grpojax.models.number_formats.NumberFormat`.
      weights: a mixer's or an MLP's (`grpojax.models.layer_kinds`), by its name: its rows of the table of weights.
      axes: no words with paths, but the logical axes that only these weights have, with the mesh axes that cut them
        (`grpojax.sharding.TRAIN`).
      problems: schemes of sources of generated problems: a module with ``rows(name, options)`` and
        ``content(name, question)``. The path is that of a module.
      rewards: functions that a recipe may name as rewards.
      environments: classes that a recipe may name as environments.
      processes: no word, but the path of a module for runs of several processes: a `grpojax.host.processes.Pod`. Empty
        for none.
      exclusions: no word, but the path of the extension's settings that exclude each other: a mapping from scopes
        (`grpojax.run.exclusions.rows`) to rows. Every recipe imports its module, which imports little. Empty for none.

    Example:
      >>> Names(needs={"luck": "my_package.luck:Luck"}).needs["luck"]
      'my_package.luck:Luck'
    """

    commands: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sections: Mapping[str, str] = dataclasses.field(default_factory=dict)
    needs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    recipes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    families: Mapping[str, str] = dataclasses.field(default_factory=dict)
    formats: Mapping[str, str] = dataclasses.field(default_factory=dict)
    weights: Mapping[str, str] = dataclasses.field(default_factory=dict)
    axes: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    problems: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rewards: Mapping[str, str] = dataclasses.field(default_factory=dict)
    environments: Mapping[str, str] = dataclasses.field(default_factory=dict)
    processes: str = ""
    exclusions: str = ""


@functools.cache
def installed() -> Mapping[str, Names]:
    """The extensions by name: the folders first, then those of other packages.

    Raises:
      UserError: an entry point cannot be imported, is no `Names`, or has a section or a setting that no recipe reads.
    """
    folders = sorted(Path(__file__).with_name("extensions").glob("*/__init__.py"))
    found = {file.parent.name: importlib.import_module(f"{GROUP}.{file.parent.name}").NAMES for file in folders}
    for entry in metadata.entry_points(group=GROUP):
        try:
            names = entry.load()
        except (ImportError, AttributeError) as e:
            raise UserError(f"extension {entry.name!r} cannot be imported from {entry.value}: {e}") from None
        if not isinstance(names, Names):
            raise UserError(f"extension {entry.name!r}: {entry.value} is no grpojax.extension.Names")
        closed = [key for key in names.sections if key.rpartition(".")[0] not in OPEN]
        if wrong := closed + [key for key in names.settings if key not in names.sections]:
            raise UserError(
                f"extension {entry.name!r}: no recipe would read {wrong[0]!r}: a section stands by itself or below "
                "rollout, and a setting is such a section"
            )
        found[entry.name] = names
    return found


def words(kind: str) -> dict[str, str]:
    """The words of a kind, which is a field of `Names` with words, with their import paths.

    Raises:
      UserError: two extensions have the same word.

    Example:
      >>> "train" in words("commands")  # it is the core's
      False
    """
    found, owners = dict[str, str](), dict[str, str]()
    for name, names in installed().items():
        for word, path in getattr(names, kind).items():
            if word in found:
                raise UserError(
                    f"extensions {owners[word]!r} and {name!r} both have {word!r} in {kind}: remove one of them"
                )
            found[word], owners[word] = path, name
    return found


def axes() -> dict[str, tuple[str, ...]]:
    """The logical axes of all extensions (`Names.axes`)."""
    return {axis: over for names in installed().values() for axis, over in names.axes.items()}


def require(kind: str, word: str, asked: str) -> str:
    """The import path of what a word stands for.

    Args:
      kind: a field of `Names`.
      word: one of its words.
      asked: the setting that asks for it, as the user wrote it.

    Raises:
      UserError: no extension has the word.
    """
    path = words(kind).get(word)
    if path is None:
        there = ", ".join(installed()) or "none"
        raise UserError(
            f"{asked}: no extension that is installed brings this (installed: {there})\n"
            "install the one that does (a complete grpojax has its own), or leave this out"
        )
    return path


def load(kind: str, word: str, asked: str) -> Any:
    """What a word stands for, imported; arguments and errors as of `require`."""
    return imported(require(kind, word, asked))


def section(key: str) -> type:
    """The dataclass of a recipe's section that an extension has; without the extension None is all that it may be."""
    path = words("sections").get(key)
    return type(None) if path is None else imported(path)


def with_sections(below: str = "") -> Callable[[type[T]], type[T]]:
    """Gives a class the sections that extensions have below a key, as fields that are None by default.

    It stands under ``@dataclasses.dataclass``. A field's line in the docstring is the first of its section's own.
    Fields that the class declares itself, because the core reads them, stay as they are.

    Args:
      below: the key of the class in a recipe, such as ``rollout``; empty for the recipe itself.

    Example:
      >>> @dataclasses.dataclass(frozen=True, kw_only=True)
      ... @with_sections("rollout")
      ... class Mine:
      ...     own: int = 1
      >>> {f"rollout.{f.name}" for f in dataclasses.fields(Mine)} - {"rollout.own"} <= words("sections").keys()
      True
    """

    def add(cls: type[T]) -> type[T]:
        for key in words("sections"):
            outer, _, name = key.rpartition(".")
            if outer != below or name in cls.__annotations__:
                continue
            kind = section(key)
            cls.__annotations__[name] = kind | None
            setattr(cls, name, None)
            first = " ".join((kind.__doc__ or "").partition("\n\n")[0].split())
            cls.__doc__ = f"{(cls.__doc__ or '').rstrip()}\n      {name}: {first}\n    "
        return cls

    return add


def imported(path: str) -> Any:
    """The module or object of an import path ``module`` or ``module:object``."""
    module, _, name = path.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found
