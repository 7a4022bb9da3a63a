"""Rollouts whose groups go to the rewards in parts (``rollout.parts``)."""

import os
import signal

import numpy as np
import pytest
import runs
from runs import Trainer, numbers

from grpojax.host.errors import UserError
from grpojax.rewards.scoring import Scores, joined
from grpojax.run import groups
from grpojax.run import recipe as config

KINDS = {
    "plain": ("train.minibatches=2",),
    "filter": (
        "rewards.0.name=tiny_run:parity",
        "filter={max_rollouts: 3}",
        "rollout.decode_slots=2",
        "rollout.rows=3",
    ),
    "invalid": ("rewards={combine: normalize, terms: [{name: 'tiny_run:some'}, {name: 'tiny_run:length'}]}",),
    "steps": ("variant=grpo_process", "rewards=[{name: 'tiny_run:steps', weight: 0.5}, {name: 'tiny_run:parity'}]"),
}


def load(recipe, directory, *overrides):
    return config.load(recipe, [
        f"run.dir={directory}", "data.validation=null", "train.steps=3", "train.checkpoint_every=1",
        "train.eval_every=0", "rollout.max_tokens=16", *overrides,
    ])  # fmt: skip


@pytest.mark.parametrize(
    "kind", ["plain", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("filter", "invalid", "steps"))]
)
def test_a_run_is_the_same_in_any_number_of_parts(recipe, tmp_path, kind):
    """Rewards that fail, those of steps and those that are normalised in their groups come back to their places."""
    for count in (1, 3):
        assert Trainer(load(recipe, tmp_path / str(count), *KINDS[kind], f"rollout.parts={count}")).run()
    assert numbers(tmp_path / "3") == numbers(tmp_path / "1")


def test_groups_are_judged_while_the_others_are_drawn(recipe, tmp_path, monkeypatch):
    """Each once, with the first part in which it is whole, before the next part is waited for."""
    trainer, seen = Trainer(load(recipe, tmp_path / "run", "rollout.parts=3")), []
    fetch, submit = trainer.policy.fetch, groups.submit

    def fetched(rollout, n, **how):
        seen.append("part")
        return fetch(rollout, n, **how)

    def submitted(rewards, problems, rollout, *more):
        seen.append([p.uid for p in problems])
        assert (rollout.stopped | (rollout.lengths == 16)).all()
        return submit(rewards, problems, rollout, *more)

    monkeypatch.setattr(trainer.policy, "fetch", fetched)
    monkeypatch.setattr(groups, "submit", submitted)
    problems = list(trainer.problems[:8])
    judged = trainer.rollouts.groups.start(problems, 0)().judged()
    assert seen.count("part") == 3 and seen[1] != "part"
    told = [x for x in seen if x != "part"]
    assert len(told) > 1 and sorted(sum(told, [])) == sorted(p.uid for p in problems)
    np.testing.assert_array_equal(judged.reward, judged.rollout.lengths)


@pytest.mark.exhaustive("run/test_rollout_parts.py::test_a_run_is_the_same_in_any_number_of_parts")
def test_a_run_that_is_stopped_or_killed_goes_on_in_another_number_of_parts(recipe, tmp_path):
    assert Trainer(load(recipe, tmp_path / "whole", "train.steps=5")).run()
    short = ["data.validation=null", "train.steps=5", "train.checkpoint_every=1", "train.eval_every=0"]
    given = (*short, "rollout.max_tokens=16", "rollout.parts=3")
    process = runs.start(recipe, tmp_path / "parts", *given)
    assert any("step 3/5" in line for line in process.stdout)
    process.kill()
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    stopped = Trainer(load(recipe, tmp_path / "parts", "train.steps=5", "rollout.parts=2"))
    plain, turns = stopped.policy.turn, []

    def turn(awaited):
        turns.append(awaited)
        if len(turns) == 4:  # between two parts of a rollout
            os.kill(os.getpid(), signal.SIGTERM)
        plain(awaited)

    stopped.policy.turn = turn
    assert 1 <= stopped.done < 4 and not stopped.run()
    assert Trainer(load(recipe, tmp_path / "parts", "train.steps=5")).run()
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("rollout.parts=0",), "parts=0"),
        (("rollout.ahead=1",), "parts=3 with ahead=1: .* set parts=1, or ahead=0"),
        (("rollout.overlap=0.25",), "parts=3 with overlap=0.25: .* set parts=1, or overlap=0"),
        (("variant=xrpo",), "rollout.parts=3: variant 'xrpo' draws more after the first rewards; set rollout.parts=1"),
        (("variant=remax",), "rollout.parts=3: variant 'remax' draws greedy completions too; set rollout.parts=1"),
    ],
)
def test_what_has_no_parts_is_refused(recipe, tmp_path, overrides, said):
    with pytest.raises(UserError, match=said):
        load(recipe, tmp_path / "run", "rollout.parts=3", *overrides)


def test_rewards_of_parts_come_back_to_the_places_of_their_groups():
    """Steps of parts of other lengths, and of a part that has none."""
    rng = np.random.default_rng(0)
    values, steps = rng.normal(size=(5, 2)).astype(np.float32), rng.normal(size=(5, 2, 3)).astype(np.float32)
    steps[[1, 3], :, 2] = np.nan  # of the second part, whose steps end earlier
    steps[4] = np.nan  # the third has none
    cuts = [([0, 2], 3), ([1, 3], 2), ([4], 0)]
    first, second, third = (
        Scores(
            values[at].ravel(),
            {"a": 2 * values[at].ravel()},
            {"a/timeout": len(at)},
            steps[at].reshape(-1, 3)[:, :n] if n else None,
            ("a",) if n else (),
        )
        for at, n in cuts
    )
    got = joined([first, second, third], np.argsort([0, 2, 1, 3, 4]), 2)
    np.testing.assert_array_equal(got.total, values.ravel())
    np.testing.assert_array_equal(got.by_name["a"], 2 * values.ravel())
    np.testing.assert_array_equal(got.step_rewards, steps.reshape(-1, 3))
    assert got.invalid == {"a/timeout": 5} and got.stepped == ("a",)
    assert joined([third, third], np.array([1, 0]), 2).step_rewards is None
