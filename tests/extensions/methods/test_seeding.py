"""XRPO's in-context seeding: a prompt whose probe fails is drawn, and learned, with solved ones before it."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from runs import numbers, opened

from grpojax.data import Problem, Problems
from grpojax.extensions.methods.allocated import sampler_of
from grpojax.extensions.methods.method_sections import AllocationConfig
from grpojax.host.errors import UserError
from grpojax.records.samples import read_samples
from grpojax.run import learn
from grpojax.run import recipe as config
from grpojax.run.problem_order import ProblemOrder
from grpojax.run.run_state import State
from grpojax.run.sections import RetireConfig
from grpojax.train import train


def load(recipe, directory, *overrides):
    return config.load(recipe, [
        f"run.dir={directory}", "data.validation=null", "data.max_prompt_tokens=16", "variant=xrpo", "train.steps=3",
        "rollout.group=4", "rollout.prompts=6", "rollout.max_tokens=6", "rewards.0.name=tiny_run:parity",
        "train.checkpoint_every=1", "rollout.sample_allocation={probe: 1, phases: 2, most: 7, exemplars: 1}",
        *overrides,
    ])  # fmt: skip


POOL = [(uid, f"{uid}") for uid in (2, 8, 11, 21, 24)]
FAILS, PASSES = (0, 7, 7), (12, 13, 29)


@pytest.fixture(scope="module")
def seeded(recipe, tmp_path_factory):
    """A trainer whose rewards are all 0 for some problems, which have a pool to be seeded from."""
    trainer = opened(load(recipe, tmp_path_factory.mktemp("seeded")))
    source = trainer.source
    for uid, completion in POOL:
        source._exemplars.add(uid, completion)
    plain = source.rewarded

    def judged(wait, batch):
        made = plain(wait, batch)
        right = np.array([[float(p.uid not in FAILS)] for p in batch.problems]) * (batch.rollout.lengths % 2)
        right = right.astype(np.float32)
        return dataclasses.replace(made, total=right, reward=right, by_name={"tiny_run:parity": right})

    source.rewarded = judged
    yield trainer
    trainer.close()


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_a_failed_probe_is_followed_by_samples_of_the_seeded_prompt(seeded):
    """Each the same as a group of the prompt with its exemplars gives at that number; the others are as without."""
    source = seeded.source
    problems = [seeded.source.problems[i] for i in (*FAILS, *PASSES)]
    drawn = source.draw(source.params(seeded.state), problems, 3).arrived()
    judged = drawn.with_rewards()
    before = [source._exemplars.before(p) for p in problems]
    params = source.params(seeded.state)
    plain, after = alone(source, params, problems), alone(source, params, before)
    fails = [p.uid in FAILS or n % 2 == 0 for p, n in zip(problems, first_lengths(plain, problems), strict=True)]
    assert judged.aided.tolist() == fails and set(fails) == {True, False}
    counts = (judged.rollout.lengths > 0).sum(1)
    assert counts.sum() == 6 * 4 - sum(fails) and counts[:3].min() > 1
    assert list(drawn.problems) == [new if f else old for old, new, f in zip(problems, before, fails, strict=True)]
    assert all(len(new.ids) > len(old.ids) for old, new in zip(problems, before, strict=True))
    for p, n in enumerate(counts):
        want, first = (after if fails[p] else plain), (7 + 1) * problems[:p].count(problems[p]) + fails[p]
        np.testing.assert_array_equal(judged.rollout.tokens[p, :n], want.tokens[p, first : first + n])
        np.testing.assert_allclose(judged.rollout.logps[p, :n], want.logps[p, first : first + n], atol=1e-5)
        assert np.isfinite(judged.total[p, :n]).all() and np.isnan(judged.total[p, n:]).all()
    failed = judged.set_aside
    assert failed.rollout.lengths.shape == (sum(fails), 7) and (failed.total[:, 0] == 0).all()
    assert np.isnan(failed.total[:, 1:]).all() and (failed.rollout.lengths[:, 1:] == 0).all()
    assert list(failed.problems) == [p for p, f in zip(problems, fails, strict=True) if f]


def alone(source, params, problems):
    """Sixteen samples of each, under the key of that rollout."""
    first = source.prompts([dataclasses.replace(p, uid=i) for i, p in enumerate(problems)], 0)
    prompts = dataclasses.replace(first, uids=np.array([p.uid for p in problems], np.uint32))
    drawn = source.dispatch_any(params, prompts, source.key(3), sampler_of(source.config, 16))
    return drawn(jax.block_until_ready)


def first_lengths(rollout, problems):
    """Of the sample that each is probed by."""
    return [rollout.lengths[p, (7 + 1) * problems[:p].count(x)] for p, x in enumerate(problems)]


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_without_solved_problems_nothing_is_seeded(seeded, monkeypatch):
    source = seeded.source
    monkeypatch.setattr(source._exemplars, "_pool", {})
    problems = [seeded.source.problems[i] for i in (*FAILS, *PASSES)]
    judged = source.draw(source.params(seeded.state), problems, 3).arrived().with_rewards()
    assert not judged.aided.any() and judged.set_aside is None and (judged.rollout.lengths > 0).sum() == 24


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_exemplars_that_never_fit_are_told(seeded, monkeypatch, caplog):
    source = seeded.source
    monkeypatch.setattr(source._exemplars, "_longest", 10)
    problems = [seeded.source.problems[i] for i in (*FAILS, *PASSES)]
    judged = source.draw(source.params(seeded.state), problems, 3).arrived().with_rewards()
    assert not judged.aided.any()
    assert re.search("no exemplar can be put before any of [1-6] prompts: raise data.max", caplog.text)


@pytest.fixture(scope="module")
def run(recipe, tmp_path_factory):
    """A whole run: its trainer, directory, judged rollouts, and how far policy and sampler are apart in log-probs."""
    directory = tmp_path_factory.mktemp("runs") / "whole"
    trainer = opened(load(recipe, directory))
    kept, apart = [], []
    note, score_all, score = trainer.source.note, learn.score, trainer.programs.score
    trainer.source.note = lambda batch: kept.extend(batch.as_drawn) or note(batch)

    def scored(setup, networks, minis):
        for m in minis:
            own = score(networks["policy"].params, m.rows.bare).logps
            off = np.abs(np.asarray(own) - np.asarray(m.rows.arrays["sampler_logps"]))
            apart.append(off[m.layout.index >= 0].max())
        return score_all(setup, networks, minis)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learn, "score", scored)
        assert train(trainer)
    return trainer, directory, kept, apart


@pytest.mark.slow
def test_seeded_samples_are_learned_under_the_prompt_they_were_drawn_under(run):
    """The policy's log-probs of them are the sampler's; with the prompt alone before them they would not be."""
    trainer, directory, kept, apart = run
    lines = [line for line in numbers(directory) if "reward" in line]
    assert max(apart) < 1e-4 and all(np.isfinite(line["loss"]) for line in lines)
    assert sum(j.aided.sum() for j in kept) > 2 and not kept[0].aided.any()
    for line, judged in zip(lines, kept, strict=True):
        there = judged.rollout.lengths > 0
        assert there.sum() + judged.aided.sum() == 24
        assert line["seeded/share"] == pytest.approx(there[judged.aided].sum() / 24)
        rewards = judged.total[judged.aided][there[judged.aided]]
        assert line["seeded/solved"] == (pytest.approx(rewards.mean()) if rewards.size else None)
        tokens = sum(int(j.rollout.lengths.sum()) for j in (judged, judged.set_aside) if j is not None)
        assert line["completions/mean_length"] == pytest.approx(tokens / 24)
    counts = (kept[-1].rollout.lengths > 0).sum(1)
    assert [r["seeded"] for r in read_samples(directory, 3)[1]] == np.repeat(kept[-1].aided, counts).tolist()


@pytest.mark.slow
def test_the_pool_has_the_first_right_sample_of_what_was_solved_last(run):
    trainer, _, kept, _ = run
    newest = {}
    for judged in kept:
        for p, problem in enumerate(judged.problems):
            right = [g for g in range(7) if judged.total[p, g] == 1 and judged.rollout.stopped[p, g]]
            text = right and trainer.policy.texts([judged.rollout.tokens[p, right[0]].tolist()])[0]
            if text and text.strip():
                newest.pop(problem.uid, None)
                newest[problem.uid] = text
    assert newest and trainer.state.kept["exemplars"] == list(newest.items())


@pytest.mark.slow
def test_a_resumed_run_shows_what_it_would_have_shown(recipe, run, tmp_path):
    first = opened(load(recipe, tmp_path / "parts"))
    assert (
        not train(first, lambda *_: first.state.step == 2 and first.control.ask("SIGTERM"))
        and first.state.kept["exemplars"]
    )
    again = opened(load(recipe, tmp_path / "parts"))
    assert again.state.step == 2 and train(again)
    assert numbers(tmp_path / "parts") == numbers(run[1])
    assert [tuple(x) for x in again.state.kept["exemplars"]] == run[0].state.kept["exemplars"]
    assert any(judged.aided.any() for judged in run[2][2:])


def test_what_is_solved_with_solutions_before_it_is_not_solved():
    problems = [Problem(uid, (1,), "q", None, {}) for uid in range(3)]
    retire = RetireConfig(share=1.0)
    order = ProblemOrder(
        Problems(tuple(problems), (1.0,), 0, (), "", len), 2, 0, retire=retire, deciding="x", state=State()
    )
    judged = SimpleNamespace(
        problems=problems, by_name={"x": np.ones((3, 2))}, aided=np.array([True, False, False]),
        rollout=SimpleNamespace(lengths=np.full((3, 2), 4)),
    )  # fmt: skip
    order.note([(judged, [0, 0, 0])])
    assert [uid for uid, _ in order.saved()["solved"]] == [1, 2]


def test_settings_that_cannot_be(recipe, tmp_path):
    assert AllocationConfig(exemplars=2, success=0.5, pool=3).pool == 3
    for options, match in (
        ("{exemplars: 0, success: 0.5}", "success=0.5: goes with exemplars over 0"),
        ("{exemplars: 0, pool: 3}", "pool=3: goes with exemplars over 0"),
        ("{exemplars: -1}", "exemplars=-1"),
        ("{exemplars: 1, pool: 0}", "pool=0"),
    ):
        with pytest.raises(UserError, match=match):
            load(recipe, tmp_path / "run", f"rollout.sample_allocation={options}")


@pytest.mark.usefixtures("fakes")
def test_a_graded_reward_seeds_by_a_success_that_is_given(seeded, monkeypatch):
    source, values = seeded.source, np.array([[0.5, np.nan, 1.0]])
    judged = SimpleNamespace(by_name={"tiny_run:parity": values})
    with pytest.raises(
        UserError, match="seeded by the reward 'tiny_run:parity', which gave 0.5.*rollout.sample_allocation.success"
    ):
        source.succeeds(judged)
    monkeypatch.setattr(source, "plan", dataclasses.replace(source.plan, success=0.5))
    assert source.succeeds(judged).tolist() == [[True, False, True]]
