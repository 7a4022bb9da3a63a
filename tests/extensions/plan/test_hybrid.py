"""Shapes of hybrid models by name."""

import pytest

from grpojax.extensions.plan.plan_shapes import shape_of
from grpojax.host.errors import UserError


def test_too_few_layers_for_both_kinds_name_how_many_there_must_be():
    with pytest.raises(UserError, match="^2 layers.*needs both kinds\n.* at least 4$"):
        shape_of("Qwen3.5-0.8B", layers=2)
    assert shape_of("Qwen3.5-0.8B", layers=4).mixer
