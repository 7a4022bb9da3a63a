"""What the model reads: chat templates, examples, instructions and the beginning of a sequence."""

import json

import pytest
from chat_tokenizer import Fake, dialog, prompts_of

from grpojax import data
from grpojax.data import DataConfig, Example, Tokenize
from grpojax.host.errors import UserError
from grpojax.models import hf


def test_a_chat_needs_a_template():
    with pytest.raises(UserError, match="needs a chat template"):
        Tokenize(Fake(), DataConfig(train=""))([{"role": "user", "content": "hi"}])


def test_a_chat_has_system_examples_and_instruction():
    examples = (Example(prompt="P", completion="C"),)
    text, ids = prompts_of(Fake(dialog), system="S", examples=examples, instruction=r"{prompt}, in \boxed{}")
    assert text == r"^<system>S<user>P, in \boxed{}<assistant>C<user>Q, in \boxed{}<assistant>"
    assert ids.count(1) == 1 and len(ids) == len(text)


def test_a_plain_prompt_has_examples_and_instruction():
    examples = (Example(prompt="P", completion=" C"),)
    text, ids = prompts_of(Fake(), examples=examples, instruction="Question: {prompt}\nAnswer:")
    assert text == "Question: P\nAnswer: C\n\nQuestion: Q\nAnswer:"
    assert ids[0] == 1 and ids.count(1) == 1 and len(ids) == 1 + len(text)
    assert prompts_of(Fake(dialog), template="plain") == ("Q", (1, ord("Q")))
    assert prompts_of(Fake(dialog, bos=None), template="plain") == ("Q", (ord("Q"),))


def test_solved_problems_come_after_those_of_the_config(write):
    """Of a chat too: after its system message, before its own turns."""
    turns = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "B"},
        {"role": "user", "content": "Q"},
    ]
    file = write("rows.jsonl", "".join(json.dumps({"question": q, "answer": "1"}) + "\n" for q in ("Q", turns)))
    config = DataConfig(train=file, examples=(Example(prompt="P", completion="C"),), instruction="{prompt}?")
    tokenize = Tokenize(Fake(dialog), config)
    problems = data.load_problems(file, tokenize, config)
    more = [Example(prompt="X", completion="Y")]
    shown = "<user>P?<assistant>C<user>X?<assistant>Y"
    assert tokenize.text("Q", more) == f"^{shown}<user>Q?<assistant>"
    assert problems.shown_after(more, problems[0]) == tokenize("Q", more) != problems[0].ids
    whole = f"^<system>S{shown}<user>A<assistant>B<user>Q?<assistant>"
    assert problems.shown_after(more, problems[1]) == tuple(Fake().encode(whole, add_special_tokens=False))
    assert problems[1].prompt == problems[0].prompt and problems[1].chat == turns and problems[0].chat is None


def test_two_beginnings_are_refused():
    with pytest.raises(UserError, match="starts with two beginning-of-sequence tokens: 'Q'"):
        prompts_of(Fake(), instruction="^^{prompt}")
    with pytest.raises(UserError, match="two beginning-of-sequence tokens"):
        prompts_of(Fake(lambda turns: "^" + dialog(turns)))
    # GPT-2's one special token begins a text and ends a turn.
    assert prompts_of(Fake(lambda turns: dialog(turns) + "^", eos=1))[1].count(1) == 2
    with pytest.raises(UserError, match="two beginning-of-sequence tokens"):
        prompts_of(Fake(lambda turns: "^" + dialog(turns), eos=1))


def test_a_template_that_loses_something_is_refused():
    def without_system(turns):
        return dialog([t for t in turns if t["role"] != "system"])

    def no_system(turns):
        if turns[0]["role"] == "system":
            raise RuntimeError("System role not supported")
        return dialog(turns)

    with pytest.raises(UserError, match="loses the system's 'Be brief.'"):
        prompts_of(Fake(without_system), system="Be brief.")
    with pytest.raises(UserError, match="error: System role not supported"):
        prompts_of(Fake(no_system), system="Be brief.")
    assert prompts_of(Fake(no_system))[0] == "^<user>Q<assistant>"
    with pytest.raises(UserError, match="data.system needs a chat template"):
        prompts_of(Fake(), system="Be brief.")
    with pytest.raises(UserError, match="has no chat template; use 'plain'"):
        prompts_of(Fake(), template="chat")


@pytest.fixture(scope="module")
def tiny():
    return hf.load_tokenizer(data.locate("builtin:tiny"))


def test_the_tiny_tokenizer(tiny):
    tokenize = Tokenize(tiny, DataConfig(train="", template="plain"))
    text = "Ann has 3 pens."
    assert tiny.decode(tokenize(text)) == text


@pytest.mark.parametrize("eos", [2, 1])
def test_a_beginning_that_opens_every_turn_is_no_second_one(eos):
    """As SmolLM2's ``<|im_start|>``, which is its BOS."""

    def opened(turns):
        return "".join(f"^{t['role']}{t['content']}~" for t in turns) + "^assistant"

    text, ids = prompts_of(Fake(opened, eos=eos), system="S")
    assert text == "^systemS~^userQ~^assistant" and ids.count(1) == 3
    with pytest.raises(UserError, match="starts with two beginning-of-sequence tokens: 'Q'"):
        prompts_of(Fake(lambda turns: "^" + opened(turns), eos=eos), system="S")


def test_a_pad_that_is_the_end_and_the_beginning_is_no_beginning_before_the_text():
    tokenizer = Fake(eos=1)
    tokenizer.pad_token_id = 1
    assert prompts_of(tokenizer, instruction="a^^{prompt}^") == ("a^^Q^", (1, ord("a"), 1, 1, ord("Q"), 1))
