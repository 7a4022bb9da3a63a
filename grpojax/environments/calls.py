"""Tool calls in a policy's text: found, read, and checked against the tools' schemas. Nothing here raises on any text.

A call that cannot be read is answered with what is wrong with it, so that the policy may try again.
"""

import ast
import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpojax.data.chat_template import after_reasoning
from grpojax.host.errors import UserError


@dataclasses.dataclass(frozen=True)
class Call:
    """A tool call as it was written.

    Attributes:
      name: of the tool; "unknown" where it could not be read.
      arguments: by name.
      error: why it cannot be called; None where it can.
      as_text: whether the arguments are texts, which the schema's types say how to read.
    """

    name: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    error: str | None = None
    as_text: bool = False


Parse = Callable[[str], list[Call]]

_SPECIAL = re.compile(r"<\|[\w ]{1,40}\|>")
_REASONING = re.compile(r"<think>.*?</think>", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^<>\n]{0,200})>")
_PARAMETER = re.compile(r"<parameter=([^<>\n]{0,200})>")
_PYTHONIC = re.compile(r"([\w.]{1,200}?)(?:\.call)?\(")


def _broken(error: str, name: str = "unknown") -> Call:
    return Call(name, error=error)


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _json(text: str) -> Any:
    """Parsed JSON; raises `ValueError` for whatever is wrong with it."""
    try:
        return json.loads(text, parse_constant=_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _from_json(text: str) -> Call:
    """A call from ``{"name": ..., "arguments": ...}``; Llama writes ``parameters``."""
    try:
        value = _json(text)
    except ValueError as e:
        return _broken(f"the call is not valid JSON: {e}")
    return _from_value(value)


def _from_value(value: Any) -> Call:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):  # as OpenAI's API writes it
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return _broken('a call is a JSON object with "name" and "arguments"')
    name, arguments = value["name"], value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = _json(arguments)
        except ValueError as e:
            return _broken(f"its arguments are not valid JSON: {e}", name)
    if not isinstance(arguments, dict):
        return _broken("its arguments are not a JSON object", name)
    return Call(name, arguments)


def _blocks(text: str, opens: str, closes: str) -> list[str]:
    """What stands between tags; the last one may be open to the end."""
    return [part.partition(closes)[0].strip() for part in text.split(opens)[1:]]


def hermes(text: str) -> list[Call]:
    """Calls of Qwen and Hermes: JSON between ``<tool_call>`` and ``</tool_call>``.

    Example:
      >>> hermes('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')[0].arguments
      {'a': 1}
    """
    return [_from_json(block) for block in _blocks(text, "<tool_call>", "</tool_call>")]


def llama(text: str) -> list[Call]:
    """Calls of Llama 3.1: a message that is JSON of ``name`` and ``parameters``, or begins with ``<|python_tag|>``.

    Several stand one after the other, with semicolons between them. After the tag there may also be
    ``tool.call(query="x")``. Other JSON, such as an answer, is no call.
    """
    _, tag, after = text.partition("<|python_tag|>")
    body = (after if tag else text).strip()
    if not tag and not body.startswith("{"):
        return []
    if tag and not body.startswith("{"):
        return [_pythonic(body)]
    found: list[Call] = []
    decoder = json.JSONDecoder(parse_constant=_constant)
    while body:
        try:
            value, end = decoder.raw_decode(body)
        except (ValueError, RecursionError) as e:
            is_call = tag or found or re.match(r"\{\s*\"(?:name|parameters|type|function)\"", body)
            problem = "it is nested too deeply" if isinstance(e, RecursionError) else e
            return [*found, _broken(f"the call is not valid JSON: {problem}")] if is_call else []
        if not tag and not found and not (isinstance(value, dict) and ("name" in value or "function" in value)):
            return []
        found.append(_from_value(value))
        body = body[end:].strip().removeprefix(";").strip()
    return found


def _pythonic(text: str) -> Call:
    found = _PYTHONIC.match(text)
    name = found[1] if found else "unknown"
    try:
        tree = ast.parse(text[:10_000].strip(), mode="eval").body
        if not found or not isinstance(tree, ast.Call) or tree.args:
            raise ValueError('write tool.call(argument="value")')
        return Call(name, {str(k.arg): ast.literal_eval(k.value) for k in tree.keywords if k.arg is not None})
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as e:
        return _broken(f"the call cannot be read: {e}", name)


def qwen_xml(text: str) -> list[Call]:
    r"""Calls of Qwen3-Coder: ``<function=name>`` with ``<parameter=key>`` in it, in ``<tool_call>`` or without.

    Example:
      >>> qwen_xml("<function=add>\n<parameter=a>\n1\n</parameter>\n</function>")[0].arguments
      {'a': '1'}
    """
    calls = []
    for block in _blocks(text, "<tool_call>", "</tool_call>") if "<tool_call>" in text else [text]:
        functions = _named(_FUNCTION, block)
        if not functions and block is not text:
            calls.append(_broken("a call is <function=name> with <parameter=key>value</parameter> in it"))
        calls += [_function(name, body.partition("</function>")[0]) for name, body in functions]
    return calls


def _named(tag: re.Pattern[str], text: str) -> list[tuple[str, str]]:
    """The name in each of the tags, and what follows up to the next one."""
    _, *parts = tag.split(text)
    return [(name.strip(), body) for name, body in zip(parts[::2], parts[1::2], strict=True)]


def _function(name: str, body: str) -> Call:
    arguments: dict[str, str] = {}
    for key, rest in _named(_PARAMETER, body):
        value, closed, _ = rest.partition("</parameter>")
        if not closed:
            return _broken(f"the parameter {key!r} has no </parameter>", name)
        if key in arguments:
            return _broken(f"the parameter {key!r} occurs twice", name)
        arguments[key] = value.removeprefix("\n").removesuffix("\n")
    return Call(name, arguments, as_text=True) if name else _broken("the function has no name")


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
      text: of the turn; special tokens at its end do not matter.
      parse: one of `FORMATS`, or a function of a user. If that raises, there is one call, which has the error.
    """
    try:
        return list(parse(_without_special(_answer(text))))
    except Exception as e:
        return [_broken(f"the call cannot be read: {type(e).__name__}: {e}"[:500])]


def _without_special(text: str) -> str:
    """Without special tokens at the end, such as ``<|eot_id|>``."""
    while _SPECIAL.fullmatch(text := text.rstrip(), max(text.rfind("<|"), 0)):
        text = text[: text.rfind("<|")]
    return text


def _answer(text: str) -> str:
    """Without reasoning, also where the prompt began it, or the turn was cut in it."""
    return after_reasoning(_REASONING.sub("", text)).partition("<think>")[0]


# ------------------------------------------------------------------------------------------------ schemas


def check(call: Call, schemas: Mapping[str, Mapping[str, Any]]) -> Call:
    """A call with its arguments in the schema's types, or with an error.

    Args:
      call: as it was read.
      schemas: each tool's ``function`` of its JSON schema, by name.

    Example:
      >>> add = {"parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}
      >>> check(Call("add", {"a": "1"}), {"add": add}).error
      "a: '1' is not an integer"
    """
    if call.error is not None:
        return call
    if call.name not in schemas:
        known = ", ".join(sorted(schemas)) or "none"
        return dataclasses.replace(call, error=f"there is no tool {call.name[:80]!r}; there are: {known}")
    parameters = schemas[call.name].get("parameters") or {}
    properties = {k: v for k, v in parameters.get("properties", {}).items() if k != "return"}
    if unknown := sorted(set(call.arguments) - set(properties)):
        known = ", ".join(properties) or "none"
        return dataclasses.replace(call, error=f"it has no argument {unknown[0][:80]!r}; it has: {known}")
    if missing := [name for name in parameters.get("required", ()) if name not in call.arguments]:
        return dataclasses.replace(call, error=f"the argument {missing[0]!r} is missing")
    read: dict[str, Any] = {}
    for name, value in call.arguments.items():
        schema = properties[name]
        if call.as_text:
            value = _typed(value, schema)
        read[name], wrong = _convert(value, schema)
        if wrong:
            return dataclasses.replace(call, error=f"{name}{wrong}")
    return dataclasses.replace(call, arguments=read)


def _types(schema: Mapping[str, Any]) -> Sequence[str]:
    kind = schema.get("type", ())
    return (kind,) if isinstance(kind, str) else tuple(kind)


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    """A text as the value that the schema asks for, where it reads as one."""
    types = {t for each in (schema, *schema.get("anyOf", ())) for t in _types(each)}
    if not types or types == {"string"}:
        return text
    stripped = text.strip()
    if stripped in ("True", "False") and "boolean" in types:
        return stripped == "True"
    if stripped in ("None", "null"):
        return None
    try:
        value = _json(stripped)
    except ValueError:
        return text
    return value if "string" not in types or not _convert(value, schema)[1] else text


_NAMES = {
    "integer": "an integer",
    "number": "a number",
    "string": "a text",
    "boolean": "true or false",
    "null": "null",
    "array": "a list",
    "object": "an object",
}


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    classes = {"number": (int, float), "string": str, "null": type(None), "array": list, "object": dict}
    return kind in classes and isinstance(value, classes[kind])


def _show(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except ValueError:  # a number with thousands of digits
        return "a very long number"


def _convert(value: Any, schema: Mapping[str, Any]) -> tuple[Any, str]:
    """A value in the schema's type, and what is wrong with it: its place in the value, and the problem."""
    if value is None and schema.get("nullable"):
        return None, ""
    if options := schema.get("anyOf"):
        tried = [_convert(value, {**option}) for option in options]
        return next((t for t in tried if not t[1]), tried[0])
    if "enum" in schema and not any(value == e and type(value) is type(e) for e in schema["enum"]):
        return value, f": {_show(value)} is none of {', '.join(map(repr, schema['enum']))}"
    types = _types(schema)
    if types and not any(_is(value, kind) for kind in types):
        return value, f": {_show(value)} is not {' or '.join(_NAMES.get(kind, kind) for kind in types)}"
    if isinstance(value, float) and "integer" in types and "number" not in types:
        return int(value), ""
    if isinstance(value, list):
        return _converted(dict(enumerate(value)), lambda i: _item(schema, i), list)
    if isinstance(value, dict) and isinstance(more := schema.get("additionalProperties"), Mapping):
        return _converted(value, lambda _: more, dict)
    return value, ""


def _item(schema: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    fixed = schema.get("prefixItems", ())
    return fixed[index] if index < len(fixed) else schema.get("items", {})


def _converted(values: Mapping[Any, Any], schema_of: Callable[[Any], Mapping[str, Any]], kind: type) -> tuple[Any, str]:
    read = {}
    for key, value in values.items():
        read[key], wrong = _convert(value, schema_of(key))
        if wrong:
            return value, f"[{_show(key)}]{wrong}"
    return (list(read.values()) if kind is list else read), ""
