"""A variant of one's own whose rollouts are ahead of their steps, or that takes a part that ships."""

import own_variants
import pytest
from own_variants import load

from grpojax.host.errors import UserError

module = own_variants.module


def test_without_an_option_that_corrects_old_samples_it_says_so(module):
    with pytest.raises(
        UserError, match=r"rollout\.ahead=1: .*:plain.*no option ratio_denominator.*or set rollout\.ahead=0"
    ):
        load(f"{module}:plain", "rollout.ahead=1")


def test_its_ratio_is_to_the_sampler_where_samples_are_older(module):
    assert load(f"{module}:mine", "rollout.ahead=1").method.variant.objective.ratio_denominator == "sampler"


def test_a_part_that_ships_has_options_that_the_variant_must_have(module):
    with pytest.raises(UserError, match="needs 'teacher', for which it must have the option 'teacher'"):
        load(f"{module}:needs")


def test_llds_needs_a_policy_that_has_moved():
    with pytest.raises(UserError, match="raise train.ppo_epochs or train.minibatches"):
        load("llds")
