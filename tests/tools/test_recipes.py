"""Recipes parse, and whatever else stands in one is taken or refused by name."""

import dataclasses
import functools
import importlib.util
import json
import re
import typing
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tpu_compiler
import yaml
from hypothesis import given

from grpojax import variants
from grpojax.advantages import Signals
from grpojax.data import PARTS
from grpojax.host import settings
from grpojax.host.errors import UserError
from grpojax.run import recipe as config
from grpojax.run.finetune_recipe import load_sft
from grpojax.tools import plan_chips, plan_estimate
from grpojax.tools.plan_shapes import SHAPES

CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART = str(CONFIGS / "quickstart.yaml")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_recipe_parses_and_says_how_to_run_it(path):
    recipe = config.load(path)
    assert recipe.method.variant.name == ("dr_grpo" if path.stem in ("smollm2_sums", "smollm2_chain_sum") else "grpo")
    head = path.read_text().split("\n\n")[0]
    assert "grpojax " in head and path.name in head


def test_the_experiments_start_from_the_policy_that_their_head_makes():
    base, start = CONFIGS / "experiments" / "base.yaml", CONFIGS / "experiments" / "start.yaml"
    recipe, supervised = config.load(base), load_sft(start)
    command = (
        f"grpojax sft configs/experiments/start.yaml && grpojax export {supervised.run.dir} --to {recipe.model.path}"
    )
    for path in (base, start):
        assert f"#   {command}\n" in path.read_text()
    levels = [source.options["levels"] for source in (recipe.data.train, recipe.data.validation, recipe.data.test)]
    assert levels == [[0, 1, 2, 3, 4, 5, 6]] * 3


VARIANTS = {path.stem: path for path in sorted((CONFIGS / "variants").glob("*.yaml"))}


@functools.cache
def of_variant(name):
    return config.load(VARIANTS[name])


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variants_recipe_changes_only_what_it_says(name):
    """Beside its base: the variant, its directory, and no more than two sections that it names."""
    path = VARIANTS[name]
    text = path.read_text()
    said = yaml.safe_load(text)
    loaded, base = of_variant(name), of_variant("base")
    changed = {line.split(":")[0].split(".")[0] for line in settings.diff(base.resolved(), loaded.resolved())}
    assert changed - {"rewards", "method"} <= said.keys() and loaded.run.dir == f"runs/variants/{name}"
    assert settings.build(config.Config, loaded.resolved()).resolved() == loaded.resolved()  # as a run stores it
    if name != "base":
        assert said["base"] == "base.yaml" and len(said) <= 5 and len(text.splitlines()) <= 8
        assert text.startswith("# ") and re.search(r"arXiv \d{4}\.\d{5}", text)
        cited = re.findall(r"\d{4}\.\d{5}", loaded.method.variant.citation)
        assert set(cited) <= set(re.findall(r"\d{4}\.\d{5}", text))


def test_every_variant_has_a_recipe_and_no_two_recipes_are_the_same():
    recipes = {name: of_variant(name) for name in VARIANTS if name != "base"}
    assert {recipe.method.variant.name for recipe in recipes.values()} == set(variants.names())
    assert all(name.startswith(recipe.method.variant.name) for name, recipe in recipes.items())
    said = [json.dumps(settings.to_dict(r) | {"run": None}, sort_keys=True) for r in recipes.values()]
    assert len(set(said)) == len(said)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_recipe_is_not_another_method_under_its_name(name):
    """What differs from others by its ratio alone has several updates a rollout."""
    own = {"dapo", "high_entropy_tokens", "magistral", "ngrpo"}  # differ in what they learn from, too
    recipe = of_variant(name)
    if recipe.train.updates_a_rollout == 1 and name not in own:
        assert variants.twin_at_one_update(recipe.method.variant) is None


def test_an_option_is_given_to_a_variant_that_a_recipe_only_names():
    dapo = config.load(VARIANTS["dapo"], ["variant.clip_high=0.3"])
    assert dapo.variant == {"name": "dapo", "clip_high": 0.3}
    last = config.load(VARIANTS["dapo"], ["variant=gspo", "variant.clip_high=0.02"])
    assert last.variant == {"name": "gspo", "clip_high": 0.02}


def test_supervised_recipes_have_bases_too(tmp_path):
    (tmp_path / "mine.yaml").write_text(f"base: {CONFIGS / 'supervised/sft.yaml'}\ntrain: {{epochs: 3}}\n")
    loaded, base = load_sft(tmp_path / "mine.yaml"), load_sft(CONFIGS / "supervised/sft.yaml")
    assert settings.diff(base.resolved(), loaded.resolved()) == ["train.epochs: 2 -> 3"]


def test_dr_grpo_divides_by_the_longest_completion_allowed():
    recipe = config.load(QUICKSTART, ["variant=dr_grpo"])
    assert recipe.method.variant.objective.constant == recipe.rollout.max_tokens


def leaves(cls, path=()):
    """Dotted paths of all settings of a config class."""
    for name, kind in typing.get_type_hints(cls).items():
        options = [kind, *typing.get_args(kind)] if typing.get_origin(kind) is not tuple else []
        inner = [k for k in options if dataclasses.is_dataclass(k)]
        if inner and name != "rewards" and (*path, name) not in [("data", part) for part in PARTS]:
            yield from leaves(inner[0], (*path, name))
        else:
            yield ".".join((*path, name)), kind


LEAVES = dict(leaves(config.Config))


def required(path):
    """What a section must have before another of its settings means anything."""
    needed = {"model.adapter.": "model.adapter.rank=4", "environment.": "environment.name=calculator"}
    return [setting for section, setting in needed.items() if path.startswith(section)]


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
    value = "[1]" if path in ("data.template_options", "environment.options") else "{oops: [1]}"  # any mapping is one
    with pytest.raises(UserError) as wrong:
        config.load(QUICKSTART, [*required(path), f"{path}={value}"])
    assert path.split(".")[-1] in str(wrong.value) and str(wrong.value).count("\n") <= 1
    with pytest.raises(UserError) as typo:
        config.load(QUICKSTART, [*required(path), f"{path}q=1"])
    assert f"{path.split('.')[-1]}q" in str(typo.value) and str(typo.value).count("\n") <= 1


@pytest.mark.parametrize("path", [p for p, kind in LEAVES.items() if {int, float} & {kind, *typing.get_args(kind)}])
def test_a_number_far_out_of_range_is_refused(path):
    if path == "rollout.curriculum.success":
        return  # a reward, which may be any number
    with pytest.raises(UserError) as wrong:
        config.load(QUICKSTART, [*required(path), f"{path}=-1000000"])
    assert path.split(".")[-1] in str(wrong.value)


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


@hypothesis.settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(PATHS, VALUES), min_size=1, max_size=3))
def test_a_recipe_with_anything_in_it_loads_or_is_refused_in_two_lines(changes):
    tree = yaml.safe_load(Path(QUICKSTART).read_text())
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


@pytest.mark.parametrize("name", ["{name: distill, teacher: t}", "gt_likelihood", "negative_advantage"])
def test_groups_that_fail_as_a_whole_are_not_filtered_from_who_learns_from_them(name):
    with pytest.raises(UserError, match="filter: variant '.*' learns from groups whose rewards are all the same"):
        config.load(QUICKSTART, [f"variant={name}", "filter={}"])


def test_a_group_of_one_is_not_normalised():
    rewards = "rewards={terms: [{name: answer}], combine: normalize}"
    with pytest.raises(UserError, match="combine=normalize with rollout.group=1"):
        config.load(QUICKSTART, [rewards, "rollout.group=1"])


def test_a_variant_takes_what_it_lacks_from_the_run():
    def load(*overrides):
        return config.load(QUICKSTART, overrides)

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


PODS = {path.stem: path for path in sorted((CONFIGS / "pods").glob("*.yaml"))}


def said_of(path):
    """The head of a pod's recipe as one line, and the topology that it names."""
    head = " ".join(line.removeprefix("# ") for line in path.read_text().splitlines() if line.startswith("#"))
    return head, re.search(r"--topology (\S+)", head)[1]


@pytest.mark.parametrize("name", PODS)
def test_a_pods_recipe_says_what_its_plan_is(name):
    """The commands, and figures that its settings still have: of GPUs all, of TPUs within what an estimate can."""
    path = PODS[name]
    head, topology = said_of(path)
    recipe, target = config.load(path), plan_chips.parse(topology)
    model = name.split("_")[1]
    assert f"grpojax train configs/pods/{path.name}" in head and f"grpojax plan configs/pods/{path.name}" in head
    assert recipe.run.dir == f"runs/pods/{name}" and recipe.model.path.lower().startswith(model)
    estimate = plan_estimate.of_recipe(recipe, target)
    assert estimate.fits and model in SHAPES
    found = {p.name: p.total + p.resident for p in estimate.programs}
    told = {n: float(re.search(rf"{n} ([\d.]+)", head)[1]) for n in ("update", "rollout", "reshard", "score")}
    step = float(re.search(r"at least ([\d.]+) s:", head)[1])
    by_sheet = "data sheet" in head
    assert ("compiled in full" in head) != by_sheet
    assert max(told.values()) == pytest.approx(max(found.values()), rel=0.01 if by_sheet else 0.25)
    if SHAPES[model].mixture:  # programs copy tokens for their experts, which no estimate counts
        assert estimate.run.step < step < 2 * estimate.run.step
    else:
        assert step == pytest.approx(estimate.run.step, rel=0.01 if by_sheet else 0.25)


COMPILE = """
import sys
from grpojax.run import recipe
from grpojax.tools import planner
path, topology, programs = sys.argv[1:]
reports = planner.plan(recipe.load(path), topology=topology, layers=1, programs=programs.split(","))
print(*(r.name for r in reports if r.fits))
"""


def compiled(path, programs):
    done = tpu_compiler.run(COMPILE, str(path), said_of(path)[1], programs)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1].split()


needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


@pytest.mark.in_ci("v5e-8_qwen2.5-0.5b")
@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("name", [name for name in PODS if not name.startswith("gpu")])
def test_a_pods_recipe_compiles(name):
    """On the smallest slice what samples, too; of the others what takes the most memory and compiles soonest."""
    programs = ["reshard", "rollout"] if name.startswith("v5e-1_") else ["reshard"]
    assert compiled(PODS[name], ",".join(programs)) == programs


RECEIVED = """
import sys
from grpojax.run import recipe
from grpojax.tools import planner
path, topology, *overrides = sys.argv[1:]
(update,) = planner.plan(recipe.load(path, overrides), topology=topology, layers=2, programs=["update"])
print(update.links["ICI"].total)
"""


@pytest.mark.exhaustive("tools/test_planner.py::test_programs_compile_and_move_what_they_must")
@needs_libtpu
def test_a_chip_of_32_receives_what_the_guide_says():
    """Four prompts a chip, and every 16 of them hold a copy of the weights; the table is flat from there on."""
    table = re.findall(r"\| v5e:\S+ \| (\d+) \| ([\d.]+) GB", (CONFIGS.parent / "docs" / "measured.md").read_text())
    said = {int(chips): float(gb) for chips, gb in table}
    assert max(said[n] for n in (64, 128, 256)) == pytest.approx(said[32], rel=0.05)
    more = ["rollout.prompts=128", "mesh.data=2", "mesh.fsdp=16"]
    done = tpu_compiler.run(RECEIVED, str(PODS["v5e-4x4_qwen2.5-1.5b"]), "v5e:4x8", *more)
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout.split()[-1]) / 1e9 == pytest.approx(said[32], rel=0.05)
