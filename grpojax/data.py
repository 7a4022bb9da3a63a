"""Problems from JSON lines to padded prompt batches.

The batch of step n is a function of (seed, n) alone, through grain's random-access pipeline, so the whole state of
the data is the step.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import grain
import numpy as np

from grpojax.errors import UserError
from grpojax.types import Prompts

BUILTIN = "builtin:"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where problems come from.

    Attributes:
      train: JSON lines file; ``builtin:`` names a file inside the package.
      eval: the same, for evaluation; None evaluates nothing.
      prompt: column with the question.
      answer: column with the reference answer; None if the rewards need none. Of an answer with ``####`` (GSM8K) the
        part after the last one counts.
      system: system message for the chat template.
      template: "chat" uses the tokenizer's chat template, "plain" the bare question; "auto" takes the chat template
        if the tokenizer has one.
      max_prompt_tokens: longer prompts are left out, and counted.
    """

    train: str
    eval: str | None = None
    prompt: str = "question"
    answer: str | None = "answer"
    system: str | None = None
    template: Literal["auto", "chat", "plain"] = "auto"
    max_prompt_tokens: int = 512

    def __post_init__(self):
        if self.max_prompt_tokens < 1:
            raise UserError(f"max_prompt_tokens={self.max_prompt_tokens}: must be at least 1")


@dataclasses.dataclass(frozen=True)
class Problem:
    """One row: ``uid`` is its number in the file, ``ids`` the tokenised prompt, ``columns`` the row itself."""

    uid: int
    ids: tuple[int, ...]
    prompt: str
    gold: str | None
    columns: Mapping[str, Any]


def locate(path: str) -> Path:
    """A path as a user writes it; ``builtin:x`` is the package's own ``assets/x``."""
    if path.startswith(BUILTIN):
        return Path(str(resources.files("grpojax") / "assets" / path.removeprefix(BUILTIN)))
    return Path(path).expanduser()


def read_rows(path: str) -> list[dict[str, Any]]:
    """The rows of a JSON lines file; a bad one raises `UserError` with file and line."""
    file = locate(path)
    if not file.is_file():
        raise UserError(f"data file {path!r} does not exist")
    rows = []
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise UserError(f"{path}: not UTF-8 at byte {e.start}") from None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as e:
            raise UserError(f"{path}:{number}: invalid JSON: {e.msg}") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: a row must be a JSON object, got {type(row).__name__}")
        rows.append(row)
    if not rows:
        raise UserError(f"{path}: no rows")
    return rows


def gold_answer(text: str) -> str:
    """The answer proper: what follows the last ``####``, or all of it."""
    return text.rsplit("####", 1)[-1].strip()


class Tokenize:
    """Questions to token ids: chat template or plain, at most one beginning-of-sequence token."""

    def __init__(self, tokenizer, config: DataConfig):
        self.tokenizer, self.system = tokenizer, config.system
        self.chat = config.template == "chat" or (config.template == "auto" and bool(tokenizer.chat_template))
        if self.chat and not tokenizer.chat_template:
            raise UserError("data.template='chat', but the tokenizer has no chat template; use 'plain'")
        if not self.chat and config.system:
            raise UserError(
                "data.system needs a chat template; put the text into the prompts or use data.template=chat"
            )

    def text(self, question: str) -> str:
        """What the model reads."""
        if not self.chat:
            return question
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": question})
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def __call__(self, question: str) -> tuple[int, ...]:
        # A template that writes its own BOS must not get the tokenizer's on top.
        ids = list(self.tokenizer.encode(self.text(question), add_special_tokens=not self.chat))
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids.count(bos) > 1 and ids[:2] == [bos, bos]:
            raise UserError(f"a prompt starts with two beginning-of-sequence tokens: {question[:60]!r}")
        return tuple(ids)


def load_problems(path: str, tokenize: Tokenize, config: DataConfig) -> tuple[list[Problem], int]:
    """The problems of a file that fit ``max_prompt_tokens``, and how many did not."""
    problems, dropped = [], 0
    for uid, row in enumerate(read_rows(path)):
        for column in (config.prompt, config.answer):
            if column is not None and not isinstance(row.get(column), str | int | float):
                raise UserError(
                    f"{path}: row {uid + 1} has no text in column {column!r}; it has {sorted(row)}"
                )
        question = str(row[config.prompt])
        ids = tokenize(question)
        if not ids:
            raise UserError(f"{path}: row {uid + 1} has an empty prompt")
        if len(ids) > config.max_prompt_tokens:
            dropped += 1
            continue
        gold = None if config.answer is None else gold_answer(str(row[config.answer]))
        problems.append(Problem(uid, ids, question, gold, row))
    if not problems:
        raise UserError(
            f"{path}: every prompt is longer than data.max_prompt_tokens={config.max_prompt_tokens}"
        )
    return problems, dropped


class Batches:
    """``batches[n]``: the problems of step n. Each pass over the data has an order of its own."""

    def __init__(self, problems: list[Problem], size: int, seed: int):
        if len(problems) < size:
            raise UserError(f"rollout.prompts={size} is more than the {len(problems)} problems of the data")
        self._problems = problems
        order = grain.MapDataset.range(len(problems)).seed(seed).shuffle().repeat()
        self._batches = order.batch(size, batch_fn=list)

    def __getitem__(self, step: int) -> list[Problem]:
        return [self._problems[i] for i in self._batches[step] or ()]


def in_order(problems: list[Problem], size: int) -> Iterator[tuple[list[Problem], int]]:
    """Batches of ``size`` once through; the last is filled up with its own problems. Yields (batch, real ones)."""
    for start in range(0, len(problems), size):
        batch = problems[start : start + size]
        real = len(batch)
        yield [batch[i % real] for i in range(size)], real


def to_prompts(problems: list[Problem], length: int) -> Prompts:
    """Right-padded prompts ``[P, length]``."""
    tokens = np.zeros((len(problems), length), np.int32)
    for row, problem in zip(tokens, problems, strict=True):
        row[: len(problem.ids)] = problem.ids
    return Prompts(
        tokens=tokens,
        lengths=np.array([len(p.ids) for p in problems], np.int32),
        uids=np.array([p.uid for p in problems], np.uint32),
        first_sample=np.zeros(len(problems), np.int32),
    )
