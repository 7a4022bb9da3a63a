r"""One spelling of answers: what only sets them is removed, and what is a number is read as one."""

import functools
import re
import unicodedata
from fractions import Fraction

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
_SIGNS = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": r"\times ",
        "·": r"\cdot ",
        "÷": "/",
        "≤": r"\le ",
        "≥": r"\ge ",
        "∞": r"\infty ",
        "π": r"\pi ",
        "’": "'",
        # What has no width, and a byte order mark.
        **dict.fromkeys("\ufeff\u200b\u200c\u200d\u2060"),
        # Digits and signs as wide as a character of Chinese, and Roman numerals.
        **{chr(c): chr(c - 0xFEE0) for c in range(0xFF01, 0xFF5F)},
        **{chr(c): unicodedata.normalize("NFKC", chr(c)) for c in range(0x2160, 0x2180)},
    }
)


_BASES = dict(two=2, three=3, four=4, five=5, six=6, seven=7, eight=8, nine=9, ten=10, eleven=11, twelve=12, sixteen=16)


def _base(m: re.Match[str]) -> str:
    return f"_{{{_BASES.get(m[1], m[1])}}}"


def _digits(m: re.Match[str]) -> str:
    return re.sub("[^0-9]", "", m[0])


_BRACES = re.compile(
    r"\\[{}]|[{}]|(?P<font>\\(?:text(?:bf|it|rm|sf|tt|sc|normal|up|md)?|math(?:rm|bf|it|sf|tt|normal)|boldsymbol|bm|mbox"
    r"|emph|underline)\s*\{)"
)


def _unset(text: str) -> str:
    """Without commands that only set what is in their braces; a command whose brace does not close stays."""
    parts: list[str] = []
    opened: list[tuple[bool, int]] = []  # whether a command opened it, and where in the parts
    place = 0
    for m in _BRACES.finditer(text):
        parts += [text[place : m.start()], m[0]]
        place = m.end()
        if m["font"] or m[0] == "{":
            opened.append((m["font"] is not None, len(parts) - 1))
        elif m[0] == "}" and opened:
            command, at = opened.pop()
            if command:
                parts[at], parts[-1] = " ", ""
    return "".join(parts) + text[place:]


_WORDS = {"dozen": "12", "hundred": "100", "thousand": "10^{3}"}
_WORDS |= {f"{start}illion": f"10^{{{power}}}" for start, power in (("m", 6), ("b", 9), ("tr", 12))}


def _worded(m: re.Match[str]) -> str:
    return rf"{m[1]}\times{_WORDS[m[2].lower()]}"


def _power(m: re.Match[str]) -> str:
    return "^{" + unicodedata.normalize("NFKC", m[0]).replace("\u2212", "-") + "}"


def _fraction(m: re.Match[str]) -> str:
    above, below = unicodedata.normalize("NFKC", m[0]).split("⁄")
    return rf"\frac{{{above}}}{{{below}}}"


_MOVES = [
    (re.compile(pattern), to)
    for pattern, to in (
        (
            r"(?<!\\)\\\\(?=(?:[dt]?frac|sqrt|pi|cdot|times|infty|left|right|text|pm|cup|cap|le|ge|leq|geq|in)(?![a-zA-Z]))",
            r"\\",
        ),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\\(?:operatorname\*?|mathop)\{([a-zA-Z]+)\}", r"\\\1 "),
        (r"\\left(?![a-z])|\\right(?![a-z])", ""),
        (r"(?<![0-9.])[1-9][0-9]{0,2}(?:(?:\{,\}|,?\\!|\\[,; ])[0-9]{3})+(?![0-9])", _digits),
        (r"\{,\}", ","),
        (r"\{([^{}]*)\\choose([^{}]*)\}", r"\\binom{\1}{\2}"),
        (r"\\frac ([0-9]) ?([0-9])(?![0-9.])", r"\\frac{\1}{\2}"),
        (r"(?<!\\)\\[,;:! ]|~", " "),
        (r"\\%", "%"),
        (r"(?<=\\\\)\[[0-9.]+ ?(?:pt|ex|em|mm|cm)\]", ""),
        (r"(?:\^ ?\{? ?)?\\(?:text)?degrees?(?![a-zA-Z])(?: ?\})?", "°"),
        (r"(?<![\\a-zA-Z])infinity(?![a-zA-Z])", r"\\infty "),
        (r"[¼-¾⅐-⅞]", _fraction),
        (r"⁻?[⁰¹²³⁴-⁹]+", _power),
        (r"√ ?(?:\(([^()]*)\)|([0-9.]+|[a-zA-Z]))", r"\\sqrt{\1\2}"),
        (r"\s+", " "),
        (r"(?<=[0-9] )([ap])\. ?m\.?", r"\1m"),
        (rf"(?<=[0-9A-Fa-f]) ?\(? ?(?:in )?base[ -]?([0-9]+|{'|'.join(_BASES)}) ?\)?$", _base),
        (rf"_ ?\{{ ?(?:base )?([0-9]+|{'|'.join(_BASES)}) ?\}}", _base),
        (r"\^ ?\{? ?\\circ ?\}?", "°"),
        (r"\( ?([0-9A-Fa-f]+) ?\)(?=_)", r"\1"),
        (r"\^ ?\{ ?([0-9]?[+-]) ?\}|\^([+-])(?![ ({\w\\])", r"^{\1\2}"),
        (rf"(?<![\w.\\])([0-9][0-9.,]*) ({'|'.join(_WORDS)})s?(?![a-z-])", _worded),
        (r"([_^])\{(\w)\}", r"\1\2"),
        (r"(?<=[0-9])\s*(?:percent|per cent)$", "%"),
    )
]
_COMMAS = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9,])")
_BLANKS = re.compile(r"(?<![^$€£+-])[1-9][0-9]{0,2}(?: [0-9]{3})+(?![0-9,/^]| [0-9])")
MONEY = re.compile(r"[$€£] ?(?=[+-]?[0-9.])")


def clean(answer: str) -> str:
    r"""The answer without what only sets it: ``$``, ``\(``, ``**``, an outer ``\text{}``, thousands separators, a stop.

    >>> clean(r"$\$1,234.$"), clean("(1,234)")
    ('1234', '(1,234)')
    """
    return re.sub(r"\$ ?(?=[+-]?[0-9.])", "", separated(unwrapped(answer)))


@functools.lru_cache(64)  # one comparison asks for it many times
def unwrapped(answer: str) -> str:
    """The answer without what is set around it, signs in LaTeX's spelling; thousands separators stay."""
    text = answer.strip().translate(_SIGNS)
    text = _unset(text)
    for pattern, to in _MOVES:
        text = pattern.sub(to, text)
    before = None
    while before != text:
        before = text
        text = re.sub(r"(?<!\.)\.$", "", text.strip(" ")).removeprefix("=").strip(" ")
        for wrapper in _WRAPPERS:
            if (inside := wrapper.fullmatch(text)) and _balanced(inside[1]):
                text = inside[1]
    return text.replace(r"\$", "$")


def separated(text: str) -> str:
    """The answer without thousands separators: commas are some where all of them can be, and nothing is in brackets."""
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


@functools.lru_cache(64)
def normal_form(answer: str) -> str:
    """Spelling that does not matter removed: `clean`, then case, blanks around signs, ``+5``, ``007``, ``5.0``.

    >>> normal_form("$1,234.00"), normal_form("New  York"), normal_form("1 1/2")
    ('1234', 'new york', '1 1/2')
    """
    text = tight(clean(answer))
    if number := re.fullmatch(r"([+-]?)([0-9]*)(?:\.([0-9]*))?", text):
        sign, whole, part = number[1], number[2].lstrip("0"), (number[3] or "").rstrip("0")
        if number[2] or part:
            text = (whole or "0") + ("." + part if part else "")
            text = "-" + text if sign == "-" and text != "0" else text
    return text


def tight(text: str) -> str:
    """In small letters, without blanks around signs."""
    return re.sub(r" ?([^\w ]) ?", r"\1", text.lower())


def longest(gold: str) -> int:
    """Characters over which an answer cannot be the gold one; what models write without end is soon dismissed."""
    return 300 + 4 * len(gold)


def same_spelling(given: str, gold: str) -> bool:
    """Whether two answers have the same `normal_form`, and one at all; ``100,200`` may also be ``100, 200``."""
    if len(given) > longest(gold):
        return False
    a, b = normal_form(given), normal_form(gold)
    return bool(a) and (a == b or "," in b + gold and tight(unwrapped(given)) == tight(unwrapped(gold)))


_NUMBERS = [
    re.compile(pattern)
    for pattern in (
        r"(?P<n>[+-]?[0-9]{1,40}(?:\.[0-9]{1,40})?)(?:e(?P<e>[+-]?[0-9]{1,3}))?",
        r"(?P<n>[+-]?[0-9]{1,40}(?:\.[0-9]{1,40})?)(?:\\times|\\cdot|\*|x| x )10\^\{?(?P<e>-?[0-9]{1,3})\}?",
        r"(?P<n>[+-]?[0-9]{1,40})/(?P<d>[0-9]{1,40})",
        r"(?P<n>[+-]?)\\frac\{?(?P<t>[0-9]{1,40})\}?\{(?P<d>[0-9]{1,40})\}",
        r"(?P<n>[+-]?)\\frac(?P<t>[0-9])(?P<d>[0-9])",
        r"(?P<w>[+-]?[0-9]{1,40}) (?P<t>[0-9]{1,40})/(?P<d>[0-9]{1,40})",
        r"(?P<w>[+-]?[0-9]{1,40}) ?\\frac\{(?P<t>[0-9]{1,40})\}\{(?P<d>[0-9]{1,40})\}",
    )
]


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
