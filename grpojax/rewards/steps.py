"""Rewards of a completion's steps: where steps end, what a function may return, and checks of equations."""

import ast
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

# One step: the tokens up to its end, and its reward.
Steps = tuple[tuple[int, float], ...]

_ARITHMETIC = frozenset("0123456789+-*/(). ,×÷$")
_OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SIGNS: dict[type, Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_SIGNS_OF_LATEX = (("\\times", "*"), ("\\cdot", "*"), ("\\div", "/"))
LONGEST_SIDE = 200  # characters of an equation's left side that are read
# Size of a reward at most. Its square, summed over a batch or over a gradient's entries, is still a float32.
LARGEST = 1e12


def split_steps(pieces: Sequence[str], separator: str = "\n") -> list[tuple[int, str]]:
    r"""The steps of a completion: the number of tokens up to the end of each step, and its text.

    A step ends with a token whose text contains the separator; the last step ends with the last token. Blanks belong to
    the step before them. A completion of blanks has no step.

    Args:
      pieces: the text of each token.
      separator: the text that ends a step.

    >>> split_steps(["1+1", "=2", "\n", "\n", "so", " 2", ""])
    [(4, '1+1=2\n\n'), (7, 'so 2')]
    """
    steps: list[tuple[int, str]] = []
    start = 0
    for end, piece in enumerate(pieces, 1):
        if separator not in piece and end < len(pieces):
            continue
        text = "".join(pieces[start:end])
        if text.replace(separator, "").strip():
            steps.append((end, text))
        elif steps:
            steps[-1] = end, steps[-1][1] + text
        else:
            continue
        start = end
    return steps


def check_equations(text: str) -> bool | None:
    """Whether every equation in a text holds; None where it has none.

    An equation is numbers joined by ``+ - * / × ÷`` (or LaTeX's words for them) and parentheses, then ``=`` and a
    number. A result with decimals may be rounded to them. An expression next to a unit, a variable, a power or a
    percentage is not an equation, since only a part of it could be read.

    >>> check_equations("7 * 6 = 42, and 10/3 = 3.33"), check_equations("5+3=9"), check_equations("2x + 1 + 1 = 3")
    (True, False, None)
    """
    for word, sign in _SIGNS_OF_LATEX:
        text = text.replace(word, sign)
    sides = text.split("=")
    holds = [known for left, right in zip(sides, sides[1:], strict=False) if (known := _holds(left, right)) is not None]
    return all(holds) if holds else None


_STEP = re.compile(r"(-?\d{1,18}) ?([-+*]) ?(-?\d{1,18}) ?= ?(-?\d{1,18})", re.ASCII)
_RESULTS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def chain_results(text: str, arithmetic: bool = False) -> list[int]:
    r"""The results of a chain of steps, one per step; empty if the text is not such a chain.

    A step is a line ``a + b = c``, with ``-`` or ``*`` too. The steps are a chain if each starts with the result of the
    step before it.

    Args:
      text: one step per line; blank lines do not count.
      arithmetic: whether each result must also be right.

    >>> chain_results("3 + 4 = 7\n7 - 2 = 5"), chain_results("3 + 4 = 7\n8 - 2 = 6"), chain_results("")
    ([7, 5], [], [])
    >>> chain_results("3 + 4 = 8"), chain_results("3 + 4 = 8", arithmetic=True)
    ([8], [])
    """
    results: list[int] = []
    for line in filter(None, map(str.strip, text.split("\n"))):
        step = _STEP.fullmatch(line)
        if step is None:
            return []
        before, by, after = int(step[1]), int(step[3]), int(step[4])
        if results and before != results[-1] or arithmetic and _RESULTS[step[2]](before, by) != after:
            return []
        results.append(after)
    return results


def _holds(left: str, right: str) -> bool | None:
    """Whether both sides of an equals sign have the same value; None where it is no equation."""
    start = len(left)
    while start and len(left) - start < LONGEST_SIDE and left[start - 1] in _ARITHMETIC:
        start -= 1
    result = re.match(r"[ $]*(-?)[ $]*(\d[\d,]*(?:\.(\d+))?)", right)
    if result is None or _goes_on(left[:start], left[start:], right[result.end() :]):
        return None
    last = re.split(r",(?!\d)", left[start:])[-1]
    expression = re.sub(r"^\s*(?:\d+[.)]|[-*])\s+", "", last)  # the mark of a list's item
    expression = expression.translate(str.maketrans({"×": "*", "÷": "/", ",": None, "$": None})).strip()
    expression = re.sub(r"(?<![\d.])0+(?=\d)", "", expression)
    if not re.search(r"[\d)]\s*[-+*/]", expression):
        return None
    try:
        value = _value(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return None
    except ZeroDivisionError:
        return False
    want = float(result[1] + result[2].replace(",", ""))
    if not math.isfinite(value) or not math.isfinite(want):
        return False
    rounding = 0.5 * 10.0 ** -len(result[3]) if result[3] else 0.0
    return abs(value - want) <= rounding + 1e-9 * max(1.0, abs(want))


def _goes_on(before: str, expression: str, after: str) -> bool:
    """Whether an expression or the number after it is a part of something else: ``2x + 3``, ``3^2 + 1``, ``= 50%``."""
    line = before.rpartition("\n")[2]
    joined = bool(line) and (expression[:1] not in (" ", "") and (line[-1].isalnum() or line[-1] in "^_%})\\"))
    operated = bool(line.strip()) and expression.lstrip()[:1] in tuple("+-*/×÷")
    return joined or operated or bool(re.match(r"\s*[%/^*×÷]|\s+\d+\s*/", after))


def _value(node: ast.AST) -> float:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _SIGNS:
        return _SIGNS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    raise ValueError("no arithmetic")


def read_steps(values: Sequence[object], tokens: int) -> Steps | tuple[str, str]:
    """The steps that a function returned for a completion of this length; ``(reason, detail)`` if they are wrong.

    >>> read_steps([(2, 1), (3, 0.5)], 3), read_steps([(2, 1.0), (2, 0.5)], 3)[0]
    (((2, 1.0), (3, 0.5)), 'steps')
    """
    steps: list[tuple[int, float]] = []
    for pair in values:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            return "type", f"it returned {pair!r:.80} in a list for a completion, not (token end, reward)"
        end, number = pair[0], real(pair[1])
        if isinstance(end, bool) or not hasattr(end, "__index__") or number is None:
            return "type", f"it returned {pair!r:.80} in a list for a completion, not (token end, reward)"
        if not abs(number) <= LARGEST:
            return (
                "nan",
                f"it returned {number:g} for the step that ends at token {end}, not a number up to {LARGEST:g}",
            )
        if not (steps[-1][0] if steps else 0) < operator.index(end) <= tokens:
            before = f"after {steps[-1][0]}" if steps else "of the first"
            return (
                "steps",
                f"it returned a step's end of {end} {before}: ends rise, from 1 to the {tokens} tokens there are",
            )
        steps.append((operator.index(end), number))
    return tuple(steps)


def real(value: Any) -> float | None:
    """A real number as a float; None for anything else, such as a text, a complex number or an array with axes.

    Scalars of other libraries count: numpy's, an array without axes, a fraction. A number that is too large for a float
    becomes infinite.

    >>> import fractions, numpy as np
    >>> real(np.bool_(True)), real(fractions.Fraction(1, 4)), real(np.array(2)), real(-(10**400))
    (1.0, 0.25, 2.0, -inf)
    >>> real("1"), real(1j), real(np.complex64(1)), real(np.ones(1))
    (None, None, None, None)
    """
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        if shape:
            return None
        value = value.item() if hasattr(value, "item") else value
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
