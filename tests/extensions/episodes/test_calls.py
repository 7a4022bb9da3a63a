"""Tool calls in texts: what each form reads, that no value changes what is called, and that nothing raises."""

import json
import random
import time

import call_texts
import pytest

from grpojax.extensions.episodes import calls
from grpojax.extensions.episodes.arguments import check
from grpojax.extensions.episodes.calls import Call
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


def xml(value, name="write"):
    return f"<tool_call>\n<function={name}>\n<parameter=text>\n{value}\n</parameter>\n</function>\n</tool_call>"


def written(value):
    return Call("write", {"text": value}, as_text=True)


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
    ("qwen_xml", "<function=search><parameter=query>a < b</parameter></function></tool_call>",
     [Call("search", {"query": "a < b"}, as_text=True)]),
])  # fmt: skip
def test_calls_are_read(form, text, found):
    assert calls.read(text, calls.FORMATS[form]) == found


TAGS = (
    "<think>a</think> <reason>b</reason> <tool_call> </tool_call> <function=x> <parameter=y> </function> </parameter> ."
)


@pytest.mark.parametrize("reasoning", ["", "<think>so</think>", "so</think>", f"<think>{HERMES}{xml(1)}</think>"])
def test_tags_in_values_are_text(reasoning):
    quoted = json.dumps(TAGS)
    for form, text, call in (
        ("hermes", f'<tool_call>{{"name": "write", "arguments": {{"text": {quoted}}}}}</tool_call>', None),
        ("llama", f'{{"name": "write", "parameters": {{"text": {quoted}}}}}', None),
        ("llama", f"<|python_tag|>write.call(text={quoted})", None),
        ("qwen_xml", xml(TAGS), written(TAGS)),
    ):
        assert calls.read(reasoning + text, calls.FORMATS[form]) == [call or Call("write", {"text": TAGS})]


@pytest.mark.parametrize("value", ["", "\n", "\na\n\n", " a ", "</parameter>", "a\n</parameter>", "\n</function>\n"])
def test_a_value_on_lines_of_its_own_is_exact(value):
    assert calls.read(xml(value) + xml("b"), calls.qwen_xml) == [written(value), written("b")]


@pytest.mark.parametrize(("form", "text", "found"), [
    ("hermes", f"I use <tool_call>.</think>{HERMES}", [ADD]),
    ("hermes", f"I could {HERMES}.</think>{HERMES}", [ADD]),
    ("hermes", f"<think>One.</think>{HERMES} that was </think>", [ADD]),
    ("hermes", f"[THINK]I could {HERMES}[/THINK]{HERMES}[THINK]Or {HERMES}", [ADD]),
    ("hermes", f"I say <reason>so</reason>. {HERMES}", [ADD]),
    ("llama", f"<think>{LLAMA}</think>\n{LLAMA}", [ADD]),
    ("qwen_xml", f"<think>I use <function=f> and <parameter=</think>{XML}", [SEARCH]),
])  # fmt: skip
def test_reasoning_ends_before_the_first_call(form, text, found):
    assert calls.read(text, calls.FORMATS[form]) == found


def test_a_parser_of_a_user_gets_what_stands_after_the_first_reasoning():
    def parse(text):
        return [Call(text)]

    for text in ("<think>so</think> f(</think>)", "[THINK]a[/THINK]<think>b</think> f(</think>)", " f(</think>)"):
        assert calls.read(text + "<|eot_id|>", parse) == [Call(" f(</think>)")]


def test_calls_are_read_up_to_where_the_text_was_cut():
    two = '<tool_call>{"name": "f", "arguments": {"text": "</tool_call>"}}</tool_call>' * 2
    whole = xml(TAGS) + "\n" + XML
    for form, text, one in (("hermes", two, len(two) // 2), ("qwen_xml", whole, len(xml(TAGS)))):
        first = calls.read(text, calls.FORMATS[form])[0]
        for end in range(len("<tool_call>"), len(text)):
            found = calls.read(text[:end], calls.FORMATS[form])
            made = [call for call in found if call.error is None]
            if form == "qwen_xml":
                assert made == [first] * (end >= one)
            else:
                assert made in ([first] * (end >= one), [first] * (1 + (end >= one)))  # without </tool_call>
            assert len(found) == len(made) or found[-1].error


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
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "a": 2}}</tool_call>', "unknown", "'a' occurs twice"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "unknown", "too large"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 200 + "]" * 200 + "}}</tool_call>", "unknown",
     "nested too deeply"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}, "b": 2}</tool_call>', "add", "also 'b'"),
    ("hermes", '<tool_call>{"name": "add", "args": {"a": 1}}</tool_call>', "add", "also 'args'"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {}, "parameters": {}}</tool_call>', "add", "both"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {}}}</tool_call>', "unknown", "stands after it"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "<tool_call>{"name": "g"}</tool_call>"}}</tool_call>',
     "unknown", "not valid JSON"),
    ("hermes", f"{HERMES} that was </think>", "add", "closes reasoning"),
    ("llama", '<|python_tag|>f.call(a="1", a="2")', "f", "once"),
    ("llama", '<|python_tag|>f.call(a="1" "2")', "f", "once"),
    ("llama", '<|python_tag|>f.call(a="C:\\new")', "f", "backslashes"),
    ("llama", '<|python_tag|>f.call(**{"a": 1})', "f", "tool.call"),
    ("llama", "<|python_tag|>f(a=1)(b=2)", "f", "cannot be read"),
    ("llama", "<|python_tag|>f(a={1, 2})", "f", "not JSON serializable"),
    ("qwen_xml", "<tool_call>add</tool_call>", "unknown", "<function=name>"),
    ("qwen_xml", "<tool_call>\n<function=f>\n</function>", "f", "no </tool_call>"),
    ("qwen_xml", '<function=f>{"a": 1}</function>', "f", "<parameter=key>"),
    ("qwen_xml", "<function=f>\n<parameter=a\n1\n</parameter>\n</function>", "f", "<parameter=key>"),
    ("qwen_xml", xml("1\n</parameter>\n<parameter=b\n2"), "write", "<parameter=key>"),
    ("qwen_xml", xml("1\n<parameter=b>\n2"), "write", "no </parameter> before the next"),
    ("qwen_xml", xml("1</parameter></function> 2"), "write", "line break"),
    ("qwen_xml", xml("1\n</parameter>\n\n<parameter=b>\n2"), "write", "line break"),
    ("qwen_xml", xml("1\n</parameter>\n</function></tool_call>"), "write", "line break"),
    ("qwen_xml", xml("1\n</parameter>\n</function>\n</tool_call> 2"), "write", "may have been cut"),
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


SCHEMAS = {"f": {"parameters": {"type": "object", "properties": {"n": {}}}}}


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
                checked = check(call, SCHEMAS)
                assert checked.error is None or (checked.error and "\n" not in checked.name[:1])
                if checked.error is None:
                    json.dumps(checked.arguments)


def test_no_text_raises():
    fuzz(0, 300)


@pytest.mark.exhaustive("extensions/episodes/test_calls.py::test_no_text_raises")
def test_none_of_ten_thousand_texts_raises():
    fuzz(1, 10_000)


LONG = ["<tool_call>", "<think>", "<think></think>", "<a_think></b_think>", "<tool_call>{}", "{", "</parameter> ",
        "<function=f><parameter=a>", "<|a|>", "think"]  # fmt: skip


@pytest.mark.parametrize("piece", LONG)
def test_a_long_text_is_read_in_no_time(piece):
    since = time.process_time()
    for begin in ("", "<", "<think>"):
        for parse in calls.FORMATS.values():
            calls.read(begin + piece * (30_000 // len(piece)), parse)
    assert time.process_time() - since < 2


# ------------------------------------------------------------------------------------------------ generated turns


def read_back(seed, n):
    """Asserts that no call of n generated turns is wrong or lost; how many are right, by form."""
    rng, right, of = random.Random(seed), dict.fromkeys(call_texts.WRITERS, 0), n // len(call_texts.WRITERS)
    for form in call_texts.WRITERS:
        for _ in range(of):
            made = call_texts.turn(rng, form)
            found = calls.read(made.text, calls.FORMATS["llama" if form == "pythonic" else form])
            right[form] += call_texts.outcome(made, found) == "right"
    return {form: count / of for form, count in right.items()}


def test_generated_turns_are_read_back():
    right = read_back(0, 600)
    assert right["hermes"] == right["llama"] == 1 and right["qwen_xml"] > 0.6 and right["pythonic"] > 0.5


@pytest.mark.exhaustive("extensions/episodes/test_calls.py::test_generated_turns_are_read_back")
def test_many_generated_turns_are_read_back():
    read_back(1, 100_000)
