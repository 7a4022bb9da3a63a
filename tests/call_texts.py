"""Turns with tool calls as the chat templates of each form write them, with arguments of all kinds of text; and what
may be read from them."""

import dataclasses
import json
from collections.abc import Callable

PIECES = [
    "<tool_call>", "</tool_call>", "<function=x>", "</function>", "<parameter=y>", "<parameter=y", "</parameter>",
    "\n</parameter>\n", "\n</function>\n", "</parameter>\n</function>", "</parameter>\n<parameter=y>",
    "\n<parameter=y>\n", "<tool_call>\n<function=x>\n<parameter=y>\n1\n</parameter>\n</function>\n</tool_call>",
    '<tool_call>{"name": "evil", "arguments": {}}</tool_call>', '{"name": "evil", "parameters": {}}', "evil.call(q=1)",
    "<|python_tag|>", "<think>", "</think>", "<refund><reason>late</reason></refund>", "[THINK]", "[/THINK]",
    "<|end_of_thought|>", "<|im_end|>", "<|eot_id|>", "</s>", '"', "'", "\\", "\\n", '", b="', '" "', ";", "{", "}",
    "[", "]", ")", ",", ":", "\n", "\n\n", "\t", " ", "", "é", "日本", "\u2028", "😀", "\0", "null", "1", "1.50",
    "True", "a < b", 'def f(x):\n    return "</parameter>"\n', '{"a": [1, {"b": "c"}]}', 'say "hi"', "word",
]  # fmt: skip
REASONING = [
    "so", "", "I could <tool_call> it", "<function=f>", "<tool_call>\n<function=no>\n</function>\n</tool_call>",
    'first <tool_call>{"name": "no", "arguments": {}}</tool_call>', '{"name": "no", "parameters": {}}',
    "<reason>x</reason>", "</parameter>", "<parameter=a",
]  # fmt: skip
NAMES = ["f", "web.search", "write_file"]


@dataclasses.dataclass(frozen=True)
class Turn:
    """A turn, and what a reader must find in it.

    Attributes:
      text: with the beginning that the prompt wrote.
      calls: name and arguments of those that are whole in the text.
      exact: whether each must be read. Else an error may stand for them.
      same: whether the text of other calls may be the same, letter by letter.
      write: how the form writes a call.
    """

    text: str
    calls: list
    exact: bool
    same: bool
    write: Callable[[str, dict], str]


def value(rng, *, text=False):
    kind = 0 if text else rng.random()
    if kind < 0.75:
        return "".join(rng.choice(PIECES) for _ in range(rng.choice([1, 1, 2, 3, 5, 8])))
    if kind < 0.85:
        return rng.choice([0, -7, 10**20, 1.5, True, False, None])
    inner = [value(rng) for _ in range(rng.randrange(3))]
    return inner if kind < 0.92 else {f"k{i}": v for i, v in enumerate(inner)}


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'


def llama(name, arguments):
    return f'{{"name": "{name}", "parameters": {json.dumps(arguments, ensure_ascii=False)}}}'


def pythonic(name, arguments):
    inside = ", ".join(f'{k}="{v}"' for k, v in arguments.items())
    return f"<|python_tag|>{name}.call({inside})"


def as_text(given):
    return given if isinstance(given, str) else json.dumps(given) if isinstance(given, dict | list) else str(given)


def qwen_xml(name, arguments):
    inside = "".join(f"<parameter={k}>\n{as_text(v)}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


# The form, how a call is written, and what may be missing of a whole one.
WRITERS = {
    "hermes": (hermes, "\n</tool_call>"),
    "llama": (llama, ""),
    "pythonic": (pythonic, ""),
    "qwen_xml": (qwen_xml, ""),
}


def reasoning(rng):
    return f"<think>\n{' '.join(rng.choices(REASONING, k=2))}\n</think>\n\n"


def turn(rng, kind):
    """A turn of a form, or of Llama's other one, ``pythonic``."""
    write, optional = WRITERS[kind]
    texts = kind == "pythonic"
    calls = []
    for _ in range(1 if texts else rng.choice([1, 1, 1, 2, 3])):
        keys = rng.sample(["a", "b", "text", "k_1"], rng.choice([0, 1, 1, 2, 3]))
        calls.append((rng.choice(NAMES), {key: value(rng, text=texts) for key in keys}))
    begin = reasoning(rng) if rng.random() < 0.4 else ""
    given = not begin or rng.random() < 0.7  # the beginning that the prompt wrote
    begin = begin if given else begin.removeprefix("<think>")
    if kind in ("hermes", "qwen_xml") and rng.random() < 0.3:
        begin += rng.choice(["I call it.\n", "x < y: \n", "日本\n"])
    text, ends = begin, []
    for n, (name, arguments) in enumerate(calls):
        between = "; " if kind == "llama" else "\n" + (reasoning(rng) if rng.random() < 0.1 else "")
        text += (between if n else "") + write(name, arguments)
        ends.append(len(text) - len(optional))
    cut = len(text)
    if rng.random() < 0.4 and given:
        cut = rng.randrange(len(text))
    inside = ["\n" + as_text(v) + "\n" for _, arguments in calls for v in arguments.values()]
    tagged = any("</parameter>" in v or "\n<parameter=" in v for v in inside)
    escaped = any(c in v[1:-1] for v in inside for c in '"\\\n\0')
    kept = [call for call, end in zip(calls, ends, strict=True) if end <= cut]
    return Turn(
        text=text[:cut] + rng.choice(["", "<|im_end|>", "<|eot_id|>\n", "\n"]),
        calls=[(name, {k: as_text(v) for k, v in a.items()} if kind == "qwen_xml" else a) for name, a in kept],
        exact=given and {"qwen_xml": not tagged, "pythonic": not escaped}.get(kind, True),
        same=(kind == "qwen_xml" and any("\n</parameter>\n<" in v for v in inside)) or (texts and escaped),
        write=write,
    )


def outcome(made, found):
    """ "right", "error" or "same" (as the text of other calls); raises `AssertionError` for a wrong or a lost call."""
    good = [(call.name, dict(call.arguments)) for call in found if call.error is None]
    failed = any(call.error for call in found)
    if made.same and good != made.calls and all(made.write(*call) in made.text for call in good):
        return "same" if good else "error"
    left = iter(made.calls)
    assert all(call in left for call in good), f"a wrong call: {good}"
    assert len(good) == len(made.calls) or (failed and not made.exact), f"{len(made.calls) - len(good)} calls lost"
    return "error" if len(good) < len(made.calls) else "right"
