"""Ranges of settings, and how a value outside of one is told."""

import math
from types import SimpleNamespace

import pytest

from grpojax.host import errors


@pytest.mark.parametrize(("interval", "inside", "outside", "said"), [
    ("[1, inf)", [1, 7, 1e300], [0, 0.999, -math.inf], "at least 1"),
    ("(0, 1]", [1e-9, 1], [0, 1.01], "over 0 and at most 1"),
    ("[0, 1)", [0, 0.5], [1, -1e-9], "at least 0 and under 1"),
    ("(-inf, 0]", [-5, 0], [1e-9], "at most 0"),
])  # fmt: skip
def test_ranges(interval, inside, outside, said):
    for value in (*inside, None):
        errors.require(SimpleNamespace(x=value), x=interval)
    for value in (*outside, math.nan):
        with pytest.raises(errors.UserError) as error:
            errors.require(SimpleNamespace(x=value), x=interval)
        assert str(error.value) == f"x={value!r}: must be {said}"
