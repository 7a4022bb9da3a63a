r"""Answers in completions: found, brought to one spelling, and compared with a gold answer.

A comparison stops at the first step that decides: the same spelling; two integers; two equal numbers; and last the
math-verify library, which knows fractions, sets, intervals, equations and LaTeX, but may run for ever on an answer such
as ``10^{10^{9}}``. Whoever calls `math_equal` must be able to stop it; `check_answer` sees to that by itself.
"""

import functools
import logging
import re
from fractions import Fraction
from typing import Any

from grpojax.errors import UserError
from grpojax.rewards import pool, sandbox

MARKERS = ("## Answer:", "####")
BOX = r"\boxed{"


def extract_answer(completion: str, marker: str | None = None) -> str | None:
    r"""The answer that a completion gives: the rest of the line after its last marker, or in its last ``\boxed{}``.

    Args:
      completion: the text.
      marker: the only marker to look for, ``\boxed{}`` for the box alone; None takes the last of any of `MARKERS` and
        the box.

    Returns:
      The answer without surrounding blanks, or None where there is none: no marker, nothing after the last one, or a
      box that does not close.

    >>> extract_answer("3 + 4 = 7, so\n#### 7")
    '7'
    >>> extract_answer(r"\boxed{3}, no: \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    boxed = marker is not None and marker.startswith(BOX.rstrip("{"))
    lines = () if boxed else (marker,) if marker else MARKERS
    place, found = max(((completion.rfind(m), m) for m in lines), default=(-1, ""))
    if boxed or marker is None and completion.rfind(BOX) > place:
        return _last_box(completion)
    if place < 0:
        return None
    return completion[place + len(found) :].split("\n", 1)[0].strip() or None


def _last_box(text: str) -> str | None:
    start = text.rfind(BOX)
    if start < 0:
        return None
    depth, begin = 1, start + len(BOX)
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin:i].strip() or None
    return None


# ----------------------------------------------------------------------------------------------- one spelling

_WRAPPERS = [
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\$+([^$]*)\$+",
        r"\\\((.*)\\\)",
        r"\\\[(.*)\\\]",
        r"\*\*([^*]*)\*\*",
        r"\\boxed\{(.*)\}",
    )
]
_GROUPS = re.compile(r"(?<![0-9.,])([0-9]{1,3})((?:,[0-9]{3})+|(?: [0-9]{3})+)(?![0-9,])")
_MOVES = [(re.compile(pattern), to) for pattern, to in (
    (r"\\[dt]frac", r"\\frac"), (r"\\left(?![a-z])|\\right(?![a-z])", ""), (r"\{,\}", ","), (r"[−–]", "-"),
    (r"(?<=[0-9])\\[,!; ](?=[0-9]{3}(?![0-9]))", ","), (r"\\([%$])", r"\1"),
    (r"\\(?:text|textbf|mathrm|mathbf|mbox)\{([^{}]*)\}(\^\{?[23]\}?)?", r" \1"), (r"\s+", " "),
    (r"(?<=[0-9])\s*(?:percent|per cent)$", "%"),
)]  # fmt: skip


def clean(answer: str) -> str:
    r"""The answer without what only sets it: ``$``, ``\(``, ``**``, an outer ``\text{}``, thousands separators, a stop.

    >>> clean(r"$\$1,234.$")
    '1234'
    """
    text = answer.strip()
    for pattern, to in _MOVES:
        text = pattern.sub(to, text)
    before = None
    while before != text:
        before = text
        text = text.strip(" ").removesuffix(".").removeprefix("= ").strip(" ")
        for wrapper in _WRAPPERS:
            if (inside := wrapper.fullmatch(text)) and _balanced(inside[1]):
                text = inside[1]
    text = re.sub(r"\$(?=[0-9.])", "", text)  # dollars
    return _GROUPS.sub(lambda m: m[1] + re.sub("[ ,]", "", m[2]), text)


def _balanced(text: str) -> bool:
    """Whether no brace closes before it opens, so that the outer ones belonged together."""
    depth = 0
    for c in text:
        depth += {"{": 1, "}": -1}.get(c, 0)
        if depth < 0:
            return False
    return depth == 0


def normal_form(answer: str) -> str:
    """Spelling that does not matter removed: `clean`, then case, blanks around signs, ``+5``, ``007``, ``5.0``.

    >>> normal_form("$1,234.00"), normal_form("New  York"), normal_form("1 1/2")
    ('1234', 'new york', '1 1/2')
    """
    text = re.sub(r" ?([^\w ]) ?", r"\1", clean(answer).lower())
    if number := re.fullmatch(r"([+-]?)([0-9]*)(?:\.([0-9]*))?", text):
        sign, whole, part = number[1], number[2].lstrip("0"), (number[3] or "").rstrip("0")
        if number[2] or part:
            text = (whole or "0") + ("." + part if part else "")
            text = "-" + text if sign == "-" and text != "0" else text
    return text


def _longest(gold: str) -> int:
    """Characters over which an answer cannot be the gold one; what models write without end is soon dismissed."""
    return 300 + 4 * len(gold)


def same_spelling(given: str, gold: str) -> bool:
    """Whether two answers have the same `normal_form`, and one at all."""
    if len(given) > _longest(gold):
        return False
    a = normal_form(given)
    return bool(a) and a == normal_form(gold)


_INTEGER = re.compile(r"-?[0-9]+")
_NUMBERS = [re.compile(pattern) for pattern in (
    r"(?P<n>[+-]?[0-9]{1,40}(?:\.[0-9]{1,40})?)(?:e(?P<e>[+-]?[0-9]{1,2}))?",
    r"(?P<n>[+-]?[0-9]{1,40})/(?P<d>[0-9]{1,40})", r"(?P<n>[+-]?)\\frac\{?(?P<t>[0-9]{1,40})\}?\{(?P<d>[0-9]{1,40})\}",
    r"(?P<n>[+-]?)\\frac(?P<t>[0-9])(?P<d>[0-9])", r"(?P<w>[+-]?[0-9]{1,40}) (?P<t>[0-9]{1,40})/(?P<d>[0-9]{1,40})",
    r"(?P<w>[+-]?[0-9]{1,40}) ?\\frac\{(?P<t>[0-9]{1,40})\}\{(?P<d>[0-9]{1,40})\}",
)]  # fmt: skip


def number(text: str) -> Fraction | None:
    r"""The number that a `normal_form` is: an integer, a decimal, ``1e3``, ``3/4``, ``\frac{3}{4}``, ``1 3/4``.

    >>> number("1 3/4"), number("0.25"), number("x")
    (Fraction(7, 4), Fraction(1, 4), None)
    """
    for pattern in _NUMBERS:
        if m := pattern.fullmatch(text):
            part = m.groupdict()
            if part.get("d") is not None and not int(part["d"]):
                return None
            if part.get("w") is not None:
                rest = Fraction(int(part["t"]), int(part["d"]))
                return int(part["w"]) + (-rest if part["w"].startswith("-") else rest)
            if part.get("t") is not None:
                return Fraction(int(part["n"] + part["t"]), int(part["d"]))
            if part.get("d") is not None:
                return Fraction(int(part["n"]), int(part["d"]))
            return Fraction(part["n"]) * Fraction(10) ** int(part.get("e") or 0)
    return None


# ------------------------------------------------------------------------------------------------- comparison

_UNIT = re.compile(
    r"([^a-z\\]*[0-9%)][^a-z\\]*?)(?: ([a-z]{3,}(?:[ /][a-z]+)*)| ?((?:[cmk]?m|[km]?g|ml|lbs?|oz|ft|mph|hrs?|[ap]m|th|st|nd|rd)(?:/[a-z]+)?))"
)
# Words after a number that change it: not units.
_FACTORS = re.compile(
    r"\b(dozen|hundred|thousand|million|billion|trillion|hal(f|ves)|thirds?|quarters?|or|and)\b"
)
_NAMES = "sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|exp|sqrt|frac|infty|pi|cup|cap"
# A numeral to the power of a power, and exponents and factorials of five digits: not to be evaluated.
_HUGE = re.compile(
    r"(\^|\*\*)[\s({]*[0-9]+[\s)}]*(\^|\*\*)|(\^|\*\*)[\s({]*[0-9]{5}|[0-9]{5}[)}\s]*!|!\s*[)}]*\s*!"
)


def compare(given: str, gold: str) -> bool | None:
    """Whether two answers are the same by spelling or as numbers; None where that decides nothing.

    >>> compare("1,000 dollars", "1000"), compare("7", "8"), compare("0.3", "x/y") is None
    (True, False, True)
    """
    if same_spelling(given, gold):
        return True
    a, b = normal_form(given[: _longest(gold) + 1]), normal_form(gold)
    if not a or not b or _INTEGER.fullmatch(a) and _INTEGER.fullmatch(b) or len(given) > _longest(gold):
        return False
    x, y = number(a), number(b)
    if x is not None and x == y:
        return True
    (n, unit), (m, gold_unit) = _split_unit(a), _split_unit(b)
    if unit or gold_unit:
        return compare(n, m) if not (unit and gold_unit) or unit == gold_unit else False
    if is_prose(given) or is_prose(gold) or _HUGE.search(given) and not _HUGE.search(gold):
        return False
    return None


def _split_unit(text: str) -> tuple[str, str]:
    """A number and the word for its unit in the singular; the text itself and "" if it is something else."""
    m = _UNIT.fullmatch(text)
    if not m or _FACTORS.search(m[2] or ""):
        return text, ""
    return m[1], (m[2] or m[3]).removesuffix("s")


def is_prose(answer: str) -> bool:
    """Whether an answer is words, which math-verify would take for products: "pairs" for "Paris"."""
    text = clean(answer)
    words = re.sub(r"\\[a-zA-Z]+", " ", text)
    if re.fullmatch(r"[^\W\d_]{2,}([ '-][^\W\d_]+)*", words.strip()) and words.strip() == text:
        return not re.fullmatch(f"(?:{_NAMES})+", text)
    return bool(re.search(r"[^\W\d_]{4,}", re.sub(_NAMES, " ", words)) or re.search(r"[0-9] +[0-9]", text))


@functools.cache
def _library():
    """math-verify's parse for one answer, and its verify. Without their alarms: those work in a main thread only."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    config = math_verify.LatexExtractionConfig(try_extract_without_anchor=False, boxed_match_priority=0)

    no_alarm: Any = None
    read = functools.partial(
        math_verify.parse, extraction_config=[config], fallback_mode="no_fallback", parsing_timeout=no_alarm
    )

    def parse(answer: str):
        text = clean(answer)
        exact = number(normal_form(answer))
        if exact is not None and re.search("[0-9][eE ][+-]?[0-9]", text):
            text = f"{exact.numerator}/{exact.denominator}"  # 1e3 and 1 1/2 it would take for 1 e 3 and for 1
        return read(f"{BOX}{text}}}")

    return parse, functools.partial(math_verify.verify, timeout_seconds=None)


def math_equal(given: str, gold: str) -> bool:
    """Whether math-verify finds two answers the same. May take for ever: call it where it can be stopped."""
    parse, verify = _library()
    return bool(verify(parse(gold), parse(given)))


def math_parses(gold: str) -> bool:
    """Whether math-verify can read an answer. May take for ever: call it where it can be stopped."""
    return bool(_library()[0](gold))


_CALM = re.compile(
    r"(?:[0-9a-zA-Z .,+\-/()\[\]{}%=<>|:;*]|\\(?:frac|cdot|times|pi|infty|pm|circ|cup|cap|sqrt|[{}%, ])(?![a-zA-Z]))*"
)


def is_calm(answer: str) -> bool:
    """Whether an answer is short and has no powers, factorials or nested roots, so that math-verify is soon done."""
    text = clean(answer)
    depth = deepest = 0
    for c in text:
        depth += {"{": 1, "(": 1, "[": 1, "}": -1, ")": -1, "]": -1}.get(c, 0)
        deepest = max(deepest, depth)
    return (
        len(text) <= 80
        and deepest <= 3
        and "**" not in text
        and text.count(r"\sqrt") <= 1
        and not re.search(r"[0-9]{16}", text)
        and _CALM.fullmatch(text) is not None
    )


def check_gold(gold: str) -> None:
    """Raises `UserError` where a gold answer is empty or can be neither read as mathematics nor compared as text."""
    if not normal_form(gold):
        raise UserError(f"gold answer {gold[:80]!r} is empty")
    if number(normal_form(gold)) is None and not is_prose(gold) and not _bounded("math_parses", gold):
        raise UserError(f"gold answer {gold[:80]!r} cannot be read")


def check_answer(completion: str, gold: str, *, marker: str | None = None) -> bool:
    r"""Whether a completion's marked answer is the gold answer.

    Same spelling, the same number or, by the math-verify library, the same mathematics. What that library cannot
    read within ten seconds is not the same. It runs in a worker process where an answer might keep it longer.

    Args:
      completion: the whole text; without a marked answer it is wrong.
      gold: the reference answer, bare or marked itself.
      marker: where the answer stands, as in `extract_answer`.

    Raises:
      UserError: the gold answer is empty.

    >>> check_answer("3 + 4 = 7\n#### 7", "7"), check_answer("I think 7", "7")
    (True, False)
    >>> check_answer(r"It is \boxed{\frac{1}{2}}", "0.5")
    True
    """
    gold = bare(gold)
    given = extract_answer(completion, marker)
    if given is None:
        return False
    decided = compare(given, gold)
    return decided if decided is not None else _bounded("math_equal", given, gold)


def bare(gold: str) -> str:
    """A gold answer without its marker; raises `UserError` where nothing is left."""
    found = extract_answer(gold) if any(m in gold for m in (*MARKERS, BOX)) else gold
    if not found or not normal_form(found):
        raise UserError(f"gold answer {gold[:80]!r} is empty")
    return found


def _bounded(name: str, *answers: str) -> bool:
    """Calls `math_equal` or `math_parses`: here if that is soon done, else in a worker process; False if it fails."""
    function = {"math_equal": math_equal, "math_parses": math_parses}[name]
    if all(map(is_calm, answers)) or sandbox.in_worker():
        try:
            return function(*answers)
        except Exception:  # its own, and sympy's of every kind
            return False
    return pool.shared().call(function, *answers) is True
