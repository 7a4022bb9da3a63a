"""Questions to token ids."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from grpojax.data.chats import Question
from grpojax.data.problems import DataConfig, Example
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
    """What a model is asked, as messages: system message, examples, and the chat that ends with the question.

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

    Raises:
      UserError: the tokenizer lacks what the config asks for, or its template loses part of it.
    """

    def __init__(self, tokenizer: Any, config: DataConfig):
        self.tokenizer, self.config = tokenizer, config
        self.chat = config.template == "chat" or (config.template == "auto" and bool(tokenizer.chat_template))
        if self.chat and not tokenizer.chat_template:
            raise UserError("data.template='chat', but the tokenizer has no chat template; use 'plain'")
        if not self.chat and config.system:
            raise UserError(
                "data.system needs a chat template; put the text into data.instruction or use data.template=chat"
            )

    def text(self, question: Question, examples: Sequence[Example] = ()) -> str:
        """What the model reads; ``examples`` are shown after those of the config."""
        config = dataclasses.replace(self.config, examples=(*self.config.examples, *examples))
        if not self.chat:
            return _plain(question, config)
        turns = chat_of(question, config)
        try:
            text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as e:  # whatever a template raises, such as "system role not supported"
            raise UserError(f"the tokenizer's chat template refuses: {' '.join(str(e).split())[:200]}") from None
        for turn in turns:
            if turn["content"].strip() not in text:
                raise UserError(
                    f"the tokenizer's chat template loses the {turn['role']}'s {turn['content'][:60]!r}; "
                    "use data.template=plain"
                )
        return text

    def __call__(self, question: Question, examples: Sequence[Example] = ()) -> tuple[int, ...]:
        # A template that writes its own BOS must not get the tokenizer's on top.
        ids = list(self.tokenizer.encode(self.text(question, examples), add_special_tokens=not self.chat))
        # Further on it may stand again: it opens the turns of some templates, and ends them where it is EOS too.
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise UserError(f"a prompt starts with two beginning-of-sequence tokens: {str(question)[:60]!r}")
        return tuple(ids)
