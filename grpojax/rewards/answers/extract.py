"""Where a completion gives its answer."""

import re

MARKERS = ("## Answer:", "####")
BOX = re.compile(r"\\boxed\s*\{")


def extract_answer(completion: str, marker: str | None = None) -> str | None:
    r"""The answer that a completion gives: the rest of the line after its last marker, or in its last ``\boxed{}``.

    Args:
      completion: the text.
      marker: the only marker to look for, ``\boxed{}`` for the box alone; None takes the last of any of `MARKERS` and
        the box.

    Returns:
      The answer without surrounding blanks and half of a pair of ``**``, or None where there is none: no marker,
      nothing after the last one, or a box that does not close.

    >>> extract_answer("3 + 4 = 7, so\n#### 7")
    '7'
    >>> extract_answer(r"\boxed{3}, no: \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    boxed = marker is not None and marker.startswith(r"\boxed")
    lines = () if boxed else (marker,) if marker else MARKERS
    place, found = max(((completion.rfind(m), m) for m in lines), default=(-1, ""))
    if boxed or marker is None:
        *_, box = [None, *BOX.finditer(completion)]
        if boxed or box is not None and box.start() > place:
            return None if box is None else _inside(completion, box.end())
    if place < 0:
        return None
    line = completion[place + len(found) :].split("\n", 1)[0].strip()
    if line.count("**") % 2:
        line = line.removeprefix("**").removesuffix("**").strip()
    return line or None


def _inside(text: str, begin: int) -> str | None:
    """What stands from there to the brace that closes."""
    depth = 1
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin:i].strip() or None
    return None
