r"""Reference answers as people's files have them, and texts in their place that are none."""

import ast
import decimal
import json
import math
import re
from typing import Any

from grpojax.data.texts import halved, lost_backslash, seen
from grpojax.host.errors import UserError

# What programs write where there is no value, as they spell it: "none" is an answer in words, Python's None is not.
MISSING = frozenset(
    "nan NaN NAN Nan -nan None NONE null NULL Null N/A n/a N.A. n.a. NA #N/A #NA <NA> NaT <null> <none> (null)"
    " [] {} () '' \"\" ? ?? ??? - -- --- . .. ... … – — _ __ ___ [deleted] [removed]".split()
)
_NO_ANSWER = re.compile(
    r"(?:please |pls )?(?:see|refer to|check|cf\.?|consult)\b.{0,30}\b(?:solution|answer|explanation|proof|above|below"
    r"|attached|attachment|figure|diagram|image|picture|graph|table|appendix|text|book|textbook|comments?|link|key)s?"
    r"(?: [^.]{1,30})?"
    r"|(?:see )?(?:solution|answer|proof) (?:above|below|omitted|attached|follows)"
    r"|(?:the )?(?:answer|solution)s? (?:is |are |was |were )?(?:not|un)[ -]?(?:available|provided|given|known|found)"
    r"|not ?(?:available|applicable|provided|given|found|specified|answered)"
    r"|no (?:answer|answers)(?: (?:was |is )?(?:available|provided|given|found))?"
    r"|(?:the )?answers? (?:may |will |can )?var(?:y|ies)|(?:sample )?answers? may differ"
    r"|(?:the )?proof|to ?do|tbd|tba|to be (?:determined|added|done)|as above|same as above",
    re.IGNORECASE,
)
_TAGGED = re.compile(r"<(answer|final_answer|ans)>((?:(?!<\1>).)*)</\1>\s*\Z", re.DOTALL | re.IGNORECASE)
_SENTENCE = re.compile(
    r"(?:\A|[.!?;:,]\s+|\n\s*|\b(?:so|thus|hence|therefore)\s+)"
    r"(?:the\s+)?(?:(?:final|correct|right)\s+)?ans(?:wer|\.)?(?:\s+is(?:\s*:)?|\s*[:=])(?:\s+(.*?))?\s*\Z",
    re.IGNORECASE,
)
_TURNED = re.compile(r"(\S+) is (?:the|our|my) (?:(?:final|correct|right) )?answer\.?", re.IGNORECASE)
_BOX = re.compile(r"\\boxed\s*\{")
LONGEST = 500  # characters of an answer that a marked answer can still be


def last_box(text: str) -> str:
    r"""The content of the last ``\boxed{}`` of a solution; raises `UserError` if none is closed.

    >>> last_box(r"So \boxed{3}, no, \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    for box in [*_BOX.finditer(text)][-1:]:
        depth = 1
        for i in range(box.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[box.end() : i]
    raise UserError(f"the solution has no \\boxed{{}} that closes: {text[-60:]!r}")


def read_gold(value: Any, column: str = "answer", *, compared: bool = True, boxed: bool = False) -> str:
    r"""The reference answer in a cell.

    One that stands in a list of one, in ``<answer>`` tags or after "The answer is" is taken out; marks that nobody
    sees go; doubled backslashes are single again.

    Args:
      value: of the cell.
      column: its name, for errors.
      compared: a built-in reward compares it with marked answers. The functions of a user get the text as it is, but
        for what follows ``####``.
      boxed: the cell is a solution, and the answer stands in its last ``\boxed{}``.

    Raises:
      UserError: there is no answer: an empty cell, what programs write for a missing value ("nan", "None", "N/A"), a
        text in place of one ("See solution."), LaTeX that does not close, a backslash that got lost.

    >>> [read_gold(x) for x in ("so #### 5", "['5']", "<answer>5</answer>", "The answer is $5$.", ["5"])]
    ['5', '5', '5', '$5$', '5']
    >>> read_gold("See solution.", "gold")
    Traceback (most recent call last):
    grpojax.host.errors.UserError: column 'gold' has 'See solution.', which is no answer; set data.on_bad_row=skip
    """
    text = _text(value, column)
    if (wrong := lost_backslash(text)) is not None:
        raise UserError(f"column {column!r} {wrong}")
    if boxed:
        text = last_box(text)
    last = text.rsplit("####", 1)[-1]
    if not compared:
        return _some(last.strip(), column)
    if len(last) <= LONGEST and (wrong := lost_backslash(last, answer=True)) is not None:
        raise UserError(f"column {column!r} {wrong}")
    gold = _some(_unwrapped(halved(seen(last).strip())), column)
    if _is_missing(gold):
        raise UserError(
            f"column {column!r} has {gold[:60]!r}, which is no answer; set data.on_bad_row=skip"
            + f", or write '\\text{{{gold}}}' where it is one" * (len(gold) < 10)
        )
    if re.match(r"\{\s*(['\"])\w+\1\s*:", gold):
        raise UserError(f"column {column!r} has an object, {gold[:60]}; name the part of it, as in {column}.value")
    marked = _BOX.search(gold) is not None or "## Answer:" in gold
    if len(gold) > LONGEST and not marked:
        raise UserError(
            f"column {column!r} has a text of {len(gold)} characters for an answer; mark the answer in it by #### or "
            "\\boxed{}"
        )
    if re.search(r"\\[a-zA-Z]", gold) and not marked and (open_ := _unclosed(gold)):
        raise UserError(f"gold answer {gold[:60]!r} cannot be read: a {open_!r} is not closed")
    return gold


def _some(gold: str, column: str) -> str:
    if not gold:
        raise UserError(f"column {column!r} has an empty answer; set data.on_bad_row=skip")
    return gold


def _text(value: Any, column: str) -> str:
    """A cell as text."""
    if isinstance(value, list | tuple) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]
    if isinstance(value, bool):
        raise UserError(f"has no text in column {column!r}, but {value}; write the answer in words, such as 'yes'")
    if isinstance(value, list | tuple) and len(value) > 1:
        raise UserError(f"has no text in column {column!r}, but a list of {len(value)} answers; a row needs one")
    if isinstance(value, dict) and value:
        raise UserError(f"has no text in column {column!r}, but an object; name its part, {column}.{next(iter(value))}")
    if not isinstance(value, str | int | float | decimal.Decimal):
        raise UserError(f"has no text in column {column!r}, but {value!r:.60}")
    if isinstance(value, float | decimal.Decimal) and not math.isfinite(value):
        raise UserError(f"has no text in column {column!r}, but {value}")
    try:
        text = str(value)
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"column {column!r} is not valid Unicode") from None
    except ValueError as e:  # an integer of thousands of digits
        raise UserError(f"column {column!r} cannot be written as text: {e}") from None
    return text


def _unwrapped(text: str) -> str:
    """The answer without tags, sentence or list around it."""
    before = None
    while before != text:
        before = text
        if tagged := _TAGGED.search(text):
            text = tagged[2].strip()
        if sentence := _SENTENCE.search(text):
            text = (sentence[1] or "").strip().removesuffix(".")
        if turned := _TURNED.fullmatch(text):
            text = turned[1]
        text = _only(text)
    return text


def _only(text: str) -> str:
    """The one text of a list that was written out, ``['5']``; a list of numbers, ``[5]``, may be mathematics."""
    if quoted := re.fullmatch(r"(['\"])([-+0-9.,/]*[0-9])\1", text):
        return quoted[2]
    if not re.match(r"\[\s*(?:['\"]|None|null|nan|NaN)", text) or not text.endswith("]"):
        return text
    for read in (json.loads, ast.literal_eval):
        try:
            values = read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(values, list) and values and all(isinstance(v, str | None) for v in values):
            if len(values) > 1:
                raise UserError(f"has {len(values)} answers, {text[:60]}; a row needs one")
            return "None" if values[0] is None else values[0].strip()
    return text.strip("[ ]") if text.strip("[ ]") in MISSING else text


def _is_missing(gold: str) -> bool:
    text = gold.strip(" \"'")
    plain = text.strip(".!:*()[] ") or text
    return text in MISSING or plain in MISSING or _NO_ANSWER.fullmatch(plain) is not None


def _unclosed(text: str) -> str:
    """The first brace without its counterpart; "" if there is none."""
    open_: list[str] = []
    for c in re.sub(r"\\[{}\\]", "", text):
        if c == "{":
            open_.append(c)
        elif c == "}":
            if not open_:
                return c
            open_.pop()
    return open_[0] if open_ else ""
