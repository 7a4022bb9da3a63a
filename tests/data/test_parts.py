"""The parts of the data: what a held-out part has is not trained on, and what is in two files is counted."""

import json

import pytest
from data_files import letters

from grpojax import data
from grpojax.data import DataConfig, Known, SourceConfig
from grpojax.host.errors import UserError

WORDS = DataConfig(train="", template="plain")


def loaded(given, known=Known(), config=WORDS):  # noqa: B008  frozen
    return data.load_problems(given, letters, config, known=known)


def known_of(*parts):
    known = Known()
    for part in parts:
        known = known.and_those_of(loaded(part))
    return known


def written(path, *questions):
    path.write_text("".join(json.dumps({"question": q, "answer": "1"}) + "\n" for q in questions))
    return str(path)


def test_rows_of_files_that_are_in_two_parts_are_counted_with_the_remedy(tmp_path):
    held = known_of(written(tmp_path / "test.jsonl", "a?", "b?"), written(tmp_path / "validation.jsonl", "c?"))
    train = loaded(written(tmp_path / "train.jsonl", "b?", "c?", "d?", "b?", "a"), held)
    assert len(train) == 5 and train.left_out == 0 and not train.notes("train", WORDS)
    (said,) = train.warnings("train")
    assert said.startswith("3 problems of data.train are word for word in data.validation or data.test too")
    assert "take them out of one of the files, or cut a source by rows: [start, stop]" in said
    validation = loaded(str(tmp_path / "validation.jsonl"), known_of(str(tmp_path / "train.jsonl")))
    assert validation.warnings("validation")[0].startswith(
        "1 problems of data.validation are word for word in data.test too"
    )


@pytest.mark.parametrize(("rows", "want"), [
    ([0, -2], "abc"), ([-2, None], "de"), ([1, 3], "bc"), ([3, 99], "de"),
])  # fmt: skip
def test_a_part_of_the_rows(tmp_path, rows, want):
    file = SourceConfig(path=written(tmp_path / "d.jsonl", *"abcde"), rows=rows)
    assert "".join(p.prompt for p in loaded(file)) == want and [p.uid for p in loaded(file)] == list(range(len(want)))


@pytest.mark.parametrize("rows", [(3, 3), (5, 2), (-2, -2), (-1, -5)])
def test_no_rows_are_refused(rows):
    with pytest.raises(UserError, match="takes no row"):
        SourceConfig(path="d.jsonl", rows=rows)
