"""The counter of files that a step goes through, on a package of three files."""

import importlib
import sys
import threading

import count_files
import jax.numpy as jnp
import pytest


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "counted"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "host.py").write_text(
        "class A:\n    def f(self):\n        return [x for x in range(3)]\ndef g():\n    pass\n"
    )
    (folder / "device.py").write_text("def double(x):\n    return 2 * x\n")
    (folder / "late.py").write_text("class B:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "counted"]:
        del sys.modules[name]


def test_what_runs_in_a_step_and_what_is_traced_is_counted(package):
    """What is traced before the step counts, what else runs before or after does not; nor do bodies of modules."""
    in_step = False
    with count_files.Counter(package, lambda: in_step) as counter:
        import jax

        device, host = importlib.import_module("counted.device"), importlib.import_module("counted.host")
        double = jax.jit(device.double, static_argnames=())
        assert double(jnp.ones(3)).tolist() == [2, 2, 2]
        host.g()
        in_step = True
        importlib.import_module("counted.late")
        thread = threading.Thread(target=host.A().f)
        thread.start(), thread.join()
        double(jnp.ones(3))  # traced before
        in_step = False
        host.g()
    assert counter.ran == {"host.py": {"A.f"}} and counter.traced == {"device.py": {"double"}}
    assert counter.whole == {"host.py": {"A.f", "g"}, "device.py": {"double"}}


def test_outside_of_it_nothing_is_counted(package):
    jit = count_files.jax.jit
    with count_files.Counter(package, lambda: True) as counter:
        pass
    importlib.import_module("counted.host").g()
    assert not counter.ran and count_files.jax.jit is jit and sys.getprofile() is None


def test_lines_of_functions_are_counted_once(tmp_path):
    text = "class A:\n    def f(self):\n\n        def g():\n            pass\n        return g\ndef h():\n    pass\n"
    (tmp_path / "a.py").write_text(text)
    names = [name for name, _ in count_files.defined(tmp_path / "a.py")]
    assert names == ["A.f", "A.f.<locals>.g", "h"]
    assert count_files.size(tmp_path, {"a.py": {*names}}) == "1 files, 3 functions of 7 lines"
    assert count_files.size(tmp_path, {"a.py": {"h", "<lambda>"}}) == "1 files, 2 functions of 2 lines"
