"""What a run of any kind does beside its steps, also when something fails."""

import contextlib
import errno

import pytest

from grpojax.host import processes
from grpojax.records import directory as directories
from grpojax.records import metrics as tracking
from grpojax.run import recorder, store
from grpojax.train import train


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def check_first_writes(run_of, monkeypatch, reads):
    """The first process writes anew what all have read; ``run_of()`` is the same run each time, ``reads`` in order."""
    assert train(run_of())
    of_directory, calls = directories.RunDirectory, []
    watched = {"read_metrics": tracking, "changed": of_directory, "meet": processes, "Recorder": recorder}
    for name, place in (watched | {"write": of_directory}).items():
        plain = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *given, plain=plain, name=name: (calls.append(name), plain(*given))[1])
    run_of().close()
    assert calls[calls.index("read_metrics") :] == [*reads, "meet", "Recorder", "write"]


def check_told(run_of, monkeypatch, where):
    """An error is told before what is held is let go of, at the start or in the loop."""
    calls = []

    @contextlib.contextmanager
    def telling():
        try:
            yield
        except Exception as e:
            calls.append(type(e).__name__)
            raise

    monkeypatch.setattr(processes, "telling", telling)
    plain = tracking.Metrics.close
    monkeypatch.setattr(tracking.Metrics, "close", lambda self: (calls.append("close"), plain(self))[1])
    place, name = (store.Store, "settle") if where == "start" else (recorder.Recorder, "write")
    monkeypatch.setattr(place, name, full)
    with pytest.raises(OSError, match="No space left"):
        train(run_of())
    assert calls == ["OSError", "close"]
