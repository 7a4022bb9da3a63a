"""The arms of the experiments in ``configs/experiments``: placebos for what is learned from groups that fail."""

import re
import shlex
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from runs import numbers, opened
from scipy.stats import spearmanr

from grpojax import advantages as A
from grpojax import variants
from grpojax.cli import main as cli
from grpojax.extensions.experiments import sweep
from grpojax.run import recipe as recipes
from grpojax.train import train

ROOT = Path(__file__).parents[3]
NAN = np.nan
CHANCE = np.random.default_rng(0).random((5, 6), np.float32)


@pytest.fixture(autouse=True)
def from_the_checkout(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(variants.registry, "_ALL", dict(variants.registry._ALL))  # which the arms join


def advantages(name, rewards, chance=CHANCE, **signals):
    rewards = np.asarray(rewards, np.float32)
    signals = A.Signals(mask=np.ones((*rewards.shape, 1), bool), extra={"chance": chance}, **signals)
    return np.asarray(jax.jit(variants.get(name).advantage)(rewards, signals))[..., 0]


def arm(name):
    return f"configs.experiments.arms:{name}"


def test_the_placebo_has_random_signs_of_mean_0_where_a_group_fails():
    rewards = np.zeros((5, 6), np.float32)
    rewards[1, 2], rewards[2] = 1, 1  # mixed, all right
    rewards[3, 1], rewards[4, :2] = NAN, NAN  # an odd and an even number of samples that count
    got, control = (advantages(name, rewards) for name in (arm("placebo"), "grpo"))
    np.testing.assert_array_equal(got[1:3], control[1:3])
    assert sorted(got[0]) == [-1, -1, -1, 1, 1, 1]
    assert sorted(got[3]) == [-1, -1, 0, 0, 1, 1] and got[3, 1] == 0
    assert sorted(got[4]) == [-1, -1, 0, 0, 1, 1] and (got[4, :2] == 0).all()
    assert (advantages(arm("placebo"), rewards, 1 - CHANCE)[0] == -got[0]).all()


def test_permuted_likelihoods_are_those_of_the_group_at_other_samples():
    rewards, likelihood = np.zeros((5, 6), np.float32), np.random.default_rng(1).random((5, 6), np.float32)
    likelihood[1, [0, 4]] = NAN
    given = {"outcome": rewards, "likelihood": likelihood}
    got = advantages(arm("permuted_likelihood"), rewards, **given)
    mixed = np.full_like(likelihood, NAN)
    for values, group, chance in zip(mixed, likelihood, CHANCE, strict=True):
        known = [g for g in range(6) if np.isfinite(group[g])]
        values[known] = group[sorted(known, key=lambda g: chance[g])]
    np.testing.assert_array_equal(got, advantages("gt_likelihood", rewards, **given | {"likelihood": mixed}))
    assert (got[1, [0, 4]] == 0).all() and (mixed != likelihood)[[0, 2, 3, 4]].any(1).all()


def test_chance_follows_from_the_samples_alone():
    from configs.experiments.arms import Chance

    part = Chance(types.SimpleNamespace(method=types.SimpleNamespace(variant=None)), None)

    def drawn(tokens):
        batch = types.SimpleNamespace(rollout=types.SimpleNamespace(tokens=tokens))
        return part.after({}, batch, np.zeros((2, 3)))[0]["chance"]

    tokens = np.arange(12, dtype=np.int32).reshape(2, 3, 2)
    np.testing.assert_array_equal(drawn(tokens), drawn(tokens[:, :, ::-1][:, :, ::-1]))
    assert (drawn(tokens) != drawn(tokens + 1)).all()


@pytest.mark.parametrize(
    ("name", "control"),
    [
        ("placebo", ("negative_advantage", {"c": 0.0})),
        ("permuted_likelihood", ("gt_likelihood", {})),
    ],
)
def test_an_arm_is_compared_with_what_it_stands_in_for(name, control):
    assert variants.control(arm(name)) == control


@pytest.mark.parametrize("file", sorted((ROOT / "configs/experiments").glob("[!s]*.yaml")), ids=lambda file: file.stem)
def test_recipes_have_no_clip_but_for_the_first(file):
    assert recipes.load(file).optimizer.grad_clip == (1.0 if file.stem == "base" else 0.0)


@pytest.mark.slow
def test_the_registered_commands_run_all_arms_of_the_registered_comparisons():
    from configs.experiments import verdicts

    arms = {}
    for line in re.findall(r"^grpojax sweep .*", (ROOT / "docs/registration.md").read_text(), re.MULTILINE):
        args, rest = cli.parser().parse_known_args(shlex.split(line)[1:])
        folder, seeds = args.to.removeprefix("runs/experiments/"), sweep.read_seeds(args.seeds)
        given = {"variants": sweep.read_variants(args.variants), "seeds": seeds, "folder": Path(args.to)}
        arms[folder] = (
            {*sweep.Sweep(config=ROOT / args.config, overrides=(*args.overrides, *rest), **given).methods},
            seeds,
        )
    for row, families in verdicts.ROWS.items():
        for family in families:
            for folder, label in family.places:
                labels, seeds = arms[folder]
                assert label in labels and len(seeds) == family.seeds, (row, folder, label)


def test_verdicts_are_of_whole_rows_and_take_the_mean_of_joined_sweeps(monkeypatch, tmp_path):
    from configs.experiments import verdicts

    runs = {"a": {"x": [0.9, 0.8]}, "b": {"x": [0.7, 0.8]}, "a/c": {"y": [0.5, 0.6]}}
    runs = {folder: {label: dict(enumerate(v)) for label, v in of.items()} for folder, of in runs.items()}
    monkeypatch.setattr(verdicts, "read", lambda folder: (runs[str(folder.relative_to(tmp_path))], []))
    monkeypatch.setattr(verdicts, "described", lambda run: {"grad_norm": run})
    given = {"outcome": lambda run: run, "margin": 0.1, "pairs": (("x", "a/c/y"),), "sweeps": (("a", "b"),)}
    given["outcome"].__name__ = "itself"
    two = verdicts.Family(**given, seeds=2)
    for name in runs:
        (tmp_path / name).mkdir()
    made, _ = verdicts.outcomes([two], tmp_path)
    (found,) = verdicts.compare([two], made)
    np.testing.assert_allclose(found["difference"], ((0.8 - 0.5) + (0.8 - 0.6)) / 2)
    np.testing.assert_allclose(found["grad_norms"], [0.8, 0.55])
    with pytest.raises(SystemExit, match="x and a/c/y have 2 of 8 seeds: no verdict yet"):
        verdicts.compare([verdicts.Family(**given)], made)


@pytest.mark.parametrize(
    ("ending", "over"),
    [
        (("finished", ""), True),
        (("failed", "the gradient was not finite"), True),
        (("failed", "its process left no reason; it was killed or crashed"), False),
        (("failed", "killed by signal 15"), False),
        (("unfinished", "it goes on"), False),
    ],
)
def test_a_run_that_was_killed_from_outside_is_not_over(ending, over):
    from configs.experiments import verdicts

    assert verdicts.over(types.SimpleNamespace(ending=ending)) == over


def test_a_verdict_that_hangs_on_one_seed_is_told_with_its_share():
    from configs.experiments import verdicts

    def comparison(verdict, *differences):
        values = [dict(enumerate(differences)), dict.fromkeys(range(len(differences)), 0.0)]
        return {"family": 0, "margin": 0.1, "values": values, "verdict": verdict}

    steady = comparison("worse", -1.0, -1.001, -0.999)
    hangs = comparison("inconclusive", -1.0, -1.001, 1.0)  # without the third seed it is worse
    assert verdicts.with_one_seed_less([steady, hangs]) == [(hangs, pytest.approx(1 / 3))]


def test_outcomes_that_are_kept_join_those_of_another_machine(tmp_path):
    from configs.experiments import verdicts

    file = tmp_path / "kept.jsonl"
    one, two = {("a", "x", 0): {"itself": 1.0, "grad_norm": None}}, {("a", "x", 1): {"itself": 2.0, "grad_norm": 3.0}}
    assert [x["itself"] for x in verdicts.keep(file, one).values()] == [1.0]
    assert verdicts.keep(file, two).keys() == {*one, *two}
    again = {("a", "x", 0): {"itself": 5.0, "grad_norm": None}} | two
    assert {at: x["itself"] for at, x in verdicts.keep(file, again).items()} == {
        ("a", "x", 0): 1.0,  # the first run stays
        ("a", "x", 1): 2.0,
    }
    assert len(file.read_text().splitlines()) == 2
    verdicts.keep(file, {("a", "x", 0): {"itself": 7.0, "new": 4.0}})  # what was not noted is added
    assert verdicts.kept_in(file)["a", "x", 0]["new"] == 4.0 and verdicts.kept_in(file)["a", "x", 0]["itself"] == 1.0


def test_a_rank_correlation_given_what_moves_both():
    from configs.experiments.verdicts import rank_correlation_given

    rng = np.random.default_rng(0)
    cause, one, two = rng.normal(size=(3, 400))
    scores, displacement = cause + 0.5 * one, -(cause + 0.5 * two)
    assert rank_correlation_given(scores, displacement, np.ones(400)) == pytest.approx(
        spearmanr(scores, -displacement)[0]
    )
    assert spearmanr(scores, -displacement)[0] > 0.7
    assert abs(rank_correlation_given(scores, displacement, cause)) < 0.1
    assert abs(rank_correlation_given(scores, displacement - one, cause)) > 0.3
    best = rng.uniform(-1, 1, 400)  # both are largest where it is neither high nor low
    scores, displacement = -(best**2) + 0.1 * one, best**2 - 0.1 * two
    assert spearmanr(scores, -displacement)[0] > 0.7 and abs(rank_correlation_given(scores, displacement, best)) < 0.35


def test_policies_of_one_step_share_a_line_of_the_displacement_table():
    from configs.experiments.verdicts import along_table

    def policy(right, *deltas):
        names = "nthr-eta=1.0", "nthr"
        return {"right": right, "gwhes": [3.0, 2.0, 1.0], "displacement": dict(zip(names, deltas, strict=True))}

    up, mixed = [1.0, 2.0, 3.0], [0.0, 1.0, 2.0]
    found = {
        "0_20": policy([0.5, 0.25, 0.75], up, mixed),
        "start": policy([0.5, 0.5, 0.5], mixed, up),
        "1_20": policy([1.0, 0.25, 0.25], mixed, mixed[::-1]),
    }
    head, _, start, later = along_table(found)
    assert head.startswith(
        "| step | questions | right samples | Δ, `nthr-eta=1.0` | Δ, `nthr` | displaced, `nthr-eta=1.0`"
    )
    assert start.startswith("| 0 | 3 | 0.50 | +1.000 | +2.000 | 0.33 | 0.00 | 1.00 |")
    assert later.startswith("| 20 | 6 | 0.50 | +1.500 | +1.000 | 0.17 | 0.33 | 1.00 |")


@pytest.mark.slow
def test_an_arm_trains(recipe, tmp_path):
    overrides = [
        f"run.dir={tmp_path / 'run'}", f"variant.name={arm('permuted_likelihood')}", "data.validation=null",
        "rewards.0.name=tiny_run:parity", "rollout.max_tokens=4", "train.steps=1",
    ]  # fmt: skip
    assert train(opened(recipes.load(recipe, overrides), eos_ids=()))
    assert numbers(tmp_path / "run")[0]["grad_norm"] > 0
