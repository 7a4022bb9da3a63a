"""How mkdocstrings reads our docstrings: ``Example:`` is a section of examples, ``a, b: text`` is two entries."""

import re
from typing import Any

import griffe


def as_google(text: str) -> str:
    """The docstring in the form that griffe's reader of Google's style expects.

    ``low, high: of the range`` becomes an entry for each of ``low`` and ``high``. A bare example gets its heading.
    """
    text = re.sub(r"(?m)^(>>> .*(?:\n(?!$).*)*)", lambda found: "Examples:\n" + _indented(found[1]), text)
    lines, out = text.splitlines(), list[str]()
    while lines:
        line = lines.pop(0)
        several = re.match(r"( +)(\w+(?:, \w+)+): (.*)", line)
        if several is None:
            out.append(re.sub(r"^( *)Example:$", r"\1Examples:", line))
            continue
        indent, names, first = several[1], several[2].split(", "), several[3]
        rest = list[str]()
        while lines and lines[0].startswith(indent + " "):
            rest.append(lines.pop(0))
        for name in names:
            out += [f"{indent}{name}: {first}", *rest]
    return "\n".join(out)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


class Docstrings(griffe.Extension):
    """Rewrites every docstring by `as_google` before it is read."""

    def on_object(self, *, obj: griffe.Object, **options: Any) -> None:
        """Griffe calls this for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_google(obj.docstring.value)
