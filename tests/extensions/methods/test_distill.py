"""On-policy distillation: a teacher's log-probs of the policy's own samples."""

import json

import numpy as np
import pytest
import tiny_hf
from hf_compare import their
from runs import draw, numbers, opened
from tiny_run import make_teacher

from grpojax.host.errors import UserError
from grpojax.run import learn
from grpojax.run import recipe as config
from grpojax.train import train


@pytest.fixture(scope="module")
def teacher(recipe, tmp_path_factory):
    """Of another size than the policy."""
    sizes = dict(hidden_size=24, head_dim=10, intermediate_size=40)
    return make_teacher(recipe.parent, tmp_path_factory.mktemp("teacher"), **sizes)


def trainer(recipe, directory, teacher, *more, devices=1, eos_ids=()):
    """Samples of one length, as a rule: an update compiles once."""
    variant = json.dumps({"name": "distill", "teacher": str(teacher)})
    overrides = [
        f"run.dir={directory}", f"variant={variant}", "data.validation=null", "rewards.0.name=tiny_run:parity",
        "train.steps=6", "train.checkpoint_every=3", "rollout.max_tokens=4", "optimizer.learning_rate=0.02",
    ]  # fmt: skip
    return opened(config.load(recipe, [*overrides, *more]), devices, eos_ids)


def weighed(run):
    """``(advantages, metrics, batch, minibatches)`` of a step before its update."""
    batch = draw(run)
    minis = learn.pack(run, batch)
    batch = batch.with_rewards()
    networks = run.state.networks
    minis, signals = learn.score(run, networks, minis)
    minis, batch, told = learn.weigh(run, networks, minis, batch, signals)
    return batch.advantages, told, batch, minis


@pytest.mark.in_ci("rows without a token")
@pytest.mark.slow
@pytest.mark.parametrize("rows", [(40, 40), (56, 48)], ids=["a row a token", "rows without a token"])
def test_advantages_are_those_of_transformers(recipe, teacher, rows, tmp_path):
    """``log π_teacher - log π`` of each token, at a temperature of both that is not 1; over the 40 tokens, whatever
    the sizes of the two embeddings."""
    import with_torch  # noqa: F401

    student = recipe.parent
    if rows != (40, 40):
        student = make_teacher(student, tmp_path / "student", seed=2, vocab_size=rows[0], initializer_range=1.0)
        teacher = make_teacher(student, tmp_path / "teacher", seed=3, vocab_size=rows[1], initializer_range=1.0)
    options = f"model.path={student}", "rollout.temperature=0.8", "rollout.prompts=3"
    run = trainer(recipe, tmp_path / "run", teacher, *options, eos_ids=None)
    try:
        advantages, told, batch, _ = weighed(run)
    finally:
        run.close()
    made = [their(folder) for folder in (teacher, student)]
    for model in made:
        model.lm_head.register_forward_hook(lambda module, inputs, output: output[..., :40] / 0.8)
    want, lengths = np.zeros(advantages.shape), batch.rollout.lengths
    for p, problem in enumerate(batch.problems):
        for g, n in enumerate(lengths[p].tolist()):
            ids = [*problem.ids, *batch.rollout.tokens[p, g, :n].tolist()]
            theirs, own = (tiny_hf.logps(model, ids).numpy()[-n:] for model in made)
            want[p, g, :n] = theirs - own
    np.testing.assert_allclose(advantages, want, atol=5e-5)
    assert batch.rollout.tokens.max() < 40
    assert told["teacher/kl"] == pytest.approx(-want.sum() / lengths.sum(), rel=1e-4)
    assert abs(told["teacher/kl"]) > 0.01


@pytest.mark.exhaustive("extensions/methods/test_distill.py::test_advantages_are_those_of_transformers")
def test_the_policy_as_its_own_teacher_teaches_nothing(recipe, tmp_path):
    """To the last bit; whatever the rewards are."""
    run = trainer(recipe, tmp_path, recipe.parent)
    try:
        advantages, told, batch, minis = weighed(run)
        _, (update,) = learn.update(run, run.state, minis)
    finally:
        run.close()
    assert not advantages.any() and told["teacher/kl"] == 0
    assert float(update["grad_norm"]) == 0 and 0 < batch.total.mean() < 1


@pytest.mark.slow
def test_a_student_comes_nearer(recipe, teacher, tmp_path):
    """Over a stop in between, too: no checkpoint has the teacher."""
    first = trainer(recipe, tmp_path, teacher)
    assert not train(first, lambda *_: first.state.step == 3 and first.control.ask("SIGTERM"))
    assert set(first.saved_networks()) == {"policy"}
    assert train(trainer(recipe, tmp_path, teacher))
    apart = [line["teacher/kl"] for line in numbers(tmp_path) if "teacher/kl" in line]
    assert len(apart) == 6 and 0 < apart[-1] < 0.5 * apart[0]


@pytest.mark.slow
def test_eight_devices_say_what_one_does(recipe, teacher, tmp_path):
    one, eight = (trainer(recipe, tmp_path / str(n), teacher, devices=n) for n in (1, 8))
    try:
        (a, *_), (b, *_) = weighed(one), weighed(eight)
    finally:
        one.close(), eight.close()
    np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.slow
def test_other_vocabularies_and_fewer_positions_are_refused(recipe, tmp_path):
    def refused(said, *more, **changes):
        folder = make_teacher(recipe.parent, tmp_path / "teacher", **changes)
        with pytest.raises(UserError, match=said):
            trainer(recipe, tmp_path / "run", folder, *more).close()

    refused("variant.teacher=.*ids for 40 tokens, and its embedding 39 rows", vocab_size=39)
    refused("made for 8 positions.*is 12", max_position_embeddings=8)
    tiny_hf.tokenizer().save_pretrained(tmp_path / "other")
    make_teacher(recipe.parent, tmp_path / "teacher")
    tiny_hf.tokenizer().save_pretrained(tmp_path / "teacher")
    with pytest.raises(UserError, match="another tokenizer than the policy"):
        trainer(recipe, tmp_path / "run", tmp_path / "teacher").close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kl_coef": 0.1, "kl_in": "reward", "kl_kind": "k1"}, "does not learn from rewards.*kl_in=loss"),
        ({"teacher": None}, "teacher"),
    ],
)
def test_what_is_refused(recipe, tmp_path, options, said):
    with pytest.raises(UserError, match=said):
        variant = json.dumps({"name": "distill", "teacher": "x"} | options)
        config.load(recipe, [f"run.dir={tmp_path}", f"variant={variant}"])


def test_a_teacher_must_be_named(recipe, tmp_path):
    with pytest.raises(UserError, match="variant.*teacher"):
        config.load(recipe, [f"run.dir={tmp_path}", "variant=distill"])
