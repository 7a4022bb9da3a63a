"""The columns of other data sets in supervised training."""

from chat_tokenizer import Fake, chatml
from data_files import jsonl

from grpojax import data
from grpojax.extensions.supervised.answered import AnsweredConfig, load_answered, read_answer


def test_the_rows_of_supervised_training(write):
    """Pairs and answers whose columns have the names of other data sets."""
    sharegpt = {"conversations": [{"from": "human", "value": "4+4="}, {"from": "gpt", "value": "8"}]}
    for row, said in (
        (sharegpt, ["reads the column 'conversations' as 'messages'"]),
        ({"question": "4+4=", "answer": "8"}, ["reads the column 'question' as 'prompt' and 'answer' as 'completion'"]),
        (
            {"problem": "4+4=", "solution": "8"},
            ["reads the column 'problem' as 'prompt' and 'solution' as 'completion'"],
        ),
        ({"prompt": "4+4=", "completion": "8", "question": "no"}, []),
    ):
        path = write("d.jsonl", jsonl([row]))
        config = AnsweredConfig(train=path)
        got = load_answered(path, data.Tokenize(Fake(chatml), config.questions()), config, read_answer, end=36)
        assert "".join(map(chr, got.kept[0].ids + got.kept[0].completions[0])) == "<u>4+4=<a>8$"
        assert [line.split(": ", 1)[1] for line in got.found] == said
        assert got.notes("train", config)[: len(said)] == [f"train data: {path}: {line}" for line in said]
