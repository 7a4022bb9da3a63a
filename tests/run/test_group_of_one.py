"""Whether a group of one, and groups whose rewards are all the same, teach a variant anything."""

import inspect

import pytest

from grpojax import variants
from grpojax.host.errors import UserError
from grpojax.run import method
from grpojax.run.sections import RolloutConfig

# Their baseline is not the group's mean, or there is a teacher, a critic, or a reward that still differs.
LEARN = {
    "distill", "gt_likelihood", "grpo_process", "negative_advantage", "ngrpo", "ppo", "reinforce_pp", "remax",
    "token_critic",
}  # fmt: skip
ALL = sorted({*variants.names()} - {"pass_at_k", "pass_at_k_margin"})
OFTEN = (
    "grpo",
    "rloo",
    "opo",
    "gpg",
    "reinforce_pp_baseline",
    "gt_likelihood",
    "reinforce_pp",
    "ngrpo",
    "remax",
    "ppo",
)
NEEDED = {"constant": 4.0, "teacher": "x"}


def variant_of(name, **options):
    required = [k for k, v in variants.parameters(name).items() if v is inspect.Parameter.empty]
    given = {k: NEEDED[k] for k in required}
    return variants.get(name, **(given | options))


def rollout(group, prompts=8):
    return RolloutConfig(prompts=prompts, group=group, max_tokens=4)


@pytest.mark.parametrize("name", ["gt_likelihood", "ngrpo", "reinforce_pp", "grpo", "gtpo", "rloo"])
def test_who_learns_from_groups_with_equal_rewards(name):
    assert method.learns_from_equals(variant_of(name), rollout(4)) == (name in LEARN)


@pytest.mark.parametrize("name", [x if x in OFTEN else pytest.param(x, marks=pytest.mark.exhaustive) for x in ALL])
def test_a_group_of_one_is_refused_where_every_advantage_is_0(name):
    """That of ``gt_likelihood`` is centred in the group, too."""
    if name in LEARN - {"gt_likelihood"}:
        return method._try(variant_of(name), rollout(1))
    with pytest.raises(UserError) as refused:
        method._try(variant_of(name), rollout(1))
    said = str(refused.value)
    assert f"rollout.group=1: variant {name!r}" in said and "set rollout.group to 2 or more" in said
    assert "\n" not in said


def test_options_count_and_so_does_a_batch_of_one():
    """A KL in the reward teaches nothing of the rewards; a batch of one prompt is its own baseline."""
    for options in ({"kl_coef": 0.1}, {"kl_coef": 0.1, "kl_in": "reward", "kl_kind": "k1"}):
        assert not method.learns_from_equals(variant_of("grpo", **options), rollout(1))
    assert not method.learns_from_equals(variant_of("reinforce_pp"), rollout(1, prompts=1))


def test_a_recipe_with_a_group_of_one_is_refused():
    from grpojax.run import recipe as config

    given = ["rollout.group=1", "model.path=x", "data.train=x", "run.dir=x"]
    with pytest.raises(UserError, match="rollout.group=1: variant 'rloo'"):
        config.load("configs/quickstart.yaml", [*given, "variant=rloo"])
    assert config.load("configs/quickstart.yaml", [*given, "variant=reinforce_pp"]).rollout.group == 1
