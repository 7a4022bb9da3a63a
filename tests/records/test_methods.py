"""Two resolved methods compared: what differs, and what a resumed run may not differ in."""

import copy
import functools
import itertools
import json

import pytest
from refusals import QUICKSTART
from variant_examples import REQUIRED, built

from grpojax import variants
from grpojax.host import settings
from grpojax.host.errors import UserError
from grpojax.records.methods import changes, differences, equal_options, explain, in_a_line, without_repeats
from grpojax.rewards import RewardConfig
from grpojax.run import recipe
from grpojax.run.method import describe, resolve
from grpojax.run.sections import RolloutConfig, TrainConfig

ROLLOUT, TRAIN = RolloutConfig(prompts=8, group=4, max_tokens=16), TrainConfig(steps=1, ppo_epochs=2)
REWARDS = (RewardConfig(name="answer"),)
NAMES = [name for name in variants.names() if built(name).objective.has_ratio]


def tree(variant, **options):
    return describe(resolve({"name": variant, **REQUIRED.get(variant, {}), **options}, REWARDS, "auto", ROLLOUT, TRAIN))


@functools.cache
def plain_tree(name):
    return tree(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_method_is_described_in_plain_json_with_all_its_options(name):
    described = plain_tree(name)
    assert json.loads(json.dumps(described)) == described
    assert described["options"].keys() == variants.parameters(name).keys()
    assert list(described) == [
        "variant", "options", "advantage", "objective", "filter", "retire", "critic",
        "sample_allocation", "needs",
    ]  # fmt: skip
    assert differences(described, tree(name)) == {} == changes(described, tree(name))


def test_every_two_variants_differ_in_more_than_their_names_or_are_the_same():
    same = set()
    for a, b in itertools.combinations(NAMES, 2):
        there, back = differences(plain_tree(a), plain_tree(b)), differences(plain_tree(b), plain_tree(a))
        assert {k: v[::-1] for k, v in there.items()} == back
        if not without_repeats(there):
            same.add((a, b))
    assert same == set()


def other(value):
    if value is None or isinstance(value, bool):
        return 0.5 if value is None else not value
    return value + (0.25 if isinstance(value, float) else 1)


@pytest.mark.parametrize("name", ["grpo", "negative_advantage", "rare_token", "nthr", "token_critic", "dapo", "gspo"])
def test_every_option_of_another_value_is_named(name):
    """As one thing, in the chain, the objective or the critic, or by itself."""
    skipped = ("constant", "entropy_step", "importance_low", "importance_high", "overlong_limit", "overlong_buffer")
    for option, value in plain_tree(name)["options"].items():
        if isinstance(value, str) or option.startswith("covariance") or option in skipped:
            continue
        changed = tree(name, **{option: 2.0 if option == "clip_dual" else other(value)})
        found = differences(plain_tree(name), changed)
        assert f"options.{option}" in found or f"objective.{option}" in found
        assert len(without_repeats(found)) == 1, (option, found)


@pytest.mark.parametrize(("a", "b", "line"), [
    (tree("grpo"), tree("grpo"), ""),
    (tree("grpo", aggregate="sequence_sum", kl_coef=0.0), tree("culling"), "retire: none -> share=1.0"),
    (tree("negative_advantage", c=0.0), tree("negative_advantage"), "options.c: 0.0 -> 1.0"),
    (tree("nthr", eta=1.0), tree("nthr"), "options.eta: 1.0 -> none"),
    (tree("grpo", aggregate="sequence_sum", kl_coef=0.0), tree("gt_likelihood"),
     "advantage.likelihood_of_all_fail: none -> "
     "reward=likelihood_of_all_fail(fail_reward=0.0, everywhere=False, relative=False)"),
    (tree("grpo", aggregate="sequence_sum", kl_coef=0.0), tree("token_critic"),
     "advantage.add_token_bias: none -> add_token_bias(bound=None, center=False); "
     "critic: none -> loss=BiasLoss, signal=token_bias, targets=center | scale | to_tokens"),
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


@pytest.mark.parametrize(
    ("path", "value", "said", "remedy"),
    [
        (("options", "eps"), 1e-6, "variant.eps was 1e-06, is 0.0001 now", "set variant.eps=1e-06"),
        (("objective", "kl_coef"), 0.5, "variant.kl_coef was 0.5, is 0.04 now", "set variant.kl_coef=0.5"),
        (("objective", "ratio"), "own", "objective.ratio was own, is token now", "go on with the version"),
        (("filter",), {"metric": "x"}, "filter.metric was x, is None now", "go on with the version"),
        (("needs",), ["greedy"], "needs was ['greedy'], is [] now", "go on with the version"),
    ],
)
def test_what_has_changed_is_named_with_both_values_and_the_remedy(path, value, said, remedy):
    stored = copy.deepcopy(plain_tree("grpo"))
    place = stored
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    got = explain(changes(stored, plain_tree("grpo")), plain_tree("grpo"))
    assert got[0] == said and got[1].startswith(remedy)


def test_a_method_is_no_setting_but_a_stored_recipe_has_one():
    stored = recipe.load(QUICKSTART).resolved()
    assert stored["method"]["variant"] == "grpo" and settings.build(recipe.Config, stored).resolved() == stored
    for override in ("method.objective.kl_coef=1", "method=grpo"):
        with pytest.raises(UserError, match="method is what the variant stands for, not a setting: set variant"):
            recipe.load(QUICKSTART, [override])
    with pytest.raises(UserError, match="method: unknown key"):
        settings.build(recipe.Config, stored | {"method": "grpo"})


def test_a_step_that_is_new_is_a_change_and_an_option_that_is_new_is_none():
    now = plain_tree("grpo")
    stored = copy.deepcopy(now)
    del stored["options"]["eps"], stored["objective"]["count_empty"], stored["options"]["count_empty"]
    stored["advantage"] = now["advantage"].replace(", live_only=False", "")
    assert changes(stored, now) == {}
    stored["advantage"] = now["advantage"].removesuffix(" | to_tokens()")
    assert changes(stored, now) == {"advantage.to_tokens": (None, "to_tokens()")}
    assert changes(now, stored) == {"advantage.to_tokens": ("to_tokens()", None)} | {
        "objective.count_empty": (True, None), "options.eps": (0.0001, None),
    }  # fmt: skip
    assert changes(None, now) == {} == changes(now, None)
    assert equal_options(None, now) == set() and "eps" not in equal_options(stored, now)
