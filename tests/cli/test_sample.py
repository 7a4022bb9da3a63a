"""``grpojax sample``: how a prompt is asked."""

import json

import pytest

from grpojax import data
from grpojax.cli import main as cli


@pytest.fixture
def asked(monkeypatch):
    """The data sections that prompts are made with. The prompts have no tokens, so that nothing is drawn."""
    made = []
    monkeypatch.setattr(data, "Tokenize", lambda tokenizer, source: made.append(source) or (lambda prompt: []))
    return made


def test_a_run_is_asked_as_it_asks_its_own_problems(asked, tmp_path, capsys):
    own = {"train": "x.jsonl", "system": "Be brief.", "instruction": "Q: {prompt}", "template": "plain"}
    own |= {"examples": [{"prompt": "1+1=", "completion": "2"}], "max_prompt_tokens": 8}
    recipe = {"model": {"path": "builtin:tiny"}, "run": {"dir": str(tmp_path)}, "data": own}
    (tmp_path / "config.json").write_text(json.dumps(recipe))
    for more in ([], ["--system", "Think.", "--template-options", "{a: 1}"]):
        assert cli.main(["sample", str(tmp_path), "--prompt", "1+2=", *more]) == 2
    first, second = asked
    assert (first.system, first.instruction, first.template) == ("Be brief.", "Q: {prompt}", "plain")
    assert first.examples[0].completion == "2" and first.template_options == {}
    assert (second.system, second.instruction, second.template_options) == ("Think.", "Q: {prompt}", {"a": 1})


def test_a_run_s_chat_can_be_left_out(asked, tmp_path, capsys):
    own = {"train": "x.jsonl", "system": "Be brief.", "template_options": {"a": 1}, "today": "2026-01-01"}
    recipe = {"model": {"path": "builtin:tiny"}, "run": {"dir": str(tmp_path)}, "data": own, "environment": {}}
    (tmp_path / "config.json").write_text(json.dumps(recipe))
    for more in (["--template", "plain"], ["--system", "", "--template-options", "{}"]):
        assert cli.main(["sample", str(tmp_path), "--prompt", "1+2=", *more]) == 2
    assert "the run plays episodes" in capsys.readouterr().err
    plain, chat = asked
    assert (plain.template, plain.system, plain.template_options, plain.today) == ("plain", None, {}, None)
    assert (chat.template, chat.system, chat.template_options, str(chat.today)) == ("auto", None, {}, "2026-01-01")
    assert cli.main(["sample", str(tmp_path), "--prompt", "1+2=", "--template", "plain", "--system", "S"]) == 2
    assert "--template plain has no place for --system" in capsys.readouterr().err


def test_a_folder_is_asked_the_bare_question(asked, capsys):
    assert cli.main(["sample", "builtin:tiny", "--prompt", "1+2="]) == 2
    assert (asked[0].system, asked[0].instruction, asked[0].template) == (None, "{prompt}", "auto")


def test_an_empty_prompt_is_refused(capsys):
    """Also where the chat template or an instruction adds text."""
    assert cli.main(["sample", "builtin:tiny", "--prompt", ""]) == 2
    assert "--prompt is empty" in capsys.readouterr().err
