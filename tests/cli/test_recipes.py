"""Recipes parse, and whatever else stands in one is taken or refused by name."""

from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import recipe_files
import yaml
from hypothesis import given
from recipe_files import CORE_VARIANTS, PLAIN, TOP, VARIANTS, needs
from refusals import RECIPE

from grpojax import variants
from grpojax.advantages import Signals
from grpojax.host import settings
from grpojax.host.errors import UserError
from grpojax.run import recipe as config


@pytest.mark.parametrize("path", [path for path in TOP if not needs(path)], ids=lambda path: path.stem)
def test_every_recipe_parses_and_says_how_to_run_it(path):
    recipe_files.check(path)


@pytest.mark.parametrize("name", CORE_VARIANTS)
def test_a_variants_recipe_changes_only_what_it_says(name):
    recipe_files.check_variant(name)


def test_every_variant_has_a_recipe_and_no_two_recipes_are_the_same():
    recipes = {name: recipe_files.variant_of(path) for name, path in VARIANTS.items() if name != "base"}
    assert set(recipes.values()) == set(variants.names())
    assert all(name.startswith(variant) for name, variant in recipes.items())
    recipe_files.check_apart(CORE_VARIANTS)


@pytest.mark.parametrize("name", CORE_VARIANTS)
def test_a_recipe_is_not_another_method_under_its_name(name):
    recipe_files.check_own(name)


def test_an_option_is_given_to_a_variant_that_a_recipe_only_names():
    dapo = config.load(VARIANTS["dapo"], [*PLAIN, "variant.clip_high=0.3"])
    assert dapo.variant == {"name": "dapo", "clip_high": 0.3}
    last = config.load(VARIANTS["dapo"], [*PLAIN, "variant=gspo", "variant.clip_high=0.02"])
    assert last.variant == {"name": "gspo", "clip_high": 0.02}


def test_dr_grpo_divides_by_the_longest_completion_allowed():
    recipe = config.load(RECIPE, ["variant=dr_grpo"])
    assert recipe.method.variant.objective.constant == recipe.rollout.max_tokens


LEAVES = recipe_files.settings_of(config.Config)


def test_the_settings_are_found():
    assert {
        "train.steps",
        "filter.metric",
        "tracking.samples",
        "optimizer.b1",
        "data.train",
        "rewards",
    } <= LEAVES.keys()
    assert len(LEAVES) > 50


@pytest.mark.parametrize("path", LEAVES)
def test_a_wrong_type_and_a_typo_are_told_with_their_path(path):
    recipe_files.check_mistakes(path)


@pytest.mark.parametrize("path", recipe_files.numbers_of(LEAVES))
def test_a_number_far_out_of_range_is_refused(path):
    recipe_files.check_range(path)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from(["grpo", "dapo", "math_answer", "adamw", "builtin:tiny", "{prompt}", "1e-6", "os:system"]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=6), inner, max_size=2),
)
PATHS = st.sampled_from([*LEAVES, "rewards.0", "rewards.0.options", "variant", "variant.name", "variant.kl_coef",
                         "variant.clip_high", "variant.aggregate", "filter", "data", "train", ""])  # fmt: skip


@hypothesis.settings(max_examples=300)
@given(st.lists(st.tuples(PATHS, VALUES), min_size=1, max_size=3))
@pytest.mark.slow
def test_a_recipe_with_anything_in_it_loads_or_is_refused_in_two_lines(changes):
    tree = yaml.safe_load(Path(RECIPE).read_text())
    for path, value in changes:
        *sections, name = path.split(".")
        node = tree
        for key in sections:
            if isinstance(node, list):
                node = node[int(key)] if len(node) > int(key) else None
            else:
                node = node.get(key)
            if not isinstance(node, dict | list):
                break
        else:
            if isinstance(node, dict):
                node[name] = value
    try:
        settings.build(config.Config, tree)
    except UserError as e:
        assert 0 < len(str(e)) < 2000 and str(e).count("\n") <= 1


@pytest.mark.parametrize("name", ["negative_advantage"])
def test_groups_that_fail_as_a_whole_are_not_filtered_from_who_learns_from_them(name):
    with pytest.raises(UserError, match="filter: variant '.*' learns from groups whose rewards are all the same"):
        config.load(RECIPE, [f"variant={name}", "filter={}"])


def test_a_group_of_one_is_not_normalised():
    rewards = "rewards={terms: [{name: answer}], combine: normalize}"
    with pytest.raises(UserError, match="combine=normalize with rollout.group=1"):
        config.load(RECIPE, [rewards, "rollout.group=1"])


def test_a_cut_sample_is_not_dropped_after_rewards_were_normalised_with_it():
    with pytest.raises(UserError, match="truncated=drop with rewards.combine=normalize"):
        config.load(RECIPE, ["variant=gdpo", "train.truncated=drop"])
    assert config.load(RECIPE, ["variant=gdpo", "train.truncated=mask"]).method.rewards.combine == "normalize"


@pytest.mark.parametrize(("variant", "combine"), [("gdpo", "normalize"), ("grpo", "sum")])
def test_rewards_are_combined_in_the_variants_way_in_both_forms(variant, combine):
    for more in ([], ["rewards.timeout_s=30"]):
        assert config.load(RECIPE, [f"variant={variant}", *more]).method.rewards.combine == combine


@pytest.mark.slow
def test_a_variant_takes_what_it_lacks_from_the_run():
    def load(*overrides):
        return config.load(RECIPE, overrides)

    dapo = load("variant=dapo")
    assert dapo.method.filter and dapo.method.filter.max_rollouts == 3
    lengths, rewards = np.array([[40, 32, 10, 10]]), np.array([[1, 1, 0, 0]], np.float32)
    signals = Signals(lengths=lengths, mask=np.ones((1, 4, 1), bool))
    punished = np.asarray(dapo.method.variant.advantage(rewards, signals))[0, :, 0]
    assert punished[0] < punished[1]  # from 32 to 40 tokens a reward is lost
    free = load("variant={name: dapo, overlong_limit: null, overlong_buffer: null}").method.variant
    assert free.advantage(rewards, signals)[0, 0, 0] == free.advantage(rewards, signals)[0, 1, 0]
    assert load("variant=dapo", "filter=none").method.filter is None
    assert load("variant=dr_grpo").method.variant.objective.constant == 40.0
    assert load("variant={name: dr_grpo, aggregate: sequence_mean}").method.variant.objective.constant is None
    twice = "rewards=[{name: answer}, {name: soft_overlong, options: {max_tokens: 40, buffer: 8}}]"
    with pytest.raises(UserError, match="and so does the reward soft_overlong"):
        load("variant=dapo", twice)
