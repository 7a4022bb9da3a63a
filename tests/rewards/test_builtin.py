"""The rewards that have names."""

import numpy as np
import pytest
from reward_examples import one

from grpojax.host.errors import UserError
from grpojax.rewards import RewardConfig, Rewards
from grpojax.rewards.builtin import Repetition, SoftOverlong


def test_exact_answers():
    assert one("answer", ["#### 1,000", "#### 999+1", "1000"], ["1000"] * 3) == [1.0, 0.0, 0.0]
    assert one("answer", ["Result: 7", "#### 7"], ["7", "7"], marker="Result:") == [1.0, 0.0]
    assert one("answer_format", ["#### 7", "7"]) == [1.0, 0.0]


@pytest.mark.slow
def test_math_answers_go_to_a_worker_only_if_they_must():
    config = [RewardConfig(name="math_answer")]
    texts = ["#### 7", "#### 8", "7", r"\boxed{\int_0^1 14x dx}", r"\boxed{\int_0^1 x dx}"]
    with Rewards(config) as scorer:
        pending = scorer.submit([""] * 5, texts, [[]] * 5, {"gold": ["7"] * 5})
        assert sum(len(job.indices) for job in pending._jobs.values()) == 2
        assert pending.result().total.tolist() == [1.0, 0.0, 0.0, 1.0, 0.0]
        assert pending.result() is pending.result()


@pytest.mark.parametrize("name", ["math_answer", "answer", "answer_format", "choice"])
@pytest.mark.parametrize("marker", ["", " "])
def test_an_empty_marker_is_refused(name, marker):
    with pytest.raises(UserError, match="marker="):
        RewardConfig(name=name, options={"marker": marker})


def test_formats():
    think = "<think>.*</think>\\s*<answer>.*</answer>"
    texts = ["<think>a\nb</think>\n<answer>7</answer>", "x<think></think><answer></answer>", "<think>"]
    assert one("format", texts, pattern=think) == [1.0, 0.0, 0.0]


def test_choices():
    texts = [
        "#### B",
        "#### (b)",
        r"\boxed{\text{B}}",
        "#### B) a dog",
        "#### B. It is",
        "#### A",
        "#### Both",
        "B",
    ]
    assert one("choice", texts, ["B"] * 8) == [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    scorer = Rewards([RewardConfig(name="choice", options={"letters": "ABCD"})])
    scorer.check_gold("(C)")
    with pytest.raises(UserError, match="'E' is none of the letters ABCD"):
        scorer.check_gold("E")


def test_lengths_count_tokens():
    reward = SoftOverlong(max_tokens=100, buffer=20, factor=1.0)
    lengths = [0, 80, 81, 90, 100, 101, 500]
    assert reward([], [], [range(n) for n in lengths]) == pytest.approx([0.0, 0.0, -0.05, -0.5, -1.0, -1.0, -1.0])
    texts = ["x" * 1000, ""]
    assert one("soft_overlong", texts, None, [[1] * 80, [1] * 90], max_tokens=100, buffer=20) == [0.0, -0.25]


def test_overlong_samples_lose_what_the_mathematics_says_and_workers_load_no_jax_for_it():
    lengths = list(range(0, 140, 3))
    with Rewards([RewardConfig(name="soft_overlong", options={"max_tokens": 97, "buffer": 13}),
                  RewardConfig(name="reward_functions:loaded", weight=0.0)]) as rewards:  # fmt: skip
        got = rewards([""] * 47, [""] * 47, [[1] * n for n in lengths], {})
    want = [0.5 * max(-1.0, min(0.0, (84 - n) / 13)) for n in lengths]
    np.testing.assert_allclose(got.total, want, rtol=1e-6, atol=0)
    assert not got.by_name["reward_functions:loaded"].any() and not got.invalid
    assert SoftOverlong(max_tokens=9, buffer=3)([], [], []) == []


def test_repetition_counts_token_grams():
    reward = Repetition(ngram=3)
    assert reward([], [], [[1, 2, 3, 4, 5], [1, 2], [], [7] * 12]) == [0.0, 0.0, 0.0, pytest.approx(-0.9)]
