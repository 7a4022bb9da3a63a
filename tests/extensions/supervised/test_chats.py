"""Chats as data sets have them: pairs and answers to learn."""

import random

import pytest
from chat_forms import USER, forms, random_chat

from grpojax.data.chats import dialog_in
from grpojax.extensions.supervised.answered import read_answer, read_pair
from grpojax.host.errors import UserError


def test_every_form_of_any_pair_is_the_same_pair():
    draw = random.Random(1)
    for _ in range(60):
        begin, (better, worse) = random_chat(draw, "user"), draw.sample(["Blue", "Nine!", "a\nb"], 2)
        want = begin[0]["content"] if len(begin) == 1 else begin, (better, worse)
        sides = [[*begin, {"role": "assistant", "content": text}] for text in (better, worse)]
        for chosen, rejected in zip(*map(forms, sides), strict=True):
            row = {"chosen": chosen, "rejected": rejected}
            if len(begin) == 2 and begin[0]["role"] == "system":
                assert read_pair(row | {"prompt": begin[-1]["content"]}) == want
            for more in (
                {},
                {"prompt": begin[-1]["content"]} if len(begin) == 1 else {"prompt": begin},
                {"messages": chosen},
            ):
                assert read_pair(row | more) == want
        lists = {"chosen": sides[0][-1:], "rejected": sides[1][-1:]}
        assert read_pair(lists | {"prompt": begin}) == read_pair(lists | {"messages": begin}) == want
        answered = [read_answer({"messages": form}) for form in forms(sides[0])]
        assert answered == [(want[0], (better,))] * len(answered)
        if begin[0]["role"] != "system":
            names = {"user": "Human", "assistant": "Assistant"}
            text = ["".join(f"\n\n{names[m['role']]}: {m['content']}" for m in side) for side in sides]
            assert dialog_in(text[0]) == sides[0]
            assert read_pair({"chosen": text[0], "rejected": text[1]}) == want
            prompt = "".join(f"\n\n{names[m['role']]}: {m['content']}" for m in begin) + "\n\nAssistant:"
            assert read_pair({"prompt": prompt, "chosen": better, "rejected": worse}) == want
            assert read_pair({"prompt": prompt, "chosen": text[0], "rejected": text[1]}) == want


def side(question, answer):
    return [USER | {"content": question}, {"role": "assistant", "content": answer}]


DIALOG = "\n\nHuman: 4 \times 2\n\nAssistant: "


@pytest.mark.parametrize(("row", "said"), [
    ({"chosen": side("Q", "8"), "rejected": side("And?", "9")}, "differ before their last messages, at message 1"),
    ({"prompt": "And?", "chosen": side("Q", "8"), "rejected": side("Q", "9")}, "begin with the question in 'prompt'"),
    ({"prompt": "Q", "chosen": side("Q", "8"), "rejected": "9"}, "got roles ['user', 'assistant']"),
    ({"chosen": side("Q", "8"), "rejected": [side("Q", "")[0], USER]}, "got roles ['user']"),
    ({"chosen": side("Q", "8"), "rejected": side("Q", "8")}, "the same text as chosen and as rejected"),
    ({"chosen": DIALOG + "8", "rejected": DIALOG + "9"}, "a tab where '\\times' lost its"),
    ({"prompt": "Q", "chosen": side("", [{"type": "image"}])[1:], "rejected": "9"}, "type 'image'"),
])  # fmt: skip
def test_pairs_that_are_refused(row, said):
    with pytest.raises(UserError) as e:
        read_pair(row)
    assert said in str(e.value)
