"""The recipes that ship with grpojax, by name: ``quickstart``, ``variants/dapo``.

They are the files of ``configs/`` in the repository. A wheel has that folder inside of the package (``setup.py``).
"""

import difflib
import re
from pathlib import Path

from grpojax.host.errors import check_path

_PACKAGE = Path(__file__).parents[1]


def folder() -> Path:
    """The folder of the recipes: next to the package in a checkout, inside of it if it was installed from a wheel."""
    inside = _PACKAGE / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent / "configs"


def names() -> list[str]:
    """The names of all recipes, sorted.

    Example:
      >>> {"quickstart", "variants/dapo"} <= set(names())
      True
    """
    return sorted(path.relative_to(folder()).as_posix().removesuffix(".yaml") for path in folder().rglob("*.yaml"))


def find(recipe: str | Path, start: Path = Path()) -> Path:
    """The file for a path from ``start`` or for a name. A path comes first if there is such a file.

    Any other text is returned as a path, and reading it raises the error. Raises `UserError` for what cannot be a path.

    Example:
      >>> find("quickstart").name, find("mine.yaml").name
      ('quickstart.yaml', 'mine.yaml')
    """
    path = start / recipe
    check_path(str(path))
    if not path.is_file() and str(recipe) in names():
        return folder() / f"{recipe}.yaml"
    return path


def close_to(recipe: str | Path) -> list[str]:
    """Up to three names that a text may have meant: those that begin with it, or else similar ones.

    Example:
      >>> close_to("configs/quikstart.yaml"), close_to("dapo")
      (['quickstart'], ['variants/dapo'])
    """
    text = re.sub(r"^(.*/)?configs/|\.ya?ml$", "", str(recipe))
    begin = [name for name in names() if text and (name.startswith(text) or name.rpartition("/")[2].startswith(text))]
    return (begin or difflib.get_close_matches(text, names()))[:3]


def text_of(name: str) -> str:
    """A recipe as a text that works in any folder: its ``base`` is given by name.

    Example:
      >>> text_of("variants/dapo").splitlines()[1]
      'base: variants/base'
    """
    path = folder() / f"{name}.yaml"

    def by_name(base: re.Match[str]) -> str:
        named = (path.parent / base[1]).resolve().relative_to(folder().resolve())
        return f"base: {named.as_posix().removesuffix('.yaml')}"

    return re.sub(r"^base: +(\S+)", by_name, path.read_text(encoding="utf-8"), flags=re.MULTILINE)
