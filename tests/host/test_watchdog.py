import time

import pytest

from grpojax.host import watchdog


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(watchdog, "LOOK_S", 0.01)
    monkeypatch.setattr(watchdog, "FLOOR_S", 0.3)


def steps(watch, *seconds):
    for number, length in enumerate(seconds, 1):
        watch.begin(number)
        time.sleep(length)
        watch.end()


def test_a_step_that_hangs_is_told_once_with_the_stacks(quick, capfd):
    said = []
    with watchdog.Watchdog(said.append, lambda: False) as watch:
        steps(watch, 0, 0, 0, 0, 0, 0.7)
    assert len(said) == 1 and said[0].startswith("step 6 has taken 0 s, over 10 times the median of ")
    stacks = capfd.readouterr().err
    assert "in steps" in stacks and "in _watch" in stacks


@pytest.mark.slow
def test_what_is_slow_for_a_reason_is_not_told(quick):
    """Too few steps to know, an evaluation between steps, a step that compiles."""
    said, compiling = [], []
    with watchdog.Watchdog(said.append, lambda: bool(compiling)) as watch:
        steps(watch, 0, 0, 0, 0, 0.5)  # of five the last: four are known
        watch.begin(6)
        watch.end()
        time.sleep(0.5)
        compiling.append(1)
        steps(watch, 0.5)
    assert said == []
    assert len(watch._seconds) == 6  # the compiling step is no measure of the others


def test_the_limit_is_ten_medians(quick):
    watch = watchdog.Watchdog(print, lambda: False)
    watch._seconds.extend([1.0, 2.0, 3.0, 100.0])
    assert watch.limit() is None
    watch._seconds.append(3.0)
    assert watch.limit() == 30.0
