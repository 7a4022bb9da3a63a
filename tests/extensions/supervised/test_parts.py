"""Answers that are in two parts of the data."""

import json

from chat_tokenizer import Fake

from grpojax import data
from grpojax.data import Known, SourceConfig
from grpojax.extensions.supervised.answered import AnsweredConfig, load_answered, read_answer


def test_answers_that_are_in_two_parts(tmp_path):
    for name, questions in (("train", ("a", "b", "b", "c")), ("test", ("b",))):
        rows = [{"prompt": q, "completion": str(n)} for n, q in enumerate(questions)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))

    config = AnsweredConfig(train="", template="plain")
    tokenize = data.Tokenize(Fake(), config.questions())

    def read(path, known=Known(), group=2):  # noqa: B008  frozen
        return load_answered(path, tokenize, config, read_answer, end=0, group=group, known=known)

    held = Known().and_those_of(read(str(tmp_path / "test.jsonl")).kept)
    train = read(str(tmp_path / "train.jsonl"), held)
    assert train.warnings("train")[0].startswith("1 problems of data.train are word for word")
    sums = [{"path": "reasoning:sums", "options": {"most": 4, "seed": seed}} for seed in (0, 1)]
    first, second = (SourceConfig(**s) for s in sums)
    held = Known().and_those_of(read(second).kept[:3])
    left = read(first, held)
    assert left.left_out >= 3 and [entry.uid for entry in left.kept] == list(range(len(left.kept)))
