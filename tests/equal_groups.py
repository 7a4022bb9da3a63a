"""Variants beside groups whose rewards are all the same."""

import inspect

import pytest

from grpojax import variants
from grpojax.host.errors import UserError
from grpojax.run import trial
from grpojax.run.sections import RolloutConfig

# Their baseline is not the group's mean, or there is a teacher, a critic, or a reward that still differs.
LEARN = {
    "distill", "gt_likelihood", "grpo_process", "negative_advantage", "ngrpo", "ppo", "reinforce_pp", "remax",
    "rl_zvp", "token_critic", "w_reinforce",
}  # fmt: skip
# Two have another reason to refuse such a group.
ALL = sorted({*variants.names()} - {"pass_at_k", "pass_at_k_margin"})
NEEDED = {"constant": 4.0, "teacher": "x"}


def variant_of(name, **options):
    required = [k for k, v in variants.parameters(name).items() if v is inspect.Parameter.empty]
    given = {k: NEEDED[k] for k in required}
    return variants.get(name, **(given | options))


def rollout(group, prompts=8):
    return RolloutConfig(prompts=prompts, group=group, max_tokens=4)


def check_learns(name):
    assert trial.learns_from_equals(variant_of(name), rollout(4)) == (name in LEARN)


def check_group_of_one(name):
    """It is refused where every advantage is 0; that of ``gt_likelihood`` is centred in the group, too."""
    if name in LEARN - {"gt_likelihood"}:
        return trial.try_out(variant_of(name), rollout(1))
    with pytest.raises(UserError) as refused:
        trial.try_out(variant_of(name), rollout(1))
    said = str(refused.value)
    assert f"rollout.group=1: variant {name!r}" in said and "set rollout.group to 2 or more" in said
    assert "\n" not in said
