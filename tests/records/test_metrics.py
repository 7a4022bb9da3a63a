"""What a run writes, and what it shows."""

import contextlib
import itertools
import json
import re
import struct
import sys
import threading
import time
import types

import jax.numpy as jnp
import pytest

from grpojax.device import Program
from grpojax.host import files
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.records import lines, samples
from grpojax.records import metrics as tracking

NAN = float("nan")
ROW = {"prompt": "1+1=", "completion": "2", "reward": 1.0, "length": 3}


def all_events(folder):
    """The tensorboard events of a run."""
    from tensorboardX.proto.event_pb2 import Event

    for path in folder.glob("tensorboard/events*"):
        content, at = path.read_bytes(), 0
        while at < len(content):
            (size,) = struct.unpack("<Q", content[at : at + 8])
            yield Event.FromString(content[at + 12 : at + 12 + size])
            at += 16 + size


def events(folder):
    """The values in them, by tag."""
    found = {}
    for event in all_events(folder):
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value))
    return found


def test_scalars_histograms_and_texts(tmp_path):
    metrics = tracking.Metrics(tmp_path, 0, tracking.TrackingConfig(samples=False, texts_every=2))
    for step in (1, 2, 3):
        assert metrics.wants_samples(step) == (step == 2)
        metrics.write(step, {"reward": 0.5 * step, "kl": NAN})
        metrics.write_samples(step, [ROW, ROW | {"completion": "3", "reward": 0.0}, ROW | {"reward": None}])
    metrics.close()
    assert not (tmp_path / "samples").exists()
    found = events(tmp_path)
    assert [(step, v.simple_value) for step, v in found["reward"] if v.HasField("simple_value")] == [
        (1, 0.5), (2, 1.0), (3, 1.5)
    ]  # fmt: skip
    assert "kl" not in found
    ((step, histogram),) = [(s, v.histo) for s, v in found["reward"] if v.HasField("histo")]
    assert step == 2 and (histogram.num, histogram.min, histogram.max) == (2, 0.0, 1.0)
    texts = {tag: v[0][1].tensor.string_val[0].decode() for tag, v in found.items() if "samples/" in tag}
    assert len(texts) == 2 and any("\n\n2\n\nreward 1" in t for t in texts.values())


def test_a_clock_that_jumps_loses_no_event_and_never_hangs(tmp_path, monkeypatch):
    jumps = itertools.cycle([0.0, -400 * 86400.0, 3650 * 86400.0, -5.0])
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + next(jumps))

    def write():
        metrics = tracking.Metrics(tmp_path, 0)
        for step in range(40):
            metrics.write(step, {"reward": 0.5})
        metrics.close()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert [step for step, _ in events(tmp_path)["reward"]] == [*range(40)]


def test_a_resumed_run_purges_the_events_after_its_step(tmp_path):
    from tensorboardX.proto.event_pb2 import SessionLog

    for resume_at in (0, 3):
        folder = tmp_path / str(resume_at)
        folder.mkdir()
        metrics = tracking.Metrics(folder, resume_at)
        metrics.write(resume_at + 1, {"reward": 0.5})
        metrics.close()
    assert [e.session_log.status for e in all_events(tmp_path / "0")] == [0, 0]
    (purges,) = [e for e in all_events(tmp_path / "3") if e.session_log.status == SessionLog.START]
    assert purges.step == 3


def test_what_is_not_finite_is_null(tmp_path):
    metrics = tracking.Metrics(tmp_path, 0)
    metrics.write(1, {"a": NAN, "b": float("inf"), "c": 2.0})
    metrics.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"step": 1, "a": None, "b": None, "c": 2.0}


def test_resuming_leaves_out_later_and_torn_lines(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "a": 1}\n5\n{"a": 2}\n{"step": 2, "a": 2}\n{"step": 3, "a": 3}\n{"step": 3, "a"')
    tracking.Metrics(tmp_path, 2).close()
    assert [line["step"] for line in tracking.read_metrics(tmp_path)] == [1, 2]
    assert file.read_text().endswith("}\n")


def test_samples_are_found_whatever_a_folder_is_called(tmp_path):
    folder = tmp_path / "lr=[1] *"
    folder.mkdir()
    with contextlib.closing(tracking.Metrics(files.path(folder), 0)) as metrics:
        metrics.write_samples(3, [{"prompt": "p", "completion": "c", "reward": 1.0, "length": 1}])
    (folder / "samples/step_000004.jsonl.gz.tmp").write_bytes(b"")
    assert samples.read_samples(folder)[0] == 3 and samples.sample_steps(folder) == [3]


def test_wandb_gets_the_same(tmp_path, monkeypatch):
    told, runs = [], []
    run = types.SimpleNamespace(log=lambda values, step: told.append((step, values)), finish=lambda: told.append("end"))
    module = types.SimpleNamespace(init=lambda **options: runs.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", module)
    for folder in ("a/run", "b/run", "a/run"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        metrics = tracking.Metrics(tmp_path / folder, 0, wandb=tracking.start_wandb("mine", tmp_path / folder))
        metrics.write(1, {"reward": 1.0, "kl": NAN})
        metrics.close()
    assert told == [(1, {"reward": 1.0})] * 3
    assert {r["project"] for r in runs} == {"mine"} and runs[0]["id"] == runs[2]["id"] != runs[1]["id"]
    tracking.start_wandb("mine", tmp_path / " a:b#c?d%e\\f;g,h'i")
    assert runs[-1]["name"] == " a:b#c?d%e\\f;g,h'i" and re.fullmatch("-a-b-c-d-e-f-g-h-i-[0-9a-f]{8}", runs[-1]["id"])
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"):
        tracking.start_wandb("mine", tmp_path)


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(log, "info", lambda text, *args: lines.append(text % args))
    return lines


STEP = {"reward": 0.5, "frac_reward_zero_std": 0.25, "completions/mean_length": 10.0, "entropy": 1.0, "grad_norm": 0.1,
        "tokens_per_s": 100.0, "time/step_s": 2.0}  # fmt: skip


def test_a_file_that_was_removed_is_begun_again_with_a_warning(tmp_path, caplog):
    written = lines.Lines(tmp_path, 0, None)
    for step in (1, 2, 3):
        written.append({"step": step})
        if step == 1:
            (tmp_path / "metrics.jsonl").unlink()
    written.close()
    assert lines.read(tmp_path) == [{"step": 2}, {"step": 3}]
    assert "metrics.jsonl was removed or replaced; its lines before step 2 are gone" in caplog.text


def test_a_terminal_gets_a_table_with_the_time_left(said):
    table = tracking.Table(2000, terminal=True)
    for step in range(1, 24):
        table.row(step, STEP)
    head, first, second = said[0].split(), said[1].split(), said[2].split()
    assert head == ["step", "reward", "zero-std", "length", "entropy", "grad", "tok/s", "seconds", "left"]
    assert first == ["1/2000", "0.500", "0.25", "10.0", "1.000", "0.100", "100", "2.00", "-"]
    assert second[-1] == "1h06m" and said[21].split() == head and len(said) == 25
    table.row(24, STEP | {"kl": 0.125, "reward": NAN})
    assert said[25].split()[4] == "kl" and said[26].split()[1] == "-" and said[26].split()[4] == "0.1250"
    assert len({len(line) for line in said[25:]}) == 1


def test_a_run_of_so_many_tokens_tells_its_share(said):
    table = tracking.Table(None, terminal=False)
    table.row(4, STEP, progress=0.25)
    table.row(5, STEP, progress=1.2)
    assert said[0].startswith("step 4 (25%)  reward") and said[0].endswith("seconds 2.00")
    assert said[1].startswith("step 5 (100%)  reward") and said[1].endswith("left 0m00s")
    table.row(6, STEP, progress=0.5)
    assert said[2].endswith("left 0m12s")


@pytest.mark.parametrize("terminal", [False, True])
def test_the_share_of_invalid_samples_is_shown_where_it_is_not_0(said, terminal):
    table = tracking.Table(10, terminal=terminal)
    for step, share in enumerate((0.0, 0.8125, 0.0), 1):
        table.row(step, STEP | {"rewards/invalid": share})
    if terminal:  # a column that came stays
        assert "invalid" not in said[0] and "invalid" in said[2]
        assert (said[3].split()[2], said[4].split()[2]) == ("81.2%", "0.0%")
    else:
        assert "invalid" not in said[0] + said[2] and "reward 0.500  invalid 81.2%  zero-std" in said[1]


def test_elsewhere_a_step_is_a_line(said):
    table = tracking.Table(10, terminal=False)
    table.row(4, STEP)  # the first one here compiles
    table.row(5, STEP | {"episode/calls": 1.25})
    assert said == [
        "step 4/10  reward 0.500  zero-std 0.25  length 10.0  entropy 1.000  grad 0.100  tok/s 100  seconds 2.00",
        "step 5/10  reward 0.500  zero-std 0.25  length 10.0  calls 1.25  entropy 1.000  grad 0.100  tok/s 100"
        "  seconds 2.00  left 0m10s",
    ]


def test_a_compile_is_announced_before_and_timed_after(said):
    double = Program("double", lambda x: said.append("tracing") or 2 * x)
    for size in (3, 3, 5):
        double(jnp.ones(size))
    once = ["tracing", "compiling double", "compiled double in"]
    assert [re.sub(r" [0-9.]+ s\b.*", "", line) for line in said] == 2 * once
