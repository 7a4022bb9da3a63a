"""Chats in the forms that data sets have them in: read as the same messages, or refused by what is in them."""

import json
import random

import pytest
from chat_tokenizer import Fake, chatml
from data_files import jsonl

from grpojax import data
from grpojax.data.chats import dialog_in, question_in
from grpojax.host.errors import UserError

USER = {"role": "user", "content": "What is 4 + 4?"}


def shown(path, **options):
    """The prompts of a file as the model reads them."""
    config = data.DataConfig(train=path, **options)
    loaded = data.load_problems(path, data.Tokenize(Fake(chatml), config), config)
    return ["".join(map(chr, p.ids)) for p in loaded]


@pytest.mark.parametrize(("chat", "want"), [
    ([{"role": "user", "content": [{"type": "text", "text": "What is 4 + 4?"}]}], "<u>What is 4 + 4?<a>"),
    ([{"role": "user", "content": ["What is", {"text": "4 + 4?", "image": None}]}], "<u>What is\n4 + 4?<a>"),
    ([{"from": "human", "value": "What is 4 + 4?"}], "<u>What is 4 + 4?<a>"),
    ([{"from": "system", "value": "S"}, {"from": "human", "value": "A"}, {"from": "gpt", "value": "B"},
      {"from": "human", "value": "Q"}], "<s>S<u>A<a>B<u>Q<a>"),
    ([{"role": "system", "content": None}, USER], "<u>What is 4 + 4?<a>"),
    ([{"role": "system", "content": ""}, USER], "<s><u>What is 4 + 4?<a>"),
    ([{"role": "developer", "content": "S"}, USER], "<s>S<u>What is 4 + 4?<a>"),
    ([{"role": "User", "content": "Q", "tool_calls": [], "name": None}], "<u>Q<a>"),
    (json.dumps([USER]), "<u>What is 4 + 4?<a>"), (str([USER]), "<u>What is 4 + 4?<a>"),
    ({"role": ["system", "user"], "content": ["S", "Q"]}, "<s>S<u>Q<a>"),
    ({"messages": [USER]}, "<u>What is 4 + 4?<a>"),
    (USER, "<u>What is 4 + 4?<a>"), ({"from": ["human"], "value": ["Q"]}, "<u>Q<a>"),
    ('["role"] or [1, 2]: which?', '<u>["role"] or [1, 2]: which?<a>'), ("[{'a': 1}]", "<u>[{'a': 1}]<a>"),
    ([{"role": "user", "content": "A"}, {"role": "assistant", "content": "<think>\nb\n</think>\n\nC"},
      {"role": "user", "content": "Q"}], "<u>A<a><think>\nb\n</think>\n\nC<u>Q<a>"),
])  # fmt: skip
def test_forms_of_a_chat(write, chat, want):
    assert shown(write("d.jsonl", jsonl([{"question": chat, "answer": "8"}]))) == [want]


@pytest.mark.parametrize(("chat", "said"), [
    ([{"role": "user", "content": [{"type": "text", "text": "See."}, {"type": "image"}]}],
     "a part of type 'image'; only"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "a part of type 'image_url'"),
    ([{"role": "user", "content": [{"audio": "x", "text": "See."}]}], "a part of type 'audio'"),
    ([{"role": "system", "content": "S"}], "it ends with the system's; a question of the user's must follow"),
    ([USER, {"role": "assistant", "content": "Let me think:"}],
     "it ends with the assistant's; leave the last message out"),
    ([USER, {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}, USER],
     "[{'id': 1}] as a tool call; a call has a name"),
    ([{"from": "human", "value": "A"}, {"from": "function_call", "value": "{}"}], "'{}' as a tool call; a call has"),
    ([USER, {"role": "assistant", "tool_calls": [{"name": "add", "arguments": "{}"}], "content": None}, USER],
     "the chat template writes no tool calls"),
    ([{"role": "user", "content": None}], "a message without a text: its content is None"), ([], "it is empty"),
    ([USER, {"role": "assistant", "content": None}, USER], "a message without a text"), (None, "has no text in column"),
    ({"role": ["user"], "content": []}, "has no text in column 'question', but {"), ({"a": 1}, "has no text in column"),
])  # fmt: skip
def test_what_is_in_a_chat_that_is_refused(write, chat, said):
    with pytest.raises(UserError) as e:
        shown(write("d.jsonl", jsonl([{"question": "a", "answer": "8"}, {"question": chat, "answer": "8"}])))
    assert "d.jsonl:2: " in str(e.value) and said in str(e.value)


def forms(chat):
    """The same chat as data sets have it."""
    sharegpt = {"system": "system", "user": "human", "assistant": "gpt"}
    parts = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in chat]
    turned = [{"from": sharegpt[m["role"]], "value": m["content"]} for m in chat]
    struct = {key: [m[key] for m in chat] for key in ("role", "content")}
    return [chat, parts, turned, struct, json.dumps(chat), str(chat), json.dumps(turned), {"conversations": turned}]


def random_chat(draw, last):
    """Messages that take turns, of which the last is the user's or the assistant's."""
    roles = ["assistant", "user"] if last == "user" else ["user", "assistant"]
    chat = [{"role": r, "content": f"{draw.random()} {draw.choice('abc')}\n'é\""} for r in roles * draw.randrange(1, 3)]
    chat = chat[1:] if last == "user" else chat
    return [{"role": "system", "content": 'be "brief"'}] * draw.randrange(2) + chat


def test_every_form_of_any_chat_is_the_same_question():
    draw = random.Random(0)
    for _ in range(60):
        chat = random_chat(draw, "user")
        want = chat[0]["content"] if len(chat) == 1 else chat
        assert all(question_in(form, "q") == want for form in forms(chat))


def test_every_form_of_any_pair_is_the_same_pair():
    draw = random.Random(1)
    for _ in range(60):
        begin, (better, worse) = random_chat(draw, "user"), draw.sample(["Blue", "Nine!", "a\nb"], 2)
        want = begin[0]["content"] if len(begin) == 1 else begin, (better, worse)
        sides = [[*begin, {"role": "assistant", "content": text}] for text in (better, worse)]
        for chosen, rejected in zip(*map(forms, sides), strict=True):
            row = {"chosen": chosen, "rejected": rejected}
            if len(begin) == 2 and begin[0]["role"] == "system":
                assert data.read_pair(row | {"prompt": begin[-1]["content"]}) == want
            for more in (
                {},
                {"prompt": begin[-1]["content"]} if len(begin) == 1 else {"prompt": begin},
                {"messages": chosen},
            ):
                assert data.read_pair(row | more) == want
        lists = {"chosen": sides[0][-1:], "rejected": sides[1][-1:]}
        assert data.read_pair(lists | {"prompt": begin}) == data.read_pair(lists | {"messages": begin}) == want
        answered = [data.read_answer({"messages": form}) for form in forms(sides[0])]
        assert answered == [(want[0], (better,))] * len(answered)
        if begin[0]["role"] != "system":
            names = {"user": "Human", "assistant": "Assistant"}
            text = ["".join(f"\n\n{names[m['role']]}: {m['content']}" for m in side) for side in sides]
            assert dialog_in(text[0]) == sides[0]
            assert data.read_pair({"chosen": text[0], "rejected": text[1]}) == want
            prompt = "".join(f"\n\n{names[m['role']]}: {m['content']}" for m in begin) + "\n\nAssistant:"
            assert data.read_pair({"prompt": prompt, "chosen": better, "rejected": worse}) == want
            assert data.read_pair({"prompt": prompt, "chosen": text[0], "rejected": text[1]}) == want


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
        data.read_pair(row)
    assert said in str(e.value)
