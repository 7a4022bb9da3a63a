"""A calculator: exact arithmetic on an expression, which is read and not run."""

import ast
import math
import operator
from collections.abc import Callable
from fractions import Fraction

Number = Fraction | float

# Limits of an expression: its characters, the size of an exponent, the bits of a number and the digits to round to.
LONGEST, MOST_EXPONENT, MOST_BITS, MOST_DIGITS = 500, 1000, 4096, 100

_OPERATIONS: dict[type, Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[..., Number]] = {
    "abs": abs,
    "max": max,
    "min": min,
    "round": lambda x, digits=Fraction(0): _rounded(Fraction(x), int(digits)),
    "sqrt": lambda x: _root(x),
    "floor": lambda x: Fraction(math.floor(x)),
    "ceil": lambda x: Fraction(math.ceil(x)),
    "gcd": lambda *x: Fraction(math.gcd(*map(_integer, x))),
    "lcm": lambda *x: Fraction(math.lcm(*map(_integer, x))),
    **{name: getattr(math, name) for name in ("exp", "log", "sin", "cos", "tan")},
}
_NAMES = {"pi": math.pi, "e": math.e}


class Calculator:
    """Computes what the policy cannot: an environment with one tool."""

    deterministic = True
    stateless = True

    def reset(self, **columns: object) -> None:
        """Nothing: an expression has all that it takes."""

    def calculate(self, expression: str) -> str:
        """Computes an arithmetic expression exactly.

        Args:
            expression: such as "12 * (3.5 + 4) ** 2"; it may have sqrt, abs, min, max, round, floor, ceil, gcd, lcm,
                exp, log, sin, cos, tan, pi and e
        """
        return compute(expression)


def compute(expression: str) -> str:
    """The value of an expression: a whole number, or a decimal with 12 significant digits.

    Raises:
      ValueError: it is no expression, it is too long, it divides by 0, or a number in it is too large.

    Example:
      >>> compute("0.1 + 0.2"), compute("2^10 - 7/2"), compute("1/3")
      ('0.3', '1020.5', '0.333333333333')
    """
    text = expression.strip().removesuffix("=").translate(str.maketrans({"^": "**", "×": "*", "÷": "/", "−": "-"}))
    if len(text) > LONGEST:
        raise ValueError(f"the expression has {len(text)} characters, and at most {LONGEST} are read")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{expression.strip()[:80]!r} is no arithmetic expression") from None
    try:
        return _written(_value(tree.body))
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("the number is too large") from None


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return _checked(Fraction(number))
        case ast.Constant(value=float() as number) if math.isfinite(number):
            return _checked(Fraction(repr(number)))
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _checked(_power(_value(left), _value(right)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _checked(_OPERATIONS[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            values = [_value(arg) for arg in args]
            try:
                return _checked(_FUNCTIONS[name](*values))
            except TypeError:
                raise ValueError(f"{name} does not take {len(values)} values") from None
    raise ValueError(f"{ast.unparse(node)[:80]!r} is no number, operation or function that is known")


def _power(base: Number, exponent: Number) -> Number:
    if abs(exponent) > MOST_EXPONENT:
        raise ValueError(f"an exponent is at most {MOST_EXPONENT}")
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(exponent) > MOST_BITS + bits:
            raise ValueError("the number is too large")
        return base**exponent
    return _root(base) if exponent == Fraction(1, 2) else float(base) ** float(exponent)


def _root(x: Number) -> Number:
    """Exact where it is rational."""
    if isinstance(x, Fraction) and x >= 0:
        root = Fraction(math.isqrt(x.numerator), math.isqrt(x.denominator))
        if root * root == x:
            return root
    return math.sqrt(x)


def _rounded(x: Fraction, digits: int) -> Fraction:
    if abs(digits) > MOST_DIGITS:
        raise ValueError(f"round takes at most {MOST_DIGITS} digits")
    return Fraction(round(x, digits))


def _integer(x: Number) -> int:
    if x != int(x):
        raise ValueError(f"{_written(x)} is no whole number")
    return int(x)


def _checked(x: Number) -> Number:
    if isinstance(x, complex):
        raise ValueError("the value is no real number")
    if isinstance(x, float) and not math.isfinite(x):
        raise ValueError("the value is not finite")
    if isinstance(x, Fraction) and max(x.numerator.bit_length(), x.denominator.bit_length()) > MOST_BITS:
        raise ValueError("the number is too large")
    return x


def _written(x: Number) -> str:
    if isinstance(x, Fraction) and x.denominator == 1:
        return str(x.numerator)
    return f"{float(x):.12g}"
