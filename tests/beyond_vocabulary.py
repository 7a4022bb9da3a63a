"""A policy whose tokenizer has ids beyond its embedding, and what every command says of it."""

import json
import shutil

import pytest
from refusals import check_said

from grpojax import data
from grpojax.cli import main as cli


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The builtin model, of 384 rows, with 100 tokens more than its tokenizer's 354."""
    made = tmp_path_factory.mktemp("beyond") / "model"
    shutil.copytree(data.locate("builtin:tiny"), made)
    tokenizer = json.loads((made / "tokenizer.json").read_text())
    tokenizer["added_tokens"] += [
        {"id": 354 + i, "content": f"<extra_{i}>", "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": False} for i in range(100)
    ]  # fmt: skip
    (made / "tokenizer.json").write_text(json.dumps(tokenizer))
    rows = [{"question": f"<extra_{90 + i}> What is 2 + {i}?", "answer": str(2 + i)} for i in range(4)]
    (made / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    taught = [
        {"prompt": row["question"], "completion": row["answer"], "chosen": row["answer"], "rejected": "9"}
        for row in rows
    ]
    (made / "taught.jsonl").write_text("".join(json.dumps(row) + "\n" for row in taught))
    return made


def check_refused(command, arguments, folder, capsys):
    """Before a file is written; ``folder`` is where the command would write."""
    assert cli.main([command, *arguments]) == 2
    check_said("its tokenizer has ids for 454 tokens, and its embedding 384 rows (vocab_size)", capsys)
    assert not [path for path in folder.rglob("*") if path.is_file()]
