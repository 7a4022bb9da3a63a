"""What rewards get as the text of a completion."""

import numpy as np
import pytest

from grpojax.data import Problem
from grpojax.evaluation import submit
from grpojax.host.errors import UserError
from grpojax.rewards import RewardConfig, Rewards
from grpojax.types import Rollout

TAGGED = r"<think>.*</think>[^<]*"
WORDS = {0: "<think>", 1: "</think>", 2: "<|end|>", 3: "so", 4: "2"}


def read(form, prompts, rows):
    special = form in ("with_special_tokens", "with_both")
    texts = ["".join(WORDS[i] for i in row if special or i > 2) for row in rows]
    return [("<think>" if form in ("with_prompt_tail", "with_both") else "") + text for text in texts]


def reward_of(text, **more):
    return RewardConfig(name="format", options={"pattern": TAGGED}, text=text, label=text, **more)


def test_each_reward_gets_the_text_that_it_asks_for():
    """Of a completion that was cut the last token stays, of one that ended the end is no part of the text."""
    forms = ["completion", "with_special_tokens", "with_prompt_tail", "with_both"]
    tokens = np.array([[[0, 3, 1, 4, 2], [3, 1, 4, 2, 0], [0, 3, 1, 4, 4]]], np.int32)
    rollout = Rollout(
        tokens=tokens,
        logps=np.zeros(tokens.shape, np.float32),
        lengths=np.array([[5, 4, 5]], np.int32),
        stopped=np.array([[True, True, False]]),
    )
    problem = Problem(0, (7,), "1+1?", None, {})
    with Rewards([reward_of(form) for form in forms], read=read) as rewards:
        scores = submit(rewards, [problem], rollout, lambda rows: read("completion", (), rows), [])()
    assert {name: x.tolist() for name, x in scores.by_name.items()} == {
        "completion": [0, 0, 0],
        "with_special_tokens": [1, 0, 1],
        "with_prompt_tail": [0, 0, 0],
        "with_both": [1, 1, 1],
    }
    seen = rewards.texts([(7,)] * 2, [[0, 3, 1, 4], [3]])
    assert seen == {form: read(form, (), [[0, 3, 1, 4], [3]]) for form in sorted(forms[1:])}


def test_a_text_that_nobody_can_make_is_an_error():
    with Rewards([reward_of("with_both")]) as rewards:
        with pytest.raises(UserError, match="a reward has text='with_both', and there is no tokenizer here"):
            rewards.texts([()], [[3]])
        with pytest.raises(ValueError, match="asks for text='with_both', which was not given"):
            rewards(["Q"], ["so"], [[3]], {})
        assert rewards(["Q"], ["so"], [[3]], {}, texts={"with_both": ["<think>so</think>"]}).total.tolist() == [1]
        with pytest.raises(ValueError, match="1 completions"):
            rewards(["Q"], ["so"], [[3]], {}, texts={"with_both": []})


@pytest.mark.parametrize(
    ("name", "options"), [("repetition", {}), ("soft_overlong", {"max_tokens": 9, "buffer": 3}), ("equations", {})]
)
def test_a_reward_that_reads_no_text_cannot_ask_for_one(name, options):
    with pytest.raises(UserError, match=f"reward '{name}' reads no text: leave text='with_both' out"):
        RewardConfig(name=name, options=options, text="with_both")


@pytest.mark.parametrize(
    ("pattern", "text", "special", "tail", "remedy"),
    [
        (TAGGED, "completion", ["<think>", "</think>"], "", "with_special_tokens"),
        (TAGGED, "completion", ["</think>"], "<think>\n", "with_both"),
        (TAGGED, "completion", [], "<think>\n", "with_prompt_tail"),
        (TAGGED, "with_prompt_tail", ["</think>"], "<think>\n", "with_both"),
        (TAGGED, "with_special_tokens", ["</think>"], "<think>\n", "with_both"),
        (r"\[THINK\].*\[/THINK\].*", "completion", [], "[THINK]", "with_prompt_tail"),
        (r"<\|box\|>\d+", "completion", ["<|box|>"], "", "with_special_tokens"),
        (r"(<think>)?.*</think>.*", "completion", [], "<think>\n", None),
        (r".*</think>.*", "completion", [], "<think>\n", None),
        (r".*</think>.*", "completion", ["<think>"], "<think>\n", None),
        (TAGGED, "with_both", ["<think>", "</think>"], "<think>\n", None),
        (TAGGED, "with_special_tokens", ["<think>", "</think>"], "", None),
        (TAGGED, "completion", ["<|end|>"], "", None),
    ],
)
def test_a_pattern_that_needs_what_its_text_lacks_is_noticed(pattern, text, special, tail, remedy):
    with Rewards([RewardConfig(name="format", options={"pattern": pattern}, text=text)]) as rewards:
        notes = rewards.notes(special, tail)
    assert [note.rsplit("set text: ")[-1] for note in notes] == ([] if remedy is None else [remedy])


def test_a_marker_and_a_tail_that_is_not_there_are_noticed():
    answer = RewardConfig(name="answer", options={"marker": "<answer>"})
    with Rewards([answer, reward_of("with_prompt_tail")]) as rewards:
        assert [note.split(",")[0] for note in rewards.notes(["<answer>"], "")] == [
            "reward answer looks for '<answer>'",
            "reward with_prompt_tail: text=with_prompt_tail",
        ]


def test_a_function_is_named_with_all_that_its_text_lacks():
    terms = [RewardConfig(name="reward_functions:tokens", text=text) for text in ("completion", "with_both")]
    special = ["<think>", "</think>", "<s>", "</s>", "<|end|>", "<pad>"]
    for term, count in zip(terms, (2, 0), strict=True):
        with Rewards([term]) as rewards:
            notes = rewards.notes(special, "<think>\n")
        assert len(notes) == count
        assert not count or "without <think>, which are special tokens" in notes[0] and "'<think>\\n'" in notes[1]
