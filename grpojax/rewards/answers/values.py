r"""Whether two trees of `reading` are the same mathematics, by their values.

Rational numbers are exact. Others have 60 digits and a bound of their error, so that ``\sqrt{2}^2 - 2`` is zero and
``1/20!`` is not. Expressions with variables are the same where they have the same value at several points. Sizes are
estimated before anything is computed: what would be huge raises `Huge`.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from grpojax.rewards.answers.reading import Tree, Unreadable, read

DIGITS = 60
# A bound of exact numbers, in bits; of factorials that are exact; of magnitudes, as a power of two; of a sum's terms.
EXACT_BITS, EXACT_FACTORIAL, LARGEST_LOG2, TERMS = 1 << 16, 5000, 1 << 36, 2000
# Steps that one evaluation may take: an operation, or 256 bits of an exact result.
WORK = 8_000
# Significant digits from which a decimal may stand for a number that it rounds, and of what floating point prints.
ROUNDED, FLOATING = 6, 15


class Huge(ValueError):
    """A number is too large to be computed."""


class Undefined(ValueError):
    """There is no value here, as of 1/0."""


# A rational number, or a number of mpmath and a bound of its error.
Value = Fraction | tuple[Any, Any]


@functools.cache
def _mp():
    import mpmath

    context = mpmath.MPContext()
    context.dps = DIGITS
    return context


def same(given: str, gold: str) -> bool | None:
    r"""Whether two answers are the same mathematics; None where one is not of this grammar.

    >>> same(r"\frac{x+2}{7}", r"\frac{x}{7}+\frac{2}{7}"), same("1/20!", "1/21!"), same(r"\int_0^1 x dx", "1/2")
    (True, False, None)
    """
    try:
        a, b = read(given), read(gold)
    except (Unreadable, RecursionError):
        return None
    return same_trees(a, b)


def same_trees(a: Tree, b: Tree) -> bool | None:
    """`same` of what was read: ``a`` is given, ``b`` is gold."""
    if a == b:
        return True
    try:
        return _Comparison().same(a, b)
    except Huge:
        return False
    except (Unreadable, Undefined, RecursionError, ValueError, OverflowError, ZeroDivisionError):
        return None


def is_readable(text: str) -> bool:
    """Whether an answer is of this grammar."""
    try:
        read(text)
    except (Unreadable, RecursionError):
        return False
    return True


def constant(text: str) -> bool:
    """Whether an answer is an expression without variables."""
    try:
        tree = read(text)
    except (Unreadable, RecursionError):
        return False
    return is_scalar(tree) and not symbols(tree)


def symbols(tree: Any) -> set[str]:
    """The variables of a tree, without those that a sum runs over."""
    if not isinstance(tree, tuple) or not tree:
        return set()
    if tree[0] == "symbol":
        return {tree[1]}
    if tree[0] in ("sum", "prod"):
        return (symbols(tree[4]) - symbols(tree[1])) | symbols(tree[2]) | symbols(tree[3])
    return set().union(*map(symbols, tree))


_SCALAR = ("number", "constant", "symbol", "function", "sum", "prod", "+", "-", "*", "/", "^", "pm", "mp")


def is_scalar(tree: Tree) -> bool:
    """Whether a tree is one expression: no list, interval, matrix or equation, and none inside."""
    return tree[0] in _SCALAR and not any(
        _has(tree, kind) for kind in ("tuple", "set", "list", "relation", "matrix", "cup", "cap", "dots", "based")
    )


def _has(tree: Any, kind: str) -> bool:
    """Whether a kind is in a tree; a determinant is a number, whatever is in it."""
    if isinstance(tree, tuple) and tree[:2] == ("function", "det"):
        return False
    return isinstance(tree, tuple) and bool(tree) and (tree[0] == kind or any(_has(x, kind) for x in tree))


class _Evaluation:
    """Values at one point.

    Args:
      point: of each variable.
      sign: what ``±`` stands for.
      log_base: of a logarithm without a base: e or 10.
    """

    def __init__(self, point: Mapping[str, Fraction], sign: int = 1, log_base: int | None = None):
        self.point, self.sign, self.log_base, self.work = dict(point), sign, log_base, WORK

    def value(self, tree: Tree) -> Value:
        result = self._value(tree)
        self.work -= 1 + (_bits(result) >> 8 if isinstance(result, Fraction) else 1)
        if self.work < 0:
            raise Huge("too long a computation")
        return result

    def _value(self, tree: Tree) -> Value:
        kind = tree[0]
        if kind == "number":
            return tree[1]
        if kind == "symbol":
            if tree[1] not in self.point:
                raise Unreadable(tree[1])
            return self.point[tree[1]]
        if kind == "constant":
            return self.constant(tree[1])
        if kind == "-" and len(tree) == 2:
            return _times(Fraction(-1), self.value(tree[1]))
        if kind in ("pm", "mp"):
            sign = Fraction(self.sign if kind == "pm" else -self.sign)
            last = _times(sign, self.value(tree[-1]))
            return last if len(tree) == 2 else _plus(self.value(tree[1]), last)
        if kind in ("sum", "prod"):
            return self.series(*tree)
        if kind == "function":
            return self.function(tree[1], tree[2])
        if kind in ("+", "-", "*", "/", "^"):
            return _OPERATIONS[kind](self.value(tree[1]), self.value(tree[2]))
        raise Unreadable(kind)

    def constant(self, name: str) -> Value:
        mp = _mp()
        if name == "infinity":
            raise Undefined("infinity")
        if name == "i":
            return mp.mpc(0, 1), mp.mpf(0)
        return _ball(+mp.pi if name == "pi" else +mp.e)

    def series(self, kind: str, index: Tree, start: Tree, end: Tree, body: Tree) -> Value:
        first, last = self.value(start), self.value(end)
        if not isinstance(first, Fraction) or not isinstance(last, Fraction) or (last - first).denominator != 1:
            raise Unreadable("the ends of a sum")
        if last - first > TERMS:
            raise Huge("a sum of many terms")
        total: Value = Fraction(0 if kind == "sum" else 1)
        name, before = index[1], self.point.get(index[1])
        if any(index[1] in x.partition("_")[2] for x in symbols(body)):
            raise Unreadable("an index in a name")
        for n in range(int(last - first) + 1):
            self.point[name] = first + n
            term = self.value(body)
            total = _plus(total, term) if kind == "sum" else _times(total, term)
        self.point.pop(name)
        if before is not None:
            self.point[name] = before
        return total

    def function(self, name: str, arguments: Sequence[Tree]) -> Value:
        if name == "det":
            return self.determinant(arguments[0][1])
        values = [self.value(x) for x in arguments]
        if name == "root":
            return _root(*values)
        if name == "double_factorial":
            n = _integer_of(values[0])
            if n > EXACT_FACTORIAL:
                raise Huge("a factorial")
            return Fraction(math.prod(range(n, 0, -2)))
        if name in ("factorial", "binom"):
            return _factorial(*values) if name == "factorial" else _binomial(*values)
        if name in ("floor", "ceil", "mod", "gcd", "lcm"):
            return _whole(name, values)
        if name in ("max", "min"):
            return functools.reduce(lambda a, b: a if (_compare(a, b) > 0) == (name == "max") else b, values)
        if name == "abs":
            x = values[0]
            return abs(x) if isinstance(x, Fraction) else (abs(x[0]), x[1])
        if name == "exp":
            return _power(self.constant("e"), values[0])
        if name in ("log", "ln", "lg"):
            base = Fraction(10) if name == "lg" else None
            if name == "log":
                base = values[1] if len(values) == 2 else Fraction(10) if self.log_base == 10 else None
            return _logarithm(values[0]) if base is None else _over(_logarithm(values[0]), _logarithm(base))
        return _apply(name, values[0])

    def determinant(self, rows: Sequence[Sequence[Tree]]) -> Value:
        if len(rows) != len(rows[0]) or len(rows) > 5:
            raise Unreadable("a determinant")
        cells = [[self.value(x) for x in row] for row in rows]
        total: Value = Fraction(0)
        for order in itertools.permutations(range(len(rows))):
            turns = sum(a > b for a, b in itertools.combinations(order, 2))
            product = functools.reduce(_times, (cells[i][j] for i, j in enumerate(order)), Fraction((-1) ** turns))
            total = _plus(total, product)
        return total


def _ball(x: Any, error: Any = 0) -> Value:
    mp = _mp()
    if not mp.isfinite(x):
        raise Undefined("no number")
    return x, error + abs(x) * mp.eps * 4


def _parts(x: Value) -> tuple[Any, Any]:
    """A value as a number of mpmath and its error."""
    if isinstance(x, tuple):
        return x
    mp = _mp()
    number = mp.mpf(x.numerator) / x.denominator
    return number, abs(number) * mp.eps


def _bits(x: Fraction) -> int:
    return x.numerator.bit_length() + x.denominator.bit_length()


def _small(x: Fraction) -> Value:
    return x if _bits(x) <= EXACT_BITS else _parts(x)


def _plus(x: Value, y: Value) -> Value:
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return _small(x + y)
    (a, ea), (b, eb) = _parts(x), _parts(y)
    return _ball(a + b, ea + eb)


def _times(x: Value, y: Value) -> Value:
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return _small(x * y)
    if Fraction(0) in (x, y):
        return Fraction(0)
    (a, ea), (b, eb) = _parts(x), _parts(y)
    return _ball(a * b, abs(a) * eb + abs(b) * ea + ea * eb)


def _over(x: Value, y: Value) -> Value:
    if isinstance(y, Fraction):
        if not y:
            raise Undefined("division by zero")
        return _times(x, 1 / y)
    (a, ea), (b, eb) = _parts(x), y
    if abs(b) <= 2 * eb:
        raise Undefined("division by zero")
    return _ball(a / b, (ea + abs(a / b) * eb) / (abs(b) - eb))


def _power(x: Value, y: Value) -> Value:
    if isinstance(y, Fraction) and y.denominator == 1 and isinstance(x, Fraction):
        n = int(y)
        if x in (0, 1, -1) or n == 0:
            if x == 0 and n <= 0:
                raise Undefined("a power of zero")
            return x ** (n if x == 0 or n == 0 else n % 2 or 2)
        if _bits(x) * abs(n) <= EXACT_BITS:
            return x**n
    if isinstance(y, Fraction) and y.denominator != 1 and y.denominator < 1000:
        return _power(_root(x, Fraction(y.denominator)), Fraction(y.numerator))
    mp = _mp()
    (a, ea), (b, eb) = _parts(x), _parts(y)
    if abs(a) <= 2 * ea:
        raise Undefined("a power of zero")
    log2 = mp.log(a, 2)
    if abs(b) * abs(log2) > LARGEST_LOG2:
        raise Huge("a power")
    if isinstance(y, Fraction) and y.denominator == 1:
        result = mp.power(a, int(y))
    else:
        result = mp.power(a, b)
    return _ball(result, abs(result) * 4 * (abs(b) * ea / abs(a) + abs(log2) * eb + abs(b * log2) * mp.eps))


def _root(x: Value, degree: Value) -> Value:
    """The real root of an odd degree, else the principal one; exact where it is rational."""
    if not isinstance(degree, Fraction) or degree.denominator != 1 or not 2 <= degree < 1000:
        return _power(x, _over(Fraction(1), degree))
    n, mp = int(degree), _mp()
    if isinstance(x, Fraction):
        if x < 0 and n % 2:
            return _times(Fraction(-1), _root(-x, degree))
        above, below = _whole_root(abs(x.numerator), n), _whole_root(x.denominator, n)
        if x >= 0 and above is not None and below is not None:
            return Fraction(above, below)
    a, ea = _parts(x)
    if abs(a) <= 2 * ea:
        if ea == 0:
            return Fraction(0)
        bound = mp.root(4 * ea, n)
        return mp.mpf(0), bound
    if n % 2 and mp.im(a) == 0 and a < 0:
        return _times(Fraction(-1), _root((-a, ea), degree))
    result = mp.root(a, n)
    return _ball(result, abs(result) * 2 * ea / abs(a))


def _whole_root(x: int, n: int) -> int | None:
    if x < 2:
        return x
    if x.bit_length() > 4096:
        return None
    if n == 2:
        r = math.isqrt(x)
    else:
        r = 1 << -(-x.bit_length() // n)
        while (better := ((n - 1) * r + x // r ** (n - 1)) // n) < r:
            r = better
    return r if r**n == x else None


def _apply(name: str, x: Value) -> Value:
    """A function of mpmath; the error is seen from its value a little further."""
    mp = _mp()
    functions: dict[str, Callable[[Any], Any]] = {
        name: getattr(mp, to)
        for name, to in (
            *((f, f) for f in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")),
            *((f"arc{f}", f"a{f}") for f in ("sin", "cos", "tan")),
        )
    }
    if name not in functions:
        raise Unreadable(name)
    a, ea = _parts(x)
    if abs(a) > (1e6 if name.endswith("h") else 1e20):
        raise Huge(name)
    if ea > 1:
        raise Undefined(name)
    try:
        result, further = functions[name](a), functions[name](a + 2 * ea)
    except (ValueError, ZeroDivisionError):
        raise Undefined(name) from None
    if abs(result) > 1e40:  # a pole
        raise Undefined(name)
    return _ball(result, 2 * abs(further - result) + 2 * ea * ea + mp.eps * ea)


def _logarithm(x: Value) -> Value:
    mp = _mp()
    a, ea = _parts(x)
    if abs(a) <= 2 * ea:
        raise Undefined("a logarithm of zero")
    return _ball(mp.log(a), 2 * ea / abs(a))


def _integer_of(x: Value) -> int:
    if isinstance(x, Fraction) and x.denominator == 1:
        return int(x)
    raise Unreadable("no integer")


def _factorial(x: Value) -> Value:
    if isinstance(x, tuple) and abs(x[0]) > 2**30:
        raise Huge("a factorial")
    n, mp = _integer_of(x), _mp()
    if n < 0:
        raise Undefined("a factorial")
    if n <= EXACT_FACTORIAL:
        return Fraction(math.factorial(n))
    if n > 2**30:
        raise Huge("a factorial")
    return _ball(mp.factorial(n), abs(mp.factorial(n)) * mp.eps * n.bit_length() * 64)


def _binomial(x: Value, y: Value) -> Value:
    n, k = _integer_of(x), _integer_of(y)
    if n < 0 or k < 0:
        raise Unreadable("a binomial")
    if k > n:
        return Fraction(0)
    if n > 2000:
        return _over(_factorial(x), _times(_factorial(y), _factorial(Fraction(n - k))))
    return Fraction(math.comb(n, k))


def _whole(name: str, values: Sequence[Value]) -> Value:
    if name in ("floor", "ceil"):
        x = values[0]
        if isinstance(x, Fraction):
            return Fraction(math.floor(x) if name == "floor" else math.ceil(x))
        mp = _mp()
        if mp.im(x[0]) != 0 or x[1] > 1e-9:
            raise Huge(name)  # its last digits are not known
        rounded = mp.floor(x[0]) if name == "floor" else mp.ceil(x[0])
        if abs(x[0] - mp.nint(x[0])) <= x[1]:
            rounded = mp.nint(x[0])
        return Fraction(int(rounded))
    if any(isinstance(x, tuple) for x in values):
        raise Huge(name)
    a, *rest = (_integer_of(x) for x in values)
    if name == "mod":
        if not rest[0]:
            raise Undefined("mod 0")
        return Fraction(a % rest[0])
    return Fraction(math.gcd(a, *rest) if name == "gcd" else math.lcm(a, *rest))


def _compare(x: Value, y: Value) -> int:
    """-1, 0 or 1 as x is less, the same, or more."""
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return (x > y) - (x < y)
    if _equal(x, y):
        return 0
    mp = _mp()
    a, b = _parts(x)[0], _parts(y)[0]
    if mp.im(a) != 0 or mp.im(b) != 0:
        raise Undefined("complex numbers have no order")
    return 1 if mp.re(a) > mp.re(b) else -1


def _equal(x: Value, y: Value) -> bool:
    """The same exactly, or to the digits that are known: relatively to their size, or both zero."""
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x == y
    (a, ea), (b, eb) = _parts(x), _parts(y)
    error, size = 2 * (ea + eb), max(abs(a), abs(b))
    return abs(a - b) <= error and (error <= size * 1e-20 or abs(a) <= 2 * ea and abs(b) <= 2 * eb)


_OPERATIONS: dict[str, Callable[[Value, Value], Value]] = {
    "+": _plus,
    "-": lambda x, y: _plus(x, _times(Fraction(-1), y)),
    "*": _times,
    "/": _over,
    "^": _power,
}

_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)


def _points(names: set[str], whole: bool) -> list[dict[str, Fraction]]:
    """Where expressions with these variables are compared: integers where a factorial or a sum's end needs them."""
    if not names:
        return [{}]
    if len(names) > len(_PRIMES) - 6:
        raise Unreadable("many variables")
    order = sorted(names)
    if whole:
        return [{x: Fraction(k + 2 * i) for i, x in enumerate(order)} for k in (3, 4, 6, 7, 9)]
    return [
        {x: sign * Fraction(_PRIMES[(7 * i + k) % 25], _PRIMES[(3 * i + 2 * k + 5) % 25]) for i, x in enumerate(order)}
        for k, sign in ((1, 1), (4, 1), (8, -1), (13, 1), (17, -1))
    ]


def _needs_whole(tree: Any) -> bool:
    if not isinstance(tree, tuple) or not tree:
        return False
    if tree[0] == "function" and tree[1] in ("factorial", "double_factorial", "binom", "mod", "gcd", "lcm"):
        return True
    return tree[0] in ("sum", "prod") or any(map(_needs_whole, tree))


class _Comparison:
    """Compares two trees, by kind."""

    def same(self, a: Tree, b: Tree) -> bool:
        if a == b:
            return True
        a, b = _plain(a), _plain(b)
        (names, x), (golds, y) = _unnamed(a), _unnamed(b)
        if names and golds:
            if sorted(names) != sorted(golds):
                return False
            if len(names) > 1 and names != golds:
                x = ("tuple", "()", tuple(x[2][names.index(n)] for n in golds))
        if names or golds:
            return self.same(x, y)
        if is_scalar(a) and is_scalar(b):
            return self.scalars(a, b)
        if "based" in (a[0], b[0]) or "dots" in (a[0], b[0]):
            return False
        if "matrix" in (a[0], b[0]):
            return self.matrices(a, b)
        if (x := region(a)) is not None and (y := region(b)) is not None and not (a[0] == b[0] == "tuple"):
            return self.regions(x, y)
        if a[0] == "relation" and b[0] == "relation":
            return self.relations(a[1], b[1])
        if a[0] == b[0] == "tuple":
            brackets = a[1] == b[1] or len(a[2]) > 2 and {a[1], b[1]} <= {"()", "[]"}
            return brackets and self.in_order(a[2], b[2])
        return self.collections(a, b)

    def collections(self, a: Tree, b: Tree) -> bool:
        """Lists and sets in any order, tuples in theirs."""
        if "tuple" in (a[0], b[0]):
            other = b if a[0] == "tuple" else a
            one = a if a[0] == "tuple" else b
            return other[0] == "list" and other[1] != "or" and one[1] == "()" and self.in_order(_items(a), _items(b))
        if not {a[0], b[0]} & {"list", "set"}:
            if any(_has(x, kind) for x in (a, b) for kind in ("cup", "cap", "setminus", "numbers")):
                raise Unreadable("collections")
            return False
        xs, ys = _members(a), _members(b)
        if any(x[0] == "dots" for x in (*xs, *ys)):
            return self.in_order(xs, ys)
        if a[0] == "set" or b[0] == "set":
            return self.covers(xs, ys) and self.covers(ys, xs)
        return self.matched(xs, ys)

    def in_order(self, xs: Sequence[Tree], ys: Sequence[Tree]) -> bool:
        return len(xs) == len(ys) and all(self.same(x, y) for x, y in zip(xs, ys, strict=True))

    def matched(self, xs: Sequence[Tree], ys: Sequence[Tree]) -> bool:
        """Each of one is one of the other."""
        left = list(ys)
        for x in xs:
            i = next((i for i, y in enumerate(left) if self.same(x, y)), None)
            if i is None:
                return False
            del left[i]
        return not left

    def covers(self, xs: Sequence[Tree], ys: Sequence[Tree]) -> bool:
        return all(any(self.same(x, y) for y in ys) for x in xs)

    def matrices(self, a: Tree, b: Tree) -> bool:
        xs, ys = _rows(a), _rows(b)
        if xs is None or ys is None:
            if _has(a if xs is None else b, "matrix"):
                raise Unreadable("an expression of matrices")
            return False
        return len(xs) == len(ys) and all(self.in_order(x, y) for x, y in zip(xs, ys, strict=True))

    def scalars(self, a: Tree, b: Tree) -> bool:
        if any(_has(x, kind) for x in (a, b) for kind in ("pm", "mp")):
            both = [[_fixed(x, sign) for sign in (1, -1)] for x in (a, b)]
            return self.covers(*both) and self.covers(*reversed(both))
        if a == b:
            return True
        bases = (None, 10) if _has((a, b), "log") or any(_named(x, "log") for x in (a, b)) else (None,)
        return any(self.values(a, b, base) for base in bases)

    def values(self, a: Tree, b: Tree, log_base: int | None) -> bool:
        if ("constant", "infinity") in (_unsigned(a), _unsigned(b)):
            return a == b
        names = symbols(a) | symbols(b)
        compared = 0
        for point in _points(names, _needs_whole((a, b))):
            x, y = (_value_or_none(_Evaluation(point, 1, log_base), tree) for tree in (a, b))
            if x is None and y is None:
                continue
            if x is None or y is None:
                if names:
                    continue
                return False
            if not _equal(x, y) and not (not names and (_rounds(a, x, y) or _rounds(b, y, x))):
                return False
            compared += 1
        if compared < min(len(_points(names, False)), 2):
            raise Undefined("no point at which both have values")
        return True

    def relations(self, a: Sequence[Any], b: Sequence[Any]) -> bool:
        """Equations that are multiples of one another; inequalities likewise, with their direction; chains by side."""
        if len(a) != len(b):
            return False
        if len(a) > 3:
            mirrored: tuple[Any, ...] = tuple(_MIRROR.get(x, x) if isinstance(x, str) else x for x in reversed(b))
            return any(
                all(x == y or not isinstance(x, str) and self.same(x, y) for x, y in zip(a, c, strict=True))
                for c in (b, mirrored)
            )
        (p, sign, q), (r, other, s) = a, b
        if "in" in (sign, other) or not all(map(is_scalar, (p, q, r, s))):
            if sign != other:
                return False
            return self.same(p, r) and self.same(q, s) or sign == "=" and self.same(p, s) and self.same(q, r)
        signs = {1} if sign == other else set()
        if _MIRROR.get(sign, sign) == other:
            signs.add(-1)
        return bool(signs) and self.multiples(("-", p, q), ("-", r, s), signs)

    def multiples(self, a: Tree, b: Tree, signs: set[int]) -> bool:
        """Whether one is the other times a number that is not 0 and of one of these signs."""
        names = symbols(a) | symbols(b)
        if not names or symbols(a) != symbols(b):
            return self.scalars(a, b)
        ratio: Value | None = None
        compared = 0
        for point in _points(names, _needs_whole((a, b))):
            x, y = (_value_or_none(_Evaluation(point), tree) for tree in (a, b))
            if x is None or y is None:
                continue
            zero = Fraction(0)
            if _equal(x, zero) or _equal(y, zero):
                if _equal(x, zero) != _equal(y, zero):
                    return False
                continue
            here = _over(x, y)
            if ratio is not None and not _equal(ratio, here):
                return False
            ratio, compared = here, compared + 1
        if ratio is None or compared < 3:
            raise Undefined("no point at which both have values")
        return signs == {1, -1} or _compare(ratio, Fraction(0)) in signs

    def regions(self, a: "Region", b: "Region") -> bool:
        """Sets of real numbers."""
        if a[0] and b[0] and a[0] != b[0]:
            return False
        xs, ys = _joined(a[1]), _joined(b[1])
        return len(xs) == len(ys) and all(
            (p.low_in, p.high_in) == (q.low_in, q.high_in) and p.low.same(q.low) and p.high.same(q.high)
            for p, q in zip(xs, ys, strict=True)
        )


_MIRROR = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}


def _value_or_none(at: _Evaluation, tree: Tree) -> Value | None:
    try:
        return at.value(tree)
    except Undefined:
        return None


def _unsigned(tree: Tree) -> Tree:
    return tree[1] if tree[0] == "-" and len(tree) == 2 else tree


def _named(tree: Any, name: str) -> bool:
    if not isinstance(tree, tuple) or not tree:
        return False
    return tree[0] == "function" and tree[1] == name and len(tree[2]) == 1 or any(_named(x, name) for x in tree)


def _fixed(tree: Any, sign: int) -> Any:
    """A tree with one sign in place of each ``±``."""
    if not isinstance(tree, tuple) or not tree:
        return tree
    if tree[0] in ("pm", "mp"):
        plus = (tree[0] == "pm") == (sign == 1)
        parts = tuple(_fixed(x, sign) for x in tree[1:])
        return ("+" if plus else "-", *parts) if len(parts) == 2 or not plus else parts[0]
    return tuple(_fixed(x, sign) for x in tree)


def _rounds(tree: Tree, value: Value, exact: Value) -> bool:
    """Whether a tree is a decimal of six digits or more that rounds, or cuts off, a number with more digits."""
    scale = Fraction(1)
    tree = _unsigned(tree)
    if tree[0] == "*" and tree[1][0] == "number" and tree[2][0] == "^":
        power = _value_or_none(_Evaluation({}), tree[2])
        if not isinstance(power, Fraction) or not power:
            return False
        tree, scale = tree[1], power
    if tree[0] != "number" or not isinstance(value, Fraction) or not tree[2]:
        return False
    return rounds(value, tree[2], scale, exact)


def rounds(decimal: Fraction, places: int, scale: Fraction, exact: Value) -> bool:
    """Whether a decimal with so many places, times a scale, stands for a number that has no end as a decimal.

    It does from six significant digits, where it is that number rounded or cut off; from fifteen also for a number
    with an end, as floating point prints ``0.30000000000000004``.
    """
    digits = len(str(abs(int(decimal / scale * 10**places))))
    if digits < ROUNDED or isinstance(exact, tuple) and _mp().im(exact[0]) != 0:
        return False
    if isinstance(exact, Fraction):
        if _ends(exact):
            return digits >= FLOATING and abs(decimal - exact) <= abs(exact) / 10 ** (FLOATING - 1)
        size, shown, place = abs(exact), abs(decimal), scale / 10**places
    else:
        size, shown, place = abs(exact[0]), abs(_parts(decimal)[0]), _parts(scale / 10**places)[0]
        exact = exact[0]
    same_sign = (decimal > 0) == (exact > 0)
    return bool(same_sign and (shown <= size < shown + place or abs(shown - size) <= place / 2))


def _ends(x: Fraction) -> bool:
    """Whether a number has finitely many decimals."""
    below = x.denominator
    for prime in (2, 5):
        while below % prime == 0:
            below //= prime
    return below == 1


def _plain(tree: Tree) -> Tree:
    """Without what is only another way to write it: names of values, sets of one, lists of equations of one name."""
    if tree[0] == "set" and len(tree[1]) == 1 and is_scalar(tree[1][0]):
        return tree[1][0]
    if tree[0] == "based" and tree[2] == 10:
        return ("number", Fraction(int(tree[1])), 0) if tree[1].isdigit() else tree
    return tree


def _unnamed(tree: Tree) -> tuple[tuple[str, ...], Tree]:
    """Names, and values without them: of ``n = 2, 3``, ``x = 2 or x = 3``, ``x = 1, y = 2``, ``(x, y) = (1, 2)``."""
    nothing: tuple[str, ...] = ()
    if tree[0] == "relation" and len(tree[1]) == 3 and tree[1][1] == "=":
        left, _, right = tree[1]
        if left[0] == right[0] == "tuple" and len(left[2]) == len(right[2]) and all(x[0] == "symbol" for x in left[2]):
            return tuple(x[1] for x in left[2]), right
        if left[0] == "symbol" and right[0] in ("set", "list", "pm"):
            return (left[1],), right
    if tree[0] == "relation" and tree[1][1:2] == ("in",) and tree[1][0][0] == "symbol" and tree[1][2][0] == "set":
        return (tree[1][0][1],), tree[1][2]
    if tree[0] != "list":
        return nothing, tree
    named = [x[1] for x in tree[2] if x[0] == "relation"]
    if not named or any(len(x) != 3 or x[1] != "=" or x[0][0] != "symbol" for x in named):
        return nothing, tree
    names = [x[0][1] for x in named]
    if len(named) == 1 and tree[2][0][0] == "relation":
        return (names[0],), ("list", tree[1], (named[0][2], *tree[2][1:]))
    if len(named) != len(tree[2]):
        return nothing, tree
    values = tuple(x[2] for x in named)
    if len(set(names)) == 1:
        return (names[0],), ("list", tree[1], values)
    if len(set(names)) == len(names) and tree[1] != "or":
        return tuple(names), ("tuple", "()", values)
    return nothing, tree


def _items(tree: Tree) -> tuple[Tree, ...]:
    return tree[2] if tree[0] in ("list", "tuple") else tree[1] if tree[0] == "set" else (tree,)


def _members(tree: Tree) -> list[Tree]:
    """The items of a list, a set or a value; both of ``±``."""
    found: list[Tree] = []
    for x in _items(tree):
        if is_scalar(x) and (_has(x, "pm") or _has(x, "mp")):
            found += [_fixed(x, 1), _fixed(x, -1)]
        else:
            found.append(x)
    return found


def _rows(tree: Tree) -> list[tuple[Tree, ...]] | None:
    """Rows of a matrix, of lists in a list, or of a tuple as a column."""
    if tree[0] == "matrix":
        return list(tree[1])
    if tree[0] == "*" and tree[2][0] == "matrix" and is_scalar(tree[1]):
        return [tuple(("*", tree[1], x) for x in row) for row in tree[2][1]]
    if tree[0] == "/" and tree[1][0] == "matrix" and is_scalar(tree[2]):
        return [tuple(("/", x, tree[2]) for x in row) for row in tree[1][1]]
    if tree[0] == "-" and len(tree) == 2 and tree[1][0] == "matrix":
        return [tuple(("-", x) for x in row) for row in tree[1][1]]
    if tree[0] != "tuple":
        return None
    if all(x[0] == "tuple" for x in tree[2]):
        return [x[2] for x in tree[2]]
    return [(x,) for x in tree[2]]


class _End:
    """An end of an interval: a value, or an infinity."""

    def __init__(self, tree: Tree):
        self.infinite = (_unsigned(tree) == ("constant", "infinity")) * (-1 if tree[0] == "-" else 1)
        self.value = None if self.infinite else _Evaluation({}).value(tree)

    def same(self, other: "_End") -> bool:
        return self.compare(other) == 0

    def compare(self, other: "_End") -> int:
        if self.infinite or other.infinite:
            return (self.infinite > other.infinite) - (self.infinite < other.infinite)
        assert self.value is not None and other.value is not None
        return _compare(self.value, other.value)


class _Interval:
    def __init__(self, low: _End, low_in: bool, high: _End, high_in: bool):
        self.low, self.low_in, self.high, self.high_in = low, low_in, high, high_in


# The variable that lies in it, "" for any; intervals.
Region = tuple[str, list[_Interval]]
_INFINITY = ("constant", "infinity")


def region(tree: Tree) -> Region | None:
    """The set of real numbers that an interval, a union or an inequality in one variable is; None for anything else."""
    kind = tree[0]
    if kind == "numbers" and tree[1] == "R":
        return "", [_interval(("-", _INFINITY), False, _INFINITY, False)]
    if kind == "tuple" and len(tree[2]) == 2 and not symbols(tree[2]):
        low, high = map(_limit, tree[2])
        if low is None or high is None or low.compare(high) > 0:
            return None
        return "", [_Interval(low, tree[1][0] == "[", high, tree[1][1] == "]")]
    if kind in ("cup", "cap", "setminus"):
        left, right = region(tree[1]), region(tree[2])
        if kind == "cap" and left is not None and right is not None:
            return left[0], _common(left[1], right[1])
        if kind == "setminus" and left is not None and tree[2][0] == "set":
            return left[0], _without(left[1], tree[2][1])
        return None if left is None or right is None or kind != "cup" else (left[0], left[1] + right[1])
    if kind == "relation":
        return _region_of(tree[1])
    if kind == "list" and all(x[0] == "relation" and x[1][1] != "=" for x in tree[2]):
        parts = [p for x in tree[2] if (p := region(x)) is not None]
        if len(parts) == len(tree[2]) and len({name for name, _ in parts}) == 1:
            join = _common if tree[1] in ("and", ",") else lambda xs, ys: [*xs, *ys]
            return parts[0][0], functools.reduce(join, (intervals for _, intervals in parts))
    return None


def _common(xs: list[_Interval], ys: list[_Interval]) -> list[_Interval]:
    found = []
    for x, y in itertools.product(xs, ys):
        low = max(x, y, key=functools.cmp_to_key(lambda p, q: p.low.compare(q.low) or q.low_in - p.low_in))
        high = min(x, y, key=functools.cmp_to_key(lambda p, q: p.high.compare(q.high) or p.high_in - q.high_in))
        order = low.low.compare(high.high)
        if order < 0 or order == 0 and low.low_in and high.high_in:
            found.append(_Interval(low.low, low.low_in, high.high, high.high_in))
    return found


def _interval(low: Tree, low_in: bool, high: Tree, high_in: bool) -> _Interval:
    return _Interval(_End(low), low_in, _End(high), high_in)


def _limit(tree: Tree) -> _End | None:
    return _End(tree) if is_scalar(tree) else None


def _region_of(parts: Sequence[Any]) -> Region | None:
    if len(parts) == 5:
        low, first, name, second, high = parts
        if {first, second} <= {">", ">="}:
            low, first, second, high = high, _MIRROR[second], _MIRROR[first], low
        if not {first, second} <= {"<", "<="} or _name_of(name) is None or symbols(low) or symbols(high):
            return None
        return _name_of(name) or "", [_interval(low, first == "<=", high, second == "<=")]
    if len(parts) != 3:
        return None
    left, sign, right = parts
    if _name_of(left) is None and sign in _MIRROR:
        left, sign, right = right, _MIRROR[sign], left
    name = _name_of(left)
    if name is None or sign == "=":
        return None
    if sign == "in":
        inside = region(right)
        return None if inside is None else (name, inside[1])
    if not is_scalar(right) or symbols(right):
        return None
    if sign == "!=":
        return name, _without([_interval(("-", _INFINITY), False, _INFINITY, False)], [right])
    if sign[0] == "<":
        return name, [_interval(("-", _INFINITY), False, right, sign == "<=")]
    return name, [_interval(right, sign == ">=", _INFINITY, False)]


def _name_of(tree: Tree) -> str | None:
    r"""What a plain variable is called, or ``f(x)``."""
    if tree[0] == "symbol":
        return tree[1]
    if tree[0] == "*" and tree[1][0] == tree[2][0] == "symbol" and tree[1][1] in "fghFGH":
        return f"{tree[1][1]}({tree[2][1]})"
    return None


def _without(intervals: list[_Interval], points: Sequence[Tree]) -> list[_Interval]:
    for point in points:
        end, found = _End(point), []
        for x in intervals:
            below, above = x.low.compare(end), end.compare(x.high)
            if below > 0 or above > 0:
                found.append(x)
                continue
            if below < 0:
                found.append(_Interval(x.low, x.low_in, end, False))
            if above < 0:
                found.append(_Interval(end, False, x.high, x.high_in))
        intervals = found
    return intervals


def _joined(intervals: list[_Interval]) -> list[_Interval]:
    """In order, those that overlap or touch made one."""
    order = functools.cmp_to_key(lambda x, y: x.low.compare(y.low) or y.low_in - x.low_in)
    found: list[_Interval] = []
    for x in sorted(intervals, key=order):
        if found:
            last = found[-1]
            gap = last.high.compare(x.low)
            if gap > 0 or gap == 0 and (last.high_in or x.low_in):
                further = last.high.compare(x.high)
                if further < 0 or further == 0 and x.high_in:
                    found[-1] = _Interval(last.low, last.low_in, x.high, x.high_in)
                continue
        found.append(x)
    return found
