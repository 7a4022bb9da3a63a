"""Units behind numbers: symbols with prefixes and case, compound units, scales of temperature."""

import itertools

import pytest

from grpojax.rewards import answers

SYMBOLS = "m g s A K mol cd Hz N Pa J W C V F S Wb T H lm lx Bq Gy Sv kat rad sr L h min bar atm eV cal dB Å M".split()
PREFIXES = ("", "k", "M", "G", "m", "µ", "n", "p")
# How a unit is written behind a number.
FORMS = (r"{n} \mathrm{{~{u}}}", r"{n}\ \text{{{u}}}", r"{n} {u}", r"{n}\,\mathrm{{{u}}}", r"${n} \text{{ {u}}}$")


def judged(given, gold):
    return answers.compare(given, gold)


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_a_unit_may_be_left_out_and_is_no_other(symbol):
    """Each symbol with each prefix and in each form against itself, against no unit, and against all other symbols."""
    for (i, prefix), form in itertools.product(enumerate(PREFIXES), FORMS):
        unit, other = prefix + symbol, PREFIXES[i - 1] + symbol
        if prefix and not all(map(answers.units._is_symbol, (unit, other))):  # "Mmin" is none, and "mM" may be
            continue
        written = form.format(n="4.5", u=unit)
        assert judged(written, "4.5") is True and judged("4.5", written) is True, written
        assert judged(written, FORMS[0].format(n="4.5", u=unit)) is True
        assert judged(written, form.format(n="4.6", u=unit)) is False
        assert judged(written, form.format(n="4.5", u=other)) is False, (written, other)
    for other in SYMBOLS:
        assert judged(f"5 {symbol}", f"5 {other}") is (symbol == other), (symbol, other)


@pytest.mark.parametrize(("given", "gold", "right"), [
    ("3 mW", "3 MW", False), ("3 Mg", "3 mg", False), ("P = 3 mW", "3 MW", False), ("5 KM", "5 km", True),
    ("5 joules", "5 J", True), ("12 amps", "12 A", True), (r"5 \mathrm{~N} \cdot \mathrm{m}", "5 J", True),
    # compound units
    (r"9.8 \mathrm{~m} / \mathrm{s}^{2}", r"9.8 \text{ m/s}^2", True), ("9.8 m/s^2", "9.8 m/s", False),
    (r"8.3 \mathrm{~J} /(\mathrm{mol} \cdot \mathrm{K})", r"8.3 \mathrm{~J} \mathrm{~K}^{-1} \mathrm{~mol}^{-1}", True),
    (r"9.8 \frac{\mathrm{m}}{\mathrm{s}^2}", "9.8 m/s^2", True), ("45 mph", "45 miles per hour", True),
    (r"1.6 \times 10^{-19} \mathrm{C}", "1.6e-19", True), ("1.6e-19 C", "1.6e-19", True),
    # letters that are no Latin ones
    (r"5 \Omega", "5 Ohm", True), (r"5 \mathrm{k} \Omega", "5 kOhm", True), ("5 \u2126", r"5 \mathrm{k}\Omega", False),
    (r"5 \mu \mathrm{m}", "5 μm", True), (r"5 \mu m", "5 mm", False), (r"6.6 \AA", "6.6 angstroms", True),
    # scales of temperature
    (r"90^\circ\text{C}", r"90^\circ\text{F}", False), ("25 K", r"25^\circ C", False), ("25°", "25 °C", True),
    ("25 C", r"25^{\circ} \mathrm{C}", True), ("25 degrees Celsius", r"25^{\circ} \mathrm{C}", True),
    ("25 Celsius", r"25^{\circ} \mathrm{F}", False),
    # letters that may be variables
    ("5V", "5", False), (r"2\pi \mathrm{~s}", r"2\pi", True), (r"2\pi s", r"2\pi", False), ("3 g h", "3", False),
    (r"4 \pi L", r"4 \pi", False), ("5 u", "5", False), (r"5 \mathrm{~u}", "5", True), ("2xy", "2", False),
])  # fmt: skip
def test_how_units_are_written(given, gold, right):
    assert (judged(given, gold) is True) is right and (judged(gold, given) is True) is right
