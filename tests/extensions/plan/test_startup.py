"""A plan says nothing on standard error."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys

import pytest


def standard_error(*command):
    """Of a process with libtpu installed that has not been told to do without."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is absent: pip install 'grpojax[test-all]'")
    environ = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY")}
    done = subprocess.run([sys.executable, *command], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
def test_nor_does_a_plan():
    look = "from grpojax.extensions.plan import planner; from grpojax.sharding import MeshConfig; "
    assert standard_error("-c", look + "planner.topology_mesh('v5p:2x2x2', MeshConfig())") == ""
