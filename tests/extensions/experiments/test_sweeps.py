"""What a sweep writes about its runs, read back."""

import json

import pytest

from grpojax.extensions.experiments import sweeps
from grpojax.extensions.experiments.sweeps import Chosen, Compared, Failure, Rate, SweepRecord
from grpojax.host.errors import UserError

LOST = Failure(status=-9, step=4, lines=("first", "last"))
RECORD = SweepRecord(
    methods={
        "dapo-clip_high=0.3": Compared(variant={"name": "dapo", "clip_high": 0.3}, control="c", baseline="grpo"),
        "c": Compared(variant="c", baseline="grpo"),
        "b": Compared(variant="b", control="grpo", baseline="grpo"),
        "grpo": Compared(variant="grpo"),
    },
    seeds=(0, 1),
    rates=(1e-4, 3e-4, 1e-3),
    margin=0.02,
    runs={"c": {0: "c_0", 1: "c_1"}, "b": {0: "c_0"}},
    failed={"c_1": LOST},
)
CHOSEN = {
    "c": Chosen(
        asked="abc",
        rate=3e-4,
        edge="highest",
        curve=(Rate(rate=3e-4, mean=0.25, values={1000: 0.5, 1001: 0.0}, failed={1001: LOST}),),
    ),
    "b": Chosen(asked="abd", rate=None, edge=None, curve=()),
}


def test_what_is_written_is_read(tmp_path):
    assert sweeps.read(tmp_path) is None and sweeps.read_rates(tmp_path) == {}
    sweeps.write(tmp_path, RECORD)
    sweeps.write_rates(tmp_path, CHOSEN)
    assert sweeps.read(tmp_path) == RECORD and sweeps.read_rates(tmp_path) == CHOSEN
    tree = json.loads((tmp_path / "sweep.json").read_text())
    assert tree["methods"]["grpo"] == {"variant": "grpo", "control": None, "baseline": None}
    assert tree["runs"] == {"c": {"0": "c_0", "1": "c_1"}, "b": {"0": "c_0"}}
    assert tree["failed"] == {"c_1": {"status": -9, "step": 4, "lines": ["first", "last"]}}


def test_a_pair_is_compared_once():
    assert RECORD.comparisons == [
        ("dapo-clip_high=0.3", "c"), ("dapo-clip_high=0.3", "grpo"), ("c", "grpo"), ("b", "grpo")
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"methods": 3}', "\xff"])
def test_a_broken_file_is_refused_with_its_name(tmp_path, text):
    for file, read in (("sweep.json", sweeps.read), ("rates.json", sweeps.read_rates)):
        if (file, text) == ("rates.json", "{}"):
            continue  # no method has been looked at yet
        (tmp_path / file).write_text(text, encoding="latin1")
        with pytest.raises(UserError, match=f"{file}: cannot be read .*; remove it, and start the sweep again"):
            read(tmp_path)
