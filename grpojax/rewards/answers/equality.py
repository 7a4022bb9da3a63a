"""Whether two answers are the same, as far as units, numbers and words decide it."""

import itertools
import re
from fractions import Fraction

from grpojax.rewards.answers import units, values
from grpojax.rewards.answers.spelling import (
    clean,
    longest,
    normal_form,
    number,
    same_spelling,
    separated,
    unwrapped,
)

_INTEGER = re.compile(r"-?[0-9]+")
NAMES = "arcsin|arccos|arctan|sinh|cosh|tanh|floor|ceil|sin|cos|tan|cot|sec|csc|log|exp|sqrt|frac|infty|pi|cup|cap"
# What no equation has at its top level, and what is no name of a quantity.
_NO_EQUATION = re.compile(r"[,;<>|]|\b(or|and)\b|\\(q?quad|[lgn]eq?|vee|lor|wedge|land|in)(?![a-z])")
_CONSTANTS = re.compile(r"\\(frac|sqrt|cdot|times|div|pi)(?![a-zA-Z])")


def compare(given: str, gold: str) -> bool | None:
    """Whether two answers are the same by spelling, as numbers or as mathematics; None where that decides nothing.

    >>> compare("1,000 dollars", "1000"), compare("7", "8"), compare(r"\\int_0^1 x dx", "1/2") is None
    (True, False, True)
    """
    if len(given) > longest(gold):
        return False
    if same_spelling(given, gold) and not _other_case(given, gold) or _decimal_comma(given, gold):
        return True
    if not normal_form(given) or not normal_form(gold):
        return False
    if (pairs := claims(given, gold)) is None:
        return False
    known = [decided(*pair) for pair in pairs]
    return False if False in known else None if None in known else True


def _other_case(given: str, gold: str) -> bool:
    """Whether two answers of one spelling have units that only capitals tell apart: ``3 mW``, ``3 MW``."""
    if given == gold:
        return False
    unit, gold_unit = (units.split(_sides(text)[-1])[1] for text in (given, gold))
    return unit.differs(gold_unit)


def _decimal_comma(given: str, gold: str) -> bool:
    """Whether a comma stands for the gold answer's point, which no thousands separator can: ``0,5``."""
    text = unwrapped(given)
    return (
        re.fullmatch(r"-?[0-9]+,(?:[0-9]{1,2}|[0-9]{4,})|-?0,[0-9]+", text) is not None
        and "." in gold
        and "," not in gold
        and normal_form(text.replace(",", ".")) == normal_form(gold)
    )


def claims(given: str, gold: str) -> list[tuple[str, str]] | None:
    """Pairs that must be the same; None where the given equation says nothing that the gold answer could be.

    An equation stands for its last side only where its first is a name or a computation: ``x = 7`` and ``3 + 4 = 7``
    are 7, ``2x = 7`` is not. The computations of a chain must be right. A sum of names may begin a chain with one:
    ``m + n = 3 + 4 = 7``. Where the gold answer is ``x = 7``, so must an equation be, and not one to be solved.
    """
    sides, golds = _sides(given), _sides(gold)
    if len(golds) == 1:
        if len(sides) == 1 or has_equation(gold):
            return [(given, gold)]
        return [(sides[-1], gold), *_computed(sides)] if _stands_for_last(sides) else None
    if len(sides) == 1:
        if has_equation(given):
            return [(given, gold)]
        call = re.fullmatch(r"\\?[a-zA-Z]+\(.*\)", golds[0]) or _FUNCTION.fullmatch(golds[0])
        named = _is_name(golds[0]) or call or _stands_for_last(golds)
        return [(given, golds[-1] if named else gold)]
    if _is_name(golds[0]) and normal_form(sides[0]) == normal_form(golds[0]):
        return [(sides[-1], golds[-1]), *_computed(sides)]
    if _is_name(golds[0]) and _is_constant(golds[-1]) and not golds[0].startswith("("):
        return [(sides[-1], golds[-1]), *_computed(sides)] if _is_constant(sides[0]) else None
    return [(given, gold)]


def has_equation(answer: str) -> bool:
    """Whether there is an equals sign in no bracket, as in a list of equations."""
    text = unwrapped(answer)
    return any(c == "=" and depth == 0 for c, depth in zip(text, depths(text), strict=True))


def _stands_for_last(sides: list[str]) -> bool:
    first, *middle, last = sides
    if _is_name(first) or _is_constant(first):
        return True
    if function := _FUNCTION.fullmatch(first):  # its definition
        return any(name in last for name in re.split(" ?, ?", function[1]))
    return any(map(_is_constant, middle)) and re.fullmatch(r"[a-zA-Z](?: ?\+? ?[a-zA-Z])*", first) is not None


def _computed(sides: list[str]) -> list[tuple[str, str]]:
    """The sides without variables must be the same as the last."""
    return [(side, sides[-1]) for side in sides[:-1] if _is_constant(side)]


_VARIABLE = (
    r"(?:[^\W\d_]|\\(?!pi)[a-zA-Z]+|\\(?:vec|overline|overrightarrow|hat|bar) ?\{[a-zA-Z]+\}"
    r"|(?:m?\\angle ?)?[A-Z]{1,3})(?:_(?:\w|\{[^{}]*\}))?'*"
)
_FUNCTION = re.compile(r"[a-zA-Z](?:\^(?:\{-1\}|-1))?'*\(([a-zA-Z](?: ?, ?[a-zA-Z])*)\)")
_NAME = re.compile(rf"{_VARIABLE}|\( ?{_VARIABLE}(?: ?, ?{_VARIABLE})+ ?\)")


def _is_name(side: str) -> bool:
    """Whether a side of an equation is one plain variable, or some in parentheses."""
    return _NAME.fullmatch(side) is not None and side not in ("e", "i")


def _is_constant(side: str) -> bool:
    return not _is_symbolic(side) or values.constant(side)


def _sides(answer: str) -> list[str]:
    """The sides of an equation or a chain of them; only the answer if it is none, or more than that."""
    text = separated(unwrapped(answer))
    top = [i for i, depth in enumerate(depths(text)) if depth == 0]
    ends = [
        i for i in top if text[i] == "=" and text[i - 1 : i] not in ("<", ">", "!", "=") and text[i + 1 : i + 2] != "="
    ]
    sides = [text[i + 1 : j].strip() for i, j in zip([-1, *ends], [*ends, len(text)], strict=True)]
    if _NO_EQUATION.search("".join(text[i] for i in top)) or not all(sides) or any(map(is_prose, sides[:-1])):
        return [text]
    if len(sides) == 2 and _is_name(sides[1]) and not _is_name(sides[0]) and _is_constant(sides[0]):
        sides.reverse()  # 7 = x
    return sides


def depths(text: str) -> list[int]:
    """How many brackets are open after each character."""
    return list(itertools.accumulate(1 if c in "([{" else -1 if c in ")]}" else 0 for c in text))


def _is_symbolic(text: str) -> bool:
    """Whether it has letters that stand for something unknown."""
    return re.search(r"[^\W\d_]", _CONSTANTS.sub("", text)) is not None


def decided(given: str, gold: str) -> bool | None:
    """Whether the two of a claim are the same by units, numbers, words and values; None where those decide nothing."""
    (given, unit), (gold, gold_unit) = units.split(given), units.split(gold)
    if unit.differs(gold_unit):
        return False
    (given, each), (gold, gold_each) = _without_units(given), _without_units(gold)
    if gold_each and any(all(x.differs(y) for y in gold_each) for x in each):
        return False
    a, b = normal_form(given), normal_form(gold)
    if _INTEGER.fullmatch(a) and _INTEGER.fullmatch(b):
        return a == b
    x, y = number(a.removesuffix("%")), number(b.removesuffix("%"))
    if x is not None and y is not None:
        scales = (1,) if a.endswith("%") == b.endswith("%") else (1, 100) if a.endswith("%") else (1, Fraction(1, 100))
        return any(_close(a, x, b, y, Fraction(scale)) for scale in scales)
    if a == b or same_spelling(a, b):
        return True
    if is_prose(a) or is_prose(b):
        return False
    if ":" in a + b and (known := _clocks(a, b)) is not None:
        return known
    return values.same(given.removesuffix("%"), gold.removesuffix("%"))


_JOINTS = re.compile(r"(,|(?<= )(?:and|or)(?= )|=)")


def _without_units(text: str) -> tuple[str, list[units.Unit]]:
    """A list without the units of its items, and these: ``3 cm, 4 cm``; the text and none of what has brackets."""
    if not _JOINTS.search(text) or re.search(r"[()\[\]{}]", text):
        return text, []
    parts = [units.split(part) if i % 2 == 0 else (part, units.Unit()) for i, part in enumerate(_JOINTS.split(text))]
    return " ".join(part for part, _ in parts), [unit for _, unit in parts if unit != units.Unit()]


def _close(a: str, x: Fraction, b: str, y: Fraction, scale: Fraction) -> bool:
    """Whether a number is another times a scale; one with decimals may stand for one without end (`values.rounds`)."""
    y *= scale
    if x == y:
        return True
    for text, decimal, exact, by in ((a, x, y, Fraction(1)), (b, y, x, scale)):
        m = re.match(r"[+-]?[0-9]*\.([0-9]+)", text)
        if m and decimal and exact:
            e = decimal / by / Fraction(m[0])
            if values.rounds(decimal, len(m[1]), e * by, exact):
                return True
    return False


def _clocks(a: str, b: str) -> bool | None:
    """Whether two times of the day, or two ratios, are the same; a ratio of two numbers is their quotient."""
    times = [re.fullmatch(r"([0-9]{1,2}):([0-5][0-9](?::[0-5][0-9])?)", text) for text in (a, b)]
    if all(times):
        return int(times[0][1]) == int(times[1][1]) and times[0][2] == times[1][2]  # type: ignore[index]
    if any(times):
        return False
    quotients = []
    for text in (a, b):
        parts = [x for part in text.split(":") if (x := number(part)) is not None]
        if len(parts) != text.count(":") + 1 or 0 in parts[1:]:
            return None
        quotients.append([x / parts[-1] for x in parts[:-1]] or parts)
    return quotients[0] == quotients[1]


def ballot(answer: str) -> str:
    r"""One spelling of answers that are the same as numbers, whatever the gold answer is: no unit, no ``x =``.

    >>> [ballot(x) for x in ("$72", "72 dollars", "x = 72.0", r"\frac{25}{2}", "12.5", "12.5%")]
    ['72', '72', '72', '25/2', '25/2', '25/2%']
    """
    *others, last = _sides(answer)
    text = normal_form(units.split(last if others and all(map(_is_symbolic, others)) else answer)[0])
    value = number(text.removesuffix("%"))
    return text if value is None else f"{value}%" if text.endswith("%") else str(value)


def is_prose(answer: str) -> bool:
    """Whether an answer is words, which math-verify would take for products: "pairs" for "Paris"."""
    text = clean(answer)
    words = re.sub(r"\\(?:begin|end)\{[a-zA-Z]+\}(?:\{[clr|]+\})?|\\[a-zA-Z]+", " ", text)
    if re.fullmatch(r"[^\W\d_]{2,}([ '-][^\W\d_]+)*", words.strip()) and words.strip() == text:
        return not re.fullmatch(f"(?:{NAMES})+", text)
    return bool(
        re.search(r"[^\W\d_]{4,}|[^\W\d_]{2,} [^\W\d_]{2,}", re.sub(NAMES, " ", words))
        or re.search(r"(?<![_^0-9.])[0-9.]+ +[0-9]", text)
    )
