"""Questions with their answers, for supervised training: one that is right, or a better and a worse one."""

import contextlib
import dataclasses
import datetime
import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from grpojax.data.chats import Question, chat_in, check_text, dialog_in, messages_of, question_in
from grpojax.data.problems import (
    PARTS,
    DataConfig,
    Known,
    Source,
    canonical,
    held_out_notes,
    held_out_warnings,
    question_of,
    sources,
)
from grpojax.data.readers import open_source
from grpojax.data.texts import halved
from grpojax.data.tokenizing import Tokenize
from grpojax.host.errors import UserError, require


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnsweredConfig:
    """Where answered questions come from, and how they are tokenised.

    A row for ``grpojax sft`` has ``messages``, a chat that ends with the assistant's message, which is learned. So are
    its earlier ones since the last message of the user's. They call tools in their text, or by ``tool_calls``, which
    the chat template writes; messages of role ``tool`` between them are context. Or the row has ``prompt``, a text or a
    chat, and ``completion``. A row for ``grpojax dpo`` has the question as ``messages`` or ``prompt``, and ``chosen``
    and ``rejected``, each a text or a list with the assistant's one message. Or ``chosen`` and ``rejected`` are whole
    chats that differ only in the last message. `grpojax.data.chats` has the forms of chats. ``tools`` may have the
    tools that the prompt shows, as a list of JSON schemas. Other columns are not read. If a source has none of these
    columns, ``conversations`` is read as ``messages``, and ``question`` and ``answer`` or ``problem`` and ``solution``
    as ``prompt`` and ``completion``.

    Attributes:
      train: a path as in `grpojax.data.SourceConfig`, a source, or a list of them.
      validation: held-out rows that are evaluated during the run, as in ``train``. None evaluates nothing.
      test: held-out rows that are evaluated once, with the final weights, as in ``train``. None has no test set.
      system: system message for the chat template. Not with chats that have one of their own.
      template: "chat" uses the tokenizer's chat template, "plain" the bare question; "auto" takes the chat template
        if the tokenizer has one.
      template_options: values of variables that the chat template reads, such as ``enable_thinking: false``.
      today: the date for a chat template that writes one. None takes the day on which the run starts, and keeps it in
        the run's config.json.
      max_prompt_tokens: most tokens of a prompt.
      max_tokens: most tokens of an answer, the end-of-sequence token included.
      too_long: "drop" leaves longer ones out and counts them, "refuse" makes them an error.
      on_bad_row: "error" stops at a row that cannot be used; "skip" leaves it out, and counts and lists such rows.
    """

    train: Source | tuple[Source, ...]
    validation: Source | tuple[Source, ...] | None = None
    test: Source | tuple[Source, ...] | None = None
    system: str | None = None
    template: Literal["auto", "chat", "plain"] = "auto"
    template_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    today: datetime.date | None = None
    max_prompt_tokens: int = 512
    max_tokens: int = 512
    too_long: Literal["drop", "refuse"] = "drop"
    on_bad_row: Literal["error", "skip"] = "error"

    def __post_init__(self):
        require(self, max_prompt_tokens="[1, inf)", max_tokens="[1, inf)")
        self.questions()  # refuses what is wrong with the sources and the system message
        for name in PARTS:
            for source in sources(getattr(self, name)):
                if source.prompt is not None or source.answer is not None:
                    raise UserError(
                        f"{name}: prompt and answer do not apply here; rows have a column messages or prompt"
                    )
                if source.level is not None:
                    raise UserError(
                        f"{name}: level={source.level!r}: levels are of problems that are sampled; leave it out"
                    )

    def questions(self) -> DataConfig:
        """The settings that `grpojax.data.Tokenize` reads."""
        shared = *PARTS, "system", "template", "template_options", "today"
        same = {name: getattr(self, name) for name in shared}
        return DataConfig(**same, answer=None)


@dataclasses.dataclass(frozen=True)
class Answered:
    """A prompt with its completions, tokenised.

    Attributes:
      uid: its number in the list that it stands in.
      ids: tokens of the prompt.
      completions: tokens of each completion.
      turns: for each completion the numbers of tokens of its parts, in order: a turn of the assistant's, which is
        learned, what tools answered, which is not, the next turn, and so on.
      source: number of its source.
      content: that of a made problem, `grpojax.data.SourceConfig.content`.
    """

    uid: int
    ids: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]
    turns: tuple[tuple[int, ...], ...]
    source: int = 0
    content: str | None = None


@dataclasses.dataclass(frozen=True)
class AnsweredProblems:
    """The loaded answers.

    Attributes:
      kept: prompts with their completions.
      weights: of each source.
      dropped: rows left out for their length.
      skipped: a line for each row left out by ``on_bad_row: skip``: file, line and reason.
      fingerprint: of all rows read.
      found: a line for each source whose columns have other names than `AnsweredConfig` says.
      left_out: rows of made problems that a held-out part has.
      shared: prompts that stand word for word in a held-out part.
    """

    kept: tuple[Answered, ...]
    weights: tuple[float, ...]
    dropped: int
    skipped: tuple[str, ...]
    fingerprint: str
    found: tuple[str, ...] = ()
    left_out: int = 0
    shared: int = 0

    def notes(self, name: str, config: AnsweredConfig) -> list[str]:
        """Lines for the console: what there is, and what was left out; at most ten rows are listed."""
        answers = sum(len(entry.completions) for entry in self.kept)
        lines = [f"{name} data: {line}" for line in self.found]
        lines.append(f"{name} data: {answers} answers to {len({entry.ids for entry in self.kept})} prompts")
        lines += held_out_notes(name, self.left_out)
        if self.dropped:
            over = f"data.max_prompt_tokens={config.max_prompt_tokens} or data.max_tokens={config.max_tokens}"
            lines.append(f"{name} data: left out {self.dropped} rows over {over}")
        if self.skipped:
            lines.append(f"{name} data: left out {len(self.skipped)} bad rows")
            lines += [f"  {line}" for line in self.skipped[:10]]
        return lines

    def warnings(self, name: str) -> list[str]:
        """Warnings for the console: prompts that a held-out part has word for word."""
        return held_out_warnings(name, self.shared)


# An answer: its text, or the messages of an episode, from the assistant's first to its last.
Answer = str | Sequence[Mapping[str, Any]]


def read_answer(row: Mapping[str, Any]) -> tuple[Question, tuple[Answer, ...]]:
    """The question of a row, and its one answer.

    Example:
      >>> read_answer({"prompt": "1+1=", "completion": "2"})
      ('1+1=', ('2',))
      >>> chat = [("user", "2*3?"), ("assistant", "<call>2*3</call>"), ("tool", "6"), ("assistant", "It is 6.")]
      >>> question, (answer,) = read_answer({"messages": [{"role": r, "content": c} for r, c in chat]})
      >>> question, [message["role"] for message in answer]
      ('2*3?', ['assistant', 'tool', 'assistant'])
    """
    if "messages" not in row:
        return question_of(row, "prompt"), (_answer(row, "completion"),)
    chat = chat_in(row["messages"], "messages")
    if chat is None or len(chat) < 2:
        raise UserError(f"column 'messages' is no chat of a question and an answer, but {row['messages']!r:.60}")
    asked = max((n for n, m in enumerate(chat) if m["role"] not in ("assistant", "tool")), default=-1) + 1
    if asked == len(chat):
        raise UserError(f"column 'messages' ends with the {chat[-1]['role']}'s message; the assistant's must follow")
    question, answer = question_in(chat[:asked], "messages"), chat[asked:]
    if len(answer) == 1 and "tool_calls" not in answer[0]:
        return question, (_answer({"messages": answer}, "messages"),)
    roles = [m["role"] for m in answer]
    if "tool" in (roles[0], roles[-1]) or any(a == b == "assistant" for a, b in itertools.pairwise(roles)):
        raise UserError(
            f"column 'messages' has roles {roles!r:.80} after the question: messages of the assistant's and answers of "
            "tools must alternate, and the assistant's stand first and last"
        )
    return question, (answer,)


def read_pair(row: Mapping[str, Any]) -> tuple[Question, tuple[str, ...]]:
    r"""The question of a row, and its chosen and its rejected answer.

    Example:
      >>> read_pair({"prompt": "1+1=", "chosen": "2", "rejected": "3"})
      ('1+1=', ('2', '3'))
      >>> read_pair({"chosen": "\n\nHuman: 1+1=\n\nAssistant: 2", "rejected": "\n\nHuman: 1+1=\n\nAssistant: 3"})
      ('1+1=', ('2', '3'))
    """
    sides = [_side(row, name) for name in ("chosen", "rejected")]
    column = "messages" if "messages" in row else "prompt"
    chosen_chat, rejected_chat = (side or [] for side in sides)
    if len(chosen_chat) > 1 and len(rejected_chat) > 1:
        begin = _common(chosen_chat, rejected_chat)
        for name in {"messages", "prompt"} & set(row):
            if not _is_question(begin, row[name], name) and chat_in(row[name], name) != chosen_chat:
                raise UserError(f"chosen and rejected are chats that do not begin with the question in {name!r}")
        column = "prompt"
        row = {column: begin, "chosen": chosen_chat[-1:], "rejected": rejected_chat[-1:]}
    elif (given := dialog_in(row.get(column))) is not None and given[-1] == {"role": "assistant", "content": ""}:
        row = {**row, column: given[:-1]}
    question = question_of(row, column)
    chosen, rejected = _answer(row, "chosen"), _answer(row, "rejected")
    if chosen == rejected:
        raise UserError("has the same text as chosen and as rejected")
    return question, (chosen, rejected)


def _side(row: Mapping[str, Any], column: str) -> list[dict[str, Any]] | None:
    """The chat in a side of a pair; None where it is a text."""
    value = row.get(column)
    dialog = dialog_in(value)
    if dialog is not None:
        check_text(str(value), column)
    return chat_in(value, column) if dialog is None else dialog


def _common(chosen: Sequence[Mapping[str, Any]], rejected: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """What two chats have in common, which must be all but the last message of each."""
    begin = chosen[:-1]
    if rejected[:-1] != begin:
        n = next((i for i, (a, b) in enumerate(zip(begin, rejected[:-1], strict=False)) if a != b), len(begin))
        raise UserError(
            f"chosen and rejected are chats that differ before their last messages, at message {n + 1}; a pair has one "
            "question and two answers to it"
        )
    return begin


def _is_question(begin: Sequence[Mapping[str, Any]], given: Any, column: str) -> bool:
    """Whether a chat is the question that a row has besides, which may lack the system's message."""
    chat = dialog_in(given) or chat_in(given, column) or [{"role": "user", "content": str(given)}]
    if chat[-1] == {"role": "assistant", "content": ""}:
        chat = chat[:-1]
    asked, known = ([dict(m, content=m["content"].strip()) for m in each] for each in (chat, begin))
    return asked in (known, known[1:] if known[0]["role"] == "system" else known)


def _answer(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    chat = chat_in(value, column) if messages_of(value) is not None else None
    if chat is not None:
        if (roles := [m["role"] for m in chat]) != ["assistant"]:
            raise UserError(f"column {column!r}: expected one message of the assistant's, got roles {roles!r:.80}")
        if "tool_calls" in chat[0]:
            raise UserError(f"column {column!r}: a tool call is not read here; write it as text into the content")
        value = chat[0]["content"]
    if not isinstance(value, str):
        raise UserError(f"column {column!r} has no text for the answer, but {value!r:.60}; it has {sorted(row)}"[:400])
    if not value.strip():
        raise UserError(f"column {column!r}: the answer is empty")
    check_text(value, column)
    return halved(value)


def tools_in(row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The JSON schemas in a row's column ``tools``, a list or its JSON; empty without one.

    Raises:
      UserError: it is no list of schemas.
    """
    value = row.get("tools")
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if not isinstance(value or [], list) or not all(isinstance(tool, Mapping) for tool in value or []):
        raise UserError(f"column 'tools' is no list of JSON schemas, but {value!r:.60}")
    return value or []


# Columns by which a row of each kind is known, and what they are read as, the first first.
_KINDS = (
    {"messages": "messages"},
    {"prompt": "prompt", "completion": "completion"},
    {"conversations": "messages"},
    {"question": "prompt", "answer": "completion"},
    {"problem": "prompt", "solution": "completion"},
)
_PAIRS = ({"messages": "messages"}, {"prompt": "prompt"}, {"conversations": "messages"}, {"question": "prompt"})


def _kind_of(row: Mapping[str, Any]) -> Mapping[str, str]:
    """Which columns of a source are read as which, by its first row."""
    kinds = _PAIRS if "chosen" in row and "rejected" in row else _KINDS
    return next((kind for kind in kinds if set(kind) <= set(row)), {})


def load_answered(
    given: Source | Sequence[Source],
    tokenize: Tokenize,
    config: AnsweredConfig,
    read: Callable[[Mapping[str, Any]], tuple[Question, tuple[Answer, ...]]],
    *,
    end: int,
    group: int = 1,
    known: Known = Known(),  # noqa: B008  frozen
) -> AnsweredProblems:
    """Reads and tokenises answered questions.

    An answer's tokens are those of its text and ``end``, after the prompt's own: as the sampler would have drawn them.
    The text that the prompt already ends with, such as ``<think>``, is not learned again.

    Args:
      given: what `AnsweredConfig.train` or ``.validation`` says.
      tokenize: question to token ids.
      config: for lengths and what to do with a bad row.
      read: `read_answer` or `read_pair`.
      end: the token that ends an answer.
      group: most answers of one prompt in an entry; a prompt with more has several. Entries stand where their first
        answer stood. Pairs are entries as they are: 1.
      known: the problems of held-out parts, as in `grpojax.data.load_problems`.

    Raises:
      UserError: a source cannot be read; or a row cannot be used, with file and line.
    """
    digest = hashlib.sha256()
    kept: list[Answered] = []
    skipped: list[str] = []
    found: list[str] = []
    dropped, left_out = 0, 0
    each = sources(given)
    for number, source in enumerate(each):
        before = len(kept)
        kind: Mapping[str, str] | None = None
        for where, row in open_source(source):
            try:
                if isinstance(row, str):
                    raise UserError(row)
                digest.update(canonical(row))
                if kind is None:
                    kind = {name: to for name, to in _kind_of(row).items() if name != to}
                    if kind:
                        names = " and ".join(f"{name!r} as {to!r}" for name, to in kind.items())
                        found.append(f"{source.path}: reads the column {names}")
                question, answers = read({kind.get(name, name): value for name, value in row.items()} if kind else row)
                content = source.content(question) if isinstance(question, str) else None
                played = any(not isinstance(answer, str) for answer in answers)
                encoded = _encode(question, answers, tokenize.with_tools(tools_in(row), played=played), end)
                entry = Answered(len(kept), *encoded, source=number, content=content)
                over = _over(entry, config)
            except UserError as e:
                if config.on_bad_row == "error":
                    raise UserError(f"{where}: {e}") from None
                skipped.append(f"{where}: {e}")
                continue
            if entry.content in known.contents:
                left_out += 1
            elif not over:
                kept.append(entry)
            elif config.too_long == "drop":
                dropped += 1
            else:
                raise UserError(f"{where}: {over}")
        if len(kept) == before:
            raise UserError(
                f"{source.path}: no row can be used; {dropped} are over data.max_prompt_tokens="
                f"{config.max_prompt_tokens} or data.max_tokens={config.max_tokens}, {len(skipped)} are bad, a "
                f"held-out part has {left_out}"
            )
    weights = tuple(s.weight for s in each)
    return AnsweredProblems(
        kept=_grouped(kept, group),
        weights=weights,
        dropped=dropped,
        skipped=tuple(skipped),
        fingerprint=digest.hexdigest()[:32],
        found=tuple(found),
        left_out=left_out,
        shared=len({entry.ids for entry in kept} & known.prompts),
    )


_Lists = tuple[tuple[int, ...], ...]  # of tokens, or of numbers of tokens, for each answer


def _encode(
    question: Question, answers: Sequence[Answer], tokenize: Tokenize, end: int
) -> tuple[tuple[int, ...], _Lists, _Lists]:
    """The tokens of the question and of each answer, and the lengths of each answer's turns (`Answered`)."""
    ids = tokenize(question)
    if not ids:
        raise UserError("has an empty prompt")
    whole = [_turns(answer, ids, tokenize, end) for answer in answers]
    return (
        ids,
        tuple(tuple(itertools.chain(*turns)) for turns in whole),
        tuple(tuple(map(len, turns)) for turns in whole),
    )


def _turns(answer: Answer, ids: Sequence[int], tokenize: Tokenize, end: int) -> list[list[int]]:
    """The tokens of an answer's parts, as an episode would have them: turns of the assistant's, and between two turns
    what the chat template writes for the tools' answers."""
    messages = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    turns = list[list[int]]()
    for of_tools, group in itertools.groupby(messages, lambda m: m["role"] == "tool"):
        if of_tools:
            turns.append(tokenize.after_turn([*group], end))
            continue
        (message,) = group
        text = tokenize.answer(ids, tokenize.turn(message))
        if not text.strip():
            raise UserError("has an answer with no text besides the end of the prompt")
        turns.append([*tokenize.tokenizer.encode(text, add_special_tokens=False), end])
    return turns


def _over(entry: Answered, config: AnsweredConfig) -> str:
    """What is too long about an entry; empty if nothing is."""
    if len(entry.ids) > config.max_prompt_tokens:
        return f"the prompt has {len(entry.ids)} tokens, over data.max_prompt_tokens={config.max_prompt_tokens}"
    longest = max(map(len, entry.completions))
    return f"an answer has {longest} tokens, over data.max_tokens={config.max_tokens}" * (longest > config.max_tokens)


def _grouped(entries: Sequence[Answered], group: int) -> tuple[Answered, ...]:
    """Entries with the answers of the same prompt of the same source together, up to ``group`` in each."""
    if group == 1:
        return tuple(entries)
    whole: list[list[Answered]] = []
    open_: dict[tuple[int, tuple[int, ...]], list[Answered]] = {}
    for entry in entries:
        key = entry.source, entry.ids
        if key not in open_ or len(open_[key]) == group:
            open_[key] = []
            whole.append(open_[key])
        open_[key].append(entry)
    return tuple(
        dataclasses.replace(
            each[0],
            uid=n,
            completions=tuple(c for entry in each for c in entry.completions),
            turns=tuple(t for entry in each for t in entry.turns),
        )
        for n, each in enumerate(whole)
    )
