"""One process for all tests of a worker that compile for a TPU: it loads libtpu and jax once.

libtpu stays in the process that loads it, and these tests have CPU options of XLA that it does not know.
"""

import atexit
import importlib.util
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

SERVER = """
import contextlib, io, json, sys, traceback
import jax
answers, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    code, sys.argv[1:] = json.loads(line)
    out, error = io.StringIO(), ""
    with contextlib.redirect_stdout(out):
        try:
            exec(compile(code, "<a test's program>", "exec"), {"__name__": "__main__"})
        except SystemExit as e:
            error = "" if not e.code else f"exit {e.code}"
        except BaseException:
            error = traceback.format_exc()
    jax.clear_caches()
    answer = {"stdout": out.getvalue(), "stderr": error, "returncode": int(bool(error))}
    print(json.dumps(answer), file=answers, flush=True)
"""

_process: subprocess.Popen | None = None


def run(code: str, *args: str) -> SimpleNamespace:
    """Runs a program with ``sys.argv[1:] = args`` and gives its ``stdout``, ``stderr`` and ``returncode``.

    The process goes on to the next test, so a program undoes what it patches.
    """
    global _process
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is absent: pip install 'grpojax[test-all]'")
    if _process is None or _process.poll() is not None:
        env = os.environ | {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "XLA_FLAGS": ""}
        _process = subprocess.Popen(
            [sys.executable, "-c", SERVER], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        atexit.register(_process.kill)
    print(json.dumps([code, args]), file=_process.stdin, flush=True)
    answer = _process.stdout.readline()
    assert answer, f"the process died with status {_process.wait()}"
    return SimpleNamespace(**json.loads(answer))
