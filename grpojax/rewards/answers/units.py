r"""Units behind numbers: where a unit begins, and whether two units are the same.

What a symbol means is looked up in pint's table, with its case: ``mW`` is no ``MW``. Words that the table does not
have, such as "apples", are compared as words. Nothing is converted: ``500 g`` is another spelling than ``0.5 kg``.
"""

import dataclasses
import functools
import re

from grpojax.rewards.answers.spelling import MONEY, clean, unwrapped

# Units whose symbols are read behind a number: the SI, what is used beside it, and prefixes that occur with them.
_UNITS = frozenset(
    "meter gram second ampere kelvin mole candela hertz newton pascal joule watt coulomb volt farad ohm siemens weber"
    " tesla henry lumen lux becquerel gray sievert katal radian steradian liter hour minute bar standard_atmosphere"
    " torr millimeter_Hg electron_volt calorie watt_hour decibel angstrom molar gauss dyne erg dalton parsec light_year"
    " unified_atomic_mass_unit astronomical_unit speed_of_light degree degree_Celsius degree_Fahrenheit inch foot pound"
    " ounce mile_per_hour horsepower british_thermal_unit pound_force_per_square_inch revolutions_per_minute".split()
)
_PREFIXES = frozenset("kilo mega giga tera hecto deci centi milli micro nano pico femto".split()) | {""}
# Letters that are names of variables more often: units where they are set as text, or within a longer unit.
_MOSTLY_VARIABLES = frozenset("cul")

_SIGNS = [
    (re.compile(pattern), to)
    for pattern, to in (
        (r"\\mu(?![a-zA-Z]) ?|μ", "µ"),
        (r"\\Omega(?![a-zA-Z])|\u2126", "\u03a9"),
        (r"Ohm", "ohm"),
        (r"\\(?:AA|r ?A|mathring ?\{? ?A ?\}?)(?![a-zA-Z])", "Å"),
        (r"\b([kMGmµ]) (?=\u03a9)", r"\1"),
        (r"(?:°|\bdeg(?:ree)?s?\b) ?(?:[cC](?:elsius)?|centigrade)\b|\b[cC](?:elsius|entigrade)\b", "degC"),
        (r"(?:°|\bdeg(?:ree)?s?\b) ?[fF](?:ahrenheit)?\b|\b[fF]ahrenheit\b", "degF"),
        (r"°|\bdegrees?\b", "degree"),
        (r"\b(?:sq|square) (\w+)", r"\1^2"),
        (r"\b(?:cu|cubic) (\w+)", r"\1^3"),
        (r"\\cdot(?![a-zA-Z])|\\times(?![a-zA-Z])|·|⋅", "*"),
        (r"\^ ?\{ ?(-?[0-9]) ?\}", r"^\1"),
        (r"\{ ?([a-zA-ZµΩÅ]+) ?\}", r"\1"),
        (r"\bper\b", "/"),
    )
]
_TOKEN = re.compile(r"[a-zA-ZµΩÅ]+")
_COMPOUND = re.compile(r"[a-zA-ZµΩÅ(](?:[a-zA-ZµΩÅ ()*/.]|\^ ?-?[0-9])*")
# A number as far as it has no letters but those of commands, of an exponent and of an "x" for times.
_NUMBER = re.compile(
    r"(?=.*?(?:[0-9]|\\pi))((?:[^a-zA-Z\\°µμΩÅ]|\\(?:frac|sqrt|pi|cdot|times|pm)(?![a-zA-Z])|(?<=[0-9])[eE](?=[+-]?[0-9])"
    r"|(?<=[0-9]) ?[xX](?= ?10 ?\^))+)(.*)"
)
_FRACTION = re.compile(r"\\frac ?\{( ?[a-zA-Zµ][^{}]*)\} ?\{( ?[a-zA-Zµ(][^{}]*)\}$")
_ROMAN = re.compile(r"\\(?:text|textrm|textbf|mathrm|mathbf|mbox|rm)(?![a-zA-Z])")
# All before the first letter, with a digit in it; then a word of three letters, or a unit that stands at the number.
_WORDS = re.compile(
    r"(?=.*?(?:[0-9]|\\pi))"
    r"((?:[^a-z\\°]|\\frac)*|(?:[^a-z\\°]|\\(?:frac|sqrt|pi|cdot|times)(?![a-z]))*(?=(?<= )[a-z](?:[a-z]|/)))"
    r"(?:(?<= )([a-z]{3,}(?:[ /][a-z]+)*(?:\^[23])?)"
    r"|((?:[cmk]?m|[km]?g|ml|lbs?|oz|ft|mph|hrs?|[ap]m|th|st|nd|rd)(?:/[a-z]+)?(?:\^[23])?)|(°) ?[cf]?)",
    re.IGNORECASE,
)
_NAMES = {
    "usd": "dollar",
    "eur": "euro",
    "gbp": "lb",
    "°": "degree",
    **{f"{name}{power}": f"{short}{power}"
       for power in ("", "^2", "^3")
       for name, short in {
           "meter": "m", "metre": "m", "centimeter": "cm", "centimetre": "cm", "millimeter": "mm", "millimetre": "mm",
           "kilometer": "km", "kilometre": "km", "feet": "ft", "foot": "ft", "inche": "inch", "gram": "g",
           "kilogram": "kg", "pound": "lb", "ounce": "oz", "hour": "hr", "h": "hr", "minute": "min", "second": "sec",
           "liter": "litre",
       }.items()},
}  # fmt: skip
_KNOWN = re.compile(
    "(?:sq|square|cu|cubic|units?|degrees?|dollars?|cents?|percent|miles?|yards?|days?|weeks?|months?|years?|acres?|gallons?|cups?|[a-z]{4,}|"
    + "|".join(f"{name}s?" for name in (*_NAMES, *_NAMES.values())).replace("^", r"\^")
    + r")\b"
)
_CURRENCIES = {"$": "dollar", "€": "euro", "£": "lb"}
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


@dataclasses.dataclass(frozen=True)
class Unit:
    """What stands behind a number.

    Attributes:
      words: in the singular and in small letters; a currency is the first of them. Empty where there is no unit.
      meanings: of a unit that pint's table has: `_key` of each that may be meant, as "C" is coulomb or, for short, °C.
    """

    words: tuple[str, ...] = ()
    meanings: frozenset[str] = frozenset()

    def differs(self, other: "Unit") -> bool:
        """Whether two units are not the same. Either may be left out; money also what it is paid for: ``$18 per hour``.

        >>> split("3 mW")[1].differs(split("3 MW")[1]), split("3 mW")[1].differs(split("3 milliwatts")[1])
        (True, False)
        """
        if self.meanings and other.meanings:
            return not self.meanings & other.meanings
        a, b = self.words, other.words
        if a and b and a[0] not in _CURRENCIES.values() and ("per" in a) != ("per" in b):
            return True
        return any(x != y for x, y in zip(a, b, strict=False))


def split(answer: str) -> tuple[str, Unit]:
    r"""A number and the unit after it; the whole text and no unit where it is something else.

    A symbol of one letter is a unit after a digit and a blank, or where it is set as text: ``2 V``, ``2\pi\text{ s}``,
    but not ``2V``, which may be a product.

    >>> split(r"4.5 \mathrm{~J}")[0], split("4.5J")[0]
    ('4.5', '4.5J')
    """
    text = MONEY.sub("", clean(answer))
    number, symbols = _symbols(answer, text) or _worded(text)
    money = MONEY.search(unwrapped(answer))
    if not symbols and not money:
        return number, Unit()
    return number, _unit(symbols, _CURRENCIES[money[0][0]] if money else "")


def _symbols(answer: str, text: str) -> tuple[str, str] | None:
    """A number and a unit of symbols that the table has."""
    m = _NUMBER.fullmatch(_FRACTION.sub(r" \1/(\2)", text))
    if not m or not m[2] or len(m[2]) > 60 or _FACTORS.search(m[2].lower()):
        return None
    number, unit = m[1].rstrip(" "), m[2].strip(" ")
    apart, written = m[1].endswith(" "), _written(unit)
    names = _TOKEN.findall(written)
    if not names or not _COMPOUND.fullmatch(written) or not all(map(_is_symbol, names)):
        return None
    if unit[0] in "°Å" or unit.startswith(r"\mu") or unit[0] in "µμ":
        return number, unit
    single = all(len(name) == 1 for name in names)
    if not apart and (single or unit.islower()):
        return None
    product = len(names) > 1 and not re.search(r"/|\^-", written)
    if single and (product or unit in _MOSTLY_VARIABLES or not number[-1:].isdigit()):
        return (number, unit) if _is_roman(answer, unit) else None
    return number, unit


def _is_roman(answer: str, unit: str) -> bool:
    """Whether the unit's first letter is set as text."""
    return any(
        re.match(r"[\s~{]|\\[,;:! ]", answer[m.end() :])
        and re.sub(r"^(?:[\s~{]|\\[,;:! ])*", "", answer[m.end() :]).startswith(unit[0])
        for m in _ROMAN.finditer(answer)
    )


def _worded(text: str) -> tuple[str, str]:
    """A number and what stands behind it in words, or as a common symbol without a blank."""
    m = _WORDS.fullmatch(text)
    if not m or _FACTORS.search((m[2] or "").lower()):
        return text, ""
    unit = m[2] or m[3] or m[4]
    if "\\" in m[1] and m[2] and not _KNOWN.match(unit.lower()):  # \frac{1}{2} abc is a product
        return text, ""
    return m[1].rstrip(" "), text[m.end(1) :].strip(" ")


@functools.lru_cache(4096)
def _unit(text: str, currency: str) -> Unit:
    words = re.sub(r"\b(?:sq|square) (\w+)", r"\1^2", re.sub(r"\b(?:cu|cubic) (\w+)", r"\1^3", text.lower()))
    words = re.sub(r"(?<=[a-z]{2})s\b", "", words).replace("/", " per ").replace("°", "° ")
    names = [_NAMES.get(w, w) for w in words.split()]
    if currency and names[:1] != [currency]:
        names.insert(0, currency)
    meanings = _key(text) or _key(text.lower())
    if currency or not meanings:
        return Unit(tuple(names))
    also = {"degree": ("degC", "degF"), "C": ("degC",), "F": ("degF",)}.get(_written(text), ())
    return Unit(tuple(names), frozenset({meanings, *map(_key, also)}))


def _written(unit: str) -> str:
    """A unit as pint reads it."""
    for pattern, to in _SIGNS:
        unit = pattern.sub(to, unit)
    return re.sub(r" +", " ", unit).strip(" .")


@functools.cache
def _table():
    import pint

    return pint.UnitRegistry()


@functools.lru_cache(4096)
def _is_symbol(name: str) -> bool:
    """Whether a name is a unit of the SI or one used beside it, with a usual prefix or none."""
    return any(prefix in _PREFIXES and unit in _UNITS for prefix, unit in _parsed(name))


def _parsed(name: str) -> list[tuple[str, str]]:
    """Prefixes and units that a name may be, those without a prefix first: "amps" is no attometre per second."""
    return sorted({(prefix, unit) for prefix, unit, _ in _table().parse_unit_name(name)})


@functools.lru_cache(4096)
def _key(unit: str) -> str:
    """One text for all spellings of a unit: its factor and base units, or its name; "" where the table has none."""
    written = _written(unit)
    if len(written) > 60 or not _COMPOUND.fullmatch(written):
        return ""
    try:
        known = _table().parse_units(_TOKEN.sub(lambda m: "".join(_parsed(m[0])[0]), written).replace("^", "**"))
        factor, base = _table().get_root_units(known)
    except Exception:  # pint's own errors and the parser's, of every kind: the table does not have it
        return ""
    # By its factor °C is 1 kelvin and a sievert 1 gray, and angles, decibels and parts in a million are all numbers.
    by_name = re.search("degree_|sievert", str(known)) or known.dimensionless
    return str(known) if by_name else f"{factor:.9g} {base}"
