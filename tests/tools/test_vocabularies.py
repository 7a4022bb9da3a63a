"""A tokenizer with ids beyond the embedding: every command that reads both refuses them before a file is written."""

import json
import shutil
from pathlib import Path

import pytest
from refusals import QUICKSTART, check_said
from tiny_run import make_teacher

from grpojax import data
from grpojax.tools import cli

SUPERVISED = Path(QUICKSTART).parent / "supervised"


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


@pytest.mark.parametrize("command", ["train", "bench", "eval", "sample", "sft", "dpo"])
def test_both_sizes_are_said(command, folder, tmp_path, capsys):
    where = (f"model.path={folder}", f"run.dir={tmp_path / 'run'}")
    sums, taught = f"data.train={folder / 'sums.jsonl'}", f"data.train={folder / 'taught.jsonl'}"
    arguments = {
        "train": [QUICKSTART, *where, sums, "data.validation=null"],
        "bench": [QUICKSTART, *where, sums, "data.validation=null"],
        "eval": [str(folder), "--data", str(folder / "sums.jsonl"), "--out", str(tmp_path / "run")],
        "sample": [str(folder), "--prompt", "<extra_90> What is 2 + 0?"],
        "sft": [str(SUPERVISED / "sft.yaml"), *where, taught],
        "dpo": [str(SUPERVISED / "dpo.yaml"), *where, taught],
    }[command]
    assert cli.main([command, *arguments]) == 2
    check_said("its tokenizer has ids for 454 tokens, and its embedding 384 rows (vocab_size)", capsys)
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file()]


def test_a_critic_reads_every_token_of_the_policy(folder, tmp_path, capsys):
    """The policy has a row for each of the tokens that both tokenizers have, and the critic has not."""
    sizes = dict(vocab_size=512, hidden_size=8, intermediate_size=8, head_dim=4)
    policy = make_teacher(folder, tmp_path / "policy", **sizes)
    capsys.readouterr()
    data_file, where = f"data.train={folder / 'sums.jsonl'}", f"run.dir={tmp_path / 'run'}"
    given = ["variant=ppo", f"critic.path={folder}", data_file, "data.validation=null", "rollout.prompts=2", where]
    assert cli.main(["train", QUICKSTART, f"model.path={policy}", *given]) == 2
    check_said(f"critic.path='{folder}': its tokenizer has ids for 454 tokens, and its embedding 384 rows", capsys)
