"""Tool calls in a policy's text: found and read. Nothing here raises on any text.

A call that cannot be read is answered with what is wrong with it, so that the policy may try again. A value may hold
any text, also tags of calls and of reasoning. So a text is read from left to right, and each form says where a call
ends. Where that is in doubt, there is an error and no call.
"""

import ast
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from grpojax.data import reasoning_tags
from grpojax.host.errors import UserError


@dataclasses.dataclass(frozen=True)
class Call:
    """A tool call as it was written.

    Attributes:
      name: of the tool; "unknown" where it could not be read.
      arguments: by name.
      error: why it cannot be called; None where it can.
      as_text: whether the arguments are texts, which the schema's types say how to read.
      at: where it begins in the text that was read.
    """

    name: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    error: str | None = None
    as_text: bool = False
    at: int = dataclasses.field(default=0, compare=False)


Parse = Callable[[str], list[Call]]


class _UnreadableError(Exception):
    """A call whose end is unknown.

    Args:
      error: for the policy.
      name: of the tool.
      begun: whether more than a tag stands there. A tag alone may also be mentioned in reasoning.
    """

    def __init__(self, error: str, name: str = "unknown", *, begun: bool = True):
        super().__init__(error)
        self.name, self.begun = name, begun


def _broken(error: str, name: str = "unknown") -> Call:
    return Call(name, error=error)


def _refused(found: list[Call], error: str) -> list[Call]:
    return [call if call.error else dataclasses.replace(call, error=error) for call in found]


# ------------------------------------------------------------------------------------------------ a text with calls

_SPACE, _SEPARATOR = re.compile(r"\s*"), re.compile(r"\s*;?\s*")


def _after_space(text: str, at: int, space: re.Pattern[str] = _SPACE) -> int:
    found = space.match(text, at)
    return found.end() if found else at


def _tags(call: str, *, whole: str = r"(?!)", stray: str = r"(?!)") -> re.Pattern[str]:
    """What a text is searched for. The last group of a match is the kind of tag.

    Args:
      call: begins a call anywhere.
      whole: begins a call where the message begins.
      stray: ends a part of a call.
    """
    parts = {
        "call": call,
        "whole": whole,
        "stray": stray,
        "opens": reasoning_tags.OPENS,
        "closes": reasoning_tags.CLOSES,
    }
    # Each begins with one of three characters: elsewhere the search fails at once.
    return re.compile(r"(?=[<\[{])(?:" + "|".join(f"(?P<{name}>{pattern})" for name, pattern in parts.items()) + ")")


def _scan(text: str, tags: re.Pattern[str], read: Callable[[str, int], tuple[list[Call], int]]) -> list[Call]:
    """The calls of a text, without those in reasoning.

    Reasoning is what stands between ``<think>`` and the next ``</think>``, outside of calls. Other tags of reasoning
    count where the message begins, and from there on. Without an opening tag, the text up to the first closing tag
    outside of calls is reasoning, too. If calls stand only there, they get an error.

    After a call whose end is unknown nothing is read: what looks like a call may be in its arguments.

    Args:
      text: of a turn.
      tags: of `_tags`.
      read: the calls that begin at a place, and where they end. None are there if the list is empty.
    """
    closings = reasoning_tags.Closings(text)
    found: list[Call] = []
    before: list[Call] = []  # those before a closing tag that nothing opened
    doubtful = 0  # how many of those found stand before a stray tag
    think = reasoning_tags.kind("<think>")
    opening, opened, mentioned = {think}, set[str](), set[str]()  # kinds that do open, did, and stand there as text
    lost = False  # whether a tag cannot be read; a closing tag may still show that it was mentioned in reasoning
    at, begin = 0, _after_space(text, 0)  # where to read on, and where the message begins
    for tag in tags.finditer(text):
        if tag.start() < at:
            continue
        match tag.lastgroup:
            case "opens":
                kind = reasoning_tags.kind(tag[0])
                if lost or (kind not in opening and tag.start() != begin):
                    mentioned.add(kind)
                    continue
                opening.add(kind)
                opened.add(kind)
                end = closings.after(tag)
                if end is None:
                    break
                at, begin = end, _after_space(text, end)
            case "closes" if (kind := reasoning_tags.kind(tag[0])) not in mentioned:
                if kind not in opened:
                    before, found, doubtful, lost = [call for call in found if not call.error], [], 0, False
                opened.add(kind)
                begin = _after_space(text, tag.end())
            case "stray":
                doubtful = len(found)
            case "call" | "whole" if not lost and (tag.lastgroup == "call" or tag.start() == begin):
                try:
                    calls, at = read(text, tag.start())
                except _UnreadableError as e:
                    found.append(dataclasses.replace(_broken(str(e), e.name), at=tag.start()))
                    if e.begun or think in opened:
                        break
                    lost = True
                else:
                    found += [dataclasses.replace(call, at=tag.start()) for call in calls]
                    begin = at if calls else -1
    cut = "a closing tag after it belongs to no call, so a value may have been cut; it was not made"
    found[:doubtful] = _refused(found[:doubtful], cut)
    return found or _refused(before, "it stands before a tag that closes reasoning; it was not made")


# ------------------------------------------------------------------------------------------------ JSON


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)[:80]!r} occurs twice")
    return made


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _number(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise ValueError(f"{digits[:80]} is too large for a number")
    return value


_MOST_NESTED = 100
_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_float=_number)


def json_value(text: str) -> Any:
    """Parsed JSON; raises `ValueError` for whatever is wrong with it."""
    try:
        return _shallow(_DECODER.decode(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _shallow(value: Any) -> Any:
    """The value, if it can be pickled: that takes Python's stack, as parsing does, and more of it."""
    layer = [value]
    for _ in range(_MOST_NESTED):
        inner = [each.values() if isinstance(each, dict) else each for each in layer if isinstance(each, dict | list)]
        layer = list(itertools.chain.from_iterable(inner))
        if not layer:
            return value
    raise ValueError("it is nested too deeply")


def _json_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins at a place, and where it ends."""
    try:
        value, end = _DECODER.raw_decode(text, at)
        return _shallow(value), end
    except RecursionError:
        problem = "it is nested too deeply"
    except json.JSONDecodeError as e:
        problem = f"{e.msg}: character {e.pos - at}"
    except ValueError as e:
        problem = str(e)
    raise _UnreadableError(f"the call is not valid JSON: {problem}", begun=text.startswith("{", at))


def _from_value(value: Any) -> Call:
    """A call from ``{"name": ..., "arguments": ...}``; Llama writes ``parameters``."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict) and not {"name", "arguments"} & set(value):
        value = value["function"]  # as OpenAI's API writes it
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return _broken('a call is a JSON object with "name" and "arguments"')
    name, given = value["name"], [value[key] for key in ("arguments", "parameters") if key in value]
    if len(given) > 1 or (other := set(value) - {"name", "arguments", "parameters", "type", "id", "index"}):
        wrong = "both arguments and parameters" if len(given) > 1 else f"also {min(other)[:80]!r}"
        return _broken(f'a call is a JSON object with "name" and "arguments"; this one has {wrong}', name)
    arguments = given[0] if given else {}
    if isinstance(arguments, str):
        try:
            arguments = json_value(arguments)
        except ValueError as e:
            return _broken(f"its arguments are not valid JSON: {e}", name)
    if not isinstance(arguments, dict):
        return _broken("its arguments are not a JSON object", name)
    return Call(name, arguments)


# ------------------------------------------------------------------------------------------------ Qwen, Hermes

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_HERMES = _tags(_OPEN)


def hermes(text: str) -> list[Call]:
    """Calls of Qwen and Hermes: JSON between ``<tool_call>`` and ``</tool_call>``.

    JSON says itself where it ends, so the closing tag may be missing where the text ends or another call begins.

    Example:
      >>> hermes('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')[0].arguments
      {'a': 1}
    """
    return _scan(text, _HERMES, _hermes_call)


def _hermes_call(text: str, at: int) -> tuple[list[Call], int]:
    value, end = _json_at(text, _after_space(text, at + len(_OPEN)))
    end = _after_space(text, end)
    rest = text[end : end + len(_CLOSE)]
    if _CLOSE.startswith(rest):  # or the text ends in it
        end += len(rest)
    elif not text.startswith(_OPEN, end):
        raise _UnreadableError(f"the call is not valid JSON: {text[end : end + 20]!r} stands after it")
    return [_from_value(value)], end


# ------------------------------------------------------------------------------------------------ Llama

_PYTHON = "<|python_tag|>"
_LLAMA = _tags(re.escape(_PYTHON), whole=r"\{")
_LLAMA_CALL = re.compile(r"\{\s*\"(?:name|parameters|type|function)\"")
_LLAMA_NEXT = re.compile(
    rf"\Z|{_LLAMA_CALL.pattern}|{re.escape(_PYTHON)}|{reasoning_tags.OPENS}|{reasoning_tags.CLOSES}"
)
_PYTHONIC = re.compile(r"([\w.]{1,200}?)(\.call)?\(")
_MOST_PYTHON = 10_000  # characters


def llama(text: str) -> list[Call]:
    """Calls of Llama 3.1: a message that is JSON of ``name`` and ``parameters``, or begins with ``<|python_tag|>``.

    Several stand one after the other, with semicolons between them. After the tag there may also be
    ``tool.call(query="x")``. Other JSON, such as an answer, is no call.
    """
    return _scan(text, _LLAMA, _llama_call)


def _llama_call(text: str, at: int) -> tuple[list[Call], int]:
    tagged = text.startswith(_PYTHON, at)
    begin = _after_space(text, at + len(_PYTHON)) if tagged else at
    if not text.startswith("{", begin):
        return [_pythonic(text[begin:].strip())], len(text)
    is_call = tagged or _LLAMA_CALL.match(text, begin)
    try:
        value, end = _json_at(text, begin)
    except _UnreadableError:
        if is_call:
            raise
        return [], begin + 1
    if not tagged and not (isinstance(value, dict) and ("name" in value or "function" in value)):
        return [], end
    calls, end = [_from_value(value)], _after_space(text, end, _SEPARATOR)
    if not _LLAMA_NEXT.match(text, end):
        calls.append(_broken(f"the call is not valid JSON: {text[end : end + 20]!r} stands after a call"))
    return calls, end


def _pythonic(text: str) -> Call:
    """A call as Llama's template writes it. The template does not escape values, and the policy may, so a text with
    backslashes could be read in two ways, and is an error."""
    found = _PYTHONIC.match(text)
    name = found[1] if found else "unknown"
    try:
        if len(text) > _MOST_PYTHON:
            raise ValueError(f"it is longer than {_MOST_PYTHON} characters")
        tree = ast.parse(text, mode="eval").body
        if not found or not isinstance(tree, ast.Call) or tree.args or not all(k.arg for k in tree.keywords):
            raise ValueError('write tool.call(argument="value")')
        sources = {str(k.arg): str(ast.get_source_segment(text, k.value)) for k in tree.keywords}
        written = f"{found[0]}{', '.join(f'{key}={source}' for key, source in sources.items())})"
        texts = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        if written != text or any(str(ast.get_source_segment(text, n))[1:-1] != n.value for n in texts):
            raise ValueError('write tool.call(a="one", b=2), each argument once and no backslashes, or write JSON')
        values = {k.arg: ast.literal_eval(k.value) for k in tree.keywords}
        return Call(name, json_value(json.dumps(values)))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as e:
        return _broken(f"the call cannot be read: {e}", name)


# ------------------------------------------------------------------------------------------------ Qwen3-Coder

_FUNCTION = re.compile(r"<function=([^<>\n]{0,200})>")
_PARAMETER = re.compile(r"<parameter=([^<>\n]{0,200})>")
_END, _VALUE_ENDS = "</function>", re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))")
_QWEN_XML = _tags(f"{_OPEN}|<function=", stray=f"</parameter>|{_END}")
_QWEN_XML_FORM = "a call is <function=name> with <parameter=key>value</parameter> in it"


def qwen_xml(text: str) -> list[Call]:
    r"""Calls of Qwen3-Coder: ``<function=name>`` with ``<parameter=key>`` in it, in ``<tool_call>`` or without.

    A value may hold any tag; nothing is escaped. So ``</parameter>`` ends it only where another parameter or
    ``</function>`` follows. Templates write a value on lines of its own, and one line break between tags. Where a call
    begins so, it must go on so: other spaces between its tags may be in a value. ``<tool_call>`` must be closed.

    Example:
      >>> qwen_xml("<function=add>\n<parameter=a>\n1\n</parameter>\n</function>")[0].arguments
      {'a': '1'}
    """
    return _scan(text, _QWEN_XML, _qwen_xml_call)


def _qwen_xml_call(text: str, at: int) -> tuple[list[Call], int]:
    wrapped = text.startswith(_OPEN, at)
    function = _FUNCTION.match(text, _after_space(text, at + len(_OPEN)) if wrapped else at)
    if not function:
        raise _UnreadableError(_QWEN_XML_FORM, begun=False)
    name, end = function[1].strip(), function.end()
    arguments: dict[str, str] = {}
    lines = False  # whether values stand on lines of their own

    def gap(end: int) -> int:
        """Behind the spaces between two tags."""
        after = _after_space(text, end)
        if lines and text[end:after] != "\n":
            raise _UnreadableError("write one line break, and nothing else, between two tags of a call", name)
        return after

    while not text.startswith(_END, end := gap(end)):
        parameter = _PARAMETER.match(text, end)
        if not parameter:
            begun = bool(arguments) or text.startswith("<parameter=", end)
            raise _UnreadableError(f"{_QWEN_XML_FORM}, not {text[end : end + 20]!r}", name, begun=begun)
        key, closing = parameter[1].strip(), _VALUE_ENDS.search(text, parameter.end())
        if not closing:
            raise _UnreadableError(f"the parameter {key!r} has no </parameter>", name)
        if key in arguments:
            raise _UnreadableError(f"the parameter {key!r} occurs twice", name)
        value, end = text[parameter.end() : closing.start()], closing.end()
        on_lines = len(value) > 1 and value[0] == value[-1] == "\n"
        if (lines or "\n" in (value[:1], value[-1:])) and not on_lines:
            raise _UnreadableError(f"write a line break before the value of {key!r} and one after it", name)
        if "<parameter=" in value if not on_lines else "\n<parameter=" in value:
            raise _UnreadableError(f"the parameter {key!r} has no </parameter> before the next one", name)
        lines, arguments[key] = on_lines, value[1:-1] if on_lines else value
    end += len(_END)
    if text.startswith(_CLOSE, after := _after_space(text, end)):
        end = (gap(end) if wrapped else after) + len(_CLOSE)
    elif wrapped:
        raise _UnreadableError(f"the call has no {_CLOSE}", name)
    return [Call(name, arguments, as_text=True) if name else _broken("the function has no name")], end


# ------------------------------------------------------------------------------------------------ a turn

FORMATS: dict[str, Parse] = {"hermes": hermes, "llama": llama, "qwen_xml": qwen_xml}


def format_of(template: str | None) -> str:
    """The form of calls that a chat template shows to the model: one of `FORMATS`.

    Raises:
      UserError: it shows none that is known.

    Example:
      >>> format_of("... <tool_call>{{ call | tojson }}</tool_call> ...")
      'hermes'
    """
    text = template or ""
    if "<function=" in text:
        return "qwen_xml"
    if "<tool_call>" in text:
        return "hermes"
    if "<|python_tag|>" in text or ('"parameters"' in text and "ipython" in text):
        return "llama"
    raise UserError(
        "the chat template shows no form of tool calls that is known; set environment.format: "
        f"{', '.join(FORMATS)}, or package.module:function"
    )


def read(text: str, parse: Parse) -> list[Call]:
    """The calls of a turn. What a policy writes while it reasons is none.

    Args:
      text: of the turn, with the beginning that its prompt wrote, such as ``<think>``. Special tokens at its end do
        not matter.
      parse: one of `FORMATS`, or a function of a user, which gets the text after the reasoning that begins it. If that
        raises, there is one call, which has the error.
    """
    text = _without_special(text)
    if parse not in FORMATS.values():
        text = reasoning_tags.without_leading(text)
    try:
        return list(parse(text))
    except Exception as e:
        return [_broken(f"the call cannot be read: {type(e).__name__}: {e}"[:500])]


_SPECIAL = re.compile(r"<\|[\w ]{1,40}\|>")


def _without_special(text: str) -> str:
    """Without special tokens at the end, such as ``<|eot_id|>``."""
    end = len(text)
    while end:
        if text[end - 1].isspace():
            end -= 1
        elif (at := text.rfind("<|", max(end - 44, 0), end)) >= 0 and _SPECIAL.fullmatch(text, at, end):
            end = at
        else:
            break
    return text[:end]
