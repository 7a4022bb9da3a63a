"""What processes give each other of a batch, with the service that they joined by in a dictionary."""

import threading

import jax
import numpy as np
import pytest

from grpojax.host import coordination, processes


class Process(threading.local):
    index = 0


@pytest.fixture
def three(monkeypatch):
    """Calls a function as each of three processes at once; what it gave them."""
    me, posted, there = Process(), {}, threading.Condition()

    def exchange(name, text, *, seconds):
        with there:
            posted.setdefault(name, {})[me.index] = text
            there.notify_all()
            assert there.wait_for(lambda: len(posted[name]) == 3, 10)
        return [posted[name][i] for i in range(3)]

    class Numbers:
        def __init__(self):
            self._of = {i: iter(range(100)) for i in range(3)}

        def __next__(self):
            return next(self._of[me.index])

    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(jax, "process_index", lambda: me.index)
    monkeypatch.setattr(coordination, "exchange", exchange)
    monkeypatch.setattr(coordination, "forget", lambda key: None)
    monkeypatch.setattr(processes, "_gathers", Numbers())
    monkeypatch.setattr(processes, "_meetings", Numbers())

    def call(function):
        out = [None] * 3

        def run(index):
            me.index = index
            out[index] = function()

        threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return out

    return call


def test_a_meeting_is_forgotten_at_the_next_one(three, monkeypatch):
    gone = []
    monkeypatch.setattr(coordination, "forget", gone.append)
    assert three(lambda: [processes.meet("a"), processes.meet("b")]) == [[["a"] * 3, ["b"] * 3]] * 3
    assert {f"meeting/0/{i}" for i in range(3)} <= {*gone} and not any("/1/" in key for key in gone)


@pytest.mark.parametrize("n", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_of_three_processes_are_the_batch_again_bit_for_bit(three, n, dtype):
    whole = np.random.default_rng(n).normal(size=(n, 2, 5)).astype(dtype)
    whole[0, 0, :2] = np.nan, -0.0
    for got in three(lambda: processes.gather_rows(whole[processes.rows(n)], n)):
        assert got.dtype == dtype and got.tobytes() == whole.tobytes()
        got[0] = 0  # it may be written to


def test_counts_are_added_up(three):
    assert three(lambda: processes.total([processes.rows(7).size, 1])) == [[7, 3]] * 3
    assert three(lambda: processes.any_of(jax.process_index() == 2)) == [True] * 3
    assert three(lambda: processes.any_of(False)) == [False] * 3
