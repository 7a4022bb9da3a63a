"""The verdict on a completion."""

import re

from grpojax.host.errors import UserError
from grpojax.rewards import pool, sandbox
from grpojax.rewards.answers import units, values
from grpojax.rewards.answers.equality import compare, is_prose
from grpojax.rewards.answers.extract import BOX, MARKERS, extract_answer
from grpojax.rewards.answers.mathematics import math_equal, math_parses
from grpojax.rewards.answers.spelling import normal_form, number

# What tables and programs write where there is no answer, and what solutions write in place of one.
_NONE = re.compile(
    r"(?:nan|none|null|n/?a|<na>|nil|tbd|see (?:the )?(?:solution|proof|above|below|explanation)s?)", re.IGNORECASE
)
# An ion, which is compared as it is spelled: ``Na^{+}``, ``SO_4^{2-}``.
_ION = re.compile(r"(?:[A-Z][a-z]?|\(|\)|_?\{?[0-9]+\}?)+\^\{[0-9]?[+-]\}")
_WRAPPED = re.compile(
    r"""<answer>(.*)</answer>|(?:the )?(?:final )?answer(?: is|:) *:?(.*)|\[(?:'([^']*)'|"([^"]*)")\]""",
    re.DOTALL | re.IGNORECASE,
)


def check_gold(gold: str) -> None:
    """Raises `UserError` for a text that is no answer, or that can be neither read as mathematics nor compared."""
    text = normal_form(gold)
    if not text:
        raise UserError(f"gold answer {gold[:80]!r} is empty")
    if _NONE.fullmatch(text):
        raise UserError(f"gold answer {gold[:80]!r} is not an answer: leave its row out, or correct it")
    if number(text) is None and not is_prose(gold) and not _is_readable(gold):
        raise UserError(f"gold answer {gold[:80]!r} cannot be read")


def _is_readable(gold: str) -> bool:
    text = units.split(gold)[0]
    return (
        values.is_readable(text.removesuffix("%"))
        or _ION.fullmatch(text) is not None
        or bool(_bounded("math_parses", gold))
    )


def check_answer(completion: str, gold: str, *, marker: str | None = None) -> bool:
    r"""Whether a completion's marked answer is the reference answer.

    Same spelling, the same number or, by the math-verify library, the same mathematics. It runs in a worker process if
    an answer might take long. The result is False too if there is no verdict, since that library failed or took over
    ten seconds; `verdict` then gives None.

    Args:
      completion: the whole text; without a marked answer it is wrong.
      gold: the reference answer, bare or marked itself.
      marker: the text before the answer, as in `extract_answer`.

    Raises:
      UserError: the gold answer is empty.

    >>> check_answer("3 + 4 = 7\n#### 7", "7"), check_answer("I think 7", "7")
    (True, False)
    >>> check_answer(r"It is \boxed{\frac{1}{2}}", "0.5")
    True
    """
    return verdict(completion, gold, marker=marker) is True


def verdict(completion: str, gold: str, *, marker: str | None = None) -> bool | None:
    """`check_answer`, but None where it could not be computed."""
    gold = bare(gold)
    given = extract_answer(completion, marker)
    if given is None:
        return False
    decided = compare(given, gold)
    return decided if decided is not None else _bounded("math_equal", given, gold)


def bare(gold: str) -> str:
    """A reference answer without its marker, tags, "the answer is", or a Python list of one.

    Raises:
      UserError: nothing is left.
    """
    found = extract_answer(gold) if BOX.search(gold) or any(m in gold for m in MARKERS) else gold
    if found and (m := _WRAPPED.fullmatch(found.strip())):
        found = next((part for part in m.groups() if part), "").strip()
    if not found or not normal_form(found):
        raise UserError(f"gold answer {gold[:80]!r} is empty")
    return found


def _bounded(name: str, *answers: str) -> bool | None:
    """Calls `math_equal` or `math_parses` in a worker process, this one if it is one; None if it fails."""
    function = {"math_equal": math_equal, "math_parses": math_parses}[name]
    if sandbox.in_worker():
        try:
            return function(*answers)
        except Exception:  # its own, and sympy's of every kind
            return None
    return pool.shared().call(function, *answers)
