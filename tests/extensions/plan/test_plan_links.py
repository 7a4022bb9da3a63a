"""Which links a collective takes, and for how long."""

import types

import pytest

from grpojax.extensions.plan.hlo import Collective
from grpojax.extensions.plan.plan_links import crossing, directions, loads
from grpojax.models import flops


def chips(kind, shape, slices=1):
    """Of all slices, one after the other."""
    x, y, z = (*shape, 1)[:3] if len(shape) < 3 else shape
    return [
        types.SimpleNamespace(device_kind=kind, slice_index=s, coords=(i, j, k))
        for s in range(slices) for i in range(x) for j in range(y) for k in range(z)
    ]  # fmt: skip


def collective(kind, size, wire, groups, *, times=1, unknown=False):
    return Collective(kind, size, wire, tuple(map(tuple, groups)), times, unknown)


@pytest.mark.parametrize(
    ("kind", "shape", "sides"),
    [
        ("TPU v5 lite", (4, 4), 2),  # a corner of an open square
        ("TPU v5 lite", (2, 1), 1),
        ("TPU v5 lite", (16, 16), 4),
        ("TPU v5 lite", (8, 16), 3),
        ("TPU v4", (2, 2, 4), 3),
        ("TPU v5", (4, 4, 4), 6),
    ],
)
def test_a_chip_is_fed_from_as_many_sides_as_its_worst_place_has(kind, shape, sides):
    devices = chips(kind, shape)
    assert directions(devices, devices) == sides


@pytest.mark.parametrize(
    ("kind", "shape", "sides"),
    [
        ("TPU v5 lite", (2, 2), 1.5),  # half of 4/3 of what a chip receives crosses each of two links
        ("TPU v5 lite", (4, 4), 15 / 16),
        ("TPU v5 lite", (16, 1), 15 / 32),  # a ring
        ("TPU v5", (4, 4, 4), 2 * 63 / 64),
        ("TPU v5 lite", (2, 1), 1),
    ],
)
def test_the_middle_of_an_axis_binds_an_all_to_all(kind, shape, sides):
    devices = chips(kind, shape)
    assert crossing(devices, devices) == pytest.approx(sides)
    n = len(devices)
    (load,) = loads((collective("all-to-all", 1e9, 1e9, [range(n)]),), devices).values()
    assert load.seconds == pytest.approx(1e9 / (flops.CHIPS[kind].link * sides))


def test_a_part_of_the_slice_is_fed_along_its_own_axes():
    devices = chips("TPU v5", (4, 4, 4))
    column = [d for d in devices if d.coords[:2] == (1, 2)]
    assert directions(column, devices) == 2 and directions([devices[0]], devices) == 1


def test_a_link_is_busy_with_what_a_chip_receives():
    devices = chips("TPU v5 lite", (2, 2))
    everyone, pairs = [range(4)], [(0, 1), (2, 3)]
    found = (
        collective("all-gather", 4e9, 3e9, everyone, times=2),
        collective("all-reduce", 1e9, 1e9, pairs),
        collective("collective-permute", 5e8, 5e8, [(0, 1), (1, 2), (2, 3), (3, 0)]),
        collective("all-reduce", 4, 6, everyone, unknown=True),
    )
    once, each = loads(found, devices), loads(found, devices, unknown=True)
    assert list(once) == ["ICI"] and once["ICI"].received == {
        "all-gather": 6e9, "all-reduce": 1e9, "collective-permute": 5e8
    }  # fmt: skip
    # 50 GB/s a link: both axes of the square for all, one for the pairs and for the neighbour
    assert once["ICI"].seconds == pytest.approx(6 / 100 + 1 / 50 + 0.5 / 50)
    assert each["ICI"].seconds == pytest.approx(6 / 100e9)


def test_slices_are_apart():
    """Messages of hosts, and a collective over all chips: each slice must have what the other holds."""
    devices = chips("TPU v5 lite", (2, 2), slices=2)
    found = (
        collective("all-reduce", 8e9, 8e9, ()),
        collective("all-gather", 8e9, 7e9, [range(8)]),
    )
    both = loads(found, devices)
    assert both["DCN"].received == {"all-reduce": pytest.approx(8e9), "all-gather": pytest.approx(1e9)}
    assert both["DCN"].seconds == pytest.approx(9e9 / 3.125e9)  # 25 Gbps a chip
    assert both["ICI"].received == {"all-gather": pytest.approx(6e9)}


def test_a_link_that_no_data_sheet_has_takes_no_time():
    devices = chips("TPU v4", (2, 2, 1), slices=2)
    load = loads((collective("all-reduce", 8, 8, ()),), devices)["DCN"]
    assert load.total == 8 and load.seconds == 0
