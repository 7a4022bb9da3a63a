"""Programs and the devices that run them; what is compiled ahead, and what is read at the next start."""

import logging
import os
import re
import threading
import time
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from plain_decoder import BASE

import grpojax
from grpojax import device
from grpojax.device import ROWS, SHARD, WHOLE, CompileAhead, Dry, Program, Real, places
from grpojax.host import compile_cache
from grpojax.host.compile_cache import cache_folder, keep_compiled
from grpojax.host.errors import UserError
from grpojax.losses import Objective
from grpojax.models import Compute
from grpojax.programs.optimizer_config import OptimizerConfig
from grpojax.run import make_programs
from grpojax.run import recipe as recipe_module
from grpojax.sharding import MeshConfig, make_mesh, named
from grpojax.train import open_run, train

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_persistent_cache_enable_xla_caches",
)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """No cache chosen yet, and a home of the test's own; afterwards all is as it was."""
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    before = {name: jax.config.values[name] for name in SETTINGS}
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def chosen():
    return jax.config.values["jax_compilation_cache_dir"]


def test_the_folder_is_the_users_or_beside_what_several_hosts_share(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/mine")
    assert cache_folder("auto", "runs/a") == cache_folder("auto") == "/var/mine/grpojax/compile"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder("auto", "runs/a") == "/home/me/.cache/grpojax/compile"
    assert cache_folder("~/c", "runs/a") == "/home/me/c"
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert cache_folder("auto", "/mnt/runs/a") == "/mnt/runs/compile_cache"
    assert cache_folder("auto") == "/home/me/.cache/grpojax/compile"
    with pytest.raises(UserError, match="s3:// is not supported"):
        cache_folder("s3://bucket/cache")


def test_a_setting_names_the_folder_and_the_environment_another(own_cache, monkeypatch):
    keep_compiled()
    assert chosen() == str(own_cache / "home/grpojax/compile") and Path(chosen()).is_dir()
    keep_compiled(str(own_cache / "given"))
    assert chosen() == str(own_cache / "given")
    keep_compiled(None)
    assert chosen() is None
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/theirs")  # which jax reads when it is imported
    keep_compiled(str(own_cache / "other"))
    assert chosen() is None and not (own_cache / "other").exists()


def test_a_folder_that_cannot_be_made(own_cache, monkeypatch, caplog):
    (own_cache / "file").write_text("")
    with pytest.raises(UserError, match="compile_cache=.*file/cache cannot be made or written: Not a directory"):
        keep_compiled(str(own_cache / "file/cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(own_cache / "file"))
    with caplog.at_level(logging.WARNING):
        keep_compiled()
    assert chosen() is None and "nothing that is compiled is kept" in caplog.text
    monkeypatch.setenv("XDG_CACHE_HOME", str(own_cache))
    monkeypatch.setattr(compile_cache.os, "access", lambda place, mode: False)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        keep_compiled()
    assert chosen() is None and "grpojax/compile cannot be made or written: Permission denied" in caplog.text


def test_the_users_folder_does_not_grow_for_ever(own_cache, monkeypatch):
    monkeypatch.setattr(compile_cache, "OWN_BYTES", 100)
    own, given = own_cache / "home/grpojax/compile", own_cache / "given"
    for folder in (own, given):
        folder.mkdir(parents=True)
        (folder / "other").write_bytes(bytes(1000))
        for n, (written, read) in enumerate([(5, 5), (1, 9), (2, 2), (7, 7), (3, 4)]):
            (folder / f"jit_{n}-cache").write_bytes(bytes(20))
            os.utime(folder / f"jit_{n}-cache", (read, written))
    keep_compiled()
    assert len(list(own.iterdir())) == 6  # no more than it may have
    (own / "jit_5-cache").write_bytes(b"1")
    keep_compiled()
    keep_compiled(str(given))
    assert sorted(f.name for f in own.iterdir()) == ["jit_1-cache", "jit_3-cache", "jit_5-cache", "other"]
    assert len(list(given.iterdir())) == 6


def new_program():
    return Program("sum", lambda x, y: x * 3 + y)


def test_a_program_that_was_compiled_before_is_read(own_cache, caplog):
    keep_compiled(str(own_cache / "cache"))
    with caplog.at_level(logging.INFO, logger="grpojax"):
        for _ in range(2):
            new_program()(jnp.arange(5), jnp.arange(5))
    said = [line.partition(" in ")[0] for line in caplog.messages]
    assert said == ["compiling sum", "compiled sum", "compiling sum", "read sum from the compile cache"]


def test_a_step_is_excused_while_something_is_traced_or_compiled():
    seen = []
    Program("sum", lambda x: seen.append(device.compiling()) or x + 1)(jnp.arange(3))
    assert seen == [True] and not device.compiling()


@pytest.mark.slow
def test_a_second_start_of_a_run_compiles_nothing(own_cache, recipe):
    told = Counter()
    jax.monitoring.register_event_listener(lambda event, **_: told.update([event.rpartition("/")[2]]))
    for n in (1, 2):
        jax.clear_caches()
        told.clear()
        changes = [f"run.dir={own_cache}/run{n}", f"compile_cache={own_cache}/cache", "train.steps=2"]
        assert train(open_run(recipe_module.load(recipe, changes), jax.devices()))
    assert told["cache_hits"] > 50 and told["cache_misses"] == 0


@pytest.fixture
def compiles():
    """Names of the programs that jax compiles, as they come: a list that grows."""
    seen = []

    def note(event, seconds, *, fun_name="", **_):
        if event.endswith("backend_compile_duration"):
            seen.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield seen
    jax.monitoring.unregister_event_duration_listener(note)


def shape(n):
    return jax.ShapeDtypeStruct((n,), jnp.float32)


def test_a_call_finds_what_was_compiled_ahead_and_waits_for_no_other(compiles, caplog):
    """Each is compiled once; one that no thread has taken yet is compiled by its call. The log tells them apart."""
    caplog.set_level(logging.INFO, logger="grpojax")
    function, started, go = new_program(), threading.Event(), threading.Event()

    def slow(x):
        started.set()
        assert go.wait(60)
        return x

    many = [(Program("slow", lambda x, i=i: slow(x) + i), (shape(3),), "") for i in range(os.cpu_count() or 1)]
    compiles.clear()
    run = CompileAhead([(function, (1.0, shape(7)), " of 7"), *many, (function, (1.0, shape(5)), " of 5")])
    assert started.wait(60)
    until = time.monotonic() + 60
    while "jit(sum)" not in compiles and time.monotonic() < until:
        time.sleep(0.01)
    assert compiles.count("jit(sum)") == 1  # before any call
    xs = [jax.device_put(jnp.ones(n)) for n in (5, 7)]
    assert [run(function, 1.0, x).shape for x in xs] == [(5,), (7,)]
    go.set()
    run.close()
    assert compiles.count("jit(sum)") == 2
    assert {"compiling sum of 7", "compiling sum of 5"} <= {*caplog.messages}


def test_what_fails_to_compile_ahead_raises_in_its_call():
    def refused(x):
        raise ValueError("no memory")

    broken, fine = Program("broken", refused), Program("fine", lambda x: x)
    run = CompileAhead([(broken, (shape(2),), ""), (fine, (shape(2),), "")])
    assert run(fine, jnp.ones(2)).shape == (2,)
    with pytest.raises(ValueError, match="no memory"):
        run(broken, jnp.ones(2))
    run.close()


def test_a_run_that_is_over_compiles_nothing_more_and_logs_nothing(compiles, capsys):
    """A program was being traced when the run ended with an error; its thread ends on its own."""
    traced, go = threading.Event(), threading.Event()

    def slow(x):
        traced.set()
        assert go.wait(60)
        return x + 1

    run = CompileAhead([(Program("late", slow), (shape(2),), "")])
    assert traced.wait(60)
    run.close()
    go.set()
    for thread in [t for t in threading.enumerate() if t.name.startswith("compile")]:
        thread.join(60)
    assert "jit(late)" not in compiles and "late" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_ragged_run_compiles_nothing_after_its_third_step(recipe, tmp_path, compiles, monkeypatch):
    """Its samples are 1 to 24 tokens long; of rows and prompts in sizes it met new ones for a dozen steps."""
    monkeypatch.setenv("XLA_FLAGS", "")  # updates have their own options, as in a user's run
    make_programs._MADE.clear()  # those of another test have other options
    sizes = ["rollout.prompts=12", "rollout.group=8", "rollout.max_tokens=24", "train.eval_every=0"]
    trainer = open_run(
        recipe_module.load(recipe, [f"run.dir={tmp_path}/run", "train.steps=50", *sizes]), jax.devices()[:1]
    )
    begin, at = trainer.profile.begin, []
    trainer.profile.begin = lambda number, state: (at.append(len(compiles)), begin(number, state))
    assert train(trainer)
    learned = ("jit(update)", "jit(score)")
    assert len(at) == 50 and not [name for name in compiles[at[3] :] if name not in learned]
    assert {name: compiles.count(name) for name in learned} == {"jit(update)": 2, "jit(score)": 2}


def test_options_of_an_update_are_known_to_xla_and_change_nothing_but_rounding(monkeypatch):
    w = jnp.linspace(0.0, 1.0, 91).reshape(7, 13)
    plain = jax.jit(lambda x: jax.nn.softmax(jnp.tanh(x @ w)).sum(0))
    monkeypatch.setenv("XLA_FLAGS", "")
    options = device.quick_options()
    assert options is not None and options["xla_backend_optimization_level"] == 1
    quick = jax.jit(plain.__wrapped__, compiler_options=options)
    np.testing.assert_allclose(quick(w.T), plain(w.T), rtol=1e-6)


def test_updates_and_scores_of_runs_have_them(monkeypatch):
    """The policy's two and not the covariance mask's."""
    monkeypatch.setenv("XLA_FLAGS", "")
    options, rule = device.quick_options(), OptimizerConfig(learning_rate=1e-3)
    inputs = make_programs.ProgramInputs(
        model=BASE, graph=None, compute=Compute(), objective=Objective(), optimizer=rule, updates=10, temperature=1.0
    )
    made = make_programs._make(inputs, ())
    assert (made.score.options, made.update.options, made.covariance_mask.options) == (options, options, None)


def test_options_of_an_update_leave_the_users_and_other_platforms_alone(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=2")
    assert "xla_backend_optimization_level" not in (device.quick_options("cpu") or {})
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=2 --xla_cpu_use_fusion_emitters=true")
    assert device.quick_options("cpu") is None
    monkeypatch.setenv("XLA_FLAGS", "")
    assert device.quick_options("gpu") is None and device.quick_options("tpu") is None


def test_the_core_jits_in_one_place():
    """Kernels aside, which are called inside of programs."""
    root = Path(grpojax.__file__).parent
    files = [
        f
        for f in root.rglob("*.py")
        if "extensions" not in f.parts and re.search(r"\bp?jit\(|jax\.jit\b", f.read_text())
    ]
    assert {str(f.relative_to(root)) for f in files} == {"device.py", "programs/decode_attention_gpu.py"}


def test_what_several_processes_hold_together_comes_whole_and_in_the_tree_it_was_in():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    device, x = Real(mesh), np.arange(48, dtype=np.int32).reshape(2, 4, 6)
    placed = device.put({"rows": x, "none": None}, ROWS)
    assert placed["rows"].sharding == named(mesh, ROWS) and placed["none"] is None
    assert device.put(x[0]).sharding == named(mesh, SHARD) and device.put(x, WHOLE).is_fully_replicated
    got = device.get({**placed, "host": x, "number": 1.5})
    np.testing.assert_array_equal(got["rows"], x)
    assert got["host"] is x and got["number"] == 1.5
    alone = Real(alone=jax.devices()[3])
    assert alone.put(x).committed and alone.put(x).devices() == {jax.devices()[3]}


def test_a_program_lays_its_results_out_as_it_says():
    """It is asked at the first call, also for shapes; one with a mesh of its own is not asked again."""
    mesh, asked = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)), []
    device = Real(mesh)

    def out(x):
        asked.append(x.shape)
        return places(x), None

    program = Program("halves", lambda x: (x / 2, x.sum()), donate=(0,), out=out)
    for n in (8, 16):
        x = device.put(np.ones((n, 3), np.float32))
        half, total = device.call(program, x)
        assert half.sharding == named(mesh, SHARD) and float(total) == 3 * n and x.is_deleted()
    assert asked == [(8, 3)]


@pytest.mark.parametrize("sizes", [None, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_a_dry_step_is_called_and_answers_as_a_real_one(sizes):
    """Shapes, dtypes and places; also of what a program says that XLA may lay out, and of results put in again."""
    mesh = None if sizes is None else make_mesh(MeshConfig(**sizes))

    def step(device):
        rows = device.put({"x": np.ones((1, 8, 3), np.float32)}, ROWS)
        stays = None if mesh is None else lambda rows, w: (places(rows), None)
        program = Program("scale", lambda rows, w: ({"x": rows["x"] * w}, rows["x"].sum()), out=stays)
        rows, total = device.call(program, rows, np.float32(2))
        rows, _ = device.call(program, rows, np.float32(2))
        return rows, total, device.get(rows)["x"]

    dry = Dry(mesh)
    got, want = step(dry), step(Real(mesh))

    def same(a, b):
        return (a.shape, a.dtype) == (b.shape, b.dtype) and a.sharding.is_equivalent_to(b.sharding, b.ndim)

    assert jax.tree.all(jax.tree.map(same, got[:2], want[:2]))
    assert got[2].shape == want[2].shape and not got[2].any()
    assert [program.name for program, _ in dry.calls] == ["scale"] * 2
    assert [x.shape for x in jax.tree.leaves(dry.calls[1][1])] == [(1, 8, 3), ()]


@pytest.mark.parametrize("longest", [True, False])
def test_a_dry_device_gives_what_a_program_makes_up(longest):
    """And zeros for the rest, also of a result that another call made."""

    def made_up(results, longest):
        return {**results, "lengths": np.full(results["lengths"].shape, 7 if longest else 1)}

    draw = Program("draw", lambda x: {"lengths": x.sum(1), "tokens": x}, made_up=made_up)
    dry = Dry(longest=longest)
    first, second = (dry.call(draw, dry.put(np.ones((2, 3), np.int32))) for _ in range(2))
    for out in (first, second):
        got = dry.get(out)
        assert got["lengths"].tolist() == [7 if longest else 1] * 2 and not got["tokens"].any()


def test_what_would_compile_ahead_may_fail_to_be_known(caplog):
    """The run itself then says what is wrong, or compiles when it calls."""

    def calls():
        raise ValueError("no such shape")
        yield

    run = CompileAhead(calls())
    assert run(Program("fine", lambda x: x), jnp.ones(2)).shape == (2,) and "no such shape" not in caplog.text
    run.close()
