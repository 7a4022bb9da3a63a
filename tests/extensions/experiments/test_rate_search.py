"""Which learning rate each method of a sweep gets, by which runs, and what is kept of them."""

import json
import logging
from pathlib import Path

import pytest

from grpojax.extensions.experiments import rate_search, sweep, sweeps
from grpojax.extensions.experiments.jobs import JobsOutcome
from grpojax.extensions.experiments.sweeps import Failure, Rate

QUICKSTART = str(Path(__file__).parents[3] / "configs" / "quickstart.yaml")
RATES = (1e-3, 3e-4, 1e-4)
DAPO = "dapo-clip_high=0.3"


@pytest.fixture
def logged(caplog):
    """What was logged, so far."""
    caplog.set_level(logging.INFO, logger="grpojax")
    return lambda: "\n".join(record.getMessage() for record in caplog.records)


def made(tmp_path, variants="grpo,{name: dapo, clip_high: 0.3}", **given):
    return sweep.Sweep(config=QUICKSTART, variants=sweep.read_variants(variants), folder=tmp_path,
                       **{"seeds": (0, 1), "rates": RATES, **given})  # fmt: skip


class FakeQueue:
    """Makes each run in no time.

    ``reward(name, rate, seed)`` is the held-out reward at its end, None for one that is not known. Those in ``fails``
    end in the middle of the run with it.
    """

    def __init__(self, reward, fails=(), stops=False):
        self.reward, self.fails, self.stops, self.ran = reward, fails, stops, []

    def run(self, jobs):
        if self.stops:
            return JobsOutcome(stopped=True)
        for one in jobs:
            self.ran.append(one)
            one.directory.mkdir(parents=True, exist_ok=True)
            name, train = one.config["variant"]["name"], one.config["train"]
            value = self.reward(name, one.config["optimizer"]["learning_rate"], train["seed"])
            lines = [{"step": 2, "eval/reward": value}] if value != "nothing" else []
            (one.directory / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        failed = {j.name: Failure(status=1, step=2, lines=("all is lost",)) for j in jobs if j.name in self.fails}
        return JobsOutcome(done=[one for one in jobs if one.name not in failed], failed=failed)

    def rates(self, kind, name):
        """The rates that runs of a kind and a method were made with, in order."""
        found = [j for j in self.ran if j.directory.parent.name == kind and j.config["variant"]["name"] == name]
        return list(dict.fromkeys(j.config["optimizer"]["learning_rate"] for j in found))


def test_the_rate_of_the_best_mean_over_seeds_of_full_runs(tmp_path, logged):
    table = {"grpo": {1e-4: 0.2, 3e-4: 0.5, 1e-3: 0.4}, "dapo": {1e-4: 0.4, 3e-4: 0.45, 1e-3: 0.4}}
    queue = FakeQueue(lambda name, rate, seed: table[name][rate])
    asked = made(tmp_path, overrides=("train.steps=24", "profile.steps=[9, 12]"), rate_count=4)
    outcome = rate_search.run(asked, queue)
    search, runs = queue.ran[:24], queue.ran[24:]
    assert {j.directory.parent.name for j in search} == {"rates"} and {j.steps for j in search} == {24}
    assert {j.config["train"]["seed"] for j in search} == {1000, 1001, 1002, 1003}
    assert {tuple(j.config["profile"].values()) for j in search} == {(None,)}
    assert [j.name for j in search[:3]] == ["grpo_0.0001_1000", f"{DAPO}_0.0001_1000", "grpo_0.0003_1000"]
    assert queue.rates("runs", "grpo") == queue.rates("runs", "dapo") == [3e-4]
    assert outcome.done == runs and len(runs) == 4 and {j.config["train"]["seed"] for j in runs} == {0, 1}
    assert (
        "grpo: learning rate 0.0003, by held-out reward over 4 seeds: 0.0001 0.200, 0.0003 0.500, 0.001 0.400"
        in logged()
    )
    kept = sweeps.read_rates(tmp_path)
    assert [(x.rate, x.mean) for x in kept["grpo"].curve] == [(1e-4, 0.2), (3e-4, 0.5), (1e-3, 0.4)]
    assert kept["grpo"].curve[0].values == dict.fromkeys((1000, 1001, 1002, 1003), 0.2)
    assert (kept["grpo"].rate, kept["grpo"].edge, kept["grpo"].curve[0].failed) == (3e-4, None, {})
    again = FakeQueue(lambda *_: 1.0)
    rate_search.run(made(tmp_path, overrides=asked.overrides, rate_count=4, seeds=(0, 1, 2)), again)
    assert {j.directory.parent.name for j in again.ran} == {"runs"}  # more seeds leave the choice as it is
    other = FakeQueue(lambda *_: 1.0)
    rate_search.run(made(tmp_path, rates=(*RATES, 1e-2), overrides=asked.overrides, rate_count=4), other)
    assert other.rates("rates", "grpo") == [1e-4, 3e-4, 1e-3, 1e-2]  # asked anew


def test_one_seed_does_not_choose(tmp_path):
    def reward(name, rate, seed):
        return 0.9 if (rate, seed) == (1e-4, 1000) else {1e-4: 0.1, 3e-4: 0.5, 1e-3: 0.4}[rate]

    queue = FakeQueue(reward)
    rate_search.run(made(tmp_path, "grpo"), queue)
    assert queue.rates("runs", "grpo") == [3e-4]  # means 0.37, 0.5, 0.4


@pytest.mark.parametrize(("peak", "tried", "edge", "rate"), [
    (3e-4, [], None, 3e-4),
    (3e-3, [3.33e-3, 1.11e-2], None, 3.33e-3),
    (3e-5, [3.33e-5, 1.11e-5], None, 3.33e-5),
    (1.0, [3.33e-3, 1.11e-2, 3.7e-2], "highest", 3.7e-2),
    (1e-9, [3.33e-5, 1.11e-5, 3.7e-6], "lowest", 3.7e-6),
])  # fmt: skip
def test_an_optimum_at_the_end_extends_the_range(tmp_path, logged, peak, tried, edge, rate):
    queue = FakeQueue(lambda name, rate, seed: 1 / (1 + max(rate / peak, peak / rate)))
    rate_search.run(made(tmp_path, "grpo,{name: dapo, clip_high: 0.3}"), queue)
    for name, label in (("grpo", "grpo"), ("dapo", DAPO)):
        assert queue.rates("rates", name) == [1e-4, 3e-4, 1e-3, *tried]
        assert queue.rates("runs", name) == [rate]
        kept = sweeps.read_rates(tmp_path)[label]
        assert (kept.rate, kept.edge, [x.rate for x in kept.curve]) == (rate, edge, sorted([*RATES, *tried]))
    assert logged().count("is tried too") == 2 * len(tried)
    assert ("after 3 extensions" in logged()) == (edge is not None)
    if edge:
        assert f"it is still the {edge} of the range" in logged()


def curve(*means):
    return [Rate(rate=float(i), mean=x, values={}, failed={}) for i, x in enumerate(means)]


@pytest.mark.parametrize(("means", "wanted"), [
    ((0.1, 0.5, 0.5, 0.2), (1.0, None)),
    ((0.5, 0.5, 0.1), (1.0, None)),
    ((0.1, 0.5, 0.5), (1.0, None)),
    ((0.0, 0.0, 0.0), (1.0, None)),  # nothing is learned at any rate: no reason to look further
    ((0.5, 0.1, 0.5), (0.0, "lowest")),
    ((0.1, 0.2, 0.5), (2.0, "highest")),
])  # fmt: skip
def test_of_equal_rates_the_smallest_inside(means, wanted):
    assert rate_search.best(curve(*means)) == wanted


def test_a_run_that_fails_counts(tmp_path, logged):
    """As 0, whatever it had; the choice is kept, and so is how the run ended."""

    def reward(name, rate, seed):
        if rate == 1e-3:  # the best one while it lasts
            return "nothing" if seed == 1001 else 0.6
        return {1e-4: 0.3, 3e-4: 0.5}[rate]

    queue = FakeQueue(reward, fails=("grpo_0.001_1001", "grpo_0.001_1002", "grpo_1"))
    outcome = rate_search.run(made(tmp_path, "grpo"), queue)
    assert queue.rates("runs", "grpo") == [3e-4]  # 0.5 against (0.6 + 0 + 0) / 3
    assert list(outcome.failed) == ["grpo_1"]
    assert "2 runs failed and count as 0" in logged()
    lost = Failure(status=1, step=2, lines=("all is lost",))
    high = sweeps.read_rates(tmp_path)["grpo"].curve[-1]
    assert (high.values, high.failed) == ({1000: 0.6, 1001: 0.0, 1002: 0.0}, {1001: lost, 1002: lost})
    assert sweeps.read(tmp_path).failed == {"grpo_1": lost}
    again = FakeQueue(reward)
    assert not rate_search.run(made(tmp_path, "grpo"), again).failed
    assert [j.name for j in again.ran] == ["grpo_0", "grpo_1"]
    assert sweeps.read(tmp_path).failed == {}  # it came to its end now


def test_a_method_without_any_held_out_reward_is_left_out(tmp_path, logged):
    queue = FakeQueue(lambda name, rate, seed: 1e-3 - abs(rate - 3e-4) if name == "grpo" else None)
    outcome = rate_search.run(made(tmp_path), queue)
    text = "no learning rate gave a held-out reward; its runs are left out"
    assert outcome.failed == {DAPO: Failure(status=None, step=0, lines=(text,))} and f"{DAPO}: {text}" in logged()
    assert queue.rates("runs", "dapo") == [] and queue.rates("runs", "grpo") == [3e-4]
    assert sweeps.read_rates(tmp_path)[DAPO].rate is None
    again = FakeQueue(lambda name, rate, seed: 1e-3 - abs(rate - 3e-4))
    assert not rate_search.run(made(tmp_path), again).failed  # it is looked for again
    assert again.rates("rates", "grpo") == [] and again.rates("runs", "dapo") == [3e-4]


def test_methods_with_equal_recipes_share_the_search(tmp_path):
    queue = FakeQueue(lambda name, rate, seed: 1e-3 - abs(rate - 3e-4))
    rate_search.run(made(tmp_path, "grpo,{name: grpo, ddof: 1}"), queue)
    assert len(queue.ran) == 9 + 2 and {j.name.partition("_")[0] for j in queue.ran} == {"grpo"}
    kept = sweeps.read_rates(tmp_path)
    assert kept["grpo"] == kept["grpo-ddof=1"]
    assert sweeps.read(tmp_path).runs["grpo-ddof=1"] == {0: "grpo_0", 1: "grpo_1"}


def test_what_is_written_before_anything_runs(tmp_path):
    asked = made(tmp_path, "culling,grpo", controls=True, margin=0.02)
    assert rate_search.run(asked, FakeQueue(None, stops=True)).stopped
    tree = json.loads((tmp_path / "sweep.json").read_text())
    control = "grpo-aggregate=sequence_sum"
    assert tree["methods"] == {
        "culling": {"variant": "culling", "control": control, "baseline": "grpo"},
        "grpo": {"variant": "grpo", "control": None, "baseline": None},
        control: {"variant": {"name": "grpo", "aggregate": "sequence_sum"}, "control": None, "baseline": None},
    }
    assert (tree["seeds"], tree["margin"], sorted(tree["rates"])) == ([0, 1], 0.02, sorted(RATES))
    assert tree["runs"][control] == {"0": f"{control}_0", "1": f"{control}_1"} and tree["failed"] == {}
    assert not (tmp_path / "rates.json").exists()


def test_a_second_command_adds_to_what_the_first_wrote(tmp_path):
    lost = FakeQueue(lambda *_: 0.5, fails=("grpo_1",))
    rate_search.run(made(tmp_path, "grpo,gspo", rates=(), margin=0.02), lost)
    rate_search.run(made(tmp_path, "grpo,cispo", rates=(), seeds=(2,)), FakeQueue(lambda *_: 0.5))
    found = sweeps.read(tmp_path)
    assert list(found.methods) == ["grpo", "gspo", "cispo"] and found.seeds == (0, 1, 2) and found.margin == 0.02
    assert found.runs["grpo"] == {seed: f"grpo_{seed}" for seed in (0, 1, 2)} and found.runs["cispo"] == {2: "cispo_2"}
    assert list(found.failed) == ["grpo_1"]  # it was not started again
    rate_search.run(made(tmp_path, "grpo", rates=()), FakeQueue(None, stops=True))
    assert list(sweeps.read(tmp_path).failed) == ["grpo_1"]


def test_what_seeds_can_show_is_printed(tmp_path, logged):
    for seed, (a, b) in enumerate([(0.4, 0.5), (0.4, 0.7)]):
        for name, value in (("grpo", a), ("dapo", b)):
            path = tmp_path / "pilot" / f"{name}_{seed}"
            path.mkdir(parents=True)
            config = {"variant": name, "train": {"steps": 1, "seed": seed}, "rollout": {}, "data": {"eval": "x"}}
            (path / "config.json").write_text(json.dumps(config))
            (path / "metrics.jsonl").write_text(json.dumps({"step": 1, "eval/accuracy": value, "eval/reward": 1}))
    asked = made(tmp_path / "s", "grpo,gspo,cispo", rates=(), seeds=range(8))
    rate_search.run(asked, FakeQueue(None, stops=True), str(tmp_path / "pilot"))
    text = logged()
    assert "seeds 8, comparisons 2: they show a difference of 1.3 times its spread between seeds, at 80 % power" in text
    pilot = "pilot: a standard deviation is 0.141 of eval/accuracy by pairs of runs (4 runs, 1 degrees of freedom)"
    assert f"{pilot}, so that is a difference of 0.189" in text
    assert "gives no p-value" not in text
    rate_search.run(made(tmp_path / "one", "grpo,gspo", rates=(), seeds=(3,)), FakeQueue(None, stops=True))
    assert "warning: one seed gives no p-value" in logged()
