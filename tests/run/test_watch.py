import logging
from pathlib import Path

import pytest

from grpojax import diagnostics
from grpojax.host.console import log
from grpojax.run.watch import Watch

LIMITS = diagnostics.CollapseLimits(window=4)


@pytest.mark.parametrize(
    ("entropies", "alarms"),
    [
        ([1.0, 1.1, 0.9, 1.0, 1.1, 0.9], []),
        ([1.0, 0.7, 0.4, 0.1, 0.1, 0.1], ["entropy_falling"]),
        ([0.05, 0.05, 0.05, 0.01, 0.01], ["entropy_collapse"]),
        ([1.0, 2.0, 4.0, 6.0, 7.0], ["entropy_explosion"]),
    ],
)
def test_each_kind_of_trouble_is_named_once(entropies, alarms, caplog):
    log.propagate = True
    caplog.set_level(logging.WARNING, "grpojax")
    watch = Watch(Path("runs/x"), LIMITS)
    rung = []
    for n, entropy in enumerate(entropies):
        watch.note(n + 1, {"entropy": entropy})
        rung += watch.look()
    assert [name for name in rung if name in alarms] == alarms and len(rung) == len(set(rung)) == len(caplog.records)
    assert bool(rung) == bool(alarms)
    assert all("grpojax show runs/x" in r.message for r in caplog.records)


@pytest.mark.parametrize(("biases", "rings"), [
    ([0.1, 0.2, 0.4, 0.8, 1.6, 3.2], True),
    ([0.1, 0.2, 0.4, 0.8, 0.9, 0.95], False),  # large, but less than the advantages
    ([2.0, 2.5, 3.0, 3.2, 3.3, 3.5], False),  # has hardly grown
    ([0.1, 4.0, 3.0, 2.0, 2.0, 2.0], False),  # comes back
    ([1.0, 2.0, 4.0], False),  # too early to say
])  # fmt: skip
def test_a_bias_that_grows_without_bound_is_named_once(biases, rings, caplog):
    log.propagate = True
    caplog.set_level(logging.WARNING, "grpojax")
    watch, rung = Watch(Path("runs/x"), LIMITS), []
    for n, bias in enumerate([*biases, 2 * biases[-1]] if rings else biases):
        watch.note(n + 1, {"critic/bias_abs": bias})
        rung += watch.look()
    assert rung == (["bias_growing"] if rings else [])
    assert [("step 5" in r.message, "variant.bound" in r.message) for r in caplog.records] == [(True, True)] * rings


def test_a_step_without_updates_says_nothing():
    watch = Watch(Path("runs/x"), LIMITS)
    for n in range(9):
        watch.note(n, {"reward": 0.0})
        assert watch.look() == []
