"""The variables that a chat template reads, and the text that it writes around messages."""

import contextlib
import copy
import datetime
import os
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpojax.data import reasoning_tags
from grpojax.host.errors import UserError

Messages = Sequence[Mapping[str, Any]]

# A question and an answer that no chat has, and the remedy where a template is not for episodes.
_ASKED, _REPLIED = "question-1", "answer-1"
_OTHER_TEMPLATE = "give the model's folder a chat template that keeps earlier messages, or set data.template=plain"

NO_CALLS = "the chat template writes no tool calls: write the call as text into the message's content"

_NO_REASONING = re.compile(r"\A\s*<think>\s*</think>\s*")

# What a template gets without being asked.
_GIVEN = {"messages", "add_generation_prompt", "raise_exception", "strftime_now"}

# transformers gives templates `strftime_now`, which reads the clock. This macro takes its place and reads a given day.
_FIXED_DAY = (
    "{%- macro strftime_now(format) -%}{%- set ns = namespace(text=format) -%}"
    "{%- for code, text in grpojax_day -%}{%- set ns.text = ns.text.replace(code, text) -%}{%- endfor -%}"
    "{{- ns.text -}}{%- endmacro -%}"
)

# Tags at the end of a text that open something. Tags with bars, such as `<|assistant|>`, open a message.
_LAST_TAGS = re.compile(r"(?:(?:<[^<>|/\s][^<>|]*>|\[[A-Z_]+\])\s*)+\Z")


def variables_of(template: str) -> frozenset[str]:
    """The names that a template takes from outside.

    Raises:
      UserError: it is not a valid Jinja template.

    Example:
      >>> sorted(variables_of("{% if thinking %}{{ messages[0].content }}{% endif %}"))
      ['messages', 'thinking']
    """
    import jinja2.meta
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag that marks what an assistant wrote; transformers has it too."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(extensions=[Generation, "jinja2.ext.loopcontrols"])
    try:
        return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(template)))
    except jinja2.TemplateError as e:
        raise UserError(f"the tokenizer's chat template is not a valid Jinja template: {e}") from None


def writes_day(tokenizer: Any) -> bool:
    """Whether the tokenizer's chat template writes the day on which it is used."""
    text = template_of(tokenizer)
    return text is not None and "strftime_now" in text and "strftime_now" in variables_of(text)


def template_of(tokenizer: Any) -> str | None:
    """The chat template; None where there is none.

    Raises:
      UserError: there are several by name, and none of them is the default.
    """
    if isinstance(named := tokenizer.chat_template, Mapping):
        if "default" not in named:
            raise UserError(
                f"the tokenizer has several chat templates, and none is named default: {', '.join(sorted(named))}\n"
                "name one of them default in the model's folder, or set data.template=plain"
            )
        return named["default"]
    return named if isinstance(named, str) else None


class ChatTemplate:
    """A tokenizer's chat template with its variables set.

    Args:
      tokenizer: of transformers, with a chat template.
      options: values of variables that the template reads.
      day: the day that a template which writes one gets; None is today.
      tools: JSON schemas of tools, for a template that shows them.

    Raises:
      UserError: the template does not read an option, or writes no day and gets one, or it is none of several.

    Attributes:
      tail: what a prompt ends with beyond the header of the assistant's message: the beginning of the answer, such as
        ``<think>``. Empty for most templates.
      markers: special tokens that it writes around messages.
      opening: what it writes between a question and its answer, without ``tail``; empty where that cannot be found.
      shows_tools: whether it reads ``tools``.
      writes_calls: whether it reads ``tool_calls`` of a message.
    """

    def __init__(
        self,
        tokenizer: Any,
        options: Mapping[str, Any],
        day: datetime.date | None,
        tools: Sequence[Mapping[str, Any]] = (),
    ):
        self._tokenizer = tokenizer
        self._more: dict[str, Any] = dict(options)
        text = template_of(tokenizer)
        reads = frozenset[str]() if text is None else variables_of(text)
        own = reads - _GIVEN - set(getattr(tokenizer, "special_tokens_map", {}))
        if unread := sorted(set(options) - own):
            raise UserError(
                f"data.template_options.{unread[0]}: the chat template does not read it; it reads "
                f"{', '.join(sorted(own)) or 'no variable'}"
            )
        if "strftime_now" in reads:
            self._more |= {"chat_template": _FIXED_DAY + str(text), "grpojax_day": _written(day)}
        elif day is not None:
            raise UserError(f"data.today={day}: the chat template writes no date; leave it out")
        self.shows_tools, self.writes_calls = "tools" in reads, "tool_calls" in str(text)
        if tools and self.shows_tools:
            self._more["tools"] = list(tools)
        self.opening, self.tail = _between(self.render)
        self.markers = self._markers()

    def render(
        self, messages: Messages, *, ready: bool = True, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """The text of a chat, with ``ready`` for the assistant's next answer; raises what the template raises.
        ``tools`` take the place of those among its variables."""
        more = self._more if tools is None else {**self._more, "tools": list(tools)}
        return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ready, **more)

    def showing(self, tools: Sequence[Mapping[str, Any]]) -> "ChatTemplate":
        """The same with these tools, where it shows any."""
        made = copy.copy(self)
        if self.shows_tools:
            made._more = {**self._more, "tools": list(tools)}
        return made

    def turn(self, message: Mapping[str, Any]) -> str:
        """What the template writes for a message of the assistant's that calls tools, without what stands around it.

        Raises:
          UserError: the template writes no calls, or not in the place of an answer.
        """
        asked = [{"role": "user", "content": _ASKED}]
        try:
            head, whole = self.render(asked).removesuffix(self.tail), self.render([*asked, message], ready=False)
        except Exception as e:  # whatever a template raises
            raise UserError(f"the chat template refuses a tool call: {' '.join(str(e).split())[:200]}") from None
        end = self._around_answer([])[1]
        text = whole[len(head) :].removesuffix(end)
        names = [call["function"]["name"] for call in message["tool_calls"]]
        if not (whole.startswith(head) and whole.endswith(end) and all(name in text for name in names)):
            raise UserError(NO_CALLS)
        return _NO_REASONING.sub("", text)  # some write it for a message without reasoning

    def after_turn(self, messages: Sequence[Mapping[str, Any]], end: str = "") -> str:
        """What the template writes after a turn of the assistant: the rest of its end, some messages, and the opening
        of the next turn.

        It is found on a chat of the template's own, in which the turn is a word. So the turn itself is not rendered
        again, and its tokens stay as they were drawn.

        Args:
          messages: those of tools or of the user that follow the turn.
          end: text of the token that ended the turn; empty if none did.

        Raises:
          UserError: the template refuses the messages, or writes another text before them than without them.
        """
        before, after = self._around_answer([])[1], self._around_answer(messages)[1]
        if not after.startswith(before):
            raise UserError(
                f"the chat template ends a turn with {before!r}, and with {after[: len(before) + 20]!r} if a tool's "
                f"answer follows: an episode cannot keep its tokens\n{_OTHER_TEMPLATE}"
            )
        at = before.find(end) if end else -1
        return after[at + len(end) :] if at >= 0 else after

    def _around_answer(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
        """What stands before the question and what stands after its answer, in a chat that goes on with ``messages``
        and is ready for the next answer. Without messages the chat is over."""
        chat = [{"role": "user", "content": _ASKED}, {"role": "assistant", "content": _REPLIED}]
        try:
            text = self.render([*chat, *messages], ready=bool(messages))
        except Exception as e:  # whatever a template raises
            why = " ".join(str(e).split())[:200]
            raise UserError(f"the chat template refuses a tool's answer: {why}\n{_OTHER_TEMPLATE}") from None
        if _ASKED not in text or _REPLIED not in text:
            raise UserError(f"the chat template loses a turn that a tool's answer follows\n{_OTHER_TEMPLATE}")
        before, rest = text.split(_ASKED, 1)
        return before, rest.split(_REPLIED, 1)[1]

    def check_turns(self) -> None:
        """Raises `UserError` unless answers of tools, one or two to a turn, are written, and leave what stands before
        them as it is: before the question, at the end of a turn, and in an earlier turn."""
        answer = [{"role": "tool", "name": "probe", "content": "result-1"}]
        written = self.after_turn(answer)
        if "result-1" not in written:
            raise UserError(f"the chat template does not write a tool's answer\n{_OTHER_TEMPLATE}")
        both = self.after_turn([*answer, {**answer[0], "content": "result-2"}])
        if not 0 <= both.find("result-1") < both.find("result-2"):
            raise UserError(
                f"the chat template does not write two answers of tools to one turn: {both[:120]!r}\n{_OTHER_TEMPLATE}"
            )
        without, shown = self._around_answer([])[0], self._around_answer(answer)[0]
        if without != shown:
            raise UserError(
                f"the chat template begins a chat with {without[-60:]!r}, and with {shown[-60:]!r} if a tool's answer "
                f"follows: an episode cannot keep its tokens\n{_OTHER_TEMPLATE}"
            )
        first = [{"role": "user", "content": "question-0"}, {"role": "assistant", "content": "answer-0"}, *answer]
        again = self._around_turns(first, answer)
        if again != written:
            raise UserError(
                f"the chat template writes {again[:80]!r} after a later turn, and {written[:80]!r} after the first: "
                f"an episode cannot keep its tokens\n{_OTHER_TEMPLATE}"
            )

    def _around_turns(self, earlier: Messages, messages: Sequence[Mapping[str, Any]]) -> str:
        """What stands after the second turn of an episode whose first one was answered too."""
        try:
            text = self.render([*earlier, {"role": "assistant", "content": _REPLIED}, *messages])
        except Exception as e:  # whatever a template raises
            why = " ".join(str(e).split())[:200]
            raise UserError(f"the chat template refuses a second answer of a tool: {why}\n{_OTHER_TEMPLATE}") from None
        return text.split(_REPLIED, 1)[-1]

    def _markers(self) -> frozenset[str]:
        written = self.opening
        with contextlib.suppress(Exception):  # a template may refuse an empty text
            written += self.render([{"role": "user", "content": ""}]).removesuffix(self.tail)
        return frozenset(token for token in special_texts(self._tokenizer) if token in written)

    def has_markers(self, text: str) -> bool:
        """Whether a text was rendered by a chat template before: it ends as a prompt does, or has several markers.

        One marker within a text may be what is asked about.
        """
        ends = [end for end in (self.opening.strip(), (self.opening + self.tail).strip()) if len(end) > 3]
        return text.rstrip().endswith(tuple(ends)) or sum(marker in text for marker in self.markers) > 1


def special_texts(tokenizer: Any) -> frozenset[str]:
    """The texts of the tokens that decoding leaves out."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    named = getattr(tokenizer, "all_special_tokens", ())
    return frozenset(map(str, named)) | {token.content for token in added if token.special}


def _written(day: datetime.date | None) -> list[tuple[str, str]]:
    """Each code of `strftime` with its text on that day, at midnight; ``%%`` last."""
    at = datetime.datetime.combine(day or datetime.date.today(), datetime.time())
    letters = string.ascii_letters.replace("s", "")  # the seconds since 1970 depend on the machine's time zone
    codes = [f"%{dash}{c}" for dash in ("-", "") for c in letters]
    found = []
    for code in codes:
        try:
            text = at.strftime(code)
        except ValueError:  # not a code on this machine
            continue
        if "%" not in text:
            found.append((code, text))
    return [*found, ("%%", "%")]


def _between(render: Callable[[Messages], str]) -> tuple[str, str]:
    """What stands between a question and its answer, in two parts: what every answer has before it, and what a prompt
    has beyond that. Both are empty where the template refuses such chats."""
    asked, reply, again = "question-1", "answer-1", "question-2"
    chat = [{"role": "user", "content": asked}]
    longer = [*chat, {"role": "assistant", "content": reply}, {"role": "user", "content": again}]
    try:
        ready = render(chat).split(asked, 1)[1]
        before = render(longer).split(asked, 1)[1].split(reply, 1)[0]
    except Exception:  # whatever a template raises
        return "", ""
    common = len(os.path.commonprefix([ready, before]))
    opens = re.search(reasoning_tags.OPENS, ready)  # an earlier answer may stand after an empty `<think></think>`
    cut = min(common, opens.start() if opens else common)
    return ready[:cut], ready[cut:]


def last_tags(text: str) -> str:
    """The tags that a prompt without a chat template ends with: the beginning of the answer.

    Example:
      >>> last_tags("<|user|>1+1?<|assistant|><think> "), last_tags("1+1=")
      ('<think> ', '')
    """
    found = _LAST_TAGS.search(text)
    return found[0] if found else ""


def without_opening(answer: str, tail: str) -> str:
    r"""An answer without the beginning that its prompt ends with already.

    Args:
      answer: to learn.
      tail: the prompt's (`ChatTemplate.tail`).

    Example:
      >>> without_opening("<think>\none</think>2", "<think>\n"), without_opening("2", "<think>\n")
      ('one</think>2', '2')
    """
    begins = [0, *(m.start() for m in re.finditer(r"[<\[]", tail))]
    for begin in begins:
        part = tail[begin:].rstrip()
        if part and answer.lstrip().startswith(part):
            return answer.lstrip()[len(part) :].removeprefix(tail[len(tail.rstrip()) :])
    return answer
