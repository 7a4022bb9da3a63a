"""``grpojax displacement``: one update on each question alone."""

import jax
import numpy as np
import pytest

from grpojax import diagnostics
from grpojax.host.errors import UserError
from grpojax.tools import cli, question_updates

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
    assert "grpo: 66.7% of 3 questions displaced (Δ <= 0), mean Δ 0.0833, 100% of the 2" in rows[3]
    assert "nthr: 33.3% of 3" in rows[4] and "50% of the 2" in rows[4]
    assert "100.0% of 3" in question_updates.format_table(FOUND, epsilon=0.5, top=99)


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
    ],
)
def test_mistakes(recipe, capsys, arguments, message):
    assert cli.main(["displacement", str(recipe), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_recipe_keeps_its_own_variants_options(recipe):
    overrides = ["variant={name: nthr, beta: 0.5}", "train.iterations=2", "optimizer.warmup_steps=9"]
    own, other = (question_updates.recipe_of(str(recipe), overrides, name) for name in ("nthr", "grpo"))
    assert own.method.variant.options["beta"] == 0.5 and other.method.variant.name == "grpo"
    assert other.train.updates_a_rollout == 1 and other.optimizer.warmup_steps == 0


SHORT = ["rewards.0.name=tiny_run:parity", "rollout.max_tokens=4", "optimizer.learning_rate=1e-3"]


@pytest.mark.slow
def test_every_question_starts_from_the_same_weights(recipe):
    """What a question gives does not depend on those before it."""
    methods = {name: question_updates.recipe_of(str(recipe), SHORT, name) for name in ("grpo", "nthr")}
    two = question_updates.measure(methods, questions=2, rollouts=1, devices=jax.devices()[:1])
    one = question_updates.measure(methods, questions=1, rollouts=1, devices=jax.devices()[:1])
    assert one.uids == two.uids[:1] and len(two.uids) == 2
    for name in methods:
        np.testing.assert_allclose(one.displacement[name], two.displacement[name][:1], rtol=1e-4)
    assert (two.displacement["grpo"] != 0).all() and np.isfinite(two.gwhes).all()
    assert ((two.right > 0) & (two.right < 1)).all()


@pytest.mark.slow
def test_no_question_with_both(recipe):
    short = {"grpo": question_updates.recipe_of(str(recipe), ["rollout.max_tokens=4"], "grpo")}  # lengths, none under 1
    with pytest.raises(UserError, match="raise --rollouts"):
        question_updates.measure(short, questions=2, rollouts=1, devices=jax.devices()[:1])
