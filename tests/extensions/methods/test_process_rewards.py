"""Rewards of steps from the function that gives them to the advantages."""

import numpy as np
import pytest
from runs import numbers, opened

from grpojax import masked
from grpojax.advantages import Signals
from grpojax.host.errors import UserError
from grpojax.run import recipe as config
from grpojax.train import train

pytestmark = pytest.mark.usefixtures("fakes")


def load(recipe, directory, rewards, *overrides):
    return config.load(recipe, [
        f"run.dir={directory}", "data.validation=null", "variant=grpo_process", "train.steps=2", "rollout.group=3",
        "rollout.prompts=5", "rollout.max_tokens=7", f"rewards={rewards}", *overrides,
    ])  # fmt: skip


def advantages(recipe, directory, rewards, *overrides, number=3):
    """Of one rollout: tokens, lengths, what a step would weigh by, and the samples."""
    trainer = opened(load(recipe, directory, rewards, *overrides))
    source = trainer.source
    judged = (
        source.draw(source.params(trainer.state), list(trainer.source.problems[:5]), number).arrived().with_rewards()
    )
    trainer.close()
    mask = np.asarray(masked.from_lengths(judged.rollout.lengths, 7))
    signals = Signals(mask=mask, **judged.signals)
    return judged, mask, np.asarray(trainer.config.method.variant.advantage(judged.total, signals))


@pytest.mark.exhaustive("extensions/methods/test_process_rewards.py::test_steps_are_suffix_sums")
def test_one_step_is_the_outcomes_advantage(recipe, tmp_path):
    """Weights, and an outcome beside it: a reward twice, by itself and as a step, counts twice."""
    outcome = "[{name: 'tiny_run:parity', weight: 2.0}]"
    whole, mask, want = advantages(recipe, tmp_path / "a", outcome, "variant=grpo")
    assert np.abs(want).max() > 0.5
    step, _, got = advantages(recipe, tmp_path / "b", "[{name: 'tiny_run:last_step', weight: 2.0}]")
    np.testing.assert_array_equal(step.rollout.tokens, whole.rollout.tokens)
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert not step.total.any() and (step.reward == whole.reward).all()
    both = "[{name: 'tiny_run:last_step', weight: 2.0}, {name: 'tiny_run:parity', weight: 2.0}]"
    mixed, _, got = advantages(recipe, tmp_path / "c", both)
    np.testing.assert_allclose(got, 2 * want, atol=1e-6)
    assert (mixed.total == whole.total).all() and (mixed.reward == 2 * whole.reward).all()


@pytest.mark.slow
def test_steps_are_suffix_sums(recipe, tmp_path):
    judged, mask, got = advantages(recipe, tmp_path / "run", "[{name: 'tiny_run:steps', weight: 0.5}]")
    tokens, lengths = judged.rollout.tokens, judged.rollout.lengths
    for p in range(5):
        steps = [(g, t + 1, 0.5 * (int(tokens[p, g, t]) % 2)) for g in range(3) for t in range(0, lengths[p, g] - 1, 2)]
        values = np.array([r for _, _, r in steps])
        want = np.zeros((3, 7))
        for g, end, r in steps if np.ptp(values) else ():
            want[g, : end + 1] += (r - values.mean()) / (values.std(ddof=1) + 1e-4)
        np.testing.assert_allclose(got[p], want * mask[p], atol=1e-5)


@pytest.mark.exhaustive("extensions/methods/test_process_rewards.py::test_steps_are_suffix_sums")
def test_it_trains_and_a_filter_merges_it(recipe, tmp_path):
    assert train(opened(load(recipe, tmp_path / "run", "[{name: 'tiny_run:steps'}]", "filter={max_rollouts: 2}")))
    lines = [line for line in numbers(tmp_path / "run") if "reward" in line]
    assert len(lines) == 2 and max(line["grad_norm"] for line in lines) > 0


@pytest.mark.slow
def test_the_one_that_comes_along_runs(recipe, tmp_path):
    rewards = "[{name: equations, options: {separator: ' '}}, {name: 'reward_functions:ends_of_pieces', pieces: true}]"
    judged, _, _ = advantages(recipe, tmp_path / "run", rewards)
    ends = np.isfinite(judged.signals["step_rewards"]) & (judged.rollout.tokens == 14)
    assert ends.any() and (ends == (judged.rollout.tokens == 14)).all()  # the token "="


def test_what_does_not_go_together_is_said(recipe, tmp_path):
    with pytest.raises(UserError, match="'tiny_run:steps' gives rewards to steps, and variant 'grpo' reads none"):
        advantages(recipe, tmp_path / "a", "[{name: 'tiny_run:steps'}]", "variant=grpo")
    with pytest.raises(UserError, match="'grpo_process' learns from rewards of steps, and no reward of the run gives"):
        advantages(recipe, tmp_path / "b", "[{name: 'tiny_run:parity'}]")
    with pytest.raises(UserError, match="combine: sum"):
        load(recipe, tmp_path / "c", "{terms: [{name: 'tiny_run:steps'}], combine: normalize}")
