"""Meshes: of one slice, of several, and of none that is possible. The devices of TPUs are made up."""

import importlib.util
import itertools
import math
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tpu_compiler

from grpojax import sharding
from grpojax.host.errors import UserError
from grpojax.sharding import MeshConfig, make_mesh


def chips(shape, slices=1, kind="TPU v5"):
    """The chips of some slices, as jax numbers them."""
    x, y, z = shape
    return [
        SimpleNamespace(id=n, platform="tpu", device_kind=kind, slice_index=s, coords=(i, j, k), core_on_chip=0,
                        process_index=n // 4)
        for n, (s, k, j, i) in enumerate(itertools.product(range(slices), range(z), range(y), range(x)))
    ]  # fmt: skip


def test_devices_that_sample_have_parts_of_weights_as_those_that_learn():
    learning = make_mesh(MeshConfig(data=1, fsdp=2, expert=2, tensor=2))
    assert sharding.sampling_mesh(learning, 8) == MeshConfig(data=2, fsdp=1, expert=2, tensor=2)


def laid_out(sizes, devices):
    got = sharding._lay_out(sizes, devices)
    assert not isinstance(got, str), got
    assert got.shape == tuple(sizes) and len({d.id for d in got.flat}) == len(devices)
    return got


@pytest.mark.parametrize(
    ("shape", "slices", "sizes"),
    [
        ((4, 4, 1), 2, (2, 16, 1, 1)),
        ((4, 4, 1), 2, (4, 4, 1, 2)),
        ((2, 2, 4), 3, (3, 4, 2, 2)),
        ((2, 2, 4), 3, (6, 2, 1, 4)),
        ((2, 2, 1), 2, (8, 1, 1, 1)),
    ],
)
def test_data_goes_across_slices_and_the_rest_stays_inside(shape, slices, sizes):
    got = laid_out(sizes, chips(shape, slices))
    numbers = np.vectorize(lambda d: d.slice_index)(got)
    assert (numbers == numbers[:, :1, :1, :1]).all()
    # A slice has consecutive places of data.
    assert numbers[:, 0, 0, 0].tolist() == sorted(numbers[:, 0, 0, 0]) and len(set(numbers.flat)) == slices


def test_an_axis_of_the_mesh_is_an_axis_of_the_chips():
    got = laid_out((1, 4, 1, 8), chips((4, 4, 2)))
    for line in got[0, :, 0].T:  # fsdp: 4 chips in a row
        assert sum(len(set(axis)) > 1 for axis in zip(*(d.coords for d in line), strict=True)) == 1


def test_an_axis_of_the_chips_serves_two_of_the_mesh_where_it_must():
    got = laid_out((1, 8, 1, 2), chips((4, 4, 1)))
    for a, b in got[0, :, 0]:
        assert sum(abs(p - q) for p, q in zip(a.coords, b.coords, strict=True)) == 1


@pytest.mark.parametrize(
    ("config", "devices", "says"),
    [
        (MeshConfig(), chips((4, 4, 1), 2),
         "mesh data=1 x fsdp=32 x tensor=1 does not divide data over the 2 slices; fsdp and tensor stay inside.*\n"
         "possible: (data=2 x fsdp=16 x tensor=1), "),
        (MeshConfig(data=3, fsdp=4, tensor=1), chips((2, 2, 2)),
         "mesh data=3 x fsdp=4 x tensor=1 needs 12 devices, but there are 8\npossible: (data=2 x fsdp=4 x tensor=1), "),
        (MeshConfig(data=2, fsdp=-1, tensor=3), chips((2, 2, 1), 2),
         "needs 6 devices, but there are 8\npossible: (data=2 x fsdp=1 x tensor=4), (data=2 x fsdp=2 x tensor=2), "),
        (MeshConfig(data=2), [*chips((2, 2, 1), 2)[:7], SimpleNamespace(**{**vars(chips((2, 2, 2))[7]), "id": 9})],
         "cannot be laid out"),
        (MeshConfig(data=3, expert=2), chips((2, 2, 2)),
         "data=3 x fsdp=1 x expert=2 x tensor=1 needs 6 devices.*\npossible: (data=4 x fsdp=1 x expert=2"),
    ],
)  # fmt: skip
def test_an_impossible_mesh_names_possible_ones(config, devices, says):
    with pytest.raises(UserError, match=re.escape(says).replace(r"\.\*", ".*")):
        make_mesh(config, devices)


def test_the_possible_ones_are():
    for shape, slices in (((4, 4, 1), 2), ((2, 2, 3), 1)):
        devices = chips(shape, slices)
        with pytest.raises(UserError) as e:
            make_mesh(MeshConfig(data=7, fsdp=5, tensor=1), devices)
        found = re.findall(r"data=(\d+) x fsdp=(\d+) x tensor=(\d+)\)", str(e.value))
        assert len(found) == 4
        for sizes in found:
            data, fsdp, tensor = map(int, sizes)
            laid_out([data, fsdp, 1, tensor], devices)


def test_processors_are_laid_out_in_their_order():
    mesh = make_mesh(MeshConfig(data=2, fsdp=-1, tensor=2), jax.devices())
    assert [d.id for d in mesh.devices.flat] == list(range(8)) and mesh.devices.shape == (2, 2, 1, 2)
    hosts = [SimpleNamespace(id=n, platform="gpu", device_kind="H100", slice_index=n // 4) for n in range(8)]
    assert [d.id for d in laid_out((1, 8, 1, 1), hosts).flat] == list(range(8))


COMPILED = """
import os
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
from jax.experimental import topologies
from grpojax.host.errors import UserError
from grpojax.sharding import MeshConfig, make_mesh
for name, slices, sizes in [("v5e:4x4", 2, (2, 16, 1)), ("v5e:4x4", 2, (4, 4, 2)), ("v5p:2x2x4", 2, (4, 4, 2))]:
    devices = topologies.get_topology_desc(name, platform="tpu", num_slices=slices).devices
    mesh = make_mesh(MeshConfig(data=sizes[0], fsdp=sizes[1], tensor=sizes[2]), devices)
    print(mesh.devices.shape, [len({d.slice_index for d in part.flat}) for part in mesh.devices])
try:
    make_mesh(MeshConfig(), devices)
except UserError as e:
    print(e)
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_the_topologies_of_the_compiler():
    run = tpu_compiler.run(COMPILED)
    assert run.returncode == 0, run.stderr[-2000:]
    lines = run.stdout.splitlines()
    assert lines[:3] == ["(2, 16, 1, 1) [1, 1]", "(4, 4, 1, 2) [1, 1, 1, 1]", "(4, 4, 1, 2) [1, 1, 1, 1]"]
    assert "data over the 2 slices" in lines[3] and math.prod(map(int, re.findall(r"=(\d+)", lines[4])[:3])) == 32
