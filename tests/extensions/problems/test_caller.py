"""The policy that the recipes with tools start from, and the products that it is asked."""

import make_caller
import numpy as np

from grpojax import data
from grpojax.extensions.problems import reasoning
from grpojax.models import hf

CALLER = data.locate("builtin:caller")


def test_what_ships_has_the_scripts_tokenizer_and_is_small():
    tok, made = hf.load_tokenizer(str(CALLER)), make_caller.tokenizer()
    assert tok.get_vocab() == made.get_vocab() and tok.chat_template.strip() == made.chat_template.strip()
    assert sum(file.stat().length for file in CALLER.iterdir()) < 1e6


def test_products_of_the_parts_are_apart_whatever_their_order():
    parts = [{reasoning.content("products", row["question"]) for row in reasoning.rows("products", {"part": part})}
             for part in ("train", "validation", "test")]  # fmt: skip
    assert not parts[0] & parts[1] and not parts[0] & parts[2] and not parts[1] & parts[2]
    assert sum(map(len, parts)) == 90 * 91 // 2
    rows = reasoning.rows("products", {"size": 5, "least": 3, "most": 9})
    assert all(str(np.prod([int(n) for n in row["question"][8:-1].split(" * ")])) == row["answer"] for row in rows)
