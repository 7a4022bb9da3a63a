"""What a row is known by: the same in every process, whatever it holds."""

import datetime
import decimal
import random
import uuid

import numpy as np
import pytest

from grpojax.data.problems import canonical
from grpojax.host.errors import UserError


class Image:
    """As PIL's: its `repr` has an address."""

    mode, size = "L", (2, 1)

    def __init__(self, content):
        self.content = content

    def tobytes(self):
        return self.content


class Entry:
    def __init__(self, name):
        self.name = name

    def fingerprint(self):
        return self.name


MAKES = [
    lambda n: datetime.date(2024, 1, 1 + n), lambda n: datetime.datetime(2024, 1, 1, n), lambda n: datetime.time(n),
    lambda n: datetime.timedelta(n), lambda n: decimal.Decimal(n), lambda n: uuid.UUID(int=n), lambda n: bytes([n]),
    lambda n: bytearray([n]), lambda n: np.float32(n), lambda n: np.arange(n + 1),
    lambda n: np.full((2, 2), n, np.int8),
    lambda n: Image(bytes([n, 0])), lambda n: Entry(str(n)), lambda n: {f"{n}", "a", "b"},
    lambda n: frozenset({n, "x"}),
    lambda n: {datetime.date(2024, 1, 1 + n), 3}, lambda n: np.array([None, n], object), lambda n: (n, "a"),
]  # fmt: skip


@pytest.mark.parametrize("make", MAKES)
def test_objects_are_known_by_what_they_hold(make):
    assert canonical({"a": make(3), "b": [make(4)]}) == canonical({"b": [make(4)], "a": make(3)})
    assert canonical({"a": make(3)}) != canonical({"a": make(4)}) and b" at 0x" not in canonical({"a": make(3)})


def test_sets_have_no_order():
    draw = random.Random(0)
    for _ in range(50):
        members = [draw.choice([draw.random(), str(draw.random()), (1, draw.random()), None]) for _ in range(9)]
        shuffled = draw.sample(members, len(members))
        assert canonical({"a": set(members)}) == canonical({"a": set(shuffled)})
    assert canonical({"a": {"b", "a"}}) == b'{"a": ["a", "b"]}\n'  # in every process, whatever its hashes


def test_what_nobody_can_know_is_refused_by_type():
    with pytest.raises(UserError, match="a row that cannot be handled: it holds a builtins.object"):
        canonical({"a": [object()]})
    with pytest.raises(UserError, match=r"it holds a .*\.<lambda>|it holds a builtins.function"):
        canonical({"a": lambda: 1})
