"""Whether two answers are the same mathematics, by the math-verify library."""

import dataclasses
import functools
import logging
import re
from typing import Any

from grpojax.rewards.answers.equality import NAMES, claims, decided, depths, split_unit
from grpojax.rewards.answers.spelling import clean, normal_form, number

_FUNCTIONS = re.compile(rf"(?<![a-zA-Z\\])({NAMES.replace('sqrt|frac|', '')})(?![a-zA-Z])")


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
        math_verify.parse,
        extraction_config=[config],
        fallback_mode="no_fallback",
        parsing_timeout=no_alarm,
        raise_on_error=True,
    )

    def parse(answer: str):
        text = clean(answer)
        exact = number(normal_form(answer))
        if exact is not None and re.search("[0-9][eE ][+-]?[0-9]", text):
            text = f"{exact.numerator}/{exact.denominator}"  # 1e3 and 1 1/2 it would take for 1 e 3 and for 1
        text = _FUNCTIONS.sub(r"\\\1 ", split_unit(text)[0]).replace("°", r"^\circ")
        return read(rf"\boxed{{{text}}}")

    return parse, functools.partial(math_verify.verify, timeout_seconds=None, raise_on_error=True)


def math_equal(given: str, gold: str) -> bool:
    """Whether math-verify finds two answers the same. May take for ever, and raise: call it where that does no harm."""
    return all(_math_equal(*claim) if (known := decided(*claim)) is None else known for claim in claims(given, gold))


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
    return any(c in "=<>|" or depth and c in "+-" for c, depth in zip(text, depths(text), strict=True))


def _is_simple(text: str, longest: int) -> bool:
    return (
        len(text) <= longest
        and max(depths(text), default=0) <= 3
        and "**" not in text
        and text.count(r"\sqrt") <= 1
        and not re.search(r"[0-9]{16}", text)
        and _CALM.fullmatch(text) is not None
    )
