"""Chats in the forms that data sets have them in: read as the same messages, or refused by what is in them."""

import json
import random

import pytest
from chat_forms import USER, forms, random_chat
from chat_tokenizer import Fake, chatml
from data_files import jsonl

from grpojax import data
from grpojax.data.chats import question_in
from grpojax.host.errors import UserError


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
    ("[{'content': 'Be brief.', 'role': 'system'}\n {'content': '1+1?', 'role': 'user'}]", "begins as a chat does"),
    ("array([{'role': 'user', 'content': '1+1?'}], dtype=object)", "begins as a chat does"),
    ('[{"role": "user", "content": "1+1', "begins as a chat does"),
    ({"role": ["user"], "content": []}, "has no text in column 'question', but {"), ({"a": 1}, "has no text in column"),
])  # fmt: skip
def test_what_is_in_a_chat_that_is_refused(write, chat, said):
    with pytest.raises(UserError) as e:
        shown(write("d.jsonl", jsonl([{"question": "a", "answer": "8"}, {"question": chat, "answer": "8"}])))
    assert "d.jsonl:2: " in str(e.value) and said in str(e.value)


@pytest.mark.parametrize("text", [
    '[{"value": 3}, {"value": 4}] What is the sum?', '[{"from": "NYC", "to": "LA", "km": 3900}]',
    '[{"content": "x"}]\nSummarise.', '[{"role": "cook"}, {"role": "waiter"}] How many roles?',
])  # fmt: skip
def test_a_question_with_json_in_it_is_a_question(text):
    assert question_in(text, "q") == text


def test_every_form_of_any_chat_is_the_same_question():
    draw = random.Random(0)
    for _ in range(60):
        chat = random_chat(draw, "user")
        want = chat[0]["content"] if len(chat) == 1 else chat
        assert all(question_in(form, "q") == want for form in forms(chat))
