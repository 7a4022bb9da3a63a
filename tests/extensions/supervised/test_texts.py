"""Backslashes that JSON or YAML took from answers that are learned."""

import itertools
import json

import pytest
from data_files import load

from grpojax.extensions.supervised.answered import AnsweredConfig, read_answer
from grpojax.host.errors import UserError


def test_in_a_recipe():
    with pytest.raises(UserError, match="system has a form feed where"):
        AnsweredConfig(train="x", system="\frac")


def test_a_question_and_an_answer_that_is_learned_too(tmp_path, write):
    path = write("d.jsonl", json.dumps({"question": r"What is \\frac{4}{2}?", "answer": "2"}))
    assert load(path)[0].prompt == r"What is \frac{4}{2}?"
    assert read_answer({"prompt": "a", "completion": r"\\frac{4}{2}"}) == ("a", (r"\frac{4}{2}",))
    for column, other in itertools.permutations(("prompt", "completion")):
        with pytest.raises(UserError, match=rf"column '{column}' has a form feed where '.frac'"):
            read_answer({column: "\frac12", other: "a"})
