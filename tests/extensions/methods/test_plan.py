"""XRPO's plan: some samples of every prompt, the rest where they tell most."""

import collections

import numpy as np
import pytest
from runs import numbers, opened

from grpojax import allocation
from grpojax.extensions.methods.method_sections import AllocationConfig
from grpojax.host.errors import UserError
from grpojax.records.samples import read_samples
from grpojax.run import learn
from grpojax.run import recipe as config
from grpojax.train import train


def load(recipe, directory, *overrides):
    return config.load(recipe, [
        f"run.dir={directory}", "data.validation=null", "variant=xrpo", "train.steps=2", "rollout.group=5",
        "rollout.prompts=5", "rollout.max_tokens=7", "rewards.0.name=tiny_run:some", *overrides,
    ])  # fmt: skip


PLAN = "rollout.sample_allocation={probe: 2, phases: 3, most: 7}"


def drawn(recipe, directory, problems, *overrides, devices=1, number=3):
    trainer = opened(load(recipe, directory, *overrides), devices=devices)
    source = trainer.source
    judged = (
        source.draw(source.params(trainer.state), [trainer.source.problems[i] for i in problems], number)
        .arrived()
        .with_rewards()
    )
    trainer.close()
    return judged


PROBLEMS = (0, 7, 7, 11, 29)  # one stands in the rollout twice


@pytest.fixture(scope="module")
def plain(recipe, tmp_path_factory):
    """Seven samples of each."""
    return drawn(recipe, tmp_path_factory.mktemp("plain"), PROBLEMS, "variant=grpo", "rollout.group=7")


@pytest.mark.exhaustive("extensions/methods/test_plan.py::test_it_draws_the_first_samples_of_a_larger_group")
def test_the_rows_of_a_phase_need_not_divide_over_the_devices(recipe, tmp_path, plain):
    options = "rollout.prompts=2", "rollout.sample_allocation={probe: 3, phases: 4, most: 10}"
    judged = drawn(recipe, tmp_path / "run", (0, 29), *options, devices=2)
    counts = (judged.rollout.lengths > 0).sum(1)
    assert counts.sum() == 10 and judged.rollout.lengths.shape == (2, 10)
    for got, wide, n in zip(judged.rollout.tokens, plain.rollout.tokens[[0, 4]], np.minimum(counts, 7), strict=True):
        np.testing.assert_array_equal(got[:n], wide[:n])


@pytest.mark.slow
def test_it_draws_the_first_samples_of_a_larger_group(recipe, tmp_path, plain):
    """Which ones, by the formula on the rewards that the larger group has."""
    judged = drawn(recipe, tmp_path / "run", PROBLEMS, PLAN)
    counts = np.full(5, 2)
    for _ in range(3):
        seen = np.where(np.arange(7) < counts[:, None], plain.total, np.nan)
        known = [x[np.isfinite(x)] for x in seen]
        std = np.array([x.std(ddof=1) if len(x) > 1 else 0 for x in known], np.float32)
        counts = counts + np.asarray(allocation.xrpo_allocate(std, counts, 5, most=7))
    there = np.arange(7) < counts[:, None]
    assert counts.sum() == 25 and len(set(counts.tolist())) > 1
    for name in ("tokens", "lengths", "stopped"):
        want = np.where(there.reshape(there.shape + (1,) * (name == "tokens")), getattr(plain.rollout, name), 0)
        np.testing.assert_array_equal(getattr(judged.rollout, name), want)
    np.testing.assert_allclose(judged.rollout.logps, np.where(there[..., None], plain.rollout.logps, 0), atol=1e-5)
    for got, want in ((judged.total, plain.total), (judged.by_name["tiny_run:some"], plain.total)):
        np.testing.assert_array_equal(got, np.where(there, want, np.nan))
    lost = int(np.isnan(plain.total[there]).sum())
    assert lost and judged.invalid == {"tiny_run:some/none": lost}
    assert len({tuple(x) for x in judged.rollout.tokens[1:3][there[1:3]].tolist()}) == there[1:3].sum()


@pytest.mark.slow
def test_what_was_not_drawn_counts_nowhere(recipe, tmp_path, monkeypatch):
    """Rows of samples, metrics and tokens are of those there are; so are the updates, in any number of parts."""
    options = (
        "rewards.0.name=tiny_run:parity",
        "rollout.prompts=6",
        "rollout.sample_allocation={probe: 1}",
        "rollout.group=4",
    )
    trainer = opened(load(recipe, tmp_path / "run", *options, "train.minibatches=3"))
    seen, plain = [], trainer.source.submit

    def submit(problems, rollout):
        seen.append((problems, rollout))
        return plain(problems, rollout)

    trainer.source.submit = submit
    advantages, sums, update = [], [], learn.update

    def weighed(run, state, minis, **options):
        sums.extend(float(m.rows.arrays["weights"].sum()) for m in minis)
        return update(run, state, minis, **options)

    monkeypatch.setattr(learn, "update", weighed)
    assert train(trainer, lambda updates: advantages.append(updates.batch.advantages))
    np.testing.assert_allclose(sums, np.ones(6), atol=1e-6)
    lines = [line for line in numbers(tmp_path / "run") if "reward" in line]
    tokens = sum(len(p.ids) * r.lengths.shape[1] for of, r in seen for p in of)
    assert lines[-1]["num_tokens"] == tokens + sum(int(r.lengths.sum()) for _, r in seen)
    first = [r.lengths.reshape(-1) for _, r in seen[:3]]
    assert [x.size for x in first] == [6, 9, 9] and lines[0]["rewards/invalid"] == lines[0]["groups/invalid"] == 0
    assert lines[0]["completions/mean_length"] == pytest.approx(np.concatenate(first).mean())
    assert lines[0]["completions/min_length"] > 0
    stopped = np.concatenate([r.stopped.reshape(-1) for _, r in seen[:3]])
    assert lines[0]["completions/clipped_ratio"] == pytest.approx(1 - stopped.mean())
    rows = read_samples(tmp_path / "run", 1)[1]
    assert len(rows) == 24 and all(row["length"] and row["reward"] is not None for row in rows)
    counts = collections.Counter(row["uid"] for row in rows)
    assert len(set(counts.values())) > 1 and advantages[0].shape == (6, 8, 7)
    assert all(np.isfinite(line["loss"]) for line in lines) and max(line["grad_norm"] for line in lines) > 0


@pytest.mark.exhaustive("extensions/methods/test_plan.py::test_what_was_not_drawn_counts_nowhere")
def test_a_filter_merges_it(recipe, tmp_path):
    options = (
        "rewards.0.name=tiny_run:parity",
        "filter={max_rollouts: 2}",
        "rollout.group=3",
        "rollout.sample_allocation={phases: 1}",
    )
    assert train(opened(load(recipe, tmp_path / "run", *options)))
    assert len([line for line in numbers(tmp_path / "run") if "kept/reward" in line]) == 2


def test_plans_that_cannot_be(recipe, tmp_path):
    def plan(*overrides):
        return load(recipe, tmp_path / "run", *overrides).method.plan

    assert plan("rollout.prompts=4", "rollout.group=6") == AllocationConfig(probe=3, phases=2, most=12)
    for overrides, match in (
        (["rollout.sample_allocation={probe: 5}"], "probe=5: must be at least 1 and under rollout.group=5"),
        (["rollout.group=1"], "probe=0: must be at least 1 and under rollout.group=1"),
        (["rollout.sample_allocation={most: 4}"], "most=4: must be at least rollout.group=5"),
        (["rollout.sample_allocation={probe: 2, phases: 2}"], "phases=2 does not divide the 15 samples"),
        ([PLAN, "variant=grpo"], "rollout.sample_allocation: variant 'grpo' gives every prompt rollout.group samples"),
        (["variant={name: xrpo, count_empty: true}"], "would divide by samples that were never drawn"),
        (["rewards={terms: [{name: answer}], combine: normalize}"], "combine: sum"),
    ):
        with pytest.raises(UserError, match=match):
            plan(*overrides)


def test_no_prompt_gets_more_than_the_most():
    std, counts = np.array([5.0, 0.1, 0.0], np.float32), np.array([2, 2, 3], np.int32)
    assert np.asarray(allocation.xrpo_allocate(std, counts, 7)).tolist() != [3, 3, 1]
    assert (counts + np.asarray(allocation.xrpo_allocate(std, counts, 8, most=5))).tolist() == [5, 5, 5]
