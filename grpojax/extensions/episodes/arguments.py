"""Arguments of tool calls, checked against the tools' schemas. Nothing here raises on any call."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpojax.extensions.episodes.calls import Call, json_value


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
        value = json_value(stripped)
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
