"""Whether a group of one, and groups whose rewards are all the same, teach variants that need more than the core."""

import equal_groups
import pytest
from equal_groups import ALL
from variant_examples import in_core

OFTEN = ("gt_likelihood", "remax", "ppo")
NAMES = [name for name in ALL if not in_core(name)]


def test_who_learns_from_groups_with_equal_rewards():
    equal_groups.check_learns("gt_likelihood")


@pytest.mark.parametrize("name", [x if x in OFTEN else pytest.param(x, marks=pytest.mark.exhaustive) for x in NAMES])
def test_a_group_of_one_is_refused_where_every_advantage_is_0(name):
    equal_groups.check_group_of_one(name)
