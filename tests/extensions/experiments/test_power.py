"""What a comparison could show, against scipy's noncentral t, and from a pilot's runs."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from grpojax.extensions.experiments import power
from grpojax.host.errors import UserError


@pytest.mark.parametrize("seeds", [2, 3, 8, 34])
@pytest.mark.parametrize("comparisons", [1, 12])
def test_the_difference_is_shown_with_the_power_that_was_asked_for(seeds, comparisons):
    freedom, level = seeds - 1, 0.05 / comparisons
    found = power.smallest_difference(0.5, seeds, comparisons=comparisons, power=0.9)
    critical, shift = stats.t.ppf(1 - level / 2, freedom), found / 0.5 * math.sqrt(seeds)
    assert stats.nct.sf(critical, freedom, shift) == pytest.approx(0.9, abs=1e-4)


def test_more_seeds_and_fewer_comparisons_show_more():
    found = [power.smallest_difference(1.0, n, comparisons=m) for n, m in ((3, 6), (5, 6), (8, 6), (8, 1))]
    assert found == sorted(found, reverse=True)
    assert power.smallest_difference(1.0, 1) is None


def test_the_spread_is_of_pairs_where_there_are_any():
    rng = np.random.default_rng(0)
    of_seed, noise = rng.normal(0, 10, 400), rng.normal(0, 1, (3, 400))
    values = {name: dict(enumerate(of_seed + x)) for name, x in zip("abc", noise, strict=True)}
    found = power.spread(values, "b")
    assert found.paired and found.freedom == 2 * 399
    # What the methods have in common in a seed goes away: what is left is sqrt(2) of the noise.
    assert found.sd == pytest.approx(math.sqrt(2), rel=0.05)
    one = power.spread({"a": values["a"]})
    assert not one.paired and one.freedom == 399
    assert one.sd == pytest.approx(math.sqrt(2) * np.std(of_seed + noise[0], ddof=1))
    separate = power.spread({"a": {0: 1.0, 1: 2.0}, "b": {2: 5.0, 3: 5.0}})  # no common seeds
    assert not separate.paired and separate.sd == pytest.approx(math.sqrt(2) * math.sqrt(0.25))
    with pytest.raises(ValueError, match="no method has two seeds"):
        power.spread({"a": {0: 1.0}, "b": {0: 2.0}})


def write_runs(folder, values, metric="eval/accuracy", done=6):
    for (variant, seed), value in values.items():
        path = folder / f"{variant}_{seed}"
        path.mkdir(parents=True)
        config = {"variant": variant, "train": {"steps": 6, "seed": seed}, "rollout": {}, "data": {"validation": "x"}}
        (path / "config.json").write_text(json.dumps(config))
        lines = [{"step": done}] + ([{"step": done, metric: value, "eval/reward": value}] if value is not None else [])
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_pilot_is_read(tmp_path):
    values = {("dapo", 0): 0.5, ("dapo", 1): 0.7, ("grpo", 0): 0.4, ("grpo", 1): 0.5, ("grpo", 2): 0.6}
    found = power.read_pilot(write_runs(tmp_path / "one", values))
    assert (found.metric, found.runs, found.unfinished) == ("eval/accuracy", 5, 0)
    assert found.spread.paired and found.spread.sd == pytest.approx(math.sqrt(0.005))  # of 0.1 and 0.2
    # Runs that failed count as 0, so that they do not differ.
    found = power.read_pilot(write_runs(tmp_path / "short", values, "test/accuracy", done=4))
    assert (found.metric, found.unfinished, found.spread.sd) == ("test/accuracy", 5, 0.0)


@pytest.mark.parametrize(("values", "message"), [
    ({("grpo", 0): 0.5, ("dapo", 0): 0.5}, "no method has two seeds; give runs with at least two"),
    ({("grpo", 0): None, ("grpo", 1): None}, "its runs have no held-out values"),
])  # fmt: skip
def test_a_pilot_that_says_nothing_is_refused(tmp_path, values, message):
    with pytest.raises(UserError, match=f"--pilot {tmp_path}: {message}"):
        power.read_pilot(write_runs(tmp_path, values))


def test_a_pilot_with_two_runs_of_a_seed_is_refused(tmp_path):
    write_runs(tmp_path, {("grpo", 0): 0.5, ("grpo", 1): 0.4})
    (tmp_path / "grpo_0").rename(tmp_path / "other")
    write_runs(tmp_path, {("grpo", 0): 0.5})
    with pytest.raises(UserError, match=f"--pilot {tmp_path}: two of its runs have the same method and seed"):
        power.read_pilot(tmp_path)
