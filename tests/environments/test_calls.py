"""Tool calls in texts: what each form reads, what schemas take, and that nothing raises."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpojax.environments import calls
from grpojax.environments.calls import Call
from grpojax.host.errors import UserError

HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}\n</tool_call>'
ADD = Call("add", {"a": 1, "b": [2, "x"]})
LLAMA = '{"name": "add", "parameters": {"a": 1, "b": [2, "x"]}}'
XML = """<tool_call>
<function=search>
<parameter=query>
a < b
and more
</parameter>
<parameter=top>
3
</parameter>
</function>
</tool_call>"""
SEARCH = Call("search", {"query": "a < b\nand more", "top": "3"}, as_text=True)


@pytest.mark.parametrize(("form", "text", "found"), [
    ("hermes", "It is 3.", []),
    ("hermes", f"Let me see.\n{HERMES}<|im_end|>", [ADD]),
    ("hermes", HERMES + HERMES, [ADD, ADD]),
    ("hermes", HERMES.removesuffix("</tool_call>"), [ADD]),
    ("hermes", f"<think>\nI could call {HERMES} here</think>\n3", []),
    ("hermes", f"<think>\nI could call {HERMES}", []),
    ("hermes", f"I call it</think>{HERMES}", [ADD]),
    ("hermes", f"<think>One.</think>{HERMES}<think>Or {HERMES}</think>{HERMES}", [ADD, ADD]),
    ("hermes", f"{HERMES}<think>Or {HERMES}", [ADD]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', [Call("now")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', [Call("add", {"a": 1})]),
    ("hermes", '<tool_call>{"type": "function", "function": {"name": "now"}}</tool_call>', [Call("now")]),
    ("llama", "It is 3.", []),
    ("llama", '{"answer": 3}', []),
    ("llama", "{x | x > 0}", []),
    ("llama", f"{LLAMA}<|eot_id|>", [ADD]),
    ("llama", f"{LLAMA}; {LLAMA}", [ADD, ADD]),
    ("llama", f"<|python_tag|>{LLAMA}<|eom_id|>", [ADD]),
    ("llama", '<|python_tag|>search.call(query="rain", top=3)', [Call("search", {"query": "rain", "top": 3})]),
    ("qwen_xml", "It is 3.", []),
    ("qwen_xml", f"I look.\n{XML}", [SEARCH]),
    ("qwen_xml", XML.removeprefix("<tool_call>").removesuffix("</tool_call>"), [SEARCH]),
    ("qwen_xml", "<function=now>\n</function>", [Call("now", as_text=True)]),
    ("qwen_xml", XML + XML, [SEARCH, SEARCH]),
])  # fmt: skip
def test_calls_are_read(form, text, found):
    assert calls.read(text, calls.FORMATS[form]) == found


@pytest.mark.parametrize(("form", "text", "name", "error"), [
    ("hermes", "<tool_call>add(1)</tool_call>", "unknown", "not valid JSON"),
    ("hermes", "<tool_call>", "unknown", "not valid JSON"),
    ("hermes", "<tool_call>3</tool_call>", "unknown", '"name" and "arguments"'),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "add", "not a JSON object"),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{"}</tool_call>', "add", "not valid JSON"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "unknown", "NaN"),
    ("hermes", "<tool_call>" + "[" * 100_000, "unknown", "nested too deeply"),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"a": ' + "9" * 5000 + "}}", "unknown", "not valid JSON"),
    ("llama", '{"name": "add", "parameters": {', "unknown", "not valid JSON"),
    ("llama", '{"name": ' + "[" * 100_000, "unknown", "nested too deeply"),
    ("llama", "<|python_tag|>print(3)", "print", "tool.call"),
    ("llama", "<|python_tag|>for x in y: pass", "unknown", "cannot be read"),
    ("qwen_xml", "<tool_call>add</tool_call>", "unknown", "<function=name>"),
    ("qwen_xml", "<function=add><parameter=a>1</function>", "add", "no </parameter>"),
    ("qwen_xml", "<function=add><parameter=a>1</parameter><parameter=a>2</parameter></function>", "add", "twice"),
])  # fmt: skip
def test_a_call_that_cannot_be_read_says_why(form, text, name, error):
    (call,) = calls.read(text, calls.FORMATS[form])
    assert call.name == name and error in call.error


def test_a_parser_that_raises_is_an_error_of_the_call():
    def parse(text):
        raise KeyError("x")

    assert "KeyError" in calls.read("any", parse)[0].error


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
    checked = calls.check(Call("f", arguments, as_text=as_text), SCHEMAS)
    assert checked.error is None and checked.arguments == (arguments if read is None else read)
    assert type(checked.arguments.get("n", 0)) is int


def test_a_tool_without_parameters():
    assert calls.check(Call("now"), SCHEMAS).error is None
    assert "it has: none" in calls.check(Call("now", {"a": 1}), SCHEMAS).error


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
    said = calls.check(Call(name, arguments), SCHEMAS).error
    assert said.replace("an integer or a text", "integer or string").startswith(error)


def test_a_number_that_is_too_long_to_show():
    assert "a very long number is not a text" in calls.check(Call("f", {"s": 16**5000}), SCHEMAS).error


@pytest.mark.parametrize(("template", "form"), [
    ("{%- if tools %}<tool_call>\n{\"name\": <function-name>}</tool_call>{% endif %}", "hermes"),
    ("<tool_call>\n<function=example>\n<parameter=x>", "qwen_xml"),
    ("{{- '<|python_tag|>' + call.name + '.call(' }} \"parameters\": ipython", "llama"),
])  # fmt: skip
def test_the_chat_template_says_how_calls_are_written(template, form):
    assert calls.format_of(template) == form


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}"])
def test_a_template_without_calls_is_an_error_that_names_the_setting(template):
    with pytest.raises(UserError, match="environment.format"):
        calls.format_of(template)


# ------------------------------------------------------------------------------------------------ any text

PIECES = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "<function=f>", "</function>", "<parameter=n>", "</parameter>",
    "<think>", "</think>", "<|im_end|>", "<|", "|>", '{"name": "f", "arguments": ', '{"name": "f", "parameters": ',
    '{"n": 1}', '{"n": 1e999}', "}", "{", "[", "]", '"', "\\", "\\ud800", ":", ",", ";", "null", "NaN", "-",
    "1" * 5000, "f.call(n=", "f(", ")", "\n", " " * 3000, "\0", "\ud800", "é", "[" * 3000, "f.call(" * 500,
    "0x" + "f" * 9000,
]  # fmt: skip


def fuzz(seed, n):
    rng = random.Random(seed)
    for _ in range(n):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 12)))
        if rng.random() < 0.5:
            at = rng.randrange(len(HERMES + XML))
            text = (HERMES + XML)[:at] + text + (LLAMA + XML)[rng.randrange(len(LLAMA)) :]
        for parse in calls.FORMATS.values():
            parse(text)
            for call in calls.read(text, parse):
                checked = calls.check(call, SCHEMAS)
                assert checked.error is None or (checked.error and "\n" not in checked.name[:1])
                if checked.error is None:
                    json.dumps(checked.arguments)


def test_no_text_raises():
    fuzz(0, 300)


@pytest.mark.exhaustive("environments/test_calls.py::test_no_text_raises")
def test_none_of_ten_thousand_texts_raises():
    fuzz(1, 10_000)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["n", "s", "k"]), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(SCHEMAS["f"]["parameters"]["properties"])), values), st.booleans())
def test_no_argument_raises(arguments, as_text):
    given = {k: json.dumps(v) for k, v in arguments.items()} if as_text else arguments
    calls.check(Call("f", given, as_text=as_text), SCHEMAS)
