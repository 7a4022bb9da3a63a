"""Whether two answers are the same mathematics, by the math-verify library."""

import dataclasses
import functools
import logging
import re
from typing import Any

from grpojax.rewards.answers import units
from grpojax.rewards.answers.equality import NAMES, claims, decided, has_equation
from grpojax.rewards.answers.spelling import normal_form, number

_FUNCTIONS = re.compile(rf"(?<![a-zA-Z\\])({NAMES.replace('sqrt|frac|', '')})(?![a-zA-Z])")


# A numeral to the power of a power, and exponents and factorials of five digits: not to be evaluated.
_HUGE = re.compile(r"(\^|\*\*)[\s({]*[0-9]+[\s)}]*(\^|\*\*)|(\^|\*\*)[\s({]*[0-9]{5}|[0-9]{5}[)}\s]*!|!\s*[)}]*\s*!")


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
        text = units.split(answer)[0]
        exact = number(normal_form(answer))
        if exact is not None and re.search("[0-9][eE ][+-]?[0-9]", text):
            text = f"{exact.numerator}/{exact.denominator}"  # 1e3 and 1 1/2 it would take for 1 e 3 and for 1
        text = _FUNCTIONS.sub(r"\\\1 ", text).replace("°", r"^\circ")
        return read(rf"\boxed{{{text}}}")

    return parse, functools.partial(math_verify.verify, timeout_seconds=None, raise_on_error=True)


def math_equal(given: str, gold: str) -> bool:
    """Whether two answers are the same, by math-verify where nothing else decides it.

    It may take for ever, and raise: call it where that does no harm.
    """
    pairs = claims(given, gold)
    if pairs is None:
        return False
    return all(_math_equal(*pair) if (known := decided(*pair)) is None else known for pair in pairs)


def _math_equal(given: str, gold: str) -> bool:
    from sympy import nan, zoo

    if _HUGE.search(given) and not _HUGE.search(gold) or has_equation(given) and not has_equation(gold):
        return False
    parse, verify = _library()
    read = parse(given)
    try:
        if any(x.has(zoo, nan) for x in read):
            return False
        wanted = parse(gold)
        return bool(verify(wanted, read)) and not any(_far(x, y) for x in read[:1] for y in wanted[:1])
    except ValueError as e:
        if str(e).startswith("zip()"):  # not as many parts
            return False
        raise


def _far(x: Any, y: Any) -> bool:
    """Whether two numbers differ by more than a millionth of their size, which math-verify does not look at."""
    from sympy import Expr

    if not (isinstance(x, Expr) and isinstance(y, Expr)) or x.free_symbols or y.free_symbols:
        return False
    difference, size = (x - y).evalf(30), max(abs(x.evalf(30)), abs(y.evalf(30)))  # type: ignore[arg-type, operator]
    return bool(abs(difference) > 1e-6 * size)  # type: ignore[arg-type, operator]


def math_parses(gold: str) -> bool:
    """Whether math-verify can read an answer. May take for ever: call it where it can be stopped."""
    return bool(_library()[0](gold))
