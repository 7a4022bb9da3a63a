"""What has no public name in jax and orbax is still where `grpojax.host.internals` looks for it."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import jax
from jax._src.lib import _jax
from orbax.checkpoint._src.futures import synchronization
from orbax.checkpoint._src.multihost import multihost

import grpojax
from grpojax.host import internals

INSTALLED = {name: importlib.metadata.version(name) for name in internals.CHECKED}
MOVED = f"a private part has moved: internals.py was checked with {internals.CHECKED}, and installed is {INSTALLED}"


def test_no_other_file_takes_what_is_private():
    root = Path(grpojax.__file__).parent
    found = {f.relative_to(root).as_posix() for f in root.rglob("*.py") if "._src" in f.read_text()}
    assert found == {"host/internals.py"}


def test_the_processes_that_joined_and_their_client():
    assert internals.client() is None and internals.joined() == (0, 1), MOVED
    for name in ("key_value_set", "key_value_dir_get", "blocking_key_value_get", "key_value_delete"):
        assert callable(getattr(_jax.DistributedRuntimeClient, name, None)), MOVED


def test_an_exit_at_once_leaves_no_semaphores_behind():
    code = """
import multiprocessing
from grpojax.host import internals
lock = multiprocessing.get_context("forkserver").Lock()
internals.exit_at_once(3)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "")


def test_the_chips():
    assert internals.has_tpu_runtime() is False and internals.tpu_chips() == 0, MOVED
    assert jax.config.jax_platforms == "cpu"


def test_orbax_waits_where_it_is_asked_to(monkeypatch):
    """At its plain barriers, at those of its threads, and at those of some processes."""
    for name in ("get_barrier_sync_fn", "EXPERIMENTAL_ORBAX_USE_DISTRIBUTED_BARRIER"):
        monkeypatch.setattr(multihost, name, getattr(multihost, name))  # as it was, afterwards
    monkeypatch.setattr(multihost, "should_skip_process_sync", lambda processes=None: False)
    keys = []
    internals.wait_for_saves_in(lambda *, key, timeout_ms: keys.append((key, timeout_ms)))
    multihost.sync_global_processes("plain", timeout=3)
    multihost.sync_global_processes("some", timeout=5, processes={0})
    multihost.get_barrier_sync_fn()(key="thread", timeout_ms=7)
    assert keys == [("plain", 3000), ("some", 5000), ("thread", 7)], MOVED


def test_saves_are_counted_on_from_a_count(monkeypatch):
    ids = synchronization.OperationIdGenerator
    for name in ("_operation_id_counter", "_operation_id"):
        monkeypatch.setattr(ids, name, getattr(ids, name))
    internals.set_save_count(17)
    assert internals.save_count() == 17, MOVED
    assert int(ids.next_operation_id()) == internals.save_count() == 18, MOVED
