"""Whether two answers are the same, as far as units, numbers and words decide it."""

import itertools
import re
from fractions import Fraction

from grpojax.rewards.answers.spelling import (
    MONEY,
    clean,
    longest,
    normal_form,
    number,
    same_spelling,
    separated,
    unwrapped,
)

_INTEGER = re.compile(r"-?[0-9]+")
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
    r"\b(one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|zero|[a-z]+teen"
    r"|(twen|thir|for|fif|six|seven|eigh|nine)ty|dozens?|scores?|gross|grand|lakh|crore|mil|(hundred|thousand|[mbtr]+illion)s?|hal(f|ves)|thirds?|quarters?"
    r"|(four|fif|six|seven|eigh|nin|ten|eleven|twelf|[a-z]+teen|(twen|thir|for|fif|six|seven|eigh|nine)tie|hundred"
    r"|thousand|[mbtr]+illion)ths?"
    r"|squared|cubed|factorial|roots? of|power|plus|minus|times (as|[b-z])|over [a-z]+|divided|choose|mod|point|than"
    r"|negative|inverse|repeating|recurring|remainder|or|and"
    r"|(sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|exp|sqrt) [a-z]+)\b"
)
NAMES = "sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|exp|sqrt|frac|infty|pi|cup|cap"
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
    if len(given) > longest(gold) or not normal_form(given) or not normal_form(gold):
        return False
    known = [decided(*claim) for claim in claims(given, gold)]
    return False if False in known else None if None in known else True


def claims(given: str, gold: str) -> list[tuple[str, str]]:
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
    text = separated(unwrapped(answer))
    top = [i for i, depth in enumerate(depths(text)) if depth == 0]
    ends = [i for i in top if text[i] == "="]
    sides = [text[i + 1 : j].strip() for i, j in zip([-1, *ends], [*ends, len(text)], strict=True)]
    if _NO_EQUATION.search("".join(text[i] for i in top)) or not all(sides) or any(map(is_prose, sides[:-1])):
        return [text]
    return sides


def depths(text: str) -> list[int]:
    """How many brackets are open after each character."""
    return list(itertools.accumulate(1 if c in "([{" else -1 if c in ")]}" else 0 for c in text))


def _is_symbolic(text: str) -> bool:
    """Whether it has letters that stand for something unknown."""
    return re.search(r"[^\W\d_]", _CONSTANTS.sub("", text)) is not None


def decided(given: str, gold: str) -> bool | None:
    """Whether the two of a claim are the same by units, numbers and words; None where those decide nothing."""
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
    text, words = split_unit(MONEY.sub("", normal_form(answer)))
    unit = [_CURRENCIES.get(w, w.removesuffix("s")) for w in words.split()]
    if money := MONEY.search(unwrapped(answer)):
        name = _CURRENCIES[money[0][0]]
        unit = unit if unit[:1] == [name] else [name, *unit]
    return text, unit


def split_unit(text: str) -> tuple[str, str]:
    """A number and the unit after it; the text and "" where it is something else."""
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
        return not re.fullmatch(f"(?:{NAMES})+", text)
    return bool(
        re.search(r"[^\W\d_]{4,}|[^\W\d_]{2,} [^\W\d_]{2,}", re.sub(NAMES, " ", words))
        or re.search(r"[0-9] +[0-9]", text)
    )
