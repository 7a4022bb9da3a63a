"""NTHR in a run."""

from types import SimpleNamespace

import numpy as np
import pytest
from runs import numbers, opened

from grpojax.extensions.methods.influence import TokenInfluence
from grpojax.host.errors import UserError
from grpojax.models import flops
from grpojax.run import recipe as config
from grpojax.run.sections import TrainConfig
from grpojax.train import train

# Of one length, so that an update compiles once.
TWIN = {"aggregate": "token_mean", "ddof": 0, "kl_coef": 1e-4}


def trained(recipe, directory, variant, *more, devices=1):
    overrides = [
        f"run.dir={directory}", f"variant={variant}", "data.validation=null", "rewards.0.name=tiny_run:parity",
        "train.steps=3", "rollout.max_tokens=4", *more,
    ]  # fmt: skip
    trainer, seen = opened(config.load(recipe, overrides), devices, eos_ids=()), []
    assert train(trainer, seen.append)
    late = late_flops(trainer, seen[-1].batch) if "nthr" in variant["name"] else 0
    assert seen[-1].flops["late"] == pytest.approx(late)
    lines = [line for line in numbers(directory) if "reward" in line]
    # Scores have names and FLOPs of their own.
    return [{k: v for k, v in line.items() if not k.startswith(("nthr/", "flops"))} for line in lines], lines


def late_flops(trainer, batch):
    """Of groups with right and wrong samples: a forward, and three products with the group's own tokens."""
    total, problems, rollout = 0.0, batch.problems, batch.rollout
    for problem, tokens, lengths in zip(problems, rollout.tokens, rollout.lengths, strict=True):
        samples = [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]
        if len({sum(ids) % 2 for ids in samples}) == 2:
            total += flops.forward_flops(trainer.policy.config, [len(problem.ids)], [lengths])
            total += 6 * trainer.policy.config.hidden_size * int(lengths.sum()) * len(set(sum(samples, [])))
    return total


@pytest.mark.exhaustive("extensions/methods/test_recipes.py::test_a_recipe_learns_from_its_own_numbers")
def test_with_a_factor_of_one_it_is_grpo(recipe, tmp_path):
    """To the last bit; with its own factor it is not."""
    want, _ = trained(recipe, tmp_path / "grpo", {"name": "grpo", **TWIN})
    got, lines = trained(recipe, tmp_path / "nthr", {"name": "nthr", "eta": 1.0})
    assert got == want
    assert all(line["nthr/mixed_groups"] > 0 for line in lines)
    own, _ = trained(recipe, tmp_path / "own", {"name": "nthr"})
    assert own[0]["reward"] == want[0]["reward"] and own[0]["grad_norm"] != want[0]["grad_norm"]


@pytest.mark.in_ci("options0")
@pytest.mark.slow
@pytest.mark.parametrize("options", [{"self_term": False}, {"select": "random"}, {"select": "all", "eta": 0.0}])
def test_its_options_train_on_one_device_as_on_eight(recipe, tmp_path, options):
    one, _ = trained(recipe, tmp_path / "one", {"name": "nthr", **options})
    eight, _ = trained(recipe, tmp_path / "eight", {"name": "nthr", **options}, devices=8)
    for a, b in zip(one, eight, strict=True):
        for name in ("loss", "grad_norm", "reward"):
            np.testing.assert_allclose(a[name], b[name], rtol=1e-3, atol=1e-5)


def test_a_kl_in_the_reward_is_refused(recipe, tmp_path):
    with pytest.raises(UserError, match="variant 'nthr'.*kl_in=loss"):
        trained(recipe, tmp_path, {"name": "nthr", "kl_in": "reward", "kl_kind": "k1"})


def test_its_anchors_are_right_answers_and_not_bonuses():
    """What a run asks the scores of: one group of wrong answers with a bonus, one of a right answer and wrong ones."""
    outcome = np.array([[0, 0, 0], [1, 0, np.nan]], np.float32)
    total = outcome + np.array([[0.1, 0, 0], [0, 0.9, 0]], np.float32)
    rollout = SimpleNamespace(tokens=np.ones((2, 3, 4), np.int32), lengths=np.full((2, 3), 4))
    sampled = np.array([True, False, True, True])[None, None].repeat(2, 0).repeat(3, 1)  # one is an environment's
    asked = []

    class Scores:
        flops = staticmethod(lambda *groups: 0.0)

        def __call__(self, params, problems, tokens, lengths, mask, weights, **options):
            asked.append((problems, mask, weights))
            return SimpleNamespace(scores=weights, own=None)

    variant = SimpleNamespace(options={"self_term": True, "select": "influence"})
    part = SimpleNamespace(
        variant=variant, method=SimpleNamespace(deciding="answer"), influences=Scores(),
        policy=SimpleNamespace(shards=1), config=SimpleNamespace(train=TrainConfig(steps=1)),
    )  # fmt: skip
    state = {"policy": SimpleNamespace(params=None)}
    batch = SimpleNamespace(
        by_name={"answer": outcome}, rollout=rollout, problems=["a", "b"], sampled=sampled,
        own_lengths=sampled.sum(-1),
    )  # fmt: skip
    made, logged = TokenInfluence.after(part, state, batch, total)
    ((problems, mask, weights),) = asked
    assert (mask == sampled[1:]).all() and (weights <= mask).all()
    assert problems == ["b"] and logged["nthr/mixed_groups"] == 1
    assert weights[0].max(-1).tolist() == [1, 0, 0]
    assert made["influence_means"].tolist() == [[0, 0, 0], [1, 0, 0]]
