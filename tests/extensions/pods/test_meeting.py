"""Saves and restores of two processes: what fails on one has failed on both, and both go on alike."""

import subprocess
import sys

import pytest
import runs

TWO = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import jax, numpy as np
from grpojax.device import SHARD, Real
from grpojax.extensions.pods import peers
from grpojax.host import processes
from grpojax.extensions.pods import meeting
from grpojax.records.checkpoint import Checkpoints, SaveError
from grpojax.sharding import MeshConfig, make_mesh, named
processes.start()
me, folder = jax.process_index(), Path(sys.argv[1])
device = Real(make_mesh(MeshConfig()))
sharding = named(device.mesh, SHARD)

def state(value):
    return {"policy": {"w": device.put(np.full(4, value, np.float32))}}

abstract = {"policy": {"w": jax.ShapeDtypeStruct((4,), np.float32, sharding=sharding)}}

def said(act, *args):
    started = time.monotonic()
    try:
        got = act(*args)
        word = "ok" if got is None else str(got)
    except SaveError as e:
        word = str(e).partition(": ")[2]
    print("said:", word, "" if time.monotonic() - started < 20 else "LATE", flush=True)

def broken_on(checkpoints, index, name):
    plain = getattr(checkpoints._manager, name)
    def broken(*args, **kwargs):
        if me == index:
            raise OSError(28, "No space left")
        return plain(*args, **kwargs)
    setattr(checkpoints._manager, name, broken)

with peers.watched():
    checkpoints = Checkpoints(folder / "checkpoints", keep=5)
    for index in range(2):  # of one alone, either; the next one is whole
        broken_on(checkpoints, index, "save")
        said(checkpoints.save, 2 * index + 1, state(1), {"step": 2 * index + 1})
        said(checkpoints.save, 2 * index + 2, state(2 * index + 2), {"step": 2 * index + 2})
        said(checkpoints.wait)
    said(checkpoints.save, 5, state(5), {"step": 5})
    broken_on(checkpoints, 1, "wait_until_finished")
    failed = threading.Event()

    def late():  # a thread of the save, which comes to its barrier when the others have gone
        failed.wait()
        meeting._barrier(key="late", timeout_ms=60_000)

    behind = ThreadPoolExecutor(1).submit(late)
    said(checkpoints.wait)
    failed.set()
    said(lambda: type(behind.exception(timeout=90)).__name__)
    said(checkpoints.steps)
    # The newest cannot be read by one of them.
    plain = checkpoints.restore
    def restore(abstract, step):
        if me == 1 and step == checkpoints.steps()[-1]:
            raise OSError(5, "torn")
        return plain(abstract, step)
    checkpoints.restore = restore
    restored, meta, broken = checkpoints.restore_newest(abstract)
    local = np.asarray(restored["policy"]["w"].addressable_shards[0].data)
    print("said:", meta["step"], broken, local[0], checkpoints.steps(), flush=True)
    checkpoints.close()
"""


@pytest.mark.slow
def test_one_process_alone_fails(tmp_path):
    group = [
        subprocess.Popen(
            [sys.executable, "-c", TWO, str(tmp_path)],
            env=runs.environment(2) | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for env in runs.together(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=400)[0] for process in group]
    assert all(process.returncode == 0 for process in group), said
    first, second = ([x for x in text.splitlines() if x.startswith("said:")] for text in said)
    own, others = "said: OSError: [Errno 28] No space left ", "said: process {}: OSError: [Errno 28] No space left "
    assert first[0] == own and second[0] == others.format(0)
    assert first[3] == others.format(1) and second[3] == own
    assert [*first[1:3], *second[1:3], *first[4:6], *second[4:6]] == ["said: ok "] * 8
    assert first[7] == others.format(1) and second[7] == own
    assert first[8:] == second[8:] and first[8] == "said: PeerError "
    assert first[9].startswith("said: [2, 4")
    step = 4 if "5" in first[9] else 2
    assert first[10].startswith(f"said: {step} [{step + 1 if step == 4 else 4}] {step}.0")
