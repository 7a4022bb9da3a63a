"""Reasoning in a model's answer: the tags around it, and where it ends."""

import bisect
import re
from collections import defaultdict

_NAME = r"[\w:]{0,32}(?:think|thought|reason|analy[sz]|reflect|scratch|cot\b)[\w:]{0,32}"
# `<think>`, `<|begin_of_thought|>`, `[THINK]`; and what closes them. They are texts, for larger patterns to hold.
OPENS = rf"(?i:<{_NAME}>|<\|(?:begin_of_|start_of_)?{_NAME}\|>|\[{_NAME}\])"
CLOSES = rf"(?i:</{_NAME}>|<\|(?:/|end_of_){_NAME}\|>|\[/{_NAME}\])"
_LEADING = re.compile(rf"\s*({OPENS})")
_CLOSES = re.compile(CLOSES)
_PAIR = re.compile(r"/|begin_of_|start_of_|end_of_")
# How tool calls begin. What closes reasoning behind that may stand in an argument.
_CALL = re.compile(r"<tool_call>|<function=|<\|python_tag\|>|\A\s*\{")


def kind(tag: str) -> str:
    """What the tag that opens reasoning and the one that closes it have in common.

    Example:
      >>> kind("<think>") == kind("</think>"), kind("<|begin_of_thought|>") == kind("<|end_of_thought|>")
      (True, True)
    """
    return _PAIR.sub("", tag.lower())


class Closings:
    """Where a text closes reasoning. It is searched once, so that many tags cost no more than few."""

    def __init__(self, text: str):
        self._ends = defaultdict[str, list[int]](list)
        for tag in _CLOSES.finditer(text):
            self._ends[kind(tag[0])].append(tag.end())

    def after(self, opening: re.Match[str]) -> int | None:
        """Behind the tag that closes reasoning; None where the text ends before that."""
        ends = self._ends.get(kind(opening[0].strip()), [])
        at = bisect.bisect_right(ends, opening.end())
        return ends[at] if at < len(ends) else None


def without_leading(answer: str) -> str:
    """An answer without the reasoning that opens it. Tags further on may stand in an argument of a call.

    Example:
      >>> without_leading("<think>one</think> 2"), without_leading("<think>one"), without_leading("2</think>")
      (' 2', '', '2</think>')
    """
    at, closings = 0, Closings(answer)
    while opening := _LEADING.match(answer, at):
        end = closings.after(opening)
        if end is None:
            return ""
        at = end
    return answer[at:]


def after_reasoning(answer: str) -> str:
    """An answer without its reasoning, which templates leave out of earlier messages.

    Example:
      >>> after_reasoning("<think>one and one</think> 2"), after_reasoning("one and one</think> 2")
      ('2', '2')
      >>> after_reasoning("2 < 3"), after_reasoning('<tool_call>{"name": "</think>"}</tool_call>')
      ('2 < 3', '<tool_call>{"name": "</think>"}</tool_call>')
    """
    rest = without_leading(answer)
    closing = _CLOSES.search(answer) if rest == answer else None  # the prompt may have opened it
    if closing and not _CALL.search(answer, 0, closing.start()):
        rest = answer[closing.end() :]
    return rest.strip()
