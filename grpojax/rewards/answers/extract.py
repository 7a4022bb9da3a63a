"""Where a completion gives its answer."""

import re

MARKERS = ("## Answer:", "####")
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# A box without braces, as TeX allows it, around a number, a letter or a fraction.
_BARE_BOX = re.compile(
    r"\\(?:boxed|fbox)\s*"
    r"(-?[0-9](?:[0-9.,]*[0-9])?|[a-zA-Z](?![a-zA-Z])|\\[dt]?frac(?: ?[0-9]{2}|\{[^{}]*\}\{[^{}]*\}))"
)


def extract_answer(completion: str, marker: str | None = None) -> str | None:
    r"""The answer that a completion gives: the rest of the line after its last marker, or in its last ``\boxed{}``.

    Args:
      completion: the text.
      marker: the only marker to look for, ``\boxed{}`` for nothing but the box; None takes the last of any of `MARKERS`
        and the box.

    Returns:
      The answer without surrounding blanks and half of a pair of ``**``, or None where there is none: no marker,
      nothing after the last one, or a box that does not close.

    >>> extract_answer("3 + 4 = 7, so\n#### 7")
    '7'
    >>> extract_answer(r"\boxed{3}, no: \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    completion = _BARE_BOX.sub(r"\\boxed{\1}", completion)
    boxed = marker is not None and marker.startswith(r"\boxed")
    lines = () if boxed else (marker,) if marker else MARKERS
    place, found = max(((completion.rfind(m), m) for m in lines), default=(-1, ""))
    if boxed or marker is None:
        boxes = list(BOX.finditer(completion))
        if boxed or boxes and boxes[-1].start() > place:
            return _last_boxes(completion, boxes)
    if place < 0:
        return None
    line = completion[place + len(found) :].split("\n", 1)[0].strip()
    if line.count("**") % 2:
        line = line.removeprefix("**").removesuffix("**").strip()
    return line or None


# Between two boxes that give one list.
_BETWEEN = re.compile(r"[\s$]*(?:,|,?\s*(?:and|or|\\text\{ ?(?:and|or) ?\}))[\s$]*")


def _last_boxes(text: str, boxes: list[re.Match[str]]) -> str | None:
    """What the last box has, after what those before it have from which only a comma or "and" divides it."""
    found: list[str] = []
    start = len(text)
    for box in reversed(boxes[-50:]):
        end = closing_brace(text, box.end())
        if end is None or found and not _BETWEEN.fullmatch(text, end + 1, start):
            break
        found.insert(0, text[box.end() : end].strip())
        start = box.start()
    return ", ".join(dict.fromkeys(found)) or None


def closing_brace(text: str, begin: int) -> int | None:
    """Where the brace stands that closes what begins there; None where it is not closed."""
    depth = 1
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return i
    return None
