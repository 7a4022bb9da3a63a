"""Learning from samples with the true answer spliced into them (gt_likelihood, train_on=spliced)."""

import numpy as np
import pytest
import tiny_hf
import torch
from hf_compare import their
from runs import Trainer, numbers

from grpojax.host.errors import UserError
from grpojax.records.samples import read_samples
from grpojax.run import recipe as config
from grpojax.run.true_answers import room, splice

SPLICED = {"name": "gt_likelihood", "marker": "e", "train_on": "spliced"}
EVERY = {**SPLICED, "groups": "all"}


def trainer_of(recipe, directory, variant, *more):
    overrides = [f"run.dir={directory}", f"variant={variant}", "data.eval=null", "rewards.0.name=tiny_run:parity"]
    return Trainer(config.load(recipe, [*overrides, *more]))


def texts(batch, tokenizer, **options):
    """What each sample is replaced by, ``{(p, g): Spliced}``, one after the other."""
    drawn = batch.drawn
    return {
        (p, g): splice(
            drawn.tokens[p, g, : drawn.lengths[p, g] - drawn.stopped[p, g]].tolist(), problem.gold, tokenizer, **options
        )
        for p, problem in enumerate(batch.problems)
        for g in range(drawn.lengths.shape[1])
    }


def prepared(trainer):
    """``(minibatches, batch, signals)`` of the next rollout, scored."""
    sampled = trainer.learner.replace(trainer.rollouts.draw(1)())
    minis = trainer.learner.prepare(sampled)
    signals = trainer.learner.score(minis)
    return sampled, minis, sampled.judged()[0], signals


def torch_logps(model, prompt, completion):
    """Of each token of the completion, with gradient."""
    ids = torch.tensor([[*prompt, *completion]])
    logps = model(ids).logits.float().log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
    return logps[len(prompt) - 1 :]


def test_old_and_reference_log_probs_are_those_of_the_spliced_text(recipe, tmp_path):
    """By transformers, of every token; with two updates a rollout there is a pass of the old policy."""
    options = {**EVERY, "kl_coef": 0.1}
    trainer = trainer_of(recipe, tmp_path, options, "train.minibatches=2")
    try:
        _, minis, batch, _ = prepared(trainer)
        made, want = their(recipe.parent), texts(batch, trainer.policy.tokenizer, marker="e")
        for mini in minis:
            rows = mini.packed.per_token
            assert rows.sampler_logps is None
            old, ref = (mini.layout.unpack(np.asarray(x)) for x in (rows.behavior_logps, rows.ref_logps))
            np.testing.assert_array_equal(old, ref)  # nothing was learned yet
            for i, p in enumerate(mini.places.tolist()):
                for g in range(old.shape[1]):
                    ids = want[p, g].ids
                    assert batch.rollout.lengths[p, g] == len(ids)
                    theirs = tiny_hf.logps(made, [*batch.problems[p].ids, *ids]).numpy()[-len(ids) :]
                    np.testing.assert_allclose(old[i, g, : len(ids)], theirs, atol=2e-5)
    finally:
        trainer.close()


@pytest.mark.parametrize("updates", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_gradient_is_that_of_the_spliced_text(recipe, tmp_path, updates):
    """``-Σ A log π`` over all tokens of reasoning, marker and answer, by torch; the ratio is 1 in the first update."""
    trainer = trainer_of(recipe, tmp_path, EVERY, f"train.iterations={updates}")
    try:
        sampled, minis, batch, signals = prepared(trainer)
        weighed = trainer.learner.weigh(minis, batch, sampled.dropped, signals)
        first, *_ = trainer.learner.update(minis, None, lambda state: None)
        want, made = texts(batch, trainer.policy.tokenizer, marker="e"), their(recipe.parent)
    finally:
        trainer.close()
    loss, sizes = 0.0, batch.rollout.lengths.shape
    rewards = np.zeros(sizes)
    logps = {at: torch_logps(made, batch.problems[at[0]].ids, spliced.ids) for at, spliced in want.items()}
    for at, spliced in want.items():
        rewards[at] = np.exp(logps[at][-spliced.scored :].mean().item())
    centred = rewards - rewards.mean(1, keepdims=True)
    advantages = centred / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)
    for at, each in logps.items():
        loss = loss - advantages[at] * each.sum() / rewards.size
    loss.backward()
    norm = torch.sqrt(sum((p.grad**2).sum() for p in made.parameters() if p.grad is not None)).item()
    assert float(first["grad_norm"]) == pytest.approx(norm, rel=1e-3)
    assert float(first["ratio"].value) == 1.0
    given = np.where(
        np.arange(weighed.advantages.shape[2]) < batch.rollout.lengths[..., None], advantages[..., None], 0
    )
    np.testing.assert_allclose(weighed.advantages, given, rtol=2e-3, atol=2e-4)


def test_only_groups_that_fail_are_replaced(recipe, tmp_path):
    """And of these no sample without a marker, where such are not completed."""
    trainer = trainer_of(recipe, tmp_path, {**SPLICED, "missing": "zero"}, "rollout.group=2")
    try:
        sampled, minis, batch, signals = prepared(trainer)
        weighed = trainer.learner.weigh(minis, batch, sampled.dropped, signals)
        want = texts(batch, trainer.policy.tokenizer, marker="e")
    finally:
        trainer.close()
    fails = (batch.total == 0).all(1)
    kept = 0
    for (p, g), spliced in want.items():
        ids = batch.rollout.tokens[p, g, : batch.rollout.lengths[p, g]].tolist()
        drawn = batch.drawn.tokens[p, g, : batch.drawn.lengths[p, g]].tolist()
        replaced = fails[p] and spliced.markers > 0
        assert ids == (list(spliced.ids) if replaced else drawn)
        assert np.isnan(batch.rollout.logps[p, g, 0]) == replaced
        kept += fails[p] and not replaced
    assert 0 < fails.sum() < len(fails) and kept
    assert batch.rollout.tokens.shape[2] == room(batch.drawn.tokens.shape[2])
    assert weighed.metrics["ground_truth/missing_marker"] == kept


def test_rows_come_in_few_sizes():
    assert {room(8, n) for n in range(100)} == {24, 40, 72, 136}
    assert all(room(8, n) >= n for n in range(100))


def small(recipe, directory, variant=EVERY):
    more = "train.steps=2", "train.checkpoint_every=1", "rollout.prompts=4", "rollout.max_tokens=4"
    return trainer_of(recipe, directory, variant, *more)


def test_a_run_tells_what_was_drawn(recipe, tmp_path):
    """The first step's figures are those of a run on the sampled text, and its samples are the same."""
    assert small(recipe, tmp_path / "spliced").run()
    assert small(recipe, tmp_path / "sampled", {**EVERY, "train_on": "sampled"}).run()
    ours, plain = (next(x for x in numbers(tmp_path / d) if "reward" in x) for d in ("spliced", "sampled"))
    same = [k for k in plain if k.startswith(("reward", "completions/", "groups/", "ground_truth/", "num_tokens"))]
    assert len(same) > 15 and [ours[k] for k in same] == [plain[k] for k in same]
    assert ours["grad_norm"] != plain["grad_norm"]
    assert set(plain) - set(ours) == {k for k in plain if k.startswith("sampling/")}

    tell, drawn = (list(read_samples(tmp_path / d, 1)[1]) for d in ("spliced", "sampled"))
    assert [x["completion"] for x in tell] == [x["completion"] for x in drawn]
    assert all("learned" not in x for x in drawn)
    assert all(x["learned"].rpartition("e")[2].strip() == x["gold"] for x in tell)


@pytest.mark.slow
def test_a_stop_in_between_changes_nothing(recipe, tmp_path):
    assert small(recipe, tmp_path / "whole").run()
    first = small(recipe, tmp_path / "parts")
    first.on_step = lambda *_: setattr(first.session, "_stop", True)
    assert not first.run() and small(recipe, tmp_path / "parts").run()
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"importance": "truncate"}, "importance=truncate"),
        ({"off_policy_limit": 0.1}, "off_policy_limit=0.1"),
        ({"anchor": "sampler"}, "anchor=sampler"),
    ],
)
def test_what_the_sampler_would_have_to_know_is_refused(recipe, tmp_path, options, said):
    with pytest.raises(UserError, match=f"train_on=spliced and {said}: .*train_on=sampled"):
        config.load(recipe, [f"run.dir={tmp_path}", f"variant={SPLICED | options}"])
    config.load(recipe, [f"run.dir={tmp_path}", f"variant={SPLICED | options | {'train_on': 'sampled'}}"])


def test_samples_that_were_not_replaced_are_refused(recipe, tmp_path):
    """As by a command that brings its own samples."""
    trainer = Trainer(config.load(recipe, [f"run.dir={tmp_path}", f"variant={SPLICED}", "data.eval=null"]))
    try:
        sampled = trainer.rollouts.draw(1)()
        minis = trainer.learner.prepare(sampled)
        with pytest.raises(UserError, match="as they are: set variant.train_on=sampled"):
            trainer.learner.weigh(minis, sampled.judged()[0], sampled.dropped, trainer.learner.score(minis))
    finally:
        trainer.close()
