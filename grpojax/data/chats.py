r"""Questions and answers that are chats, in the forms in which data sets have them, as lists of role and content.

Read are ``[{"role", "content"}]``; ``[{"from", "value"}]`` of ShareGPT; either as a struct of two lists; either as JSON
in a text; contents that are lists of text parts; and ``"\n\nHuman: ... \n\nAssistant: ..."``.
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from grpojax.data.texts import halved, lost_backslash
from grpojax.host.errors import UserError

# A message: role and content; of a tool perhaps its name, and of the assistant perhaps ``tool_calls``.
Message = dict[str, Any]
# A question as text, or as the messages of a chat so far: [{"role": "user", "content": "..."}].
Question = str | Sequence[Mapping[str, Any]]

_KEYS = (("role", "content"), ("from", "value"), ("role", "value"), ("from", "content"))
_ROLES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "function_call": "tool_calls",
    "observation": "tool",
    "function": "tool",
}
_TEXT_PARTS = ("text", "input_text", "output_text")
_HUMAN = re.compile(r"(?:\A|\n\n)(Human|Assistant):")


def messages_of(value: Any) -> list[Any] | None:
    """The messages of a value that is a chat in any form, as they are; None for any other value, such as a text.

    >>> messages_of('[{"role": "user", "content": "Hi"}]'), messages_of({"from": ["human"], "value": ["Hi"]})
    ([{'role': 'user', 'content': 'Hi'}], [{'from': 'human', 'value': 'Hi'}])
    >>> messages_of("[1, 2]") is None
    True
    """
    if isinstance(value, str):
        return _written(value)
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, Mapping):
        keys = next((k for k in _KEYS if k[0] in value and k[1] in value), None)
        if keys is None:
            inner = [value[name] for name in ("messages", "conversations", "conversation") if name in value]
            return messages_of(inner[0]) if len(inner) == len(value) == 1 else None
        if isinstance(value[keys[0]], str):
            return [dict(value)]
        lists = {name: part for name, part in value.items() if isinstance(part, list | tuple)}
        if not set(keys) <= set(lists) or len({len(part) for part in lists.values()}) != 1:
            return None
        return [dict(zip(lists, each, strict=True)) for each in zip(*lists.values(), strict=True)]
    return None


def is_message(value: Any) -> bool:
    """Whether a value has a message's two keys."""
    return isinstance(value, Mapping) and any(set(keys) <= set(value) for keys in _KEYS)


# Such as numpy shows a chat, without commas, or as one that was cut off in a cell: it has the two keys of a message.
_BEGINS_AS_CHAT = re.compile(
    r"\s*(array\()?\[\s*\{\s*['\"](?:(?P<who>role|from)|content|value)['\"]\s*:"
    r".*['\"](?(who)(?:content|value)|(?:role|from))['\"]\s*:",
    re.DOTALL,
)


def _written(text: str) -> list[Any] | None:
    """The messages of a chat that was written out, in JSON or as Python shows it."""
    if not re.match(r"\s*[\[{]\s*[\[{'\"]", text) or not re.search(r"['\"](?:role|from)['\"]", text):
        return None
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        messages = None if isinstance(value, str) else messages_of(value)
        if messages and all(map(is_message, messages)):
            return messages
    return None


def chat_in(value: Any, column: str) -> list[Message] | None:
    """A chat as a list of messages; None where the value is no chat.

    A message without content that is the system's is left out. The role ``developer`` of a first message is the
    system's.

    Raises:
      UserError: there is something in it that no model here reads: images, contents that are no text, calls of no form.
    """
    messages = messages_of(value)
    if messages is None:
        return None
    chat = [_message(m, column) for m in messages]
    chat = [m for m in chat if m is not None]
    if chat and chat[0]["role"] == "developer":
        chat[0]["role"] = "system"
    return chat


def _message(message: Any, column: str) -> Message | None:
    keys = None
    if isinstance(message, Mapping):
        keys = next((k for k in _KEYS if isinstance(message.get(k[0]), str) and k[1] in message), None)
        keys = keys or next((k for k in _KEYS[:2] if isinstance(message.get(k[0]), str)), None)
    if keys is None:
        raise UserError(f"column {column!r} has {message!r:.60}, no message with a role and a content")
    named, content = message[keys[0]], message.get(keys[1])
    role = _ROLES.get(named.lower(), named.lower() if named.lower() in ("user", "assistant", "system") else named)
    used = {name for name, part in message.items() if part not in (None, [], {}, "")} - set(keys)
    name = {"name": str(message["name"])} if role == "tool" and "name" in used else {}
    calls = {}
    if role == "tool_calls":
        role, content, calls = "assistant", "", {"tool_calls": _calls(content, column)}
    elif role == "assistant" and used & {"tool_calls", "function_call"}:
        content, calls = (
            content or "",
            {"tool_calls": _calls(message.get("tool_calls") or message["function_call"], column)},
        )
        used -= {"tool_calls", "function_call"}
    used -= name.keys()
    if used:
        raise UserError(f"column {column!r} has a message of more than role and text: {message!r:.60}")
    if content is None and role == "system":
        return None
    return {"role": role, "content": _content(content, column), **name, **calls}


def _calls(value: Any, column: str) -> list[dict[str, Any]]:
    """Tool calls in the form that chat templates read, arguments as a mapping. They may be a list or only one, as JSON
    or not, and each in OpenAI's form or a name with arguments."""
    try:
        given = json.loads(value) if isinstance(value, str) else value
        calls = []
        for call in [given] if isinstance(given, Mapping) else given:
            function = call.get("function", call)
            name, arguments = function["name"], function["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            if not isinstance(name, str) or not isinstance(arguments, Mapping):
                raise TypeError
            calls.append({"type": "function", "function": {"name": name, "arguments": dict(arguments)}})
        return calls
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UserError(
            f"column {column!r} has {value!r:.60} as a tool call; a call has a name, and its arguments as a mapping or "
            "as JSON"
        ) from None


def _content(content: Any, column: str) -> str:
    """The text of a message; text parts are joined by line breaks."""
    if isinstance(content, list | tuple):
        content = "\n".join(_part(part, column) for part in content)
    if not isinstance(content, str):
        raise UserError(f"column {column!r} has a message without a text: its content is {content!r:.60}")
    check_text(content, column)
    return content


def _part(part: Any, column: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if isinstance(part, Mapping) else None
    used = {name for name, value in part.items() if value is not None} if isinstance(part, Mapping) else set()
    if isinstance(text, str) and (kind is None or kind in _TEXT_PARTS) and used <= {"type", "text"}:
        return text
    known = kind if isinstance(kind, str) else next(iter(sorted(map(str, used - {"type", "text"}))), repr(part)[:40])
    raise UserError(f"column {column!r} has a message with a part of type {known!r}; only text is read here, no images")


def check_text(text: str, column: str) -> None:
    """Raises `UserError` where a text is not valid Unicode, or a LaTeX command in it lost its backslash."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"column {column!r} is not valid Unicode") from None
    if (wrong := lost_backslash(text)) is not None:
        raise UserError(f"column {column!r} {wrong}")


def question_in(value: Any, column: str) -> Question:
    """The question in a cell: a text, or a chat that ends with the user's message.

    A chat of one message of the user's is its text, which needs no chat template.

    Raises:
      UserError: it is neither.

    >>> question_in([{"from": "human", "value": "1+1="}], "chat")
    '1+1='
    """
    chat = chat_in(value, column)
    if chat is None:
        if isinstance(value, int | float) and not isinstance(value, bool) and value == value:
            raise UserError(f"column {column!r} is no text but {value!r:.60}")
        if not isinstance(value, str):
            raise UserError(f"has no text in column {column!r}, but {value!r:.60}")
        if _BEGINS_AS_CHAT.match(value):
            raise UserError(
                f"column {column!r} has {value!r:.60}: it begins as a chat does, and is neither JSON nor Python; write "
                "the messages as JSON"
            )
        check_text(value, column)
        return halved(value)
    roles = [m["role"] for m in chat]
    if roles[-1:] != ["user"]:
        has = f"ends with the {roles[-1]}'s" if roles else "is empty"
        raise UserError(
            f"column {column!r} is a list of messages that does not end with the user's; it {has}; "
            + ("leave the last message out" if "user" in roles else "a question of the user's must follow")
        )
    chat = [m | {"content": halved(m["content"])} for m in chat]
    return chat[0]["content"] if len(chat) == 1 else chat


def dialog_in(text: Any) -> list[Message] | None:
    r"""The chat in a text of the form ``"\n\nHuman: Hi\n\nAssistant: Hello"``; None where it has another.

    >>> dialog_in("\n\nHuman: Hi\n\nAssistant: Hello")
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]
    """
    if not isinstance(text, str) or not re.match(r"\s*Human:", text):
        return None
    _, *parts = _HUMAN.split(text.strip())
    roles = {"Human": "user", "Assistant": "assistant"}
    chat = [{"role": roles[r], "content": c.strip()} for r, c in zip(parts[::2], parts[1::2], strict=True)]
    return chat if any(m["role"] == "assistant" for m in chat) else None
