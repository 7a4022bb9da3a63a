"""Questions to token ids."""

import copy
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from grpojax.data.chat_template import (
    NO_CALLS,
    ChatTemplate,
    last_tags,
    special_texts,
    without_opening,
)
from grpojax.data.chats import Question
from grpojax.data.problems import DataConfig, Example
from grpojax.data.reasoning_tags import after_reasoning
from grpojax.host.console import log
from grpojax.host.errors import UserError


def _ask(question: str, config: DataConfig) -> str:
    return config.instruction.replace("{prompt}", question)


def _plain(question: Question, config: DataConfig) -> str:
    """What a model without a chat template reads."""
    if not isinstance(question, str):
        raise UserError("the prompt is a list of messages, which needs a chat template")
    shown = [f"{_ask(e.prompt, config)}{e.completion}\n\n" for e in config.examples]
    return "".join(shown) + _ask(question, config)


def chat_of(question: Question, config: DataConfig) -> list[Mapping[str, str]]:
    """The messages for a model: system message, examples, and the chat that ends with the question.

    With ``template: plain`` it is one message, of all that the model reads.

    Example:
      >>> chat_of("1+1=", DataConfig(train="", system="Add.", instruction="{prompt} ?"))
      [{'role': 'system', 'content': 'Add.'}, {'role': 'user', 'content': '1+1= ?'}]
    """
    if config.template == "plain":
        return [{"role": "user", "content": _plain(question, config)}]
    examples: list[Mapping[str, str]] = []
    for example in config.examples:
        examples.append({"role": "user", "content": _ask(example.prompt, config)})
        examples.append({"role": "assistant", "content": example.completion})
    system = [] if config.system is None else [{"role": "system", "content": config.system}]
    chat = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
    before = chat[:-1]
    if before and before[0]["role"] == "system":
        if system:
            raise UserError("the prompt has a system message of its own, and data.system gives another")
        system, before = before[:1], before[1:]
    last = {"role": "user", "content": _ask(chat[-1]["content"], config)}
    return [*system, *examples, *before, last]


class Tokenize:
    """Questions to token ids: chat template or plain, and a beginning of sequence that is not doubled.

    Args:
      tokenizer: of transformers.
      config: for the instruction, the examples, the system message and the template.
      tools: JSON schemas of the tools that an episode may call, by its environment's name, as the column
        ``environment`` of its row says; those of a run's only environment stand under None. None where samples are no
        episodes.

    Raises:
      UserError: the tokenizer lacks what the config asks for, or its template loses part of it.

    Attributes:
      chat: whether prompts are chats.
      special: texts of the tokens that decoding leaves out.
    """

    def __init__(
        self,
        tokenizer: Any,
        config: DataConfig,
        *,
        tools: Mapping[str | None, Sequence[Mapping[str, Any]]] | None = None,
    ):
        self.tokenizer, self.config = tokenizer, config
        self.chat = config.template == "chat" or (config.template == "auto" and bool(tokenizer.chat_template))
        self.special = special_texts(tokenizer)
        self._noted: set[str] = set()
        if self.chat and not tokenizer.chat_template:
            raise UserError("data.template='chat', but the tokenizer has no chat template; use 'plain'")
        for name in ("system", "template_options", "today"):
            if not self.chat and getattr(config, name):
                remedy = "put the text into data.instruction" if name == "system" else "leave it out"
                remedy += " or use data.template=chat" if tokenizer.chat_template else "; the tokenizer has none"
                raise UserError(f"data.{name} needs a chat template; {remedy}")
        self._template: ChatTemplate | None = None
        self._of_choice: dict[str, Tokenize] = {}
        self._goes_on = False  # whether the template is known to go on after a tool's answer
        if self.chat:
            named = {name: schemas for name, schemas in (tools or {}).items() if name is not None}
            self._template = self._showing((tools or {}).get(None, ()), played=tools is not None and not named)
            self._of_choice = {name: self._with(name, schemas) for name, schemas in named.items()}

    def _showing(self, tools: Sequence[Mapping[str, Any]], *, played: bool) -> ChatTemplate:
        """The chat template with these tools; ``played`` where episodes go on after a tool's answer."""
        template = ChatTemplate(self.tokenizer, self.config.template_options, self.config.today, tools)
        if played:
            template.check_turns()
        if tools:
            self._note_tools(template)
        return template

    def _with(self, name: str, tools: Sequence[Mapping[str, Any]]) -> "Tokenize":
        """The same for the rows of an environment."""
        made = copy.copy(self)
        try:
            made._template = self._showing(tools, played=True)
        except UserError as e:
            raise UserError(f"environment.choices.{name}: {e}") from None
        return made

    def with_tools(self, tools: Sequence[Mapping[str, Any]], *, played: bool = False) -> "Tokenize":
        """The same for prompts that show these tools.

        Args:
          tools: JSON schemas.
          played: whether chats go on after a tool's answer (`after_turn`).

        Raises:
          UserError: the template cannot go on after a tool's answer, or there are tools and no chat template.
        """
        template = self._template
        if played and template is not None and not self._goes_on:
            template.check_turns()
            self._goes_on = True
        if not tools:
            return self
        if template is None:
            raise UserError("column 'tools': prompts show tools by a chat template, and there is none")
        self._note_tools(template)
        made = copy.copy(self)
        made._template = template.showing(tools)
        return made

    def _note_tools(self, template: ChatTemplate) -> None:
        if not template.shows_tools:
            self._note("tools", "the chat template shows no tools to the policy: data.system can name them")

    def of_row(self, columns: Mapping[str, Any]) -> "Tokenize":
        """The same for the prompt of a row with these columns, which shows the tools of the row's environment.

        Raises:
          UserError: the row names no environment of the run.
        """
        if not self._of_choice:
            return self
        name = columns.get("environment")
        if name not in self._of_choice:
            raise UserError(
                f"the column 'environment' is {name!r}, which environment.choices does not have; it has "
                f"{', '.join(map(repr, self._of_choice))}"
            )
        return self._of_choice[name]

    def text(self, question: Question, examples: Sequence[Example] = ()) -> str:
        """The prompt's text; ``examples`` are shown after those of the config."""
        config = dataclasses.replace(self.config, examples=(*self.config.examples, *examples))
        if self._template is None:
            return _plain(question, config)
        messages = chat_of(question, config)
        self._check_new(messages[-1]["content"], self._template)
        try:
            text = self._template.render(messages)
        except Exception as e:  # whatever a template raises, such as "system role not supported"
            raise UserError(
                f"the tokenizer's chat template raised an error: {' '.join(str(e).split())[:200]}"
            ) from None
        for message in messages:
            content = message["content"].strip()
            if "tool_calls" in message and not self._template.writes_calls:
                raise UserError(NO_CALLS)
            if content in text:
                continue
            if message["role"] == "assistant" and after_reasoning(content) in text:
                self._note("reasoning", "the chat template leaves the reasoning out of earlier answers and examples")
                continue
            raise UserError(
                f"the tokenizer's chat template loses the {message['role']}'s {message['content'][:60]!r}; "
                "use data.template=plain"
            )
        return text

    def _check_new(self, question: str, template: ChatTemplate) -> None:
        """A question that was rendered before would stand in a second chat."""
        if not template.has_markers(question):
            return
        text_of_message = f"the prompt {question[-60:]!r} has the chat template's own markers, as if rendered before"
        if self.config.template == "auto":
            raise UserError(f"{text_of_message}: set data.template=plain, or data.template=chat if it was not")
        self._note("markers", f"{text_of_message}; with data.template=plain it would stay as it is (shown once)")

    def _note(self, kind: str, line: str) -> None:
        """Shows the first line of a kind."""
        if kind not in self._noted:
            self._noted.add(kind)
            log.warning("%s", line)

    def __call__(self, question: Question, examples: Sequence[Example] = ()) -> tuple[int, ...]:
        # A template that writes its own BOS must not get the tokenizer's on top.
        ids = list(self.tokenizer.encode(self.text(question, examples), add_special_tokens=not self.chat))
        # Further on it may stand again: it opens the turns of some templates, and ends them where it is EOS too.
        bos = self.tokenizer.bos_token_id
        if bos is not None and not self.chat and ids[:2] == [bos, bos]:
            ids = ids[1:]  # the text has its own
        if bos is not None and ids[:2] == [bos, bos]:
            raise UserError(f"a prompt starts with two beginning-of-sequence tokens: {str(question)[:60]!r}")
        return tuple(ids)

    def tail(self, ids: Sequence[int]) -> str:
        """The beginning of the answer that a prompt ends with, such as ``<think>``; mostly empty."""
        if self._template is not None:
            return self._template.tail
        return last_tags(self.tokenizer.decode(list(ids[-32:]), skip_special_tokens=False))

    def read(self, form: str, prompts: Sequence[Sequence[int]], rows: Sequence[Sequence[int]]) -> list[str]:
        """Completions as the texts that rewards ask for.

        Args:
          form: "with_special_tokens", "with_prompt_tail", "with_both" (`grpojax.rewards.RewardConfig.text`).
          prompts: ``[N]``, the ids of each one's prompt.
          rows: ``[N]``, their ids, without the token that ended them.
        """
        skip, tail = form == "with_prompt_tail", form in ("with_prompt_tail", "with_both")
        texts = [self.tokenizer.decode(list(ids), skip_special_tokens=skip) for ids in rows]
        return [self.tail(p) + text for p, text in zip(prompts, texts, strict=True)] if tail else texts

    def answer(self, prompt: Sequence[int], text: str) -> str:
        """An answer to learn, without the beginning that its prompt ends with already."""
        return without_opening(text, self.tail(prompt))

    def turn(self, message: Mapping[str, Any]) -> str:
        """The text of a message of the assistant's, with its tool calls as the chat template writes them."""
        if "tool_calls" not in message:
            return message["content"]
        if self._template is None:
            raise UserError(NO_CALLS)
        return self._template.turn(message)

    def after_turn(
        self, messages: Sequence[Mapping[str, Any]], end: int | None, *, most: int | None = None
    ) -> list[int]:
        """The tokens to append to a turn of an episode: an environment's messages as the chat template writes them, and
        the opening of the next turn. Without a chat template they are the messages' texts, or a newline if these are
        empty. Special tokens are taken out of the texts: an environment cannot end its message, or open another.

        Args:
          messages: each with a role and a content.
          end: the token that ended the turn; None if it was cut.
          most: most tokens of a message; what is longer is cut. None cuts none.
        """
        short = [{**m, "content": self._cut(self._without_special(m["content"]), most)} for m in messages]
        if self._template is None:
            text = "".join(m["content"] for m in short) or "\n"
        else:
            ended = "" if end is None else self.tokenizer.decode([end], skip_special_tokens=False)
            text = self._template.after_turn(short, ended)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _without_special(self, text: str) -> str:
        """A text without texts of special tokens, also those that appear when others are taken out."""
        tokens = re.compile("|".join(map(re.escape, sorted(self.special, key=len, reverse=True))) or r"(?!)")
        while (shorter := tokens.sub("", text)) != text:
            text = shorter
        return text

    def _cut(self, text: str, most: int | None) -> str:
        if most is None:
            return text
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return text if len(ids) <= most else self.tokenizer.decode(ids[:most], skip_special_tokens=False)

    def message(self, text_of_message: str) -> str:
        """A completion, special tokens included, as the content of an assistant's message.

        It begins with what the chat template opened for it, and has those special tokens that are tags of its own: not
        those that stand around messages, nor the tokenizer's own, such as its padding.
        """
        named = getattr(self.tokenizer, "special_tokens_map", {}).values()
        for token in {*named, *(self._template.markers if self._template is not None else ())}:
            text_of_message = text_of_message.replace(token, "")
        return (self._template.tail if self._template is not None else "") + text_of_message
