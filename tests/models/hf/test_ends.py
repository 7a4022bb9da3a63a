"""What ends a completion: the files of a folder, its tokenizer, and its chat template."""

import json

import pytest
import tokenizers
from chat_templates import MARKS, TEMPLATES, tokenizer_of

from grpojax.host.errors import UserError
from grpojax.models import hf
from grpojax.models.hf import writing

END, DONE, STOP = (MARKS.index(mark) for mark in ("<|end|>", "<|done|>", "<|stop|>"))


@pytest.mark.parametrize(
    ("template", "end"),
    [
        *((name, END) for name in ("plain", "bos", "dated", "drops", "opens", "fills", "closes", "double")),
        ("returns", DONE),
        ("words", STOP),
        ("{% for m in messages %}{{ m.content }}{{ '\n' }}{% endfor %}", None),  # ends with text
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}<|end|>{% endfor %}", None),  # knows no answers
        ("{{ raise_exception('no') }}", None),
        (TEMPLATES["plain"].replace("<|end|>", " <|end|>\n"), END),
        (TEMPLATES["plain"].replace("for m in messages", "for m in messages[:2]"), END),
        (None, None),
    ],
)
def test_the_end_of_a_message(template, end):
    assert hf.turn_end(tokenizer_of(template)) == end


def files_of(folder, **contents):
    for name, ids in contents.items():
        (folder / f"{name}.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder


@pytest.mark.parametrize(
    ("template", "contents", "ends", "note"),
    [
        ("plain", {}, {END, STOP}, "'<|end|>' (chat template) or '<|stop|>' (tokenizer)"),
        ("words", {}, {STOP}, None),
        ("words", {"config": STOP, "generation_config": [STOP]}, {STOP}, None),
        ("words", {"config": END}, {END, STOP}, "'<|end|>' (config.json) or '<|stop|>' (tokenizer, chat template)"),
        ("closes", {"config": STOP, "generation_config": [END, STOP]}, {END, STOP},
         "'<|end|>' (generation_config.json, chat template) or "
         "'<|stop|>' (generation_config.json, config.json, tokenizer)"),
        (None, {"config": [DONE, END]}, {DONE, END, STOP},
         "'<|end|>' (config.json) or '<|done|>' (config.json) or '<|stop|>' (tokenizer)"),
    ],
)  # fmt: skip
def test_a_folder_whose_files_disagree_says_what_ends_a_completion(tmp_path, template, contents, ends, note):
    folder, tokenizer = files_of(tmp_path, **contents), tokenizer_of(template)
    assert hf.eos_ids(folder, tokenizer) == tuple(sorted(ends))
    assert hf.ends_note(folder, tokenizer) == (note and f"{folder}: completions end at {note}")


def test_a_folder_without_an_end_is_refused_unless_that_is_meant():
    with pytest.raises(UserError, match="f names no token that ends a completion .* or set rollout.no_end=true"):
        hf.check_ends("f", (), no_end=False, setting="rollout.no_end=true")
    with pytest.raises(UserError, match=r"--no-end: f has tokens that end a completion, \[4\]; leave it out"):
        hf.check_ends("f", (4,), no_end=True, setting="--no-end")
    hf.check_ends("f", (), no_end=True, setting="--no-end")
    hf.check_ends("f", (4,), no_end=False, setting="--no-end")


@pytest.mark.parametrize(
    ("contents", "config", "ends", "written"),
    [
        ({}, {"eos_token_id": 6}, (4, 6), {"eos_token_id": [6, 4]}),
        ({}, {"eos_token_id": 6, "pad_token_id": 0}, (4, 6), {"eos_token_id": [6, 4], "pad_token_id": 0}),
        ({}, {}, (4,), {"eos_token_id": 4}),
        ({"generation_config": [9, 4]}, {}, (4, 6, 9), {"eos_token_id": [9, 4, 6]}),
        # Where engines stop there already, nothing is written.
        ({}, {"eos_token_id": 6}, (6,), None),
        ({"generation_config": [9, 4]}, {}, (4, 9), {"eos_token_id": [9, 4]}),
        ({}, {"eos_token_id": 6}, (), None),
    ],
)
def test_an_exported_folder_names_every_end(tmp_path, contents, config, ends, written):
    files_of(tmp_path, **contents)
    writing._write_ends(tmp_path, config, ends)
    file = tmp_path / "generation_config.json"
    assert (json.loads(file.read_text()) if file.exists() else None) == written


@pytest.mark.parametrize("what", ["truncation", "padding", "both"])
def test_truncation_and_padding_in_a_tokenizer_are_not_used(tmp_path, what):
    made = tokenizer_of("plain")
    made.save_pretrained(tmp_path)
    core = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    if what != "padding":
        core.enable_truncation(5)
    if what != "truncation":
        core.enable_padding(length=400, pad_id=0, pad_token="<|begin|>")
    core.save(str(tmp_path / "tokenizer.json"))
    loaded = hf.load_tokenizer(tmp_path)
    for text in ("1+1?", "what is it? " * 50):
        assert loaded.encode(text) == made.encode(text) and len(made.encode(text)) == len(text)
        assert hf.decode_all(loaded, [loaded.encode(text)]) == [text]
    assert loaded.backend_tokenizer.truncation is loaded.backend_tokenizer.padding is None
