"""Whether a group of one, and groups whose rewards are all the same, teach a variant anything."""

import equal_groups
import pytest
from equal_groups import ALL, rollout, variant_of
from refusals import RECIPE
from variant_examples import in_core

from grpojax.host.errors import UserError
from grpojax.run import recipe as config
from grpojax.run import trial
from grpojax.train import open_run

OFTEN = ("grpo", "rloo", "opo", "gpg", "reinforce_pp_baseline", "reinforce_pp", "ngrpo")
NAMES = [name for name in ALL if in_core(name)]


@pytest.mark.parametrize("name", ["ngrpo", "reinforce_pp", "grpo", "gtpo", "rloo"])
def test_who_learns_from_groups_with_equal_rewards(name):
    equal_groups.check_learns(name)


@pytest.mark.parametrize("name", [x if x in OFTEN else pytest.param(x, marks=pytest.mark.exhaustive) for x in NAMES])
def test_a_group_of_one_is_refused_where_every_advantage_is_0(name):
    equal_groups.check_group_of_one(name)


def test_options_count_and_so_does_a_batch_of_one():
    """A KL in the reward teaches nothing of the rewards; a batch of one prompt is its own baseline."""
    for options in ({"kl_coef": 0.1}, {"kl_coef": 0.1, "kl_in": "reward", "kl_kind": "k1"}):
        assert not trial.learns_from_equals(variant_of("grpo", **options), rollout(1))
    assert not trial.learns_from_equals(variant_of("reinforce_pp"), rollout(1, prompts=1))


def test_a_run_with_a_group_of_one_is_refused_before_anything_is_read(monkeypatch, tmp_path):
    """Reading the recipe tries nothing; the run does, before it looks for the model and the data."""
    monkeypatch.chdir(tmp_path)
    given = ["rollout.group=1", "model.path=x", "data.train=x", "run.dir=x"]
    recipe = config.load(RECIPE, [*given, "variant=rloo"])
    with pytest.raises(UserError, match="rollout.group=1: variant 'rloo'"):
        open_run(recipe)
    with pytest.raises(UserError, match="x: no such folder"):
        open_run(config.load(RECIPE, [*given, "variant=reinforce_pp"]))
    assert not (tmp_path / "x").exists()
