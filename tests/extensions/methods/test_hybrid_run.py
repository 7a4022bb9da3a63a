"""Critics on models whose layers are of two kinds."""

import pytest
from plain_decoder import FAMILIES

from grpojax.extensions.methods.critic import critic_model
from grpojax.extensions.methods.method_sections import CriticConfig
from grpojax.host.errors import UserError
from grpojax.models import Compute
from grpojax.models import decoder as dec
from grpojax.programs.policy import PolicyShape, Sampling


@pytest.mark.parametrize("family", ["qwen3_5", "glm4_moe"])
def test_a_critic_with_layers_of_one_kind_is_refused_by_its_setting(family):
    config = FAMILIES[family]
    shape = PolicyShape(
        config=config, graph=dec.abstract(config)[0], compute=Compute(), sampling=Sampling(None, Compute())
    )
    with pytest.raises(UserError, match="critic.layers=1: .*\nset critic.layers to at least 2"):
        critic_model(CriticConfig(layers=1), shape)
    assert critic_model(CriticConfig(layers=2), shape).config.num_layers == 2
