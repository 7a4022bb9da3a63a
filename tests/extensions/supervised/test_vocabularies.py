"""A tokenizer with ids beyond the embedding is refused by supervised runs too."""

from pathlib import Path

import beyond_vocabulary
import pytest

SUPERVISED = Path(__file__).parents[3] / "configs" / "supervised"
folder = beyond_vocabulary.folder


@pytest.mark.parametrize("command", ["sft", "dpo"])
def test_both_sizes_are_said(command, folder, tmp_path, capsys):
    where = (f"model.path={folder}", f"run.dir={tmp_path / 'run'}", f"data.train={folder / 'taught.jsonl'}")
    arguments = [str(SUPERVISED / f"{command}.yaml"), *where]
    beyond_vocabulary.check_refused(command, arguments, tmp_path / "run", capsys)
