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


def test_a_step_without_updates_says_nothing():
    watch = Watch(Path("runs/x"), LIMITS)
    for n in range(9):
        watch.note(n, {"reward": 0.0})
        assert watch.look() == []
