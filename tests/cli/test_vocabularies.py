"""A tokenizer with ids beyond the embedding: every command that reads both refuses them before a file is written."""

import beyond_vocabulary
import pytest
from refusals import RECIPE

folder = beyond_vocabulary.folder


@pytest.mark.parametrize("command", ["train", "bench", "eval", "sample"])
def test_both_sizes_are_said(command, folder, tmp_path, capsys):
    where = (f"model.path={folder}", f"run.dir={tmp_path / 'run'}", f"data.train={folder / 'sums.jsonl'}")
    arguments = {
        "train": [RECIPE, *where, "data.validation=null"],
        "bench": [RECIPE, *where, "data.validation=null"],
        "eval": [str(folder), "--data", str(folder / "sums.jsonl"), "--out", str(tmp_path / "run")],
        "sample": [str(folder), "--prompt", "<extra_90> What is 2 + 0?"],
    }[command]
    beyond_vocabulary.check_refused(command, arguments, tmp_path / "run", capsys)
