"""The greedy completion that ReMax has beside the samples of each prompt."""

import jax
import numpy as np
import pytest
from runs import numbers, opened

from grpojax import data, masked
from grpojax.advantages import Signals
from grpojax.host.errors import UserError
from grpojax.programs.sampler_config import SamplerConfig
from grpojax.run import recipe as config
from grpojax.train import train


def load(recipe, directory, *overrides):
    return config.load(recipe, [
        f"run.dir={directory}", "data.validation=null", "variant=remax", "train.steps=2", "rollout.group=3",
        "rollout.prompts=5", "rollout.max_tokens=7", *overrides,
    ])  # fmt: skip


@pytest.fixture(scope="module")
def trainer(recipe, tmp_path_factory):
    """Five prompts on two devices: the greedy rows have to be filled up."""
    options = "rollout.prompts=2", "rollout.group=3", "rewards.0.name=tiny_run:some"
    trainer = opened(load(recipe, tmp_path_factory.mktemp("run") / "run", *options), devices=2)
    yield trainer
    trainer.close()


@pytest.mark.slow
def test_its_reward_is_the_baseline_and_without_one_nothing_is_learned(trainer):
    source, policy = trainer.source, trainer.policy
    problems = [trainer.source.problems[i] for i in (0, 7, 11, 13, 2, 29)]
    judged = source.draw(source.params(trainer.state), problems, 3).arrived().with_rewards()
    prompts = data.to_prompts(problems, 8)
    plain = SamplerConfig(group=1, temperature=0.0, max_tokens=7)
    greedy = policy.fetch(policy.sample(source.params(trainer.state), prompts, jax.random.key(5), plain), 6)
    lengths, tokens = greedy.lengths[:, 0], greedy.tokens[:, 0]
    assert judged.besides[0].lengths[:, 0].tolist() == lengths.tolist()
    gold = np.array([int(p.gold) for p in problems])
    want = np.where((tokens.sum(1) + gold) % 2, np.nan, tokens[:, 0])
    np.testing.assert_array_equal(judged.signals["greedy_rewards"], want)
    assert judged.all_lengths.shape == (6, 4) and judged.all_lengths[:, 3].tolist() == lengths.tolist()
    known = np.isfinite(want)
    assert known.any() and not known.all()
    invalid = {kind: n for kind, n in judged.invalid.items() if kind.startswith("greedy/")}
    assert invalid == {"greedy/tiny_run:some/none": int((~known).sum())}
    signals = Signals(mask=masked.from_lengths(judged.rollout.lengths, 7), **judged.signals)
    got = np.asarray(trainer.config.method.variant.advantage(judged.total, signals))[..., 0]
    np.testing.assert_array_equal(got, np.nan_to_num(judged.total - want[:, None]))


@pytest.mark.slow
def test_any_number_of_prompts_goes_over_the_shards(trainer):
    source = trainer.source
    prompts, one = (
        data.to_prompts(list(trainer.source.problems[:3]), 8),
        SamplerConfig(group=1, temperature=0.0, max_tokens=7),
    )

    def sampled(prompts):
        return source.dispatch_any(source.params(trainer.state), prompts, jax.random.key(0), one)(jax.block_until_ready)

    all_of_them = sampled(prompts)
    assert all_of_them.tokens.shape == (3, 1, 7)
    for i in range(3):
        alone = sampled(jax.tree.map(lambda x, i=i: x[i : i + 1], prompts))
        np.testing.assert_array_equal(alone.tokens[0], all_of_them.tokens[i])


@pytest.mark.exhaustive("extensions/methods/test_recipes.py::test_a_recipe_learns_from_its_own_numbers")
def test_it_trains_with_a_filter_and_counts_what_it_draws(recipe, tmp_path):
    seen = []
    trainer = opened(load(recipe, tmp_path / "run", "filter={max_rollouts: 2}", "rollout.group=2"))
    plain = trainer.source.submit

    def submit(problems, rollout, greedy):
        got = plain(problems, rollout, greedy)
        prompts = sum(len(p.ids) for p in problems)
        seen.append((got, 3 * prompts + int(rollout.lengths.sum()) + int(greedy.lengths.sum())))
        return got

    trainer.source.submit = submit
    batches = []
    assert train(trainer, lambda updates: batches.append(updates.batch))
    lines = [line for line in numbers(tmp_path / "run") if "reward" in line]
    assert lines[-1]["num_tokens"] == sum(n for _, n in seen)
    of_uid = {}
    for drawn, _ in seen:
        of_uid |= {p.uid: x for p, x in zip(drawn.problems, drawn.with_rewards().besides[0].lengths[:, 0], strict=True)}
    for batch in batches[:1]:  # the weights are the same for all of the first step's rollouts
        assert batch.signals["greedy_rewards"].tolist() == [of_uid[p.uid] for p in batch.problems]
    assert all(np.isfinite(line["greedy_reward"]) for line in lines)


@pytest.mark.parametrize("more", [(), ("rewards.timeout_s=30",)], ids=["rewards", "rewards-and-a-limit"])
def test_rewards_are_summed_when_nothing_is_said_of_it(recipe, tmp_path, more):
    assert load(recipe, tmp_path / "run", *more).method.rewards.combine == "sum"


def test_rewards_that_are_normalised_in_their_group_are_refused(recipe, tmp_path):
    rewards = "rewards={terms: [{name: 'tiny_run:length'}], combine: normalize}"
    with pytest.raises(UserError, match="'remax' is defined on rewards with combine: sum"):
        load(recipe, tmp_path / "run", rewards).method  # noqa: B018
