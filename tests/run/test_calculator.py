"""The recipe in which a tiny policy learns to call a calculator, and the policy that it starts from."""

import json

import make_caller
import numpy as np
import pytest

from grpojax import data
from grpojax.data.chat_template import ChatTemplate
from grpojax.environments import calls, reasoning
from grpojax.models import hf
from grpojax.tools import cli

CALLER = data.locate("builtin:caller")


@pytest.fixture(scope="module")
def tok():
    return hf.load_tokenizer(str(CALLER))


def test_what_ships_has_the_scripts_tokenizer_and_is_small(tok):
    made = make_caller.tokenizer()
    assert tok.get_vocab() == made.get_vocab() and tok.chat_template.strip() == made.chat_template.strip()
    assert sum(file.stat().length for file in CALLER.iterdir()) < 1.5e6


def test_its_calls_are_read_and_its_turns_can_be_answered(tok):
    (call,) = calls.read(make_caller.call(37, 48) + "<|end|>", calls.hermes)
    assert (call.name, dict(call.arguments)) == ("calculate", {"expression": "37 * 48"})
    assert calls.format_of(tok.chat_template) == "hermes"
    template = ChatTemplate(tok, {}, None)
    template.check_turns()
    answer = template.after_turn([{"role": "tool", "name": "calculate", "content": "1776"}], "<|end|>")
    assert answer == "<|tool|>1776<|end|><|assistant|>"


def test_products_of_the_parts_are_apart_whatever_their_order():
    parts = [{reasoning.content("products", row["question"]) for row in reasoning.rows("products", {"part": part})}
             for part in ("train", "validation", "test")]  # fmt: skip
    assert not parts[0] & parts[1] and not parts[0] & parts[2] and not parts[1] & parts[2]
    assert sum(map(len, parts)) == 90 * 91 // 2
    rows = reasoning.rows("products", {"size": 5, "least": 3, "most": 9})
    assert all(str(np.prod([int(n) for n in row["question"][8:-1].split(" * ")])) == row["answer"] for row in rows)


@pytest.mark.slow
def test_a_policy_that_rarely_calls_learns_to(tmp_path):
    command = [
        "train",
        "calculator",
        "train.steps=10",
        "train.eval_every=0",
        "data.test=null",
        f"run.dir={tmp_path}/run",
    ]
    assert cli.main(command) == 0
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").open())
    steps = [row for row in rows if "reward" in row]
    assert 0.01 < steps[0]["episode/calling"] < 0.2 and steps[0]["reward"] < 0.3
    assert steps[-1]["episode/calling"] > 0.9 and steps[-1]["reward"] > 0.9
    assert steps[-1]["episode/failures"] == 0 and steps[-1]["sampling/logp_difference_max"] < 1e-4
