"""Methods resolved for a small recipe, and what is asked of every one of them."""

import functools
import itertools
import json

from variant_examples import REQUIRED

from grpojax import variants
from grpojax.records.method_diff import differences, without_repeats
from grpojax.rewards import RewardConfig
from grpojax.run.run_method import describe, resolve
from grpojax.run.sections import RolloutConfig, TrainConfig

ROLLOUT, TRAIN = RolloutConfig(prompts=8, group=4, max_tokens=16), TrainConfig(steps=1, ppo_epochs=2)
REWARDS = (RewardConfig(name="answer"),)


def tree(variant, **options):
    return describe(resolve({"name": variant, **REQUIRED.get(variant, {}), **options}, REWARDS, "auto", ROLLOUT, TRAIN))


@functools.cache
def plain_tree(name):
    return tree(name)


def check_described(name):
    """In plain JSON, with all its options."""
    described = plain_tree(name)
    assert json.loads(json.dumps(described)) == described
    assert described["options"].keys() == variants.parameters(name).keys()
    assert list(described) == [
        "variant", "options", "advantage", "objective", "filter", "retire", "critic",
        "sample_allocation", "needs",
    ]  # fmt: skip
    assert differences(described, tree(name)) == {}


def check_apart(names):
    """Every two of them differ in more than their names."""
    for a, b in itertools.combinations(names, 2):
        there, back = differences(plain_tree(a), plain_tree(b)), differences(plain_tree(b), plain_tree(a))
        assert {k: v[::-1] for k, v in there.items()} == back
        assert without_repeats(there), (a, b)


def other(value):
    if value is None or isinstance(value, bool):
        return 0.5 if value is None else not value
    return value + (0.25 if isinstance(value, float) else 1)


def check_options(name):
    """Every option of another value is named: as one thing, in the chain, the objective or the critic, or by itself."""
    skipped = ("constant", "entropy_step", "importance_low", "importance_high", "overlong_limit", "overlong_buffer")
    for option, value in plain_tree(name)["options"].items():
        if isinstance(value, str) or option.startswith("covariance") or option in skipped:
            continue
        changed = tree(name, **{option: 2.0 if option == "clip_dual" else other(value)})
        found = differences(plain_tree(name), changed)
        assert f"options.{option}" in found or f"objective.{option}" in found
        assert len(without_repeats(found)) == 1, (option, found)
