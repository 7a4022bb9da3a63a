"""One process for all tests of a worker that compile for a TPU: it loads libtpu and jax once.

libtpu stays in the process that loads it, and these tests have CPU options of XLA that it does not know.
"""

import atexit
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpojax.models import DecoderConfig
from grpojax.tools.plan_report import ProgramReport

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"

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


# What a program of `run` has to begin with to plan recipes: `planned(model, topology, programs, recipe)`.
PLANNED = """
import dataclasses, json, sys
from unittest import mock
from grpojax.models import DecoderConfig, compute_of
from grpojax.models.decoder_config import Experts
from grpojax.run import recipe
from grpojax.tools import planner

def planned(model, topology, programs, given, **more):
    def compute(*args, **how):
        return dataclasses.replace(compute_of(*args, **how), **more)

    if model["experts"] is not None:
        model = model | {"experts": Experts(**model["experts"])}
    with mock.patch.object(planner, "compute_of", compute):
        return planner.plan(recipe.load(*given), topology=topology, model=DecoderConfig(**model), programs=programs)
"""


def recipe(*overrides: str) -> tuple[str, list[str]]:
    """The quickstart in bfloat16 without held-out problems, and what else it is to be: arguments of `recipe.load`."""
    plain = ["data.validation=null", "data.test=null", "model.dtype=bfloat16", "model.remat=layer"]
    return str(QUICKSTART), [*plain, *overrides]


def plan(model: DecoderConfig, topology: str, *overrides: str, programs: tuple[str, ...] | None = None, **compute):
    """The reports of a `recipe` by name; ``compute`` are fields of `Compute` that no recipe sets."""
    made = """
given, compute = map(json.loads, sys.argv[1:])
print(json.dumps([dataclasses.asdict(r) for r in planned(*given, **compute)]))
"""
    given = dataclasses.asdict(model), topology, programs, recipe(*overrides)
    done = run(PLANNED + made, json.dumps(given), json.dumps(compute))
    assert done.returncode == 0, done.stderr[-3000:]
    return {r["name"]: ProgramReport(**r) for r in json.loads(done.stdout.splitlines()[-1])}
