"""How mkdocstrings reads our docstrings.

``Example:`` is a section of examples, ``a, b: text`` is two entries, and a table under ``====`` is one of Markdown.
"""

import re
from typing import Any

import griffe

RULE = "=+(?: +=+)+"  # above the heads of a table, below them, and at the end


def as_google(text: str) -> str:
    """The docstring in the form that griffe's reader of Google's style expects.

    ``low, high: of the range`` becomes an entry for each of ``low`` and ``high``. A bare example gets its heading.
    """
    text = re.sub(rf"(?m)^{RULE}\n(?:.+\n)*?(?:{RULE}\n(?:.+\n)*?)?{RULE}$", lambda found: _table(found[0]), text)
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


def _table(text: str) -> str:
    """A table with rules of ``=`` over its columns as one of Markdown, whose heads are empty where it has none."""
    rule, *lines, _ = text.splitlines()
    starts, rows = [found.start() for found in re.finditer("=+", rule)], list[list[str]]()
    for line in lines:
        if re.fullmatch(RULE, line):
            continue
        cells = [line[a:b].strip().replace("|", "\\|") for a, b in zip(starts, [*starts[1:], None], strict=True)]
        if cells[0]:
            rows.append(cells)
        else:  # more of the row above
            rows[-1] = [" ".join(both).strip() for both in zip(rows[-1], cells, strict=True)]
    heads = rows.pop(0) if text.count(rule) > 2 else [""] * len(starts)
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(starts), *rows))


class Docstrings(griffe.Extension):
    """Rewrites every docstring by `as_google` before it is read."""

    def on_object(self, *, obj: griffe.Object, **options: Any) -> None:
        """Griffe calls this for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_google(obj.docstring.value)
