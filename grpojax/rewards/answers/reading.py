r"""An answer as a tree: numbers, expressions, lists, intervals, matrices, equations, in LaTeX or plain spelling.

A tree is nested tuples whose first entry names the kind, so that two trees are compared with ``==``. Nothing is
evaluated here. What this grammar does not know raises `Unreadable`, in place of a guess.
"""

import re
from fractions import Fraction
from typing import Any

Tree = tuple[Any, ...]

# Brackets and functions within one another; more is no answer.
DEEPEST = 40


class Unreadable(ValueError):
    """An answer is not of this grammar."""


FUNCTIONS = (
    "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|sqrt|log|ln|lg|exp|max|min|gcd|lcm|floor|ceil|abs"
)
_GREEK = (
    "alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|vartheta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau"
    "|upsilon|phi|varphi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Sigma|Phi|Psi|Omega|ell"
)
_BLANK = re.compile(r"(?:\s|~|\\[,;:! ]|\\(?:q?quad|displaystyle|limits|bigl?|bigr?|Bigl?|Bigr?)(?![a-zA-Z]))*")
_NUMBER = re.compile(
    r"(?P<whole>[0-9]*)(?:\.(?P<part>[0-9]*))?"
    r"(?:(?<=[.0-9])\\(?:overline|bar|dot)\{(?P<period>[0-9]+)\})?(?:(?<=[0-9.])[eE](?P<e>[+-]?[0-9]{1,6})(?![0-9.]))?"
)
_NAME = re.compile(rf"\\(?P<tex>[a-zA-Z]+)|(?P<plain>{FUNCTIONS}|pi|infty|infinity|inf|oo)(?![a-z])")
_LETTER = re.compile(r"[^\W\d_]")
_INFIX_RELATIONS = [
    (re.compile(pattern), sign)
    for pattern, sign in (
        (r"<=|\\leq?(?![a-z])|\\leqslant", "<="),
        (r">=|\\geq?(?![a-z])|\\geqslant", ">="),
        (r"!=|\\neq?(?![a-z])", "!="),
        (r"<|\\lt(?![a-z])", "<"),
        (r">|\\gt(?![a-z])", ">"),
        (r"==?", "="),
        (r"\\in(?![a-z])|∈", "in"),
    )
]
_SEPARATOR = re.compile(
    r"(?P<comma>[,;](?:\s*(?:and|or)(?![a-zA-Z]))?)|(?P<joint>(?:and|or)(?![a-zA-Z])|\\(?:vee|lor|wedge|land)(?![a-zA-Z]))"
)
_MODULO = re.compile(r"\\?b?mod(?![a-z])")
_DOTS = re.compile(r"\\(?:ldots|cdots|dots)(?![a-z])|\.\.\.|…")
_PARENTHESES = {"(": ")", "[": "]", r"\{": r"\}", r"\langle": r"\rangle", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
_MATRICES = re.compile(r"\\begin\{([pbBvV]?matrix|smallmatrix|array)\}(?:\s*\{[clr|]*\})?")


def read(text: str) -> Tree:
    r"""The tree of an answer.

    Raises:
      Unreadable: it is not of this grammar.

    >>> read("x = 3")
    ('relation', (('symbol', 'x'), '=', ('number', Fraction(3, 1), 0)))
    """
    reader = _Reader(text)
    tree = reader.items()
    reader.blank()
    if reader.place < len(text):
        raise Unreadable(text[reader.place :])
    return tree


def integer(n: int) -> Tree:
    return ("number", Fraction(n), 0)


class _Reader:
    """Reads on from `place`; each method takes what its name says and leaves the place behind it."""

    def __init__(self, text: str):
        self.text, self.place, self.depth, self.bars = text, 0, 0, 0

    def blank(self) -> None:
        m = _BLANK.match(self.text, self.place)
        self.place = m.end() if m else self.place

    def sees(self, *starts: str) -> str:
        """Which of these comes next, after blanks; "" for none."""
        self.blank()
        for start in starts:
            if self.text.startswith(start, self.place):
                after = self.text[self.place + len(start) : self.place + len(start) + 1]
                if not (start[0] == "\\" and start[-1].isalpha() and after.isalpha()):
                    return start
        return ""

    def takes(self, *starts: str) -> str:
        start = self.sees(*starts)
        self.place += len(start)
        return start

    def needs(self, start: str) -> None:
        if not self.takes(start):
            raise Unreadable(f"{start} at {self.text[self.place :]}")

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        self.blank()
        m = pattern.match(self.text, self.place)
        if m:
            self.place = m.end()
        return m

    def items(self, *ends: str) -> Tree:
        """One answer or a list of them: ``("list", joint, items)``, the joint "," or "and" or "or"."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise Unreadable("nested too deep")
        found, joints = [self.relation()], set()
        while m := self.match(_SEPARATOR):
            joint = m["joint"] or ("," if m["comma"] in ",;" else m["comma"].lstrip(",; "))
            joints.add({r"\vee": "or", r"\lor": "or", r"\wedge": "and", r"\land": "and"}.get(joint, joint))
            found.append(self.relation())
        self.depth -= 1
        if len(found) == 1:
            return found[0]
        if len(joints - {","}) > 1:
            raise Unreadable("and beside or")
        return ("list", next(iter(joints - {","}), ","), tuple(found))

    def relation(self) -> Tree:
        parts: list[Any] = [self.union()]
        while True:
            self.blank()
            for pattern, sign in _INFIX_RELATIONS:
                if self.match(pattern):
                    parts += [sign, self.union()]
                    break
            else:
                return parts[0] if len(parts) == 1 else ("relation", tuple(parts))

    def union(self) -> Tree:
        left = self.sum()
        while sign := self.takes(r"\cup", r"\cap", r"\setminus", "∪", "∩"):
            left = ({"∪": r"\cup", "∩": r"\cap"}.get(sign, sign)[1:], left, self.sum())
        return left

    def sum(self) -> Tree:
        left = self.signed()
        while sign := self.takes(r"\pm", r"\mp", "±", "∓", "+", "-"):
            right = self.product()
            left = _signed(sign, right, left)
        return left

    def signed(self) -> Tree:
        sign = self.takes(r"\pm", r"\mp", "±", "∓", "+", "-")
        if not sign:
            return self.product()
        self.depth += 1
        if self.depth > DEEPEST:
            raise Unreadable("nested too deep")
        tree = _signed(sign, self.signed() if self.sees("+", "-") else self.product())
        self.depth -= 1
        return tree

    def product(self) -> Tree:
        """Factors; one without a sign before it belongs to the divisor before it, but for a letter after 1/2."""
        left = self.factors()
        while True:
            if self.takes("*", r"\cdot", r"\times", r"\ast"):
                left = ("*", left, self.signed_factors())
            elif self.takes("/", r"\div"):
                right = self.signed_factor()
                while self.at_factor():
                    if _is_literal(left) and _is_literal(right):
                        left, right = ("/", left, right), None
                        left = ("*", left, self.factors())
                        break
                    right = ("*", right, self.power())
                left = left if right is None else ("/", left, right)
            elif self.match(_MODULO):
                left = ("function", "mod", (left, self.factors()))
            else:
                return left

    def signed_factors(self) -> Tree:
        return _signed("-", self.factors()) if self.takes("-") else self.factors()

    def signed_factor(self) -> Tree:
        return _signed("-", self.power()) if self.takes("-") else self.power()

    def factors(self) -> Tree:
        left = self.power()
        while self.at_factor():
            mixed = left[0] == "number" and left[1].denominator == 1 and self.mixed()
            left = ("+", left, mixed) if mixed else ("*", left, self.power())
        return left

    def mixed(self) -> Tree | None:
        r"""The fraction of a mixed number, ``3/4`` or ``\frac{3}{4}``; a number after a number is nothing else."""
        if m := self.match(re.compile(r"([0-9]+) ?/ ?([0-9]+)(?![0-9.])|\\frac ?\{([0-9]+)\} ?\{([0-9]+)\}")):
            return ("/", integer(int(m[1] or m[3])), integer(int(m[2] or m[4])))
        if m := self.match(re.compile(r"\\frac ?([0-9]) ?([0-9])(?![0-9.])")):
            return ("/", integer(int(m[1])), integer(int(m[2])))
        if self.text[self.place].isdigit():
            raise Unreadable("a number after a number")
        return None

    def at_factor(self) -> bool:
        self.blank()
        rest = self.text[self.place : self.place + 12]
        if not rest or rest[0] in "+-*/=<>,;)]}&!%^_:±∓∪∩∈" or rest[0] == "|" and self.bars:
            return False
        if rest[0] == "\\":
            name = re.match(r"\\([a-zA-Z]+|.)", rest)
            return name is not None and name[1] not in _NO_FACTOR
        return re.match(r"(?:and|or|mod)(?![a-zA-Z])", rest) is None

    def power(self) -> Tree:
        tree = self.atom()
        while True:
            if self.text.startswith("!", self.place) and not self.text.startswith("!=", self.place):
                self.place += 1
                double = self.takes("!")
                tree = ("function", "double_factorial" if double else "factorial", (tree,))
            elif self.takes("%"):
                tree = ("/", tree, integer(100))
            elif self.takes("°"):
                tree = ("*", tree, ("/", ("constant", "pi"), integer(180)))
            elif self.takes("**", "^"):
                tree = ("^", tree, self.exponent())
            else:
                return tree

    def exponent(self) -> Tree:
        """Powers of powers go from the right."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise Unreadable("nested too deep")
        self.blank()
        if self.takes("{"):
            tree = self.items()
            self.needs("}")
        elif self.takes("-"):
            tree = _signed("-", self.exponent())
        elif m := self.match(re.compile(r"[0-9]+(?:\.[0-9]+)?")):
            tree = ("number", Fraction(m[0]), len(m[0].partition(".")[2]))
            if "." not in m[0] and self.sees("!"):
                raise Unreadable("a factorial after a power")
        else:
            tree = self.atom()
        if self.takes("**", "^"):
            tree = ("^", tree, self.exponent())
        self.depth -= 1
        return tree

    def argument(self) -> Tree:
        """A command's argument: a group in braces, or one digit, letter or command."""
        self.blank()
        if self.takes("{"):
            tree = self.items()
            self.needs("}")
            return tree
        if m := self.match(re.compile("[0-9]")):
            return integer(int(m[0]))
        return self.atom()

    def atom(self) -> Tree:
        self.depth += 1
        if self.depth > DEEPEST:
            raise Unreadable("nested too deep")
        tree = self._atom()
        self.depth -= 1
        return tree

    def _atom(self) -> Tree:
        self.blank()
        if self.match(_DOTS):
            return ("dots",)
        if m := self.match(_MATRICES):
            return self.matrix(m[1])
        if opening := self.takes("(", "[", r"\{", r"\langle", r"\lfloor", r"\lceil", "{"):
            return self.bracketed(opening)
        if self.takes("|", r"\lvert", r"\vert"):
            self.bars += 1
            inside = self.sum()
            if not self.takes("|", r"\rvert", r"\vert"):
                raise Unreadable("a bar")
            self.bars -= 1
            return ("function", "abs", (inside,))
        if (m := self.match(_NUMBER)) and m[0] not in ("", "."):
            return self.number(m)
        if m := self.match(_NAME):
            return self.named(m["tex"] or m["plain"], m["tex"] is not None)
        if m := self.match(_LETTER):
            return self.symbol(m[0])
        raise Unreadable(self.text[self.place :])

    def number(self, m: re.Match[str]) -> Tree:
        whole, part, period = m["whole"] or "", m["part"] or "", m["period"] or ""
        value = Fraction(int(whole + part or "0"), 10 ** len(part))
        if period:
            value += Fraction(int(period), 10 ** len(part) * (10 ** len(period) - 1))
        e = int(m["e"] or 0)
        places = 0 if period else len(part)
        if self.text.startswith("_", self.place):
            if part or m["e"]:
                raise Unreadable("a base of a decimal")
            self.place += 1
            return self.based(whole)
        tree: Tree = ("number", value, places)
        return tree if not m["e"] else ("*", tree, ("^", integer(10), integer(e)))

    def based(self, digits: str) -> Tree:
        self.blank()
        if m := self.match(re.compile(r"\{\s*([0-9]{1,2})\s*\}|([0-9])")):
            base = int(m[1] or m[2])
            if base >= 2:
                return ("based", digits.lstrip("0") or "0", base)
        raise Unreadable("a base")

    def symbol(self, name: str) -> Tree:
        if name == "e" and not self.sees("_"):
            return ("constant", "e")
        if name == "i" and not self.sees("_"):
            return ("constant", "i")
        if self.takes("_"):
            inner = self.argument_text()
            name = f"{name}_{inner}"
        while self.text.startswith("'", self.place):
            self.place += 1
            name += "'"
        return ("symbol", name)

    def argument_text(self) -> str:
        if self.takes("{"):
            end, depth = self.place, 1
            while end < len(self.text) and depth:
                depth += {"{": 1, "}": -1}.get(self.text[end], 0)
                end += 1
            if depth:
                raise Unreadable("a brace")
            inner = self.text[self.place : end - 1]
            self.place = end
            return re.sub(r"\s|[{}]", "", inner)
        m = self.match(re.compile(r"[0-9a-zA-Z]|\\[a-zA-Z]+"))
        if not m:
            raise Unreadable("an index")
        return m[0]

    def bracketed(self, opening: str) -> Tree:
        bars, self.bars = self.bars, 0
        if opening == r"\{" and self.takes(r"\}"):
            self.bars = bars
            return ("set", ())
        tree = self.items()
        closing = self.takes(")", "]", r"\}", r"\rangle", r"\rfloor", r"\rceil", "}")
        self.bars = bars
        if opening in (r"\lfloor", r"\lceil"):
            if closing != _PARENTHESES[opening]:
                raise Unreadable("a bracket")
            return ("function", opening[2:], (tree,))
        items = tree[2] if tree[0] == "list" and tree[1] == "," else (tree,)
        if opening in (r"\{", "{"):
            if closing != {"{": "}"}.get(opening, r"\}"):
                raise Unreadable("a bracket")
            return ("set", items) if opening == r"\{" or len(items) > 1 else tree
        if closing not in (")", "]", r"\rangle") or (opening == r"\langle") != (closing == r"\rangle"):
            raise Unreadable("a bracket")
        if len(items) == 1:
            if _PARENTHESES[opening] != closing:
                raise Unreadable("a bracket")
            return tree
        if opening == r"\langle":
            opening, closing = "(", ")"
        if opening + closing not in ("()", "[]") and len(items) != 2:
            raise Unreadable("a bracket")
        return ("tuple", opening + closing, items)

    def matrix(self, kind: str) -> Tree:
        rows: list[tuple[Tree, ...]] = []
        while not self.sees(r"\end"):
            row = [self.sum()]
            while self.takes("&"):
                row.append(self.sum())
            rows.append(tuple(row))
            if not self.takes("\\\\"):
                break
            while self.takes("\\\\"):
                pass
        self.needs(r"\end")
        self.needs("{" + kind + "}")
        if len({len(row) for row in rows}) != 1:
            raise Unreadable("rows of a matrix")
        tree = ("matrix", tuple(rows))
        return ("function", "det", (tree,)) if kind in ("vmatrix", "Vmatrix") else tree

    def named(self, name: str, tex: bool) -> Tree:
        if name in ("frac", "dfrac", "tfrac", "cfrac"):
            above = self.argument()
            return ("/", above, self.argument())
        if name == "sqrt":
            return self.root()
        if name in ("binom", "dbinom", "tbinom"):
            above = self.argument()
            return ("function", "binom", (above, self.argument()))
        if name in ("pi", "infty", "infinity", "inf", "oo"):
            return ("constant", "pi" if name == "pi" else "infinity")
        if name in ("imath", "emptyset", "varnothing"):
            return ("constant", "i") if name == "imath" else ("set", ())
        if name == "mathbb":
            kind = self.match(re.compile(r"\{?\s*([A-Z])\s*\}?"))
            if not kind:
                raise Unreadable("a set of numbers")
            return ("numbers", kind[1])
        if name in ("sum", "prod"):
            return self.series(name)
        if name in FUNCTIONS.split("|"):
            return self.function(name)
        if tex and name in _GREEK.split("|"):
            return self.symbol("\\" + name)
        raise Unreadable(name)

    def root(self) -> Tree:
        degree: Tree = integer(2)
        if self.text.startswith("[", self.place):
            self.place += 1
            degree = self.sum()
            self.needs("]")
        if self.sees("("):
            self.takes("(")
            inside = self.sum()
            self.needs(")")
        else:
            inside = self.argument()
        return ("function", "root", (inside, degree))

    def series(self, name: str) -> Tree:
        """A sum or a product from one number to another."""
        self.needs("_")
        self.needs("{")
        start = self.relation()
        self.needs("}")
        self.needs("^")
        end = self.argument()
        body = self.product()
        if start[0] != "relation" or len(start[1]) != 3 or start[1][1] != "=" or start[1][0][0] not in _INDICES:
            raise Unreadable("what a sum begins with")
        index = start[1][0]
        if index[0] == "constant":  # i or e, which are names here
            index, body = ("symbol", index[1]), _replaced(body, index, ("symbol", index[1]))
        return (name, index, start[1][2], end, body)

    def function(self, name: str) -> Tree:
        base = power = None
        while sign := self.takes("_", "^"):
            if sign == "_":
                base = self.argument()
            else:
                power = self.exponent_of_function()
        if base is not None and name not in ("log",):
            raise Unreadable("an index of a function")
        if self.takes("("):
            inside = self.items()
            self.needs(")")
            arguments = inside[2] if inside[0] == "list" and inside[1] == "," else (inside,)
        elif self.sees("{"):
            arguments = (self.argument(),)
        else:
            inside = self.signed_factor()
            while self.at_factor() and not self.at_function():
                inside = ("*", inside, self.power())
            arguments = (inside,)
        if (len(arguments) > 1) != (name in ("max", "min", "gcd", "lcm")):
            raise Unreadable("arguments")
        if power == integer(-1):
            inverse = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}.get(name)
            if inverse is None:
                raise Unreadable("an inverse function")
            return ("function", inverse, arguments)
        tree: Tree = ("function", name, arguments if base is None else (*arguments, base))
        return tree if power is None else ("^", tree, power)

    def exponent_of_function(self) -> Tree:
        tree = self.argument() if not self.takes("-") else _signed("-", self.argument())
        return integer(-1) if tree == ("-", integer(1)) else tree

    def at_function(self) -> bool:
        return re.match(rf"\\?(?:{FUNCTIONS})(?![a-z])", self.text[self.place :]) is not None and not self.sees(
            r"\sqrt", "sqrt"
        )


_INDICES = ("symbol", "constant")
# Commands that end a product.
_NO_FACTOR = set(
    "} rangle rfloor rceil rvert vert pm mp cdot times ast div cup cap setminus le leq leqslant ge geq geqslant ne neq"
    " lt gt in vee lor wedge land bmod mod end \\ to equiv approx sim ldots cdots dots pmod".split()
)


def _replaced(tree: Any, old: Tree, new: Tree) -> Any:
    if tree == old or not isinstance(tree, tuple):
        return new if tree == old else tree
    return tuple(_replaced(x, old, new) for x in tree)


def _signed(sign: str, tree: Tree, left: Tree | None = None) -> Tree:
    """``+ tree`` or ``left + tree``, for each sign."""
    kind = {r"\pm": "pm", r"\mp": "mp", "±": "pm", "∓": "mp"}.get(sign, sign)
    if left is not None:
        return (kind, left, tree)
    return tree if kind == "+" else (kind, tree)


def _is_literal(tree: Tree | None) -> bool:
    return tree is not None and tree[0] == "number"
