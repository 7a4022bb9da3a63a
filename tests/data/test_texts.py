r"""Backslashes that JSON or YAML took: found by what they became and what follows; prose with tabs is left alone."""

import json
import random

import pytest
from data_files import refusal

from grpojax import data
from grpojax.data.texts import halved, lost_backslash
from grpojax.host import settings
from grpojax.host.errors import UserError

COMMANDS = (
    r"\frac{1}{3}", r"\forall x", r"\beta", r"\boxed{4}", r"\binom{4}{2}", r"\begin{cases}", r"\bar{x}", r"\times 4",
    r"\theta", r"\text{two}", r"\textbf{a}", r"\tfrac{1}{2}", r"\triangle ABC", r"\tilde{x}", r"\tan(x)", r"\tan 30",
    r"\tan x", r"\tau = 3", r"\to 0", r"\rho", r"\right)", r"\rightarrow", r"\rangle", r"\rfloor",
    r"\neq 3", r"\nabla f",
    r"\notin", r"\nleq", r"\nRightarrow", r"\nsubseteq A", r"\neg p", r"\ne 0", r"\nu = 3",
)  # fmt: skip
# No escape of JSON: only YAML reads them.
OF_YAML = (r"\alpha", r"\approx", r"\varepsilon", r"\vec{x}", r"\epsilon", r"\exp", r"\Lambda", r"\Phi", r"\Pi")


def eaten(text):
    """What a parser makes of a text whose backslashes are single."""
    letters = {"b": "\b", "f": "\f", "t": "\t", "r": "\r", "n": "\n", "a": "\a", "v": "\v", "e": "\x1b", "L": "\u2028"}
    return "".join((letters | {"P": "\u2029"})[part[0]] + part[1:] for part in text.split("\\") if part)


@pytest.mark.parametrize(("row", "column", "said"), [
    (r'{"question": "a", "answer": "\frac{1}{3}"}', "answer", r"a form feed where '\frac' lost its backslash"),
    (r'{"question": "a", "answer": "5 \times 6"}', "answer", r"a tab where '\times'"),
    (r'{"question": "a", "answer": "\text{two}"}', "answer", r"a tab where '\text'"),
    (r'{"question": "a", "answer": "so #### 2\nu"}', "answer", r"a line break where '\nu'"),
    (r'{"question": "Write \boxed{} around it: 2+2", "answer": "4"}', "question", r"a backspace where '\boxed'"),
    (r'{"question": "Is 3 \neq 4?", "answer": "4"}', "question", r"a line break where '\neq'"),
    (r'{"question": [{"role": "user", "content": "\rho?"}], "answer": "4"}', "question",
     r"a carriage return where '\rho'"),
    (r'{"question": "a\u0000b", "answer": "4"}', "question", "has a NUL character before 'b'"),
])  # fmt: skip
def test_a_lost_backslash_names_row_and_cause(write, row, column, said):
    message = refusal(write("d.jsonl", '{"question": "a", "answer": "1"}\n' + row))
    assert f"d.jsonl:2: column '{column}' has {said.removeprefix('has ')}" in message


def test_in_a_recipe():
    for key, text in (("instruction", "{prompt} in \boxed{}"), ("system", "Use \times."), ("system", eaten(r"\alpha"))):
        with pytest.raises(
            UserError, match=f"{key} has a .* lost its backslash; .* or put the text into single quotes"
        ):
            data.DataConfig(train="", **{key: text})
    with pytest.raises(UserError, match=r"examples.0.completion has a tab where '.text'"):
        data.DataConfig(train="", examples=(data.Example(prompt="p", completion="\text{a}"),))
    tree, origins = settings.override({"train": ""}, [r'instruction="{prompt}\n\nPut it in \boxed{}."'])
    with pytest.raises(UserError, match="instruction has a backspace where"):
        settings.build(data.DataConfig, tree, origins)


@pytest.mark.parametrize("command", COMMANDS)
def test_json_takes_the_backslash_of_a_command(command):
    text = json.loads(f'"Find x {command}"')
    assert lost_backslash(text) is not None and lost_backslash(text.removeprefix("Find x "), answer=True) is not None
    assert lost_backslash(f"Find x {command}") is None


@pytest.mark.parametrize("command", OF_YAML)
def test_yaml_takes_more(command):
    assert lost_backslash(f"Find ${eaten(command)}$") is not None


WORDS = (
    "an any and ant answer apple other of or on to one open option text texts examples extra exit tag again ago au aux"
    " equal equation eq. eggs ego e.g. not nothing note nor neither mid middle number u i use me my might right angle"
    " angles hot how real root random hours heat item times triangle over a b x 5 3.5 - 1. (2) $4$ I said: {x} [y] é"
).split(" ")


def test_prose_with_tabs_and_line_breaks_is_left_alone():
    """Tables, lists and code, whatever word follows a tab or a line break."""
    draw = random.Random(1)
    for _ in range(2000):
        words = draw.choices(WORDS, k=12)
        text = "".join(w + draw.choice(["\t", "\n", "\r\n", " ", "\n\t", "\n\n", ". ", "\f\n"]) for w in words)
        assert lost_backslash(text) is None, repr(text)
    assert lost_backslash("def f(x):\n\ttext = x\n\tan = 3\n\tau = 2\n\treturn text") is None
    assert all(
        lost_backslash(f"3{gap}{word}", answer=True) is None for gap in "\t\n" for word in ("hours", "5", "yes", "A")
    )


def test_doubled_backslashes_are_single_again():
    draw = random.Random(2)
    for _ in range(200):
        text = " ".join(
            draw.choice([r"\frac{1}{3}", r"\pi", r"3 \times 4", r"\sqrt{2}", r"\text{cm}"]) for _ in range(3)
        )
        assert halved(text) == text and halved(text.replace("\\", "\\\\")) == text
        matrix = rf"\begin{{pmatrix}} 1 \\ {text} \end{{pmatrix}}"
        assert halved(matrix) == matrix and halved(matrix.replace("\\", "\\\\")) == matrix
    for other in (r"C:\\data\\text", r"print('a\\n')", r"\\server\log", r"a\\b", r"\begin{matrix}1\\pi\end{matrix}"):
        assert halved(other) == other
