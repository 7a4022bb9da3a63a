"""Two resolved methods compared: what differs, and what a resumed run may not differ in."""

import copy

import pytest
import resolved_methods
from refusals import RECIPE
from resolved_methods import plain_tree, tree
from variant_examples import built, in_core

from grpojax import variants
from grpojax.host import settings
from grpojax.host.errors import UserError
from grpojax.records.method_diff import differences, equal_options, in_a_line
from grpojax.run import recipe

NAMES = [name for name in variants.names() if built(name).objective.has_ratio and in_core(name)]


@pytest.mark.parametrize("name", NAMES)
def test_a_method_is_described_in_plain_json_with_all_its_options(name):
    resolved_methods.check_described(name)


def test_every_two_variants_differ_in_more_than_their_names():
    resolved_methods.check_apart(NAMES)


@pytest.mark.parametrize("name", ["grpo", "negative_advantage", "rare_token", "dapo", "gspo"])
def test_every_option_of_another_value_is_named(name):
    resolved_methods.check_options(name)


@pytest.mark.parametrize(("a", "b", "line"), [
    (tree("grpo"), tree("grpo"), ""),
    (tree("grpo", aggregate="sequence_sum", kl_coef=0.0), tree("culling"), "retire: none -> share=1.0"),
    (tree("negative_advantage", c=0.0), tree("negative_advantage"), "options.c: 0.0 -> 1.0"),
])  # fmt: skip
def test_methods_differ_from_their_controls_in_a_line(a, b, line):
    assert in_a_line(differences(a, b)) == line


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        ("x() | y(a=1)", "x() | y(a=2)", {"advantage.y.a": ("1", "2")}),
        ("x()", "x() | y(a=1)", {"advantage.y": (None, "y(a=1)")}),
        ("x(a=[1, 2], b=f(c=1, d=2))", "x(a=[1, 2], b=f(c=1, d=3))", {"advantage.x.b": ("f(c=1, d=2)", "f(c=1, d=3)")}),
        ("reward=r(a=1) | x()", "reward=r(a=2) | x()", {"advantage.r.a": ("1", "2")}),
        ("x() | z() | y()", "y() | x()", {"advantage": ("x, y", "y, x"), "advantage.z": ("z()", None)}),
        ("x(a=1) | y() | x(a=2)", "x(a=1) | y() | x(a=3)", {"advantage.x.a": ("2", "3")}),
        ("x(a=p() | q())", "x(a=p())", {"advantage.x.a": ("p() | q()", "p()")}),
        ("x(a=1)", "x(a=1, b=2)", {"advantage.x.b": (None, "2")}),
        ("mine", "yours", {"advantage.mine": ("mine", None), "advantage.yours": (None, "yours")}),
        ("", "x()", {"advantage.x": (None, "x()")}),
    ],
)
def test_chains_are_compared_step_by_step(a, b, found):
    assert differences({"advantage": a}, {"advantage": b}) == found
    assert differences({"advantage": b}, {"advantage": a}) == {k: v[::-1] for k, v in found.items()}


def test_a_method_is_no_setting_but_a_stored_recipe_has_one():
    stored = recipe.load(RECIPE).resolved()
    assert stored["method"]["variant"] == "grpo" and settings.build(recipe.Config, stored).resolved() == stored
    for override in ("method.objective.kl_coef=1", "method=grpo"):
        with pytest.raises(UserError, match="method is what the variant stands for, not a setting: set variant"):
            recipe.load(RECIPE, [override])
    with pytest.raises(UserError, match="method: unknown key"):
        settings.build(recipe.Config, stored | {"method": "grpo"})


def test_options_with_equal_values():
    now = plain_tree("grpo")
    stored = copy.deepcopy(now)
    del stored["options"]["eps"]
    assert equal_options(None, now) == set() and equal_options(stored, now) == now["options"].keys() - {"eps"}
