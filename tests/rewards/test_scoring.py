"""What becomes of the rewards of a batch: weights, normalisation, invalid samples; and that importing them is light."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from reward_examples import score

from grpojax import rewards
from grpojax.host.errors import UserError
from grpojax.rewards import RewardConfig, Rewards, RewardsConfig

HERE = Path(__file__).parents[1]
NAN = float("nan")


def test_the_import_is_light():
    code = "import sys, grpojax.rewards; assert not {'jax', 'math_verify', 'sympy', 'pebble'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=HERE.parent)


def test_a_gold_answer_is_checked_for_each_reward():
    scorer = Rewards([RewardConfig(name="answer_format")])
    scorer.check_gold(None)
    for name in ("answer", "choice"):
        with pytest.raises(UserError, match=f"reward '{name}' needs gold answers"):
            Rewards([RewardConfig(name=name)]).check_gold(None)
    with Rewards([RewardConfig(name="answer_format"), RewardConfig(name="math_answer")]) as scorer:
        with pytest.raises(UserError, match="cannot be read"):
            scorer.check_gold(r"\frac{")


def test_weights_sum_and_one_invalid_reward_makes_the_sum_invalid():
    config = RewardsConfig(terms=(
        RewardConfig(name="answer"),
        RewardConfig(name="reward_functions:some_none", weight=2.0, label="half"),
    ))  # fmt: skip
    got = score(config, ["#### 7"] * 2, ["7", "8"], k=[1, 3])
    assert got.total[0] == 3.0 and math.isnan(got.total[1])
    assert got.by_name["answer"].tolist() == [1.0, 0.0] and got.invalid == {"half/none": 1}


def test_a_reward_of_weight_0_is_only_measured():
    config = [RewardConfig(name="answer"), RewardConfig(name="reward_functions:some_none", weight=0.0)]
    got = score(config, ["#### 7"], ["7"], k=[3])
    assert got.total.tolist() == [1.0] and math.isnan(got.by_name["reward_functions:some_none"][0])


def test_normalised_rewards_are_summed():
    """GDPO: (1, 0) and (0, 2) are as good as each other, whatever their scales; a plain sum prefers the second."""
    values = np.array([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0], [1.0, 2.0]], np.float32)
    terms = (RewardConfig(name="answer"), RewardConfig(name="reward_functions:later", options={"scale": 2}))
    config = RewardsConfig(terms=terms, combine="normalize")
    texts = ["#### 7" if v else "" for v in values[:, 0]]
    got = score(config, texts, ["7"] * 4, group=4, k=[int(v) // 2 for v in values[:, 1]])
    std = np.array([math.sqrt(1 / 3), math.sqrt(4 / 3)])
    want = ((values - values.mean(0)) / (std + 1e-4)).sum(1)
    np.testing.assert_allclose(got.total, want, atol=1e-6)
    assert abs(got.total[0] - got.total[1]) < 1e-3
    np.testing.assert_array_equal(got.by_name["answer"], values[:, 0])


def test_invalid_samples_have_no_part_in_the_normalisation():
    from grpojax.rewards.scoring import normalize

    x = np.array([1, 0, NAN, 0.1, 0.1, 0.1, NAN, NAN, 5], np.float32)
    want = [0.5 / (math.sqrt(0.5) + 1e-4), -0.5 / (math.sqrt(0.5) + 1e-4), NAN, 0, 0, 0, NAN, NAN, 0]
    np.testing.assert_allclose(normalize(x, 3), np.array(want, np.float32), atol=1e-6)
    for group in range(1, 30):
        same = np.repeat(np.array([0.1, 0.7, -1 / 3], np.float32), group)
        assert not normalize(same, group).any()


def test_unequal_columns_are_a_mistake():
    with pytest.raises(ValueError, match="2 completions in groups of 1, but {'gold': 1}"):
        score([RewardConfig(name="answer")], ["", ""], ["7"])
    with pytest.raises(ValueError, match="that leaves a rest"):
        score([RewardConfig(name="answer")], ["", ""], ["7", "7"], group=3)


def test_names_are_public():
    for name in rewards.__all__:
        assert hasattr(rewards, name)
