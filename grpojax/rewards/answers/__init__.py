r"""Answers in completions: found, brought to one spelling, and compared with a gold answer.

A comparison stops at the first step that decides: the same spelling; units that differ; two numbers; words; and last
the math-verify library, which knows fractions, sets, intervals, equations and LaTeX, but may run for ever on an answer such
as ``10^{10^{9}}``. Whoever calls `math_equal` must be able to stop it; `check_answer` sees to that by itself.
"""

import dataclasses
import functools
import itertools
import logging
import re
import unicodedata
from fractions import Fraction
from typing import Any

from grpojax.host.errors import UserError
from grpojax.rewards import pool, sandbox

MARKERS = ("## Answer:", "####")
_BOX = re.compile(r"\\boxed\s*\{")


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
        *_, box = [None, *_BOX.finditer(completion)]
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


# ----------------------------------------------------------------------------------------------- one spelling

_WRAPPERS = [
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\$+((?:[^$\\]|\\.)*)\$+",
        r"\\\((.*)\\\)",
        r"\\\[(.*)\\\]",
        r"\*\*([^*]*)\*\*",
        r"\\boxed\s*\{(.*)\}",
    )
]
_SIGNS = str.maketrans({
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "≤": r"\le ", "≥": r"\ge ", "∞": r"\infty ", "π": r"\pi ",
})  # fmt: skip


def _digits(m: re.Match) -> str:
    return re.sub("[^0-9]", "", m[0])


def _power(m: re.Match) -> str:
    return "^{" + unicodedata.normalize("NFKC", m[0]) + "}"


def _fraction(m: re.Match) -> str:
    above, below = unicodedata.normalize("NFKC", m[0]).split("⁄")
    return rf"\frac{{{above}}}{{{below}}}"


_MOVES = [(re.compile(pattern), to) for pattern, to in (
    (r"\\[dt]frac", r"\\frac"), (r"\\left(?![a-z])|\\right(?![a-z])", ""),
    (r"(?<![0-9.])[1-9][0-9]{0,2}(?:(?:\{,\}|,?\\!|\\[,; ])[0-9]{3})+(?![0-9])", _digits), (r"\{,\}", ","), (r"\\%", "%"),
    (r"\\(?:text|textbf|mathrm|mathbf|mbox)\{([^{}]*)\}(\^\{?[23]\}?)?", r" \1"), (r"[¼-¾⅐-⅞]", _fraction),
    (r"[⁰¹²³⁴-⁹]+", _power), (r"√ ?(?:\(([^()]*)\)|([0-9.]+|[a-zA-Z]))", r"\\sqrt{\1\2}"), (r"\s+", " "),
    (r"\^ ?\{? ?\\circ ?\}?", "°"), (r"([_^])\{(\w)\}", r"\1\2"), (r"(?<=[0-9])\s*(?:percent|per cent)$", "%"),
)]  # fmt: skip
_COMMAS = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9,])")
_BLANKS = re.compile(r"(?<![^$€£+-])[1-9][0-9]{0,2}(?: [0-9]{3})+(?![0-9,/^]| [0-9])")
_MONEY = re.compile(r"[$€£] ?(?=[+-]?[0-9.])")


def clean(answer: str) -> str:
    r"""The answer without what only sets it: ``$``, ``\(``, ``**``, an outer ``\text{}``, thousands separators, a stop.

    >>> clean(r"$\$1,234.$"), clean("(1,234)")
    ('1234', '(1,234)')
    """
    return re.sub(r"\$ ?(?=[+-]?[0-9.])", "", _separated(_unwrapped(answer)))


def _unwrapped(answer: str) -> str:
    text = answer.strip().translate(_SIGNS)
    for pattern, to in _MOVES:
        text = pattern.sub(to, text)
    before = None
    while before != text:
        before = text
        text = text.strip(" ").removesuffix(".").removeprefix("= ").strip(" ")
        for wrapper in _WRAPPERS:
            if (inside := wrapper.fullmatch(text)) and _balanced(inside[1]):
                text = inside[1]
    return text.replace(r"\$", "$")


def _separated(text: str) -> str:
    """Without thousands separators: commas are some where all of them can be, and nothing is in brackets."""
    text = _BLANKS.sub(_digits, text, count=1)
    merged = _COMMAS.sub(_digits, text)
    return text if "," in merged or re.search(r"[(\[]|\\\{", text) else merged


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
    text = _tight(clean(answer))
    if number := re.fullmatch(r"([+-]?)([0-9]*)(?:\.([0-9]*))?", text):
        sign, whole, part = number[1], number[2].lstrip("0"), (number[3] or "").rstrip("0")
        if number[2] or part:
            text = (whole or "0") + ("." + part if part else "")
            text = "-" + text if sign == "-" and text != "0" else text
    return text


def _tight(text: str) -> str:
    return re.sub(r" ?([^\w ]) ?", r"\1", text.lower())


def _longest(gold: str) -> int:
    """Characters over which an answer cannot be the gold one; what models write without end is soon dismissed."""
    return 300 + 4 * len(gold)


def same_spelling(given: str, gold: str) -> bool:
    """Whether two answers have the same `normal_form`, and one at all; ``100,200`` may also be ``100, 200``."""
    if len(given) > _longest(gold):
        return False
    a, b = normal_form(given), normal_form(gold)
    return bool(a) and (a == b or "," in b + gold and _tight(_unwrapped(given)) == _tight(_unwrapped(gold)))


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

# All before the first letter, with a digit in it; then the unit.
_UNIT = re.compile(
    r"(?=.*?[0-9])((?:[^a-z\\°]|\\frac)*)(?:(?<= )([a-z]{3,}(?:[ /][a-z]+)*(?:\^[23])?)"
    r"|((?:[cmk]?m|[km]?g|ml|lbs?|oz|ft|mph|hrs?|[ap]m|th|st|nd|rd)(?:/[a-z]+)?(?:\^[23])?)|(°) ?[cf]?)",
    re.IGNORECASE,
)
_CURRENCIES = {
    "$": "dollar",
    "usd": "dollar",
    "€": "euro",
    "eur": "euro",
    "£": "pound",
    "gbp": "pound",
    "°": "degree",
}
# Words after a number that make another one of it: with them it has no unit.
_FACTORS = re.compile(
    r"\b(one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|zero|[a-z]+teen|(twen|thir|for|fif|six|seven|eigh|nine)ty"
    r"|dozens?|scores?|gross|grand|lakh|crore|mil|(hundred|thousand|[mbtr]+illion)s?|hal(f|ves)|thirds?|quarters?"
    r"|(four|fif|six|seven|eigh|nin|ten|eleven|twelf|[a-z]+teen|(twen|thir|for|fif|six|seven|eigh|nine)tie|hundred|thousand|[mbtr]+illion)ths?"
    r"|squared|cubed|factorial|roots? of|power|plus|minus|times (as|[b-z])|over [a-z]+|divided|choose|mod|point|than|negative|inverse"
    r"|repeating|recurring|remainder|or|and|(sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|exp|sqrt) [a-z]+)\b"
)
_NAMES = "sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|exp|sqrt|frac|infty|pi|cup|cap"
_FUNCTIONS = re.compile(rf"(?<![a-zA-Z\\])({_NAMES.replace('sqrt|frac|', '')})(?![a-zA-Z])")
# A numeral to the power of a power, and exponents and factorials of five digits: not to be evaluated.
_HUGE = re.compile(r"(\^|\*\*)[\s({]*[0-9]+[\s)}]*(\^|\*\*)|(\^|\*\*)[\s({]*[0-9]{5}|[0-9]{5}[)}\s]*!|!\s*[)}]*\s*!")
# What no equation has at its top level, and what is no name of a quantity.
_NO_EQUATION = re.compile(r"[,;<>|]|\b(or|and)\b|\\(q?quad|[lgn]eq?|vee|lor|wedge|land|in)(?![a-z])")
_CONSTANTS = re.compile(r"\\(frac|sqrt|cdot|times|div|pi)(?![a-zA-Z])")


def compare(given: str, gold: str) -> bool | None:
    """Whether two answers are the same by spelling or as numbers; None where that decides nothing.

    >>> compare("1,000 dollars", "1000"), compare("7", "8"), compare("0.3", "x/y") is None
    (True, False, True)
    """
    if same_spelling(given, gold):
        return True
    if len(given) > _longest(gold) or not normal_form(given) or not normal_form(gold):
        return False
    known = [_compare(*claim) for claim in _claims(given, gold)]
    return False if False in known else None if None in known else True


def _claims(given: str, gold: str) -> list[tuple[str, str]]:
    """Pairs that must be the same. An equation claims its last side, and of constants that they are the same as it."""
    sides, golds = _sides(given), _sides(gold)
    if len(sides) > 1 and len(golds) == 1:
        *others, last = sides
        return [(last, gold)] + [(side, last) for side in others if not _is_symbolic(side)]
    if len(sides) == 1 and len(golds) == 2 and re.fullmatch(r"[a-zA-Z]|\\[a-zA-Z]+", golds[0]):
        return [(given, golds[1])]
    return [(given, gold)]


def _sides(answer: str) -> list[str]:
    """The sides of an equation or a chain of them; the answer alone if it is none, or more than that."""
    text = _separated(_unwrapped(answer))
    top = [i for i, depth in enumerate(_depths(text)) if depth == 0]
    ends = [i for i in top if text[i] == "="]
    sides = [text[i + 1 : j].strip() for i, j in zip([-1, *ends], [*ends, len(text)], strict=True)]
    if _NO_EQUATION.search("".join(text[i] for i in top)) or not all(sides) or any(map(is_prose, sides[:-1])):
        return [text]
    return sides


def _depths(text: str) -> list[int]:
    """How many brackets are open after each character."""
    return list(itertools.accumulate(1 if c in "([{" else -1 if c in ")]}" else 0 for c in text))


def _is_symbolic(text: str) -> bool:
    """Whether it has letters that stand for something unknown."""
    return re.search(r"[^\W\d_]", _CONSTANTS.sub("", text)) is not None


def _compare(given: str, gold: str) -> bool | None:
    (a, unit), (b, gold_unit) = _measure(given), _measure(gold)
    if any(x != y for x, y in zip(unit, gold_unit, strict=False)):
        return False
    x, y = number(a.removesuffix("%")), number(b.removesuffix("%"))
    if x is not None and y is not None:
        scales = (1,) if a.endswith("%") == b.endswith("%") else (1, 100) if a.endswith("%") else (1, Fraction(1, 100))
        return any(_close(x, y * scale, "." in a + b) for scale in scales)
    if a == b or same_spelling(a, b):
        return True
    if _INTEGER.fullmatch(a) and _INTEGER.fullmatch(b) or {_brackets(a), _brackets(b)} == {"set", "tuple"}:
        return False
    if is_prose(a) or is_prose(b) or _HUGE.search(given) and not _HUGE.search(gold):
        return False
    return None


def _close(x: Fraction, y: Fraction, rounded: bool) -> bool:
    """Whether two numbers are the same; one with decimals may be the other to six digits."""
    return x == y or rounded and abs(x - y) <= min(Fraction(1, 2 * 10**6), max(abs(x), abs(y)) / 10**5)


def _brackets(text: str) -> str:
    if text.startswith(r"\{") and text.endswith(r"\}"):
        return "set"
    return "tuple" if text[:1] in ("(", "[") and text[-1:] in (")", "]") else ""


def _measure(answer: str) -> tuple[str, list[str]]:
    """The `normal_form` without a unit, and the words of that in the singular."""
    text, words = _split_unit(_MONEY.sub("", normal_form(answer)))
    unit = [_CURRENCIES.get(w, w.removesuffix("s")) for w in words.split()]
    if money := _MONEY.search(_unwrapped(answer)):
        name = _CURRENCIES[money[0][0]]
        unit = unit if unit[:1] == [name] else [name, *unit]
    return text, unit


def _split_unit(text: str) -> tuple[str, str]:
    m = _UNIT.fullmatch(text)
    return (m[1].rstrip(" "), m[2] or m[3] or m[4]) if m and not _FACTORS.search(m[2] or "") else (text, "")


def ballot(answer: str) -> str:
    r"""One spelling of answers that are the same as numbers, whatever the gold answer is: no unit, no ``x =``.

    >>> [ballot(x) for x in ("$72", "72 dollars", "x = 72.0", r"\frac{25}{2}", "12.5", "12.5%")]
    ['72', '72', '72', '25/2', '25/2', '25/2%']
    """
    *others, last = _sides(answer)
    text = _measure(last if others and all(map(_is_symbolic, others)) else answer)[0]
    value = number(text.removesuffix("%"))
    return text if value is None else f"{value}%" if text.endswith("%") else str(value)


def is_prose(answer: str) -> bool:
    """Whether an answer is words, which math-verify would take for products: "pairs" for "Paris"."""
    text = clean(answer)
    words = re.sub(r"\\[a-zA-Z]+", " ", text)
    if re.fullmatch(r"[^\W\d_]{2,}([ '-][^\W\d_]+)*", words.strip()) and words.strip() == text:
        return not re.fullmatch(f"(?:{_NAMES})+", text)
    return bool(
        re.search(r"[^\W\d_]{4,}|[^\W\d_]{2,} [^\W\d_]{2,}", re.sub(_NAMES, " ", words))
        or re.search(r"[0-9] +[0-9]", text)
    )


@functools.cache
def _library():
    """math-verify's parse for one answer, and its verify. Without their alarms: those work in a main thread only."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    config = math_verify.LatexExtractionConfig(try_extract_without_anchor=False, boxed_match_priority=0)
    # It would take off any words as units.
    config = dataclasses.replace(
        config, normalization_config=dataclasses.replace(config.normalization_config, units=False)
    )
    no_alarm: Any = None
    read = functools.partial(
        math_verify.parse, extraction_config=[config], fallback_mode="no_fallback", parsing_timeout=no_alarm,
        raise_on_error=True,
    )  # fmt: skip

    def parse(answer: str):
        text = clean(answer)
        exact = number(normal_form(answer))
        if exact is not None and re.search("[0-9][eE ][+-]?[0-9]", text):
            text = f"{exact.numerator}/{exact.denominator}"  # 1e3 and 1 1/2 it would take for 1 e 3 and for 1
        text = _FUNCTIONS.sub(r"\\\1 ", _split_unit(text)[0]).replace("°", r"^\circ")
        return read(rf"\boxed{{{text}}}")

    return parse, functools.partial(math_verify.verify, timeout_seconds=None, raise_on_error=True)


def math_equal(given: str, gold: str) -> bool:
    """Whether math-verify finds two answers the same. May take for ever, and raise: call it where that does no harm."""
    return all(_math_equal(*claim) if (known := _compare(*claim)) is None else known for claim in _claims(given, gold))


def _math_equal(given: str, gold: str) -> bool:
    from sympy import nan, zoo

    parse, verify = _library()
    read = parse(given)
    try:
        return not any(x.has(zoo, nan) for x in read) and bool(verify(parse(gold), read))
    except ValueError as e:
        if str(e).startswith("zip()"):  # not as many parts
            return False
        raise


def math_parses(gold: str) -> bool:
    """Whether math-verify can read an answer. May take for ever: call it where it can be stopped."""
    return bool(_library()[0](gold))


_CALM = re.compile(
    r"(?:[0-9a-zA-Z .,+\-/()\[\]{}%=<>|:;*]|\\(?:frac|cdot|times|pi|infty|pm|circ|cup|cap|sqrt|[{}%, ])(?![a-zA-Z]))*"
)


_IRRATIONAL = re.compile(r"\\(pi|sqrt)")


def is_calm(*answers: str) -> bool:
    """Whether math-verify is soon done with answers: short ones without powers, factorials, nested roots and brackets.

    Those with letters have at most three of them between them, no sums in brackets, which it would expand, and are no
    equations, which it would solve.
    """
    texts = list(map(clean, answers))
    letters = set(re.sub(r"\\[a-z]+|[^a-zA-Z]", "", "".join(texts)))
    if letters or any(map(_IRRATIONAL.search, texts)):
        return len(letters) <= 3 and all(_is_simple(text, 40) and not _expands(text) for text in texts)
    return all(_is_simple(text, 80) for text in texts)


def _expands(text: str) -> bool:
    """Whether it has a sum in brackets, or is an equation or a comparison."""
    return any(c in "=<>|" or depth and c in "+-" for c, depth in zip(text, _depths(text), strict=True))


def _is_simple(text: str, longest: int) -> bool:
    return (
        len(text) <= longest
        and max(_depths(text), default=0) <= 3
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

    Same spelling, the same number or, by the math-verify library, the same mathematics. It runs in a worker process
    where an answer might keep it longer. False too where there is no verdict, as that library fails or takes over ten
    seconds; `verdict` tells.

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
    """A gold answer without its marker; raises `UserError` where nothing is left."""
    found = extract_answer(gold) if _BOX.search(gold) or any(m in gold for m in MARKERS) else gold
    if not found or not normal_form(found):
        raise UserError(f"gold answer {gold[:80]!r} is empty")
    return found


def _bounded(name: str, *answers: str) -> bool | None:
    """Calls `math_equal` or `math_parses`: here if that is soon done, else in a worker process; None if it fails."""
    function = {"math_equal": math_equal, "math_parses": math_parses}[name]
    if is_calm(*answers) or sandbox.in_worker():
        try:
            return function(*answers)
        except Exception:  # its own, and sympy's of every kind
            return None
    return pool.shared().call(function, *answers)
