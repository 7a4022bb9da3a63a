r"""Which columns of a row hold what: by name, by a dotted path into nested ones, or found where nobody named them."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from grpojax.data.chats import messages_of
from grpojax.host.errors import UserError

AUTO = "auto"
BOXED = r"the last \boxed{} of "
_ABSENT = object()
_QUESTIONS = ("problem", "prompt", "messages", "conversations")
_CHATS = ("messages", "conversations")
_ANSWERS = ("ground_truth", "reward_model.ground_truth", "final_answer", "expected_answer")


def find(row: Any, name: str, default: Any = None) -> Any:
    """A row's value under a name: the column of that name, or else of a nested one, ``a.b.c``.

    Objects may be JSON texts, as in tables. A number takes an entry of a list.

    >>> row = {"a": {"b": [5, 6]}, "a.c": 7, "d": '{"e": 8}'}
    >>> find(row, "a.b.1"), find(row, "a.c"), find(row, "d.e"), find(row, "x.y") is None
    (6, 7, 8, True)
    """
    if isinstance(row, str) and row.lstrip().startswith("{"):
        try:
            row = json.loads(row)
        except (ValueError, RecursionError):
            return default
    if isinstance(row, list | tuple):
        head, _, rest = name.partition(".")
        if not head.isascii() or not head.isdigit() or int(head) >= len(row):
            return default
        return find(row[int(head)], rest, default) if rest else row[int(head)]
    if not isinstance(row, Mapping):
        return default
    if name in row:
        return row[name]
    heads = [name[:i] for i, c in enumerate(name) if c == "."]
    for head in reversed(heads):  # a column whose own name has a dot comes first
        if head in row and (found := find(row[head], name[len(head) + 1 :], _ABSENT)) is not _ABSENT:
            return found
    return default


def cell(row: Mapping[str, Any], name: str, wanted: str) -> Any:
    """`find`, but raises `UserError` if there is no such column; it says what is ``wanted`` and which columns exist."""
    value = find(row, name, _ABSENT)
    if value is not _ABSENT:
        return value
    head = name.split(".")[0]
    inside = row.get(head)
    nested = f"; {head!r} has {sorted(map(str, inside))}" if isinstance(inside, Mapping) and head != name else ""
    raise UserError(f"has no column {name!r} for {wanted}; it has {sorted(map(str, row))}{nested}"[:400])


@dataclasses.dataclass(frozen=True)
class Columns:
    r"""The columns of a question and its answer; ``boxed`` takes the answer from its last ``\boxed{}``."""

    prompt: str
    answer: str | None
    boxed: bool = False

    @property
    def names(self) -> tuple[str, str | None]:
        """Both."""
        return self.prompt, self.answer

    def __str__(self) -> str:
        text = f"questions are the column {self.prompt!r}"
        if self.answer is None:
            return text
        return f"{text}, answers {BOXED if self.boxed else ''}the column {self.answer!r}"


def find_columns(row: Mapping[str, Any], prompt: str = AUTO, answer: str | None = AUTO) -> Columns:
    r"""The columns of a source, by its first row. Named ones are kept; "auto" is found if only one is possible.

    A question is in ``question``, or in the only one there is of ``problem``, ``prompt`` and a chat in ``messages`` or
    ``conversations`` that no answer ends. An answer is in ``answer``, or in the only one there is of ``ground_truth``,
    ``reward_model.ground_truth``, ``final_answer`` and ``expected_answer``, or in the last box of ``solution``.

    >>> str(find_columns({"problem": "1+1=", "solution": r"It is \boxed{2}.", "level": 1}))
    "questions are the column 'problem', answers the last \\boxed{} of the column 'solution'"
    """
    if prompt == AUTO and AUTO not in row:
        found = [name for name in _QUESTIONS if name in row and _asks(name, row[name])]
        prompt = found[0] if len(found) == 1 and "question" not in row else "question"
    boxed = False
    if answer == AUTO and AUTO not in row:
        found = [name for name in _ANSWERS if find(row, name) is not None]
        solution = row.get("solution")
        answer = found[0] if len(found) == 1 and "answer" not in row else "answer"
        if not found and "answer" not in row and isinstance(solution, str) and r"\boxed" in solution:
            answer, boxed = "solution", True
    return Columns(prompt, answer, boxed)


def _asks(name: str, value: Any) -> bool:
    """Whether a column may hold questions: texts, or chats that no answer ends."""
    messages = messages_of(value)
    if messages is None:
        return isinstance(value, str) and name not in _CHATS
    last = messages[-1] if messages else None
    role = (last.get("role") or last.get("from")) if isinstance(last, Mapping) else None
    return isinstance(role, str) and role.lower() not in ("assistant", "gpt", "model", "bot", "chatgpt")
