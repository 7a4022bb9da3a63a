"""Samples that eight bits have drawn, ahead of their step or beside greedy ones."""

import pytest

from grpojax.extensions.methods import greedy
from grpojax.host.errors import UserError
from grpojax.run import recipe as config
from grpojax.run.held_out import config_of

CACHE = "rollout.cache_dtype=int8"


def test_samples_of_an_older_policy_are_corrected_for_already(recipe):
    assert config.load(recipe, [CACHE, "rollout.ahead=1"]).method.variant.objective.ratio_denominator == "sampler"


def test_greedy_and_held_out_completions_read_the_policys_own_keys_and_values(recipe):
    eight = config.load(recipe, [CACHE, "variant=remax", "variant.importance=truncate"])
    assert config_of(eight).sampler.cache_dtype == greedy.sampler_of(eight.rollout).cache_dtype == "compute"
    half = config.load(recipe, ["rollout.cache_dtype=bfloat16", "variant=remax"])
    assert config_of(half).sampler.cache_dtype == greedy.sampler_of(half.rollout).cache_dtype == "bfloat16"


def test_uncorrected_samples_are_refused(recipe):
    with pytest.raises(UserError, match="set variant.train_on=sampled and variant.importance=truncate"):
        config.load(recipe, ["rollout.weights=int8", "variant={name: gt_likelihood, train_on: spliced}"])
