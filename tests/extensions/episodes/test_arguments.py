"""What schemas take of the arguments of a call, and that no argument raises."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpojax.extensions.episodes.arguments import check
from grpojax.extensions.episodes.calls import Call

SCHEMAS = {
    "f": {
        "parameters": {
            "type": "object",
            "properties": {
                "n": {"type": "integer"},
                "x": {"type": "number", "nullable": True},
                "s": {"type": "string"},
                "yes": {"type": "boolean"},
                "side": {"type": "string", "enum": ["left", "right"]},
                "list": {"type": "array", "items": {"type": "integer"}},
                "pair": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
                "map": {"type": "object", "additionalProperties": {"type": "number"}},
                "either": {"type": ["integer", "string"]},
                "any": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "integer"}]},
                "free": {},
                "return": {"type": "string"},
            },
        }
    },
    "needs": {"parameters": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}},
    "now": {"parameters": None},
}


@pytest.mark.parametrize(("arguments", "as_text", "read"), [
    ({"n": 3, "x": 2, "s": "a", "yes": True, "side": "left"}, False, None),
    ({"n": 3.0}, False, {"n": 3}),
    ({"x": None, "list": [1, 2], "pair": [1, "a"], "map": {"k": 1.5}, "free": [None]}, False, None),
    ({"either": "a", "any": ["a"]}, False, None),
    ({"n": "3", "x": " 2.5\n", "s": "3", "yes": "True", "list": "[1]", "either": "4", "any": "[\"a\"]"}, True,
     {"n": 3, "x": 2.5, "s": "3", "yes": True, "list": [1], "either": 4, "any": ["a"]}),
    ({"x": "null", "either": "{", "free": "[1]", "yes": "false"}, True,
     {"x": None, "either": "{", "free": "[1]", "yes": False}),
])  # fmt: skip
def test_arguments_of_the_right_types(arguments, as_text, read):
    checked = check(Call("f", arguments, as_text=as_text), SCHEMAS)
    assert checked.error is None and checked.arguments == (arguments if read is None else read)
    assert type(checked.arguments.get("n", 0)) is int


def test_a_tool_without_parameters():
    assert check(Call("now"), SCHEMAS).error is None
    assert "it has: none" in check(Call("now", {"a": 1}), SCHEMAS).error


@pytest.mark.parametrize(("name", "arguments", "error"), [
    ("g", {}, "there is no tool 'g'; there are: f, needs, now"),
    ("needs", {}, "the argument 'a' is missing"),
    ("needs", {"b": 1}, "it has no argument 'b'; it has: a"),
    ("f", {"return": "x"}, "it has no argument 'return'"),
    ("f", {"n": "3"}, "n: '3' is not an integer"),
    ("f", {"n": True}, "n: True is not an integer"),
    ("f", {"n": 2.5}, "n: 2.5 is not an integer"),
    ("f", {"n": None}, "n: None is not an integer"),
    ("f", {"x": False}, "x: False is not a number"),
    ("f", {"s": 3}, "s: 3 is not a text"),
    ("f", {"yes": 1}, "yes: 1 is not true or false"),
    ("f", {"side": "up"}, "side: 'up' is none of 'left', 'right'"),
    ("f", {"list": [1, "a"]}, "list[1]: 'a' is not an integer"),
    ("f", {"pair": [1, 2]}, "pair[1]: 2 is not a text"),
    ("f", {"map": {"k": "v"}}, "map['k']: 'v' is not a number"),
    ("f", {"either": 2.5}, "either: 2.5 is not integer or string"),
    ("f", {"any": [1]}, "any[0]: 1 is not a text"),
])  # fmt: skip
def test_arguments_of_wrong_types(name, arguments, error):
    said = check(Call(name, arguments), SCHEMAS).error
    assert said.replace("an integer or a text", "integer or string").startswith(error)


def test_a_number_that_is_too_long_to_show():
    assert "a very long number is not a text" in check(Call("f", {"s": 16**5000}), SCHEMAS).error


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["n", "s", "k"]), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from(sorted(SCHEMAS["f"]["parameters"]["properties"])), values), st.booleans())
@pytest.mark.slow
def test_no_argument_raises(arguments, as_text):
    given = {k: json.dumps(v) for k, v in arguments.items()} if as_text else arguments
    check(Call("f", given, as_text=as_text), SCHEMAS)
