"""Methods whose updates cannot leave out groups without an advantage."""

import pytest

from grpojax.host.errors import UserError
from grpojax.run import recipe as config

BASE = ("data.validation=null", "train.steps=3", "rollout.prompts=6", "rollout.group=2", "rollout.max_tokens=7",
        "rewards.0.name=tiny_run:parity", "variant.kl_coef=0", "train.seed=5")  # fmt: skip


def load(recipe, directory, *overrides):
    return config.load(recipe, [f"run.dir={directory}", *BASE, *overrides])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["variant={name: llds, kl_coef: 0}", "train.ppo_epochs=2"], "llds_coef"),
        (["variant={name: ppo, kl_coef: 0}"], "critic of all samples"),
        (["variant.importance=truncate", "rollout.ahead=1", "train.ppo_epochs=2"], "ratio_denominator=sampler"),
    ],
)
def test_what_does_not_go_with_it(recipe, tmp_path, options, said):
    assert load(recipe, tmp_path, *options).method.variant
    told = f"skip_zero_advantage=true does not go with .*{said}.*; or set train.skip_zero_advantage=false"
    with pytest.raises(UserError, match=told):
        assert load(recipe, tmp_path, *options, "train.skip_zero_advantage=true").method
