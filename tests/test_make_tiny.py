"""The built-in task and policy: what ships is what the script makes, fits together and is small."""

import functools
import json
import re
from collections import Counter
from pathlib import Path

import make_tiny
import pytest
import tiny_run
from data_files import read_rows

from grpojax import data
from grpojax.models import hf
from grpojax.models.hf import from_hf
from grpojax.rewards import extract_answer

TINY = data.locate("builtin:tiny")
SPLITS = dict(zip(("train", "test"), make_tiny.splits(), strict=True))
PROBLEMS = [p for split in SPLITS.values() for p in split]


@pytest.fixture(scope="module")
def tok():
    return hf.load_tokenizer(TINY)


@pytest.mark.parametrize("name", SPLITS)
def test_problems_are_what_the_script_makes(name):
    shipped = data.locate(f"builtin:arithmetic/{name}.jsonl").read_bytes()
    assert shipped == make_tiny.jsonl(SPLITS[name]).encode()


def test_both_parts_are_as_large():
    rows = read_rows("builtin:arithmetic/test.jsonl")
    assert Counter(row["part"] for row in rows) == {"easy": 128, "hard": 128}
    assert all(set(row) == {"question", "answer", "part"} and isinstance(row["answer"], str) for row in rows)


def test_test_questions_are_held_out():
    train, test = ([p.question for p in split] for split in SPLITS.values())
    assert not set(train) & set(test)
    assert len(set(train + test)) == len(train + test)


def test_answers_are_right():
    """Steps use the question's numbers in order, each goes on from the one before, and all are true."""
    for p in PROBLEMS:
        count, *others = map(int, re.findall(r"\d+", p.question))
        assert len(others) == len(p.steps)
        for step, other in zip(p.steps, others, strict=True):
            a, op, b, result = re.fullmatch(r"(\d+) ([-+*]) (\d+) = (\d+)", step).groups()
            assert (int(a), int(b)) == (count, other)
            count = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[op](count, other)
            assert count == int(result) and 1 <= count <= make_tiny.MOST
        assert p.answer == count
        assert extract_answer(p.completion(hasty=False)) == str(p.answer)
        assert p.hard == (len(p.steps) in (2, 3))


@pytest.mark.parametrize(
    ("sum_", "without_carry"),
    [
        ((27, "+", 15), 32),
        ((30, "-", 17), 23),
        ((21, "+", 15), 36),
        ((38, "-", 15), 23),
        ((6, "*", 6), 36),
        ((5, "-", 9), 6),
    ],
)
def test_carries_are_forgotten(sum_, without_carry):
    assert make_tiny.calculate(*sum_, carry=False) == without_carry


def test_tokenizer_loses_nothing(tok):
    texts = [t for p in PROBLEMS for t in (p.question, p.completion(hasty=True), p.completion(hasty=False))]
    assert tok.batch_decode(tok(texts)["input_ids"]) == texts
    other = "Größe:\t123.5 _x_  #!\r\n\n don't a+b=-3 日本 🙂"
    assert tok.decode(tok.encode(other)) == other


def test_tokenizer_knows_every_word(tok):
    used = {i for p in PROBLEMS for i in tok.encode(p.question + "\n" + p.completion(hasty=False))}
    spelled = tok.convert_ids_to_tokens(sorted(used))
    assert {t for t in spelled if len(t) == 1} <= set("0123456789.?:ĊĠ")
    assert tok.tokenize("4217") == list("4217")


@pytest.mark.slow
def test_lengths(tok):
    assert max(len(make_tiny.prompt(p.question, tok)) for p in PROBLEMS) <= 48
    assert max(len(tok.encode(p.completion(hasty=False))) + 1 for p in PROBLEMS) <= 40


def test_chat_template(tok):
    special = dict(zip(make_tiny.SPECIAL, tok.convert_tokens_to_ids(list(make_tiny.SPECIAL)), strict=True))
    end, user, assistant = (special[f"<|{name}|>"] for name in ("end", "user", "assistant"))
    assert (tok.eos_token_id, tok.pad_token_id, tok.bos_token_id) == (end, special["<|pad|>"], None)
    chat = [{"role": "user", "content": "Mia has 3 nuts."}, {"role": "assistant", "content": "## Answer: 3"}]
    question, answer = (tok.encode(m["content"]) for m in chat)
    assert not {*question, *answer} & set(special.values())
    render = functools.partial(tok.apply_chat_template, return_dict=False)
    opened = [user, *question, end, assistant]
    assert render(chat[:1], add_generation_prompt=True) == opened
    assert render(chat) == [*opened, *answer, end]
    assert tok.encode(render(chat, tokenize=False)) == [*opened, *answer, end]
    with pytest.raises(Exception, match="unknown role: tool"):
        render([{"role": "tool", "content": "3"}])


def test_policy_is_a_small_qwen3(tok):
    assert sum(f.stat().st_size for f in Path(TINY).rglob("*") if f.is_file()) <= 4 * 2**20
    raw = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    assert raw["architectures"] == ["Qwen3ForCausalLM"]
    assert from_hf(raw) == make_tiny.config(len(tok))
    assert (raw["eos_token_id"], raw["pad_token_id"]) == (tok.eos_token_id, tok.pad_token_id)
    assert hf.eos_ids(TINY, tok) == (tok.eos_token_id,)
    assert len(tok) <= hf.load(TINY).config.vocab_size


def test_the_model_of_the_tests_is_what_transformers_makes(tmp_path):
    tiny_run.make_model(tmp_path)
    for file in tiny_run.MODEL.iterdir():
        assert file.read_bytes() == (tmp_path / file.name).read_bytes(), file.name
