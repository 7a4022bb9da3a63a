"""How a recipe's section becomes a way to run a model; and the examples of this package run."""

import pytest

from grpojax.host.errors import UserError
from grpojax.models import Compute, ModelConfig, compute_of
from grpojax.sharding import MeshConfig, make_mesh


def test_a_section_says_all_of_how_a_model_runs():
    mesh = make_mesh(MeshConfig(data=2, tensor=2))
    config = ModelConfig(path="builtin:tiny", dtype="bfloat16", remat="matmuls", attention="cudnn")
    want = Compute(dtype="bfloat16", remat="matmuls", attention="cudnn", mesh=mesh, platform="gpu")
    assert compute_of(config, mesh, "gpu") == want
    assert compute_of(ModelConfig(path="builtin:tiny")) == Compute()


def test_cudnn_needs_half_precision():
    with pytest.raises(UserError, match="attention='cudnn' needs dtype: bfloat16"):
        ModelConfig(path="builtin:tiny", attention="cudnn")
