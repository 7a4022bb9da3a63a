"""Answers that are learned under chat templates: from where their prompts end."""

import json

import pytest
from chat_templates import MARKS, tokenizer_of

from grpojax.data import DataConfig, Tokenize
from grpojax.extensions.supervised.answered import AnsweredConfig, load_answered, read_answer, read_pair
from grpojax.host import agreement, settings
from grpojax.host.errors import UserError


def tokenize_with(template, /, *, tags=(), add_bos=False, **options):
    tokenizer = tokenizer_of(template, tags=tags, add_bos=add_bos)
    return Tokenize(tokenizer, settings.build(DataConfig, {"train": "-", **options}))


def test_options_are_part_of_what_processes_and_runs_agree_on():
    given = [{}, {"template_options": {"thinking": False}}, {"template_options": {"thinking": True}}]
    given += [{"today": "2026-01-05"}, {"today": "2026-01-06"}]
    built = [settings.build(AnsweredConfig, {"train": "-", **g}) for g in given]
    trees = [settings.to_dict(config) for config in built]
    assert len({agreement.digest(json.dumps(t, sort_keys=True).encode()) for t in trees}) == len(given)
    assert [settings.build(AnsweredConfig, t) for t in trees] == built
    for g, config in zip(given, built, strict=True):
        questions = config.questions()
        assert (questions.template_options, str(questions.today)) == (
            g.get("template_options", {}), g.get("today", "None")
        )  # fmt: skip


@pytest.mark.parametrize("rows", ["chat", "pair", "text"])
def test_an_opening_is_learned_once(write, rows):
    answer, question = "<think>\none and one\n</think>\n2", {"role": "user", "content": "1+1?"}
    row = {
        "chat": {"messages": [question, {"role": "assistant", "content": answer}]},
        "pair": {"prompt": "1+1?", "chosen": answer, "rejected": "<think>\n</think>3"},
        "text": {"prompt": "1+1?", "completion": answer},
    }[rows]
    tokenize = tokenize_with("opens")
    config = AnsweredConfig(train=write("rows.jsonl", json.dumps(row)))
    read = read_pair if rows == "pair" else read_answer
    loaded = load_answered(config.train, tokenize, config, read, end=MARKS.index("<|end|>"))
    entry = loaded.kept[0]
    whole = tokenize.tokenizer.decode(entry.ids + entry.completions[0])
    assert whole == f"<|user|>1+1?<|end|><|assistant|>{answer}<|end|>"
    assert all(tokenize.tokenizer.decode(entry.ids + c).count("<think>") == 1 for c in entry.completions)


def test_an_answer_of_nothing_else_is_refused(write):
    config = AnsweredConfig(train=write("rows.jsonl", json.dumps({"prompt": "1+1?", "completion": "<think>\n"})))
    with pytest.raises(UserError, match="rows.jsonl:1: has an answer with no text besides the end of the prompt"):
        load_answered(config.train, tokenize_with("opens"), config, read_answer, end=4)
