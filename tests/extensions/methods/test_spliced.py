"""Learning from samples with the true answer spliced into them (gt_likelihood, train_on=spliced)."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_hf
from hf_compare import their
from runs import draw, numbers, opened

from grpojax.extensions.methods.splicing import SplicedAnswers, room, splice
from grpojax.extensions.methods.true_answers import TrueAnswers, _Found, _Scored
from grpojax.host.errors import UserError
from grpojax.records.samples import read_samples
from grpojax.run import learn
from grpojax.run import recipe as config
from grpojax.run.batch import Batch
from grpojax.run.sections import TrainConfig
from grpojax.run.step_metrics import of_drawn
from grpojax.train import train
from grpojax.types import Rollout

SPLICED = {"name": "gt_likelihood", "marker": "e", "train_on": "spliced", "kl_coef": 0.1}
EVERY = {**SPLICED, "groups": "all"}


def trainer_of(recipe, directory, variant, *more, devices=1):
    """All of two steps with two updates on a rollout."""
    overrides = [
        f"run.dir={directory}", f"variant={variant}", "data.validation=null", "rewards.0.name=tiny_run:parity",
        "train.steps=2", "train.ppo_epochs=2", "train.checkpoint_every=1",
    ]  # fmt: skip
    return opened(config.load(recipe, [*overrides, *more]), devices)


@dataclasses.dataclass
class Text:
    """What a sample is replaced by, and where in it the answer stands."""

    ids: list
    answer: slice
    markers: int


def texts(batch, policy):
    """What each sample is replaced by, ``{(p, g): Text}``, one after the other, up to the token that ends it."""
    drawn, found = batch.drawn, {}
    for p, g in np.ndindex(drawn.lengths.shape):
        ids = drawn.tokens[p, g, : drawn.lengths[p, g] - drawn.stopped[p, g]].tolist()
        made = splice(ids, batch.problems[p].gold, policy.tokenizer, marker="e")
        n, end = len(made.ids), drawn.tokens[p, g, len(ids)] if drawn.stopped[p, g] else policy.eos_ids[0]
        found[p, g] = Text([*made.ids, int(end)], slice(n - made.scored, n), made.markers)
    return found


@dataclasses.dataclass
class Step:
    """What became of a step; ``old`` and ``ref`` are log-probs ``[P, G, T]``."""

    batch: Batch
    want: dict
    old: np.ndarray
    ref: np.ndarray
    advantages: np.ndarray
    owed: list


def step_of(trainer):
    """The first step of a run, with its updates."""
    try:
        networks = trainer.state.networks
        batch = learn.replaced(trainer, networks, draw(trainer))
        minis = learn.pack(trainer, batch)
        (mini,), signals = learn.score(trainer, networks, minis)
        rows = mini.rows.arrays
        assert "sampler_logps" not in rows
        old, ref = (mini.layout.unpack(np.asarray(rows[name])) for name in ("old_logps", "ref_logps"))
        minis, batch, _ = learn.weigh(trainer, networks, [mini], batch, signals)
        _, owed = learn.update(trainer, trainer.state, minis)
        return Step(batch, texts(batch, trainer.policy), old, ref, batch.advantages, owed)
    finally:
        trainer.close()


@pytest.fixture(scope="module")
def step(recipe, tmp_path_factory):
    import with_torch  # noqa: F401

    return step_of(trainer_of(recipe, tmp_path_factory.mktemp("runs") / "step", EVERY))


def torch_logps(model, prompt, completion):
    """Of each token of the completion, with gradient."""
    from with_torch import torch

    ids = torch.tensor([[*prompt, *completion]])
    logps = model(ids).logits.float().log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
    return logps[len(prompt) - 1 :]


@pytest.mark.slow
def test_old_and_reference_log_probs_are_those_of_the_spliced_text(recipe, step):
    """By transformers, of every token."""
    made = their(recipe.parent)
    np.testing.assert_array_equal(step.old, step.ref)  # nothing was learned yet
    for (p, g), spliced in step.want.items():
        n = len(spliced.ids)
        assert step.batch.rollout.lengths[p, g] == n and step.batch.rollout.stopped[p, g]
        theirs = tiny_hf.logps(made, [*step.batch.problems[p].ids, *spliced.ids]).numpy()[-n:]
        np.testing.assert_allclose(step.old[p, g, :n], theirs, atol=2e-5)


@pytest.mark.slow
def test_the_gradient_is_that_of_the_spliced_text(recipe, step):
    """``-Σ A log π`` over all tokens of reasoning, marker and answer, by torch; the KL's is 0 at first, the ratio 1."""
    from with_torch import torch

    made, problems = their(recipe.parent), step.batch.problems
    rewards = np.zeros(step.batch.total.shape)
    logps = {at: torch_logps(made, problems[at[0]].ids, spliced.ids) for at, spliced in step.want.items()}
    for at, spliced in step.want.items():
        rewards[at] = np.exp(logps[at][spliced.answer].mean().item())
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)
    sum(-advantages[at] * each.sum() / rewards.size for at, each in logps.items()).backward()
    norm = torch.sqrt(sum((p.grad**2).sum() for p in made.parameters() if p.grad is not None)).item()
    first, second = step.owed
    assert float(first["grad_norm"]) == pytest.approx(norm, rel=1e-3)
    assert float(first["ratio"].value) == 1.0 != float(second["ratio"].value)
    there = np.arange(step.old.shape[2]) < step.batch.rollout.lengths[..., None]
    given = np.where(there, advantages[..., None], 0)
    np.testing.assert_allclose(step.advantages, given, rtol=2e-3, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "devices"), [("log", 1), ("mean", 8)])
def test_the_answers_term_and_what_is_likely_without_reasoning(recipe, tmp_path, kind, devices):
    """By transformers: the reward is what reasoning adds; the answer's tokens have the reward's derivatives, and the
    token that ends the sample their mean."""
    import with_torch  # noqa: F401

    options = {**EVERY, "likelihood": kind, "relative_to": "no_reasoning", "answer_term": 2.0, "kl_coef": 0.0}
    trainer = trainer_of(recipe, tmp_path, options, devices=devices)
    try:
        networks = trainer.state.networks
        batch = learn.replaced(trainer, networks, draw(trainer))
        minis = learn.pack(trainer, batch)
        minis, signals = learn.score(trainer, networks, minis)
        _, batch, _ = learn.weigh(trainer, networks, minis, batch, signals)
        want, policy = texts(batch, trainer.policy), trainer.policy
    finally:
        trainer.close()
    made = their(recipe.parent)
    measure = {"log": np.sum, "mean": lambda x: np.exp(x).mean()}[kind]

    def logps(prompt, ids, answer):
        return tiny_hf.logps(made, [*prompt, *ids]).numpy()[-len(ids) :][answer]

    rewards, by_token = np.zeros(batch.total.shape), {}
    for (p, g), text in want.items():
        problem = batch.problems[p]
        bare = splice([], problem.gold, policy.tokenizer, marker="e")
        without = logps(problem.ids, bare.ids, slice(-bare.scored, None))
        own = logps(problem.ids, text.ids, text.answer)
        rewards[p, g] = max(measure(own) - measure(without), 0)
        by_token[p, g] = 2 * (np.ones(len(own)) if kind == "log" else np.exp(own) / len(own)) * (rewards[p, g] > 0)
    assert 0 < (rewards == 0).sum() < rewards.size
    given = batch.signals["likelihood"]
    np.testing.assert_allclose(given, rewards, atol=5e-5)
    advantages = (given - given.mean(1, keepdims=True)) / (given.std(1, ddof=1, keepdims=True) + 1e-4)
    for at, text in want.items():
        got, answer = batch.advantages[at], text.answer
        np.testing.assert_allclose(got[: answer.start], advantages[at], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(got[answer], by_token[at], rtol=1e-3)
        np.testing.assert_allclose(got[answer.stop : len(text.ids)], by_token[at].mean(), rtol=1e-3)


@pytest.mark.exhaustive("extensions/methods/test_true_answers.py::test_only_groups_that_fail_ask_for_it")
def test_only_groups_that_fail_are_replaced(recipe, tmp_path):
    """And of these no sample without a marker, where such are not completed."""
    step = step_of(trainer_of(recipe, tmp_path, {**SPLICED, "missing": "zero"}, "rollout.group=2"))
    batch, fails, kept = step.batch, (step.batch.total == 0).all(1), 0
    for (p, g), spliced in step.want.items():
        ids = batch.rollout.tokens[p, g, : batch.rollout.lengths[p, g]].tolist()
        drawn = batch.drawn.tokens[p, g, : batch.drawn.lengths[p, g]].tolist()
        replaced = fails[p] and spliced.markers > 0
        assert ids == (spliced.ids if replaced else drawn)
        assert np.isnan(batch.rollout.logps[p, g, 0]) == replaced
        kept += fails[p] and not replaced
    assert 0 < fails.sum() < len(fails) and kept
    assert batch.rollout.tokens.shape[2] == room(batch.drawn.tokens.shape[2])
    assert batch.metrics["ground_truth/missing_marker"] == kept


def test_rows_come_in_few_sizes():
    assert {room(8, n) for n in range(100)} == {24, 40, 72, 136}
    assert all(room(8, n) >= n for n in range(100))


@pytest.mark.slow
def test_a_run_tells_what_was_drawn_and_goes_on_as_it_was(recipe, tmp_path, monkeypatch):
    drawn, plain = [], learn.replaced
    monkeypatch.setattr(learn, "replaced", lambda *given: drawn.append(given[-1]) or plain(*given))
    first = trainer_of(recipe, tmp_path, EVERY)
    assert not train(first, lambda *_: first.control.ask("SIGTERM")) and train(trainer_of(recipe, tmp_path, EVERY))
    for line, sampled in zip((x for x in numbers(tmp_path) if "reward" in x), drawn, strict=True):
        batch = sampled.with_rewards()
        told = of_drawn(batch.everything, first.config.method.deciding)
        assert {name: line[name] for name in told} == pytest.approx(told)
        assert batch.drawn is None and not any(k.startswith("sampling/") for k in line)
        assert line["ground_truth/scored"] == 32 and line["grad_norm"] > 0
        _, rows = read_samples(tmp_path, line["step"])
        rollout = batch.rollout
        for row, (p, g) in zip(rows, np.ndindex(rollout.lengths.shape), strict=True):
            assert row["completion"] == first.policy.texts([rollout.tokens[p, g, : rollout.lengths[p, g]].tolist()])[0]
            assert row["learned"].rpartition("e")[2].strip() == row["gold"]


@pytest.mark.exhaustive("extensions/methods/test_spliced.py::test_a_run_tells_what_was_drawn_and_goes_on_as_it_was")
def test_a_stop_in_between_changes_nothing(recipe, tmp_path):
    assert train(trainer_of(recipe, tmp_path / "whole", EVERY))
    first = trainer_of(recipe, tmp_path / "parts", EVERY)
    assert not train(first, lambda *_: first.control.ask("SIGTERM"))
    assert train(trainer_of(recipe, tmp_path / "parts", EVERY))
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"importance": "truncate"}, "importance=truncate"),
        ({"off_policy_limit": 0.1}, "off_policy_limit=0.1"),
        ({"ratio_denominator": "sampler"}, "ratio_denominator=sampler"),
    ],
)
def test_what_the_sampler_would_have_to_know_is_refused(recipe, tmp_path, options, said):
    with pytest.raises(UserError, match=f"train_on=spliced and {said}: .*train_on=sampled"):
        config.load(recipe, [f"run.dir={tmp_path}", f"variant={SPLICED | options}"])
    config.load(recipe, [f"run.dir={tmp_path}", f"variant={SPLICED | options | {'train_on': 'sampled'}}"])


@pytest.mark.slow
def test_samples_that_were_not_replaced_are_refused(recipe, tmp_path):
    """As by a command that brings its own samples."""
    trainer = trainer_of(recipe, tmp_path, SPLICED)
    try:
        batch = draw(trainer)
        minis = learn.pack(trainer, batch)
        with pytest.raises(UserError, match="as they are: set variant.train_on=sampled"):
            networks = trainer.state.networks
            minis, signals = learn.score(trainer, networks, minis)
            learn.weigh(trainer, networks, minis, batch.with_rewards(), signals)
    finally:
        trainer.close()


def test_a_cut_sample_that_weighs_nothing_stays_as_it_was_drawn():
    """Spliced text ends, and would weigh something again."""
    drawn = Rollout(
        tokens=np.full((1, 2, 4), 5, np.int32), logps=np.zeros((1, 2, 4), np.float32),
        lengths=np.full((1, 2), 4, np.int32), stopped=np.array([[True, False]]),
    )  # fmt: skip
    size = room(4)
    answers = SplicedAnswers(
        tokens=np.full((1, 2, size), 7, np.int32), lengths=np.full((1, 2), 3, np.int32),
        mask=np.ones((1, 2, size), bool), markers=np.ones((1, 2), np.int32), stopped=np.ones((1, 2), bool),
    )  # fmt: skip
    zero = np.zeros((1, 2), np.float32)
    batch = Batch(problems=[], rollout=drawn, total=zero, reward=zero, by_name={}, invalid={},
                         dropped=np.zeros(1, bool))  # fmt: skip
    for truncated, want in (("mask", [7, 5]), ("train", [7, 7])):
        scored = _Scored(zero, np.ones(answers.tokens.shape, np.float32), answers, {})
        part = SimpleNamespace(
            method=SimpleNamespace(replaces_samples=True),
            config=SimpleNamespace(train=TrainConfig(steps=1, truncated=truncated)),
            _splice=lambda *given, scored=scored: _Found(zero, zero == 0, np.array([0]), scored, {}),
        )  # fmt: skip
        made = TrueAnswers.replace(part, {"policy": SimpleNamespace(params=None)}, batch)
        got = made.rollout
        assert got.tokens[0, :, 0].tolist() == want and got.stopped.tolist() == [[True, want[1] == 7]]
        assert np.isnan(made.signals["answer_weights"][0]).all(-1).tolist() == [w == 5 for w in want]
