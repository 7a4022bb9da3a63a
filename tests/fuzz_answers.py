r"""A fuzzer of `check_answer` over the grammar of answers.

    python tests/fuzz_answers.py --cases 100000 --seed 0

Each case is a gold answer and a given one. Half are rewritten into an equal one and must be right; in the other half one
number, bracket or name is changed and they must be wrong. Which of the two it is follows from how a case is made: from
integers and fractions, and in the kind "expression" from values of 80 digits at several points. sympy and math-verify
have no part in it. ``--math-verify`` tries these cases on math-verify, too.
"""

# ruff: noqa: E501  one line for each table of spellings

import argparse
import itertools
import json
import math
import random
import signal
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from decimal import Decimal, localcontext
from fractions import Fraction


@dataclass(frozen=True)
class Case:
    """One comparison; the rule says how the given answer was made from the gold one."""

    kind: str
    rule: str
    gold: str
    given: str
    right: bool


# What a generator gives: a gold answer, equal ones by rule, and wrong ones by rule.
Spelled = tuple[str, dict[str, str], dict[str, str]]
KINDS = {}


def kind(function):
    KINDS[function.__name__] = function
    return function


def frac(x, r=None):
    x = Fraction(x)
    if x.denominator == 1:
        return str(x.numerator)
    form = r.randrange(3) if r else 0
    sign, n, d = "-" * (x < 0), abs(x.numerator), x.denominator
    return (rf"{sign}\frac{{{n}}}{{{d}}}", rf"{sign}\dfrac{{{n}}}{{{d}}}", f"{sign}{n}/{d}")[form]


def fraction(r, low=2, high=12):
    x = Fraction(r.randint(1, 60), r.randint(low, high))
    while x.denominator == 1:
        x = Fraction(r.randint(1, 60), r.randint(low, high))
    return x


def changed(r, n):
    """Another integer, near it."""
    return n + r.choice((-2, -1, 1, 2, 10))


def decimal_of(x, digits=30):
    """A fraction that has an end, as a decimal."""
    with localcontext() as context:
        context.prec = digits
        return f"{Decimal(x.numerator) / Decimal(x.denominator):f}"


@kind
def integers(r) -> Spelled:
    n = r.choice((r.randint(-99, 99), r.randint(100, 99_999), r.randint(10**5, 10**12)))
    a = r.randint(1, 50)
    equal = {
        "grouped": f"{n:,}", "braced comma": f"{n:,}".replace(",", "{,}"), "point": f"{n}.0", "text": rf"\text{{{n}}}",
        "sum": f"{n - a}+{a}", "difference": f"{n + a}-{a}", "quotient": rf"\frac{{{n * a}}}{{{a}}}",
        "dollars": f"${n}$", "bold": f"**{n}**", "zeros": f"00{n}" if n > 0 else str(n), "stop": f"{n}.",
    }  # fmt: skip
    m = changed(r, n)
    wrong = {
        "number": str(m), "a digit more": f"{n}{r.randint(0, 9)}" if n else "10", "sum": f"{n - a}+{a + 1}",
        "sign": str(-n) if n else "1", "fraction more": f"{n}.5", "root more": rf"{n or 1}\sqrt{{3}}",
    }  # fmt: skip
    return str(n), equal, wrong


@kind
def fractions(r) -> Spelled:
    x = fraction(r) * r.choice((1, -1))
    k, a = r.randint(2, 9), fraction(r)
    n, d = x.numerator, x.denominator
    equal = {
        "slash": f"{n}/{d}", "expanded": rf"\frac{{{n * k}}}{{{d * k}}}", "sign inside": rf"\frac{{{n}}}{{{d}}}",
        "sum": f"{frac(x - a)}+{frac(a)}", "product": rf"{n}\cdot\frac{{1}}{{{d}}}", "negative power": rf"{n}\cdot {d}^{{-1}}",
    }  # fmt: skip
    digits = r.randint(7, 15)
    if set(str(d)) and pow(10, 40, d) == 0:
        equal["decimal"] = decimal_of(x)
    else:
        with localcontext() as context:
            context.prec = digits
            equal["rounded decimal"] = f"{Decimal(n) / Decimal(d):f}"
    wrong = {
        "numerator": rf"\frac{{{changed(r, n)}}}{{{d}}}", "denominator": rf"\frac{{{n}}}{{{d + 1}}}",
        "turned": rf"\frac{{{d}}}{{{n}}}" if abs(n) != d else "2", "numerator alone": str(n), "sign": frac(-x),
        "few digits": f"{n / d:.2f}" if Fraction(f"{n / d:.2f}") != x else str(n),
    }  # fmt: skip
    return frac(x), equal, wrong


@kind
def decimals(r) -> Spelled:
    places = r.randint(1, 6)
    n = r.randint(1, 10 ** r.randint(2, 7)) * 10 + r.randint(1, 9)
    x = Fraction(n, 10**places)
    text = decimal_of(x)
    equal = {"zeros": text + "00", "fraction": f"{n}/{10**places}", "reduced": frac(x), "scientific": f"{n}e-{places}"}
    m = changed(r, n)
    wrong = {
        "digit": decimal_of(Fraction(m, 10**places)), "point": decimal_of(x / 10), "digit more": text + "1",
        "cut": decimal_of(Fraction(n // 10, 10 ** (places - 1))) if places > 1 else str(n),
    }  # fmt: skip
    return text, equal, wrong


@kind
def repeating(r) -> Spelled:
    period = str(r.randint(1, 98)).zfill(2) if r.random() < 0.7 else str(r.randint(1, 8))
    start = r.choice(("", str(r.randint(0, 9))))
    whole = r.randint(0, 9)
    x = whole + Fraction(int(start or 0), 10 ** len(start))
    x += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(start))
    text = rf"{whole}.{start}\overline{{{period}}}"
    other = rf"{whole}.{start}\overline{{{str((int(period) + 1) % 10 ** len(period)).zfill(len(period))}}}"
    equal = {"fraction": frac(x), "digits": f"{whole}.{start}" + (period * 9)[:16]}
    if x.denominator in (1, 2, 4, 5, 8, 10, 20, 25, 40, 50):
        equal.pop("digits")
    return text, equal, {"period": other, "cut": f"{whole}.{start}{period}", "fraction": frac(x + Fraction(1, 99))}


@kind
def mixed_numbers(r) -> Spelled:
    whole, part = r.randint(1, 20), Fraction(r.randint(1, 11), 12)
    n, d = part.numerator, part.denominator
    gold = frac(whole + part)
    equal = {
        "blank": f"{whole} {n}/{d}",
        "frac": rf"{whole}\frac{{{n}}}{{{d}}}",
        "sum": rf"{whole}+\frac{{{n}}}{{{d}}}",
    }
    wrong = {
        "whole": f"{whole + 1} {n}/{d}", "part": f"{whole} {n}/{d + 1}", "whole only": str(whole),
        "joined": f"{whole}{n}/{d}", "other part": rf"{whole}\frac{{{n + 1}}}{{{d}}}",
    }  # fmt: skip
    return gold, equal, wrong


@kind
def scientific(r) -> Spelled:
    m, e = r.randint(101, 999), r.choice((r.randint(3, 30), -r.randint(3, 30), r.randint(100, 300)))
    text = f"{m // 100}.{m % 100:02d}"

    def spelled(m, e, r):
        text = f"{m // 100}.{m % 100:02d}"
        return r.choice((rf"{text} \times 10^{{{e}}}", rf"{text}\cdot 10^{{{e}}}", f"{text}*10^{{{e}}}", f"{text}E{e}",
                         f"{text} × 10^{{{e}}}"))  # fmt: skip

    equal = {"spelling": spelled(m, e, r), "shifted": rf"{m}\times 10^{{{e - 2}}}", "letter": f"{text}e{e}"}
    if abs(e) < 20:
        x = Fraction(m, 100) * Fraction(10) ** e
        equal["digits"] = str(x) if x.denominator == 1 else decimal_of(x)
    wrong = {"exponent": spelled(m, e + r.choice((-1, 1)), r), "mantissa": spelled(m + r.choice((-1, 1)), e, r),
             "sign": spelled(m, -e, r)}  # fmt: skip
    return r.choice((f"{text}e{e}", rf"{text} \times 10^{{{e}}}")), equal, wrong


@kind
def factorials(r) -> Spelled:
    n, k = r.randint(6, 400), r.randint(1, 3)
    product = math.prod(range(n - k + 1, n + 1))
    if r.random() < 0.5:
        gold = rf"\frac{{1}}{{{n}!}}"
        equal = {"next": rf"\frac{{{n + 1}}}{{{n + 1}!}}", "slash": f"1/{n}!", "power": rf"({n}!)^{{-1}}",
                 "before": rf"\frac{{1}}{{{n} \cdot {n - 1}!}}"}  # fmt: skip
        wrong = {"number": rf"\frac{{1}}{{{n + r.randint(1, 3)}!}}", "numerator": rf"\frac{{2}}{{{n}!}}", "zero": "0",
                 "next": rf"\frac{{{n + 2}}}{{{n + 1}!}}", "negative": rf"-\frac{{1}}{{{n}!}}"}  # fmt: skip
        return gold, equal, wrong
    gold = rf"\frac{{{n}!}}{{{n - k}!}}"
    equal = {"product": str(product), "binomial": rf"\binom{{{n}}}{{{k}}} \cdot {k}!", "next": f"{n}!/{n - k}!"}
    return gold, equal, {"number": str(changed(r, product)), "factorial": rf"\frac{{{n}!}}{{{n - k - 1}!}}"}


@kind
def powers(r) -> Spelled:
    a, b, k = r.randint(2, 9), r.randint(20, 1200), r.randint(2, 9)
    if r.random() < 0.5:
        gold = rf"\frac{{1}}{{{a}^{{{b}}}}}"
        equal = {"negative": rf"{a}^{{-{b}}}", "next": rf"\frac{{{a}}}{{{a}^{{{b + 1}}}}}",
                 "split": rf"\frac{{1}}{{{a}^{{{k}}}\cdot {a}^{{{b - k}}}}}"}  # fmt: skip
        wrong = {"exponent": rf"\frac{{1}}{{{a}^{{{b + 1}}}}}", "base": rf"\frac{{1}}{{{a + 1}^{{{b}}}}}", "zero": "0",
                 "sign": rf"-{a}^{{-{b}}}", "numerator": rf"\frac{{2}}{{{a}^{{{b}}}}}"}  # fmt: skip
        return gold, equal, wrong
    gold = rf"\frac{{{a}^{{{b}}}+1}}{{{k} \cdot {a}^{{{b + 1}}}}}"
    equal = {"split": rf"\frac{{1}}{{{k * a}}}+\frac{{1}}{{{k}\cdot {a}^{{{b + 1}}}}}",
             "negative": rf"\frac{{1 + {a}^{{-{b}}}}}{{{k * a}}}"}  # fmt: skip
    wrong = {"part": rf"\frac{{1}}{{{k * a}}}", "sign": rf"\frac{{{a}^{{{b}}}-1}}{{{k} \cdot {a}^{{{b + 1}}}}}",
             "exponent": rf"\frac{{{a}^{{{b}}}+1}}{{{k} \cdot {a}^{{{b + 2}}}}}"}  # fmt: skip
    return gold, equal, wrong


SQUAREFREE = (2, 3, 5, 6, 7, 10, 11, 13, 15)


@kind
def roots(r) -> Spelled:
    """``c + a sqrt(b)``, with b free of squares, so that (c, a, b) is the number."""
    a, b, c = r.randint(1, 9), r.choice(SQUAREFREE), r.randint(1, 20)
    if r.random() < 0.5:
        gold = rf"{a if a > 1 else ''}\sqrt{{{b}}}"
        equal = {"inside": rf"\sqrt{{{a * a * b}}}", "power": rf"{a} \cdot {b}^{{1/2}}", "plain": f"{a}*sqrt({b})",
                 "below": rf"\frac{{{a * b}}}{{\sqrt{{{b}}}}}", "short": rf"{a}\sqrt {b}" if b < 10 else gold}  # fmt: skip
        others = [x for x in SQUAREFREE if x != b]
        wrong = {"inside": rf"{a}\sqrt{{{r.choice(others)}}}", "before": rf"{a + 1}\sqrt{{{b}}}", "root left out": str(a * b),
                 "square": rf"\sqrt{{{a * a * b + 1}}}", "cube": rf"{a}\sqrt[3]{{{b}}}"}  # fmt: skip
        return gold, equal, wrong
    gold, norm = rf"{c}+{a}\sqrt{{{b}}}", c * c - a * a * b
    equal = {"order": rf"{a}\sqrt{{{b}}}+{c}", "conjugate": rf"\frac{{{norm}}}{{{c}-{a}\sqrt{{{b}}}}}",
             "halves": rf"\frac{{{2 * c}+{2 * a}\sqrt{{{b}}}}}{{2}}",
             "nested": rf"\sqrt{{{c * c + a * a * b}+{2 * a * c}\sqrt{{{b}}}}}"}  # fmt: skip
    wrong = {"sign": rf"{c}-{a}\sqrt{{{b}}}", "number": rf"{c + 1}+{a}\sqrt{{{b}}}", "part": rf"{a}\sqrt{{{b}}}",
             "nested": rf"\sqrt{{{c * c + a * a * b}+{2 * a * c + 1}\sqrt{{{b}}}}}"}  # fmt: skip
    return gold, equal, wrong


@kind
def constants(r) -> Spelled:
    """``x name + y`` with rational x and y and a name that is no algebraic number."""
    x, y = fraction(r), r.randint(1, 20)
    name, other = r.choice(((r"\pi", "e"), ("e", r"\pi"), (r"\ln 2", r"\ln 3")))
    n, d = x.numerator, x.denominator
    gold = rf"{y} + \frac{{{n}{name}}}{{{d}}}"
    equal = {"order": rf"\frac{{{n}}}{{{d}}} {name} + {y}", "one fraction": rf"\frac{{{y * d} + {n}{name}}}{{{d}}}"}
    if name == "e":
        equal["roman"] = rf"{y} + \frac{{{n}\mathrm{{e}}}}{{{d}}}"
    if name == r"\ln 2":
        equal["power"] = rf"{y} + \frac{{\ln {2**n if n < 40 else 2}}}{{{d}}}" if n < 40 else gold
    wrong = {"sign": rf"{y} - \frac{{{n}{name}}}{{{d}}}", "number": rf"{y} + \frac{{{n + 1}{name}}}{{{d}}}",
             "other": rf"{y} + \frac{{{n}{other}}}{{{d}}}", "part": str(y), "few digits": f"{y + n / d * 3.14:.2f}"}  # fmt: skip
    return gold, equal, wrong


# Of angles in degrees: the sine, and whether it is known by which radicals; the cosine is of 90 degrees less.
SINES = {0: "0", 30: r"\frac{1}{2}", 45: r"\frac{\sqrt{2}}{2}", 60: r"\frac{\sqrt{3}}{2}", 90: "1",
         15: r"\frac{\sqrt{6}-\sqrt{2}}{4}", 75: r"\frac{\sqrt{6}+\sqrt{2}}{4}"}  # fmt: skip


@kind
def trigonometry(r) -> Spelled:
    angle = r.choice(list(SINES))
    other = r.choice([x for x in SINES if x != angle])
    turns = Fraction(angle, 180)
    equal = {"degrees": rf"\sin {angle}^\circ", "radians": rf"\sin\left({frac(turns)}\pi\right)",
             "cosine": rf"\cos({90 - angle}^\circ)", "supplement": rf"\sin({180 - angle}^\circ)"}  # fmt: skip
    wrong = {"angle": rf"\sin {other}^\circ", "value": SINES[other],
             "cosine": rf"\cos({90 - other}^\circ)"}  # fmt: skip
    return SINES[angle], equal, wrong


def times(p, q):
    """The product of polynomials {(power of x, power of y): coefficient}."""
    product = Counter()
    for (a, b), (c, d) in itertools.product(p, q):
        product[a + c, b + d] += p[a, b] * q[c, d]
    return {m: c for m, c in product.items() if c}


def polynomial(p, r=None, names="xy"):
    terms = sorted(p, reverse=True)
    if r:
        r.shuffle(terms)
    text = ""
    for m in terms:
        c = p[m]
        letters = "".join(f"{n}^{{{e}}}" if e > 1 else n * e for n, e in zip(names, m, strict=True))
        number = "" if abs(c) == 1 and letters else frac(abs(c))
        text += (" - " if c < 0 else " + " if text else "") + number + letters
    return text.strip() or "0"


def linear(r):
    return {m: c for m, c in (((1, 0), r.randint(1, 5)), ((0, 1), r.choice((0, r.randint(-4, 4)))),
                              ((0, 0), r.randint(-9, 9))) if c}  # fmt: skip


@kind
def polynomials(r) -> Spelled:
    names = r.choice(("xy", "ab", "nk", "tu"))
    factors = [linear(r) for _ in range(r.randint(1, 3))]
    p = {(0, 0): 1}
    for f in factors:
        p = times(p, f)
    k = r.randint(2, 5)
    m = r.choice(list(p))
    q = {**p, m: p[m] + r.choice((-1, 1, 2))}
    q = {m: c for m, c in q.items() if c} or {(0, 0): 1}
    equal = {"order": polynomial(p, r, names), "factors": "".join(f"({polynomial(f, r, names)})" for f in factors),
             "fraction": rf"\frac{{{polynomial({m: c * k for m, c in p.items()}, r, names)}}}{{{k}}}"}  # fmt: skip
    other = dict(factors[0])
    other[1, 0] += 1
    wrong = {"coefficient": polynomial(q, r, names),
             "factor": "".join(f"({polynomial(f, r, names)})" for f in (other, *factors[1:])),
             "sign": f"-({polynomial(p, r, names)})", "names": polynomial(p, None, "vw")}  # fmt: skip
    return polynomial(p, None, names), equal, wrong


@kind
def rational_functions(r) -> Spelled:
    a, b, k = r.randint(1, 9), r.randint(10, 19), r.randint(2, 7)
    if r.random() < 0.5:
        gold = rf"\frac{{x+{a}}}{{{k}}}"
        equal = {"split": rf"\frac{{x}}{{{k}}}+\frac{{{a}}}{{{k}}}", "slash": f"(x+{a})/{k}",
                 "product": rf"\frac{{1}}{{{k}}}(x+{a})"}  # fmt: skip
        return gold, equal, {"part": rf"\frac{{x}}{{{k}}}+{a}", "number": rf"\frac{{x+{a + 1}}}{{{k}}}"}
    gold = rf"\frac{{1}}{{x+{a}}}+\frac{{1}}{{x+{b}}}"
    equal = {
        "joined": rf"\frac{{2x+{a + b}}}{{(x+{a})(x+{b})}}",
        "expanded": rf"\frac{{2x+{a + b}}}{{x^2+{a + b}x+{a * b}}}",
    }
    return (
        gold,
        equal,
        {"joined": rf"\frac{{2x+{a + b + 1}}}{{(x+{a})(x+{b})}}", "sign": rf"\frac{{1}}{{x+{a}}}-\frac{{1}}{{x+{b}}}"},
    )


@kind
def complex_numbers(r) -> Spelled:
    a, b, c, d = (r.randint(1, 9) for _ in range(4))
    x, y = a * c - b * d, a * d + b * c  # y > 0
    gold = f"{x}+{y}i"
    equal = {"order": f"{y}i{x:+d}" if x else f"{y}i", "product": f"({a}+{b}i)({c}+{d}i)",
             "quotient": rf"\frac{{{2 * x}+{2 * y}i}}{{2}}"}  # fmt: skip
    wrong = {
        "conjugate": f"{x}-{y}i",
        "part": str(x),
        "number": f"{x + 1}+{y}i",
        "product": f"({a}+{b}i)({c}+{d + 1}i)",
    }
    return gold, equal, wrong


@kind
def named_values(r) -> Spelled:
    """An equation counts as its last side only where its first is a name or a computation."""
    n, a, k = r.randint(2, 99), r.randint(1, 9), r.randint(2, 9)
    name = r.choice(("x", "n", "y_1", r"\theta", "k", "A", "S_n", r"\alpha"))
    gold = r.choice((str(n), f"{name}={n}"))
    equal = {"name": f"{name} = {n}", "turned": f"{n} = {name}", "chain": f"{name} = {n + a} - {a} = {n}",
             "computation": f"{n - a}+{a} = {n}"}  # fmt: skip
    if gold == str(n):
        equal["sum of names"] = f"p+q = {n - 1}+1 = {n}"
    wrong = {"factor": f"{k}{name} = {n}", "power": f"{name}^{k} = {n}", "difference": f"{name} - {n} = 0",
             "sum": f"{name}+{a} = {n}", "two names": f"y - x = {n}", "number": f"{name} = {n + 1}",
             "computation": f"{n - a}+{a + 1} = {n}", "quotient": rf"\frac{{{name}}}{{{k}}} = {n}",
             "root": rf"\sqrt{{{name}}} = {n}", "chain": f"{name} = {n + a} - {a + 1} = {n}",
             "several": f"{name} = {n}k", "factorial": f"{name}! = {n}"}  # fmt: skip
    return gold, equal, wrong


@kind
def equations(r) -> Spelled:
    a, b, c, k = r.randint(1, 9), r.randint(1, 9), r.randint(1, 20), r.choice((-3, -2, -1, 2, 3))

    def line(p, q, s, right="0"):
        return f"{p}x{q:+d}y{s:+d}={right}"

    if r.random() < 0.3:
        gold = rf"\frac{{x^2}}{{{a + 1}}}+\frac{{y^2}}{{{b + 10}}}=1"
        equal = {
            "multiple": f"{b + 10}x^2+{a + 1}y^2={(a + 1) * (b + 10)}",
            "order": rf"\frac{{y^2}}{{{b + 10}}}+\frac{{x^2}}{{{a + 1}}}=1",
        }
        wrong = {"number": rf"\frac{{x^2}}{{{a + 2}}}+\frac{{y^2}}{{{b + 10}}}=1", "sign": rf"\frac{{x^2}}{{{a + 1}}}-\frac{{y^2}}{{{b + 10}}}=1",
                 "multiples": rf"\frac{{x^2}}{{{(a + 1) * 4}}}+\frac{{y^2}}{{{(b + 10) * 4}}}=1"}  # fmt: skip
        return gold, equal, wrong
    gold = line(a, b, c)
    equal = {"multiple": line(a * k, b * k, c * k), "other side": f"{a}x+{b}y={-c}", "turned": f"0={a}x+{b}y+{c}",
             "solved": f"y = {frac(Fraction(-a, b))}x {'-' if c > 0 else '+'} {frac(Fraction(c, b))}"}  # fmt: skip
    wrong = {"coefficient": line(a + 1, b, c), "constant": line(a, b, c + 1), "sign": line(a, -b, c),
             "side": f"{a}x+{b}y={c}", "solved": f"y = {frac(Fraction(a, b))}x - {frac(Fraction(c, b))}",
             "no equation": f"{a}x+{b}y+{c}"}  # fmt: skip
    return gold, equal, wrong


def in_base(n, base):
    digits = ""
    while n:
        digits = "0123456789ABCDEF"[n % base] + digits
        n //= base
    return digits or "0"


@kind
def bases(r) -> Spelled:
    base = r.randint(2, 9)
    n = r.randint(10, 5000)
    digits = in_base(n, base)
    words = ("two", "three", "four", "five", "six", "seven", "eight", "nine")
    equal = {"index": f"{digits}_{base}", "braces": f"{digits}_{{{base}}}", "text": rf"{digits}_{{\text{{{words[base - 2]}}}}}",
             "after": f"{digits} (base {base})", "zeros": f"0{digits}_{{{base}}}"}  # fmt: skip
    wrong = {"digits": f"{in_base(n + 1, base)}_{{{base}}}", "base": f"{digits}_{{{base + 1}}}", "no base": digits,
             "in ten": str(n)}  # fmt: skip
    return f"{digits}_{{{base}}}", equal, wrong


UNITS = (("cm", "centimeters"), ("m", "meters"), ("kg", "kilograms"), ("km/h", "km/h"), ("cm^2", "square centimeters"),
         ("m^3", "cubic meters"), ("inches", "inches"), ("hours", "hours"), ("degrees", "degrees"))  # fmt: skip


@kind
def units(r) -> Spelled:
    short, long = r.choice(UNITS)
    others = [x for pair in UNITS for x in pair if x not in (short, long) and not (x == "m" and "m" in short)]
    x = r.choice((Fraction(r.randint(2, 500)), fraction(r)))
    name, _, power = short.partition("^")
    text = rf"\text{{ {name}}}" + (f"^{power}" if power else "")
    gold = frac(x) + text
    equal = {"none": frac(x, r), "text": frac(x, r) + text, "long": f"{frac(x, r)} {long}",
             "braces": frac(x) + rf"\ \mathrm{{{name}}}" + (f"^{{{power}}}" if power else "")}  # fmt: skip
    wrong = {"unit": f"{frac(x)} {r.choice(others)}", "number": frac(x + 1) + text, "number alone": frac(x + 1)}
    return gold, equal, wrong


@kind
def money(r) -> Spelled:
    cents = r.randint(1, 999_999)
    text, whole = f"{cents // 100}.{cents % 100:02d}", f"{cents // 100:,}.{cents % 100:02d}"
    equal = {
        "plain": text,
        "sign": f"${text}",
        "escaped": rf"\${whole}",
        "word": f"{whole} dollars",
        "fraction": f"{cents}/100",
    }
    wrong = {"number": f"${(cents + 1) // 100}.{(cents + 1) % 100:02d}", "cents": f"{text} cents", "other": f"€{text}"}
    return rf"\${text}", equal, wrong


@kind
def percents(r) -> Spelled:
    n, places = r.randint(1, 9999), r.randint(0, 2)
    x = Fraction(n, 10**places)
    text = decimal_of(x)
    equal = {
        "number": text,
        "word": f"{text} percent",
        "sign": f"{text}%",
        "part": decimal_of(x / 100),
        "fraction": frac(x / 100),
    }
    wrong = {"number": decimal_of(x + Fraction(1, 10**places)) + r"\%", "of it": decimal_of(x / 100) + r"\%",
             "times ten": decimal_of(x * 10), "part": decimal_of(x / 10)}  # fmt: skip
    return text + r"\%", equal, wrong


def elements(r, n):
    """Numbers of which no two are the same, with their spellings."""
    found = {}
    while len(found) < n:
        if r.random() < 0.25:
            a, b = r.randint(1, 5), r.choice(SQUAREFREE)
            found["root", a, b] = (rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b}}}")
        elif r.random() < 0.4:
            x = fraction(r) * r.choice((1, -1))
            found["rational", x, 1] = (frac(x), f"{x.numerator * 2}/{x.denominator * 2}")
        else:
            x = r.randint(-30, 60)
            found["rational", Fraction(x), 1] = (str(x), f"{x}.0")
    return list(found.values())


@kind
def collections(r) -> Spelled:
    n = r.randint(2, 5)
    items, extra = elements(r, n + 1)[:n], r.randint(100, 200)
    first = [x for x, _ in items]
    second = [r.choice(x) for x in items]
    order = second[:]
    r.shuffle(order)
    i = r.randrange(n)
    other = [str(extra) if j == i else x for j, x in enumerate(second)]
    less = [x for j, x in enumerate(second) if j != i]
    swapped = [second[-1], *second[1:-1], second[0]]
    join = ", ".join
    form = r.choice(("set", "list", "tuple"))
    if form == "tuple":
        equal = {"entries": f"({join(second)})", "left": rf"\left( {join(second)} \right)", "none": join(second)}
        wrong = {"entry": f"({join(other)})", "order": f"({join(swapped)})", "set": rf"\{{{join(second)}\}}"}
        if n > 2:
            wrong["left out"] = f"({join(less)})"
        return f"({join(first)})", equal, wrong
    words = f"{join(order[:-1])} and {order[-1]}"
    if form == "set":
        equal = {"order": rf"\{{{join(order)}\}}", "left": rf"\left\{{ {join(order)} \right\}}", "list": join(order),
                 "twice": rf"\{{{join([*order, order[0]])}\}}"}  # fmt: skip
        wrong = {"element": rf"\{{{join(other)}\}}", "more": rf"\{{{join([*second, str(extra)])}\}}",
                 "left out": rf"\{{{join(less)}\}}", "tuple": f"({join(second)})"}  # fmt: skip
        return rf"\{{{join(first)}\}}", equal, wrong
    names = rf"{first[0]} \text{{ and }} {first[1]}" if n == 2 else rf"{join(first[:-1])}, \text{{ and }} {first[-1]}"
    equal = {"order": join(order), "and": words, "set": rf"\{{{join(order)}\}}", "semicolons": "; ".join(second),
             "or": " or ".join(order), "name": f"n = {join(order)}"}  # fmt: skip
    wrong = {"element": join(other), "left out": join(less), "more": join([*second, str(extra)]), "one": second[0]}
    return r.choice((join(first), names, f"n = {join(first)}")), equal, wrong


@kind
def points(r) -> Spelled:
    a, b = r.sample(range(-20, 21), 2)
    gold = r.choice((f"(p,q)=({a},{b})", f"p={a}, q={b}"))
    equal = {"pair": f"({a},{b})", "names": f"(p,q)=({a}, {b})", "each": rf"p={a} \text{{ and }} q={b}", "turned": f"q={b}, p={a}",
             "names turned": f"(q, p) = ({b}, {a})"}  # fmt: skip
    wrong = {"order": f"({b},{a})", "each": f"p={b}, q={a}", "number": f"({a},{b + 1 if b + 1 != a else b + 2})", "one": f"p={a}",
             "names": f"(p,r)=({a},{b})"}  # fmt: skip
    return gold, equal, wrong


@kind
def lists_of_tuples(r) -> Spelled:
    rows = [tuple(r.sample(range(1, 40), r.choice((2, 3)))) for _ in range(r.randint(2, 3))]
    while len(set(rows)) < len(rows):
        rows = [tuple(r.sample(range(1, 40), 2)) for _ in range(2)]
    text = ", ".join(f"({', '.join(map(str, row))})" for row in rows)
    order = rows[1:] + rows[:1]
    turned = [rows[0][::-1], *rows[1:]]
    other = [(*rows[0][:-1], rows[0][-1] + 50), *rows[1:]]
    cut = [rows[0][:-1], *rows[1:]]

    def spelled(rows):
        return ",".join(f"({','.join(map(str, row))})" for row in rows)

    wrong = {"entry": spelled(other), "left out": spelled(rows[1:]), "cut": spelled(cut).replace("()", "(0)")}
    if sorted(turned) != sorted(rows):
        wrong["turned"] = spelled(turned)
    return text, {"order": spelled(order), "blanks": spelled(rows), "set": rf"\{{{spelled(order)}\}}"}, wrong


@kind
def matrices(r) -> Spelled:
    rows, columns = r.randint(1, 3), r.randint(2, 3)
    cells = [[r.choice((Fraction(r.randint(-9, 9)), fraction(r))) for _ in range(columns)] for _ in range(rows)]

    def spelled(cells, name="pmatrix", end="", r=None):
        lines = r"\\".join("&".join(frac(x, r) for x in row) for row in cells)
        return rf"\begin{{{name}}}{lines}{end}\end{{{name}}}"

    i, j = r.randrange(rows), r.randrange(columns)
    other = [[x + 1 if (a, b) == (i, j) else x for b, x in enumerate(row)] for a, row in enumerate(cells)]
    turned = [list(x) for x in zip(*cells, strict=True)]
    k = r.randint(2, 5)
    equal = {"brackets": spelled(cells, "bmatrix", r=r), "last line": spelled(cells, end=r"\\", r=r),
             "parentheses": f"({spelled(cells)})", "array": spelled(cells, "array").replace("{array}", "{array}{" + "c" * columns + "}", 1),
             "factor": rf"\frac{{1}}{{{k}}}" + spelled([[x * k for x in row] for row in cells]), "name": "A = " + spelled(cells),
             "blanks": spelled(cells).replace("&", " & ").replace(r"\\", r" \\ ")}  # fmt: skip
    wrong = {
        "entry": spelled(other),
        "column less": spelled([row[:-1] for row in cells]),
        "factor": "2" + spelled(other),
    }
    if turned != cells:
        wrong["turned"] = spelled(turned)
    if rows == columns:
        wrong["determinant"] = spelled(cells, "vmatrix")
    return spelled(cells), equal, wrong


def interval(low, high, ends):
    return f"{ends[0]}{low}, {high}{ends[1]}"


@kind
def intervals(r) -> Spelled:
    a = r.randint(-9, 9)
    b = a + r.randint(1, 9)
    low, high = r.choice("(["), r.choice(")]")
    signs = {"(": "<", ")": "<", "[": r"\le ", "]": r"\le "}
    x = f"{a}{signs[low]}x{signs[high]}{b}"
    other = interval(a, b, ("[" if low == "(" else "(") + high)
    form = r.randrange(4)
    if form == 0:
        gold = interval(a, b, low + high)
        equal = {
            "inequality": x,
            "left": rf"\left{low} {a}, {b} \right{high}",
            "in": rf"x \in {gold}",
            "decimal": interval(f"{a}.0", b, low + high),
        }
        return (
            gold,
            equal,
            {
                "end": interval(a, b + 1, low + high),
                "bracket": other,
                "inequality": f"{a}{signs[low]}x{signs[high]}{b + 1}",
            },
        )
    if form == 1:
        gold = interval(a, r"\infty", low + ")")
        turned = {"(": "<", "[": r"\le "}[low]
        equal = {
            "plus": interval(a, r"+\infty", low + ")"),
            "inequality": f"x {'>' if low == '(' else chr(92) + 'ge'} {a}",
            "turned": f"{a} {turned} x",
        }
        return (
            gold,
            equal,
            {
                "end": interval(a + 1, r"\infty", low + ")"),
                "side": interval(r"-\infty", a, "(" + ")]"[low == "["]),
                "inequality": f"x < {a}",
            },
        )
    if form == 2:
        gold = rf"(-\infty, {a}) \cup ({b}, \infty)"
        equal = {
            "order": rf"({b},\infty)\cup(-\infty,{a})",
            "or": rf"x < {a} \text{{ or }} x > {b}",
            "names": rf"x \in {gold}",
        }
        return (
            gold,
            equal,
            {
                "end": rf"(-\infty, {a}) \cup ({b + 1}, \infty)",
                "bracket": rf"(-\infty, {a}] \cup ({b}, \infty)",
                "inside": f"({a}, {b})",
                "part": rf"(-\infty, {a})",
            },
        )
    gold = rf"(-\infty, {a}) \cup ({a}, \infty)"
    return (
        gold,
        {"not": rf"x \neq {a}", "without": rf"\mathbb{{R}} \setminus \{{{a}\}}"},
        {"point": rf"x \neq {a + 1}", "all": r"\mathbb{R}"},
    )


@kind
def inequalities(r) -> Spelled:
    a, b, c, k = r.randint(1, 9), r.randint(1, 9), r.randint(1, 20), r.randint(2, 5)
    gold = f"{a}x+{b}y>{c}"
    equal = {
        "turned": f"{c}<{a}x+{b}y",
        "multiple": f"{a * k}x+{b * k}y>{c * k}",
        "negative": f"-{a}x-{b}y<-{c}",
        "side": f"{a}x+{b}y-{c}>0",
    }
    wrong = {
        "sign": f"{a}x+{b}y<{c}",
        "equal": rf"{a}x+{b}y \ge {c}",
        "number": f"{a}x+{b}y>{c + 1}",
        "equation": f"{a}x+{b}y={c}",
    }
    return gold, equal, wrong


@kind
def plus_minus(r) -> Spelled:
    c, a, b = r.randint(1, 9), r.randint(1, 9), r.choice(SQUAREFREE)
    if r.random() < 0.5:
        equal = {
            "list": f"{c}, -{c}",
            "turned": f"-{c}, {c}",
            "set": rf"\{{-{c}, {c}\}}",
            "name": rf"x = \pm {c}",
            "or": f"x = {c} or x = -{c}",
        }
        return (
            rf"\pm {c}",
            equal,
            {"one": str(c), "number": rf"\pm {c + 1}", "other": f"{c}, -{c + 1}", "negative": f"-{c}"},
        )
    gold = rf"{c} \pm {a}\sqrt{{{b}}}"
    equal = {
        "list": rf"{c}+{a}\sqrt{{{b}}}, {c}-{a}\sqrt{{{b}}}",
        "fraction": rf"\frac{{{2 * c} \pm {2 * a}\sqrt{{{b}}}}}{{2}}",
        "sign": gold.replace("pm", "mp"),
    }
    return (
        gold,
        equal,
        {
            "one": rf"{c}+{a}\sqrt{{{b}}}",
            "number": rf"{c + 1} \pm {a}\sqrt{{{b}}}",
            "turned": rf"{-c} \pm {a}\sqrt{{{b}}}",
        },
    )


@kind
def times_of_day(r) -> Spelled:
    h, m = r.randint(1, 12), r.randint(0, 59)
    other = (m + r.randint(1, 59)) % 60
    equal = {"zero": f"{h:02d}:{m:02d}", "text": rf"\text{{{h}:{m:02d}}}", "half": f"{h}:{m:02d} pm"}
    wrong = {
        "minute": f"{h}:{other:02d}",
        "hour": f"{h % 12 + 1}:{m:02d}",
        "half": f"{h}:{m:02d} am",
        "point": f"{h}.{m:02d}",
    }
    return f"{h}:{m:02d} p.m.", equal, wrong


@kind
def ratios(r) -> Spelled:
    x, k = fraction(r, 2, 9), r.randint(2, 9)
    n, d = x.numerator, x.denominator
    return f"{n}:{d}", {"multiple": f"{n * k}:{d * k}" if not 10 <= d * k < 60 else f"{n} : {d}", "fraction": f"{n}/{d}"}, {
        "number": f"{n + 1}:{d}", "turned": f"{d}:{n}", "fraction": f"{d}/{n}"}  # fmt: skip


WORDS = ("Paris", "Tuesday", "Thursday", "even", "odd", "yes", "no", "north", "Anna", "Hannah", "increasing", "decreasing",
         "ellipse", "circle", "parabola", "true", "false", "red", "never", "New York", "no solution")  # fmt: skip


@kind
def texts(r) -> Spelled:
    if r.random() < 0.4:
        a, b = r.sample("ABCDE", 2)
        return (
            rf"\text{{({a})}}",
            {"bare": a, "parentheses": f"({a})", "text": rf"\text{{{a}}}"},
            {"letter": b, "in text": rf"\text{{({b})}}"},
        )
    a, b = r.sample(WORDS, 2)
    equal = {"bare": a, "small": a.lower(), "capitals": a.upper(), "bold": f"**{a}**", "stop": f"{a}."}
    return (
        rf"\text{{{a}}}",
        equal,
        {"word": b, "text": rf"\text{{{b}}}", "letters": "".join(sorted(a.replace(" ", ""))) + "q"},
    )


@kind
def sequences(r) -> Spelled:
    a, d, n = r.randint(1, 9), r.randint(1, 5), r.randint(10, 40)
    terms = [a + i * d for i in range(3)]
    gold = rf"{terms[0]}, {terms[1]}, {terms[2]}, \ldots, {a + n * d}"
    return gold, {"dots": rf"{terms[0]},{terms[1]},{terms[2]},\dots,{a + n * d}", "points": gold.replace(r"\ldots", "...")}, {
        "last": rf"{terms[0]}, {terms[1]}, {terms[2]}, \ldots, {a + n * d + 1}", "first": rf"{terms[0]}, {terms[1] + 1}, {terms[2]}, \ldots, {a + n * d}",
        "general": rf"{terms[0]}, {terms[1]}, {terms[2]}, \ldots, {d}n"}  # fmt: skip


# Expressions: trees of integers, names, roots of integers, and operations; values by Decimal of 80 digits.


def grow(r, depth, names):
    if depth == 0 or r.random() < 0.15:
        x = r.random()
        if x < 0.55 or not names and x < 0.8:
            return r.randint(1, 12)
        if x < 0.85 and names:
            return r.choice(names)
        return ("root", r.choice(SQUAREFREE))
    op = r.choice("++--**/^")
    if op == "^":
        return ("^", grow(r, depth - 1, names), r.randint(2, 3))
    return (op, grow(r, depth - 1, names), grow(r, depth - 1, names))


def value(tree, point):
    """In the field of decimals of 80 digits; None where something is divided by what may be 0."""
    if isinstance(tree, int):
        return Decimal(tree)
    if isinstance(tree, str):
        return point[tree]
    if tree[0] == "root":
        return Decimal(tree[1]).sqrt()
    a = value(tree[1], point)
    if tree[0] == "^":
        return None if a is None else a ** tree[2]
    b = value(tree[2], point)
    if a is None or b is None or tree[0] == "/" and abs(b) < Decimal("1e-40"):
        return None
    return {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[tree[0]]


POINTS = [
    {x: Decimal(n) / d for x, n, d in zip("xyz", ns, (7, 11, 13), strict=True)}
    for ns in ((9, 5, 31), (-4, 16, 3), (23, -8, 6))
]


def compared(a, b):
    """1 where two expressions are the same at each point, 0 where they differ at one, None where neither is certain."""
    with localcontext() as context:
        context.prec = 80
        seen = 0
        for point in POINTS:
            x, y = value(a, point), value(b, point)
            if x is None or y is None:
                return None
            size = max(abs(x), abs(y), Decimal("1e-20"))
            if abs(x - y) > size * Decimal("1e-30"):
                return 0
            seen += abs(x - y) < size * Decimal("1e-60")
        return 1 if seen == len(POINTS) else None


def spell(tree, r, place="+"):
    """In LaTeX, with the parentheses that it needs in a sum, a product or a power."""
    if isinstance(tree, int):
        return f"({tree})" if tree < 0 and place != "{" else str(tree)
    if isinstance(tree, str):
        return tree
    op = tree[0]
    if op == "root":
        return rf"\sqrt{{{tree[1]}}}"
    if op == "^":
        text = f"{spell(tree[1], r, '^')}^{{{tree[2]}}}"
        return f"({text})" if place == "^" else text
    if op == "/":
        text = rf"\frac{{{spell(tree[1], r, '{')}}}{{{spell(tree[2], r, '{')}}}"
        return f"({text})" if place == "^" else text
    a, b = (
        spell(tree[1], r, "*" if op == "*" else "{" if place == "{" else "+"),
        spell(tree[2], r, "*" if op in "*-" else "+"),
    )
    if op == "*":
        text = a + r.choice((r" \cdot ", r" \times ", "*")) + b
        return rf"\left({text}\right)" if place == "^" else text
    text = f"{a} {op} {b}"
    return f"({text})" if place in "*^" else text


def rewritten(tree, r):
    """A tree that is equal to it, and the rule."""
    c = r.randint(1, 9)
    rules = [("add and take away", ("-", ("+", tree, c), c)), ("expand a fraction", ("/", ("*", c, tree), c)),
             ("half twice", ("+", ("/", tree, 2), ("/", tree, 2)))]  # fmt: skip
    if isinstance(tree, int):
        rules += [
            ("number as a sum", ("+", tree - c, c)),
            ("number as a quotient", ("/", tree * c, c)),
            ("number as a product", ("*", tree * c, ("/", 1, c))),
        ]
    elif isinstance(tree, tuple):
        op = tree[0]
        if op in "+*":
            rules += [("other order", (op, tree[2], tree[1]))] * 3
        if op == "-":
            rules += [("minus as plus", ("+", ("*", -1, tree[2]), tree[1]))] * 3
        if op == "*" and isinstance(tree[2], tuple) and tree[2][0] in "+-":
            rules += [("distribute", (tree[2][0], ("*", tree[1], tree[2][1]), ("*", tree[1], tree[2][2])))] * 5
        if op == "/":
            rules += [("divide by multiplying", ("*", tree[1], ("/", 1, tree[2])))] * 2
        if op == "/" and isinstance(tree[1], tuple) and tree[1][0] in "+-":
            rules += [("split a fraction", (tree[1][0], ("/", tree[1][1], tree[2]), ("/", tree[1][2], tree[2])))] * 5
        if op == "^":
            rules += [
                ("power as a product", ("*", ("^", tree[1], tree[2] - 1) if tree[2] > 2 else tree[1], tree[1]))
            ] * 3
        if op == "^" and tree[2] == 2 and isinstance(tree[1], tuple) and tree[1][0] in "+-":
            s, a, b = tree[1]
            rules += [("expand a square", ("+", (s, ("^", a, 2), ("*", 2, ("*", a, b))), ("^", b, 2)))] * 5
        if op == "root":
            rules += [("root of a multiple", ("/", ("root", tree[1] * c * c), c)), ("root below", ("/", tree[1], tree))]
    return r.choice(rules)


def paths(tree, wanted, path=()):
    if wanted(tree):
        yield path
    if isinstance(tree, tuple) and tree[0] != "root":
        for i in (1, 2) if tree[0] != "^" else (1,):
            yield from paths(tree[i], wanted, (*path, i))


def at(tree, path):
    for i in path:
        tree = tree[i]
    return tree


def put(tree, path, new):
    return new if not path else tuple(put(x, path[1:], new) if i == path[0] else x for i, x in enumerate(tree))


@kind
def expressions(r) -> Spelled:
    names = r.choice(("", "x", "xy", "xyz"))
    while True:
        gold = given = grow(r, r.randint(1, 3), names)
        used = []
        for _ in range(r.randint(1, 3)):
            path = r.choice(list(paths(given, lambda t: True)))
            rule, new = rewritten(at(given, path), r)
            given = put(given, path, new)
            used.append(rule)
        numbers = list(paths(given, lambda t: isinstance(t, int)))
        if compared(gold, given) != 1 or not numbers:
            continue
        path = r.choice(numbers)
        other = put(given, path, at(given, path) + r.choice((-1, 1, 2)))
        text = spell(given, r)
        if compared(gold, other) != 0 or len(text) > 200:
            continue
        return spell(gold, r), {used[-1]: text}, {"one number": spell(other, r)}


def cases(seed: int, count: int, kinds=None):
    """So many cases, the same for the same seed; half of each kind are right."""
    r = random.Random(seed)
    names = sorted(kinds or KINDS)
    for i in range(count):
        name = names[i % len(names)]
        gold, equal, wrong = KINDS[name](r)
        right = r.random() < 0.5
        rule, given = r.choice(sorted((equal if right else wrong).items()))
        yield Case(name, rule, gold, given, right)


def completion(case: Case) -> str:
    return rf"so it is \boxed{{{case.given}}}"


def chunk(seed, count, kinds, library):
    from grpojax.rewards import answers

    begin = time.perf_counter()
    results = []
    for case in cases(seed, count, kinds):
        decided = answers.compare(answers.extract_answer(completion(case)) or "", answers.bare(case.gold))
        ours = handed_on(answers.extract_answer(completion(case)), case.gold) if decided is None else decided
        results.append([case, ours, decided is None])
    seconds = time.perf_counter() - begin
    for row in results if library else []:
        row.append(math_verify_says(row[0]))
    return results, seconds


def handed_on(given, gold):
    """What math-verify says in `check_answer`, in this process; None after ten seconds."""
    from grpojax.rewards import answers

    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError()))
    signal.alarm(10)
    try:
        return answers.math_equal(given, answers.bare(gold))
    except Exception:
        return None
    finally:
        signal.alarm(0)


def math_verify_says(case: Case):
    import math_verify

    try:
        return math_verify.verify(
            math_verify.parse(rf"\boxed{{{case.gold}}}", parsing_timeout=10),
            math_verify.parse(completion(case), parsing_timeout=10), timeout_seconds=10,
        )  # fmt: skip
    except BaseException as e:
        if isinstance(e, KeyboardInterrupt):
            raise
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kinds", help="some of them, with commas between")
    parser.add_argument("--math-verify", action="store_true", help="try them on math-verify, too (slow)")
    parser.add_argument("--out", help="a JSONL file for the disagreements")
    args = parser.parse_args()
    kinds = args.kinds.split(",") if args.kinds else None
    size = min(500, args.cases)
    seeds = [args.seed * 1_000_003 + i for i in range(-(-args.cases // size))]
    rows, seconds = [], 0.0
    with ProcessPoolExecutor(args.workers) as pool:
        counts = [min(size, args.cases - i * size) for i in range(len(seeds))]
        n = len(seeds)
        for done, spent in pool.map(chunk, seeds, counts, [kinds] * n, [args.math_verify] * n):
            rows += done
            seconds += spent
            if len(rows) % 5000 < size:
                wrong = sum(ours is not case.right for case, ours, *_ in rows)
                print(f"{len(rows)} of {args.cases} cases, {wrong} disagree", flush=True)
    print(f"\n{'kind':20} {'cases':>7} {'ours':>9} {'handed on':>9}" + " math-verify" * args.math_verify)
    for name in sorted({case.kind for case, *_ in rows}):
        print(summary(name, [row for row in rows if row[0].kind == name], args.math_verify))
    print(summary("all", rows, args.math_verify))
    print(f"{1e3 * seconds / len(rows):.2f} ms a case on average\n\nshare of each rule:")
    rules = Counter((case.kind, "right" if case.right else "wrong", case.rule) for case, *_ in rows)
    for (name, right, rule), count in sorted(rules.items()):
        print(f"  {name:20} {right}  {rule:22} {100 * count / len(rows):6.2f} %")
    failures = [(case, ours) for case, ours, *_ in rows if ours is not case.right]
    print(f"\n{len(failures)} disagreements")
    for case, ours in failures[:100]:
        print(f"  {case.kind}/{case.rule}: {case.given!r} for {case.gold!r} is {case.right}, found {ours}")
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            for case, _ in failures:
                print(json.dumps(asdict(case)), file=file)
    return 1 if failures else 0


def summary(name, rows, library):
    def share(found):
        return f"{100 * found / len(rows):8.2f}%"

    text = f"{name:20} {len(rows):7} {share(sum(row[1] is row[0].right for row in rows))} {share(sum(row[2] for row in rows))}"
    return text + (f"   {share(sum(bool(row[3]) is row[0].right for row in rows))}" if library else "")


if __name__ == "__main__":
    raise SystemExit(main())
