"""``grpojax displacement``: one update on each question alone."""

import dataclasses
import doctest
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from grpojax import diagnostics
from grpojax.cli import main as cli
from grpojax.extensions.methods import question_updates
from grpojax.host.errors import UserError
from grpojax.programs.optimizer_config import OptimizerConfig
from grpojax.run.run_state import State
from grpojax.types import TrainState

FOUND = question_updates.QuestionUpdates(
    uids=[7, 3, 5],
    right=np.array([0.5, 0.25, 0.75]),
    gwhes=np.array([-2.0, 3.0, 1.0]),
    displacement={"grpo": np.array([0.5, -0.25, 0.0]), "nthr": np.array([0.25, 0.5, -0.1])},
)


def test_table():
    """Questions by their GWHES; two of three displaced at ε = 0, one at -0.1, all at 0.5."""
    head, *rows = question_updates.format_table(FOUND, epsilon=0.0, top=2).splitlines()
    assert [row.split()[0] for row in rows[:3]] == ["3", "5", "7"]
    assert rows[0].split()[1:] == ["0.25", "3", "-0.2500", "0.5000"]
    assert rows[3] == "only 3 questions were found: rankings are compared on 1 of them in place of 2"
    assert "grpo: 66.7% of 3 questions displaced (Δ <= 0), mean Δ 0.0833, 100% of the 1 with" in rows[4]
    assert "(33% by chance), rank correlation of GWHES and -Δ 1.00 (0 by chance)" in rows[4]
    assert "nthr: 33.3% of 3" in rows[5] and "0% of the 1" in rows[5] and "-Δ -0.50" in rows[5]
    assert "100.0% of 3" in question_updates.format_table(FOUND, epsilon=0.5)


def test_numbers_are_written(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(question_updates, "measure", lambda *args, **how: FOUND)
    out = tmp_path / "numbers.json"
    assert cli.main(["displacement", str(recipe), "--methods", "grpo", "--json", str(out)]) == 0
    got = json.loads(out.read_text())
    assert got["displacement"] == {name: list(x) for name, x in FOUND.displacement.items()} and got["uids"] == [7, 3, 5]
    assert "one AdamW step" in got["step"] and f"wrote {out}" in capsys.readouterr().out
    assert cli.main(["displacement", str(recipe), "--methods", "grpo", "--json", str(tmp_path)]) == 2


def test_rankings_of_nothing_in_common_look_like_it():
    """Two tops of 10 of 15 share half at the least, whatever they are: a fifth and a correlation do not flatter."""
    up, rng = np.arange(15.0), np.random.default_rng(0)
    assert float(diagnostics.ranking_overlap(up, up, 10)) == 0.5  # exactly the wrong way round
    assert float(diagnostics.ranking_overlap(up, up, 3)) == 0.0 and float(diagnostics.rank_correlation(up, up)) == -1
    pairs = [(rng.random(15), rng.random(15)) for _ in range(40)]
    for a, b in pairs:
        want = scipy.stats.spearmanr(a.round(1), -b.round(1)).statistic  # with ties
        assert float(diagnostics.rank_correlation(a.round(1), b.round(1))) == pytest.approx(want, abs=1e-5)
    assert float(diagnostics.rank_correlation(up, np.zeros(15))) == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"learning_rate": 1e-4}, "one AdamW step from zero moments at a rate of 0.0001: about the sign"),
        ({"name": "sgd", "learning_rate": 0.1}, "gradient, clipped at a norm of 1, times 0.1"),
    ],
)
def test_the_step_is_stated(settings, said):
    assert said in question_updates.step_of(OptimizerConfig(**settings))


def test_ranking_overlap():
    got = [float(diagnostics.ranking_overlap(FOUND.gwhes, FOUND.displacement["nthr"], k)) for k in (1, 2, 3)]
    assert got == [0.0, 0.5, 1.0]
    with pytest.raises(ValueError, match="top=4.*of 3"):
        diagnostics.ranking_overlap(FOUND.gwhes, FOUND.displacement["nthr"], 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "grpo,ntrh"], "'ntrh' is unknown; did you mean 'nthr'"),
        (["--methods", ","], "name at least one variant"),
        (["--questions", "0"], "--questions 0: must be at least 1"),
        (
            ["--top", "10"],
            "--top 10 of --questions 15: rankings that have nothing in common would share 67%; give --top 3",
        ),
        (["--top", "4", "--questions", "19"], "or --questions 20"),
    ],
)
def test_mistakes(recipe, capsys, arguments, message):
    assert cli.main(["displacement", str(recipe), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_recipe_keeps_its_own_variants_options(recipe):
    overrides = ["variant={name: nthr, beta: 0.5}", "train.ppo_epochs=2", "optimizer.warmup_steps=9", "train.tokens=9"]
    own, other = (question_updates.recipe_of(str(recipe), overrides, name) for name in ("nthr", "grpo"))
    assert own.method.variant.options["beta"] == 0.5 and other.method.variant.name == "grpo"
    assert other.train.updates_a_rollout == other.train.steps == 1 and other.optimizer.warmup_steps == 0


def test_a_recipe_of_episodes_is_refused(recipe):
    played = ["environment={name: 'a:B'}", "rollout.overlap=0"]
    with pytest.raises(UserError, match="set environment=null"):
        question_updates.recipe_of(str(recipe), played, "grpo")


def test_methods_are_names_mappings_and_recipes(tmp_path):
    assert doctest.testmod(question_updates).failed == 0
    (tmp_path / "base.yaml").write_text("variant: {name: nthr, beta: 0.5}\n")
    (tmp_path / "random.yaml").write_text("base: base.yaml\nvariant: {select: random}\n")
    (tmp_path / "plain.yaml").write_text("train: {steps: 3}\n")
    text = f"grpo, {{name: nthr, eta: 0}}, {tmp_path}/random.yaml, {tmp_path}/plain.yaml"
    assert question_updates.read_methods(text) == {
        "grpo": "grpo",
        "nthr-eta=0": {"name": "nthr", "eta": 0},
        "random": {"name": "nthr", "beta": 0.5, "select": "random"},
        "plain": {"name": "grpo"},
    }
    for wrong, said in (("grpo,grpo", "grpo occurs twice"), ("3", "3 is no variant"), ("[grpo]", "is no variant")):
        with pytest.raises(UserError, match=said):
            question_updates.read_methods(wrong)


def test_controls_are_added_once_and_stand_for_their_methods(recipe):
    """What differs beside the mechanism is printed for a method without its control."""
    own = ["variant={name: grpo, kl_coef: 0.1}"]
    methods = question_updates.read_methods(
        "grpo, culling, token_critic, rare_token, dapo, {name: rare_token, limit: 1}"
    )
    plain, both = (question_updates.recipes_of(str(recipe), own, methods, controls=on) for on in (False, True))
    assert list(plain) == list(methods) and plain["grpo"].method.variant.objective.kl_coef == 0.1
    added = ["grpo-aggregate=sequence_sum-kl_coef=0.0"]  # of both; that of rare_token is there already
    assert list(both) == [*methods, *added] and both[added[0]].method.variant.objective.kl_coef == 0
    lines = question_updates.mismatches(str(recipe), own, methods, plain)
    assert [line.partition(" differs from grpo in ")[0] for line in lines] == ["culling", "token_critic", "dapo"] + [
        "rare_token-limit=1"
    ]
    assert "culling differs from grpo in 3 things: objective.aggregate: sequence_mean -> sequence_sum; " in lines[0]
    lines = question_updates.mismatches(str(recipe), own, methods, both)
    assert [line.partition(" ")[0] for line in lines] == ["dapo", "rare_token-limit=1"]


def test_a_control_of_the_name_of_the_recipes_own_variant_is_another(recipe):
    """The control has the published options, the method by that name the recipe's."""
    own, methods = ["variant={name: grpo, kl_coef: 0.1}"], {"grpo": "grpo", "grpo_lambda_length": "grpo_lambda_length"}
    recipes = question_updates.recipes_of(str(recipe), own, methods, controls=True)
    assert [x.method.variant.objective.kl_coef for x in recipes.values()] == [0.1, 0.04, 0.04]
    assert list(recipes)[2] == "grpo_lambda_length-control"


def test_sections_of_the_recipes_own_variant_go_with_it_alone(recipe):
    def of(method, variant, *overrides):
        return question_updates.recipe_of(str(recipe), [f"variant={{name: {variant}}}", *overrides], method)

    critic = ["critic={layers: 1, warmup_steps: 3}"]
    own, other = of("ppo", "ppo", *critic), of("grpo", "ppo", *critic)
    assert own.critic.layers == 1 and own.critic.warmup_steps == 0 and other.critic is None
    plan = ["rollout.sample_allocation={probe: 1, phases: 1}"]
    own, other = of("xrpo", "xrpo", *plan), of("grpo", "xrpo", *plan)
    assert own.rollout.sample_allocation.probe == 1 and other.rollout.sample_allocation is None
    for share, stays in ((None, False), (0.5, True)):
        retire = [f"rollout.retire={{share: {'null' if share is None else share}, readmit_after: 2}}"]
        own, other = of("scale_rl", "scale_rl", *retire), of("grpo", "scale_rl", *retire)
        assert own.rollout.retire.readmit_after == 2 and (other.rollout.retire is not None) == stays


def test_a_reference_that_is_refreshed_is_no_matter_of_one_update(recipe):
    """A method without a reference would refuse the setting."""
    overrides = ["variant={name: grpo, kl_coef: 0.1}", "train.reference_every=3", "train.reference_mix=0.5"]
    for method, reference in (("grpo", True), ("dapo", False)):
        got = question_updates.recipe_of(str(recipe), overrides, method)
        assert got.method.variant.objective.needs_reference == reference and got.train.reference_every == 0


def test_nothing_is_tracked(recipe):
    got = question_updates.recipe_of(str(recipe), ["tracking={wandb: mine, texts_every: 1}"], "grpo").tracking
    assert (got.samples, got.texts_every, got.wandb) == (False, 0, None)


class Counting:
    """Updates that add 1 to the weights of every network, and take the arrays over (`grpojax.run.learn`)."""

    def __init__(self):
        self.seen = []

    def pack(self, run, batch):
        return [None]

    def score(self, run, networks, minis):
        return minis, {}

    def weigh(self, run, networks, *rest):
        both = [networks[role] for role in ("policy", "critic")]
        self.seen.append([float(x) for s in both for x in (s.step, s.params[0], s.opt_state[0])])
        return *rest[:2], {}

    def update(self, run, state, minis):
        networks = {**state.networks}
        for role in ("policy", "critic"):
            before = networks[role]
            networks[role] = jax.tree.map(lambda x: x + 1, before)
            jax.tree.map(lambda x: x.delete(), before)
        return dataclasses.replace(state, networks=networks), []


def test_every_network_starts_over_with_each_question(monkeypatch):
    """The critic and its moments too, and after the last question."""
    outcome = np.array([[1.0, 0.0]])
    monkeypatch.setattr(question_updates, "_outcome", lambda *args: outcome)
    monkeypatch.setattr(question_updates, "_logps", lambda trainer, *rest: np.full((1, 2, 3), -1.0, np.float32))
    counting, batch = Counting(), SimpleNamespace(sampled=np.arange(3) < np.array([[[2], [3]]]))
    monkeypatch.setattr(question_updates, "learn", counting)
    zero = TrainState(step=jnp.zeros((), jnp.int32), params=jnp.zeros(2), opt_state=jnp.zeros(3))
    networks = {role: jax.tree.map(jnp.copy, zero) for role in ("policy", "critic")} | {"reference": jnp.ones(2)}
    question_updates._displacement(SimpleNamespace(state=State(networks=networks)), [batch] * 3)
    assert counting.seen == [[0.0] * 6] * 3
    assert float(networks["critic"].params[0]) == 0


SHORT = ["rewards.0.name=tiny_run:parity", "rollout.max_tokens=4", "optimizer.learning_rate=1e-3"]


@pytest.mark.slow
def test_every_question_starts_from_the_same_weights(recipe, monkeypatch):
    """What a question gives does not depend on those before it."""
    methods = {name: question_updates.recipe_of(str(recipe), SHORT, name) for name in ("grpo", "nthr")}
    two = question_updates.measure(methods, questions=2, rollouts=1, devices=jax.devices()[:1])
    plain = question_updates._mixed
    monkeypatch.setattr(question_updates, "_mixed", lambda *given: reversed(list(plain(*given))))
    turned = question_updates.measure(methods, questions=2, rollouts=1, devices=jax.devices()[:1])
    assert turned.uids == two.uids[::-1] and len(two.uids) == 2
    for name in methods:
        np.testing.assert_allclose(turned.displacement[name], two.displacement[name][::-1], rtol=1e-4)
    assert (two.displacement["grpo"] != 0).all() and np.isfinite(two.gwhes).all()
    assert ((two.right > 0) & (two.right < 1)).all()


@pytest.mark.slow
def test_no_question_with_both(recipe):
    short = {"grpo": question_updates.recipe_of(str(recipe), ["rollout.max_tokens=4"], "grpo")}  # lengths, none under 1
    with pytest.raises(UserError, match="raise --rollouts"):
        question_updates.measure(short, questions=2, rollouts=1, devices=jax.devices()[:1])
