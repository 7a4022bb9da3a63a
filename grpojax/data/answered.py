"""Questions with their answers, for supervised training: one that is right, or a better and a worse one."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from grpojax.data.problems import DataConfig, Question, Source, canonical, question_of, sources
from grpojax.data.readers import open_source
from grpojax.data.tokenizing import Tokenize
from grpojax.host.errors import UserError, require


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnsweredConfig:
    """Where answered questions come from, and how they are tokenised.

    A row has ``messages``, a chat whose last message is the assistant's and is what is learned; or ``prompt``, a text
    or a chat so far, with ``completion``. A pair has the question as ``messages`` or ``prompt``, and ``chosen`` and
    ``rejected``, each a text or a list with the assistant's one message. Other columns are not read.

    Attributes:
      train: a path as in `grpojax.data.SourceConfig`, a source, or a list of them.
      eval: the same, held out; None evaluates nothing.
      system: system message for the chat template; a chat that has its own is refused with it.
      template: as in `grpojax.data.DataConfig`.
      max_prompt_tokens: most tokens of a prompt.
      max_tokens: most tokens of an answer, the end-of-sequence token included.
      too_long: "drop" leaves longer ones out and counts them, "refuse" makes them an error.
      on_bad_row: "error" stops at a row that cannot be used, "skip" leaves it out, counts and lists it.
    """

    train: Source | tuple[Source, ...]
    eval: Source | tuple[Source, ...] | None = None
    system: str | None = None
    template: Literal["auto", "chat", "plain"] = "auto"
    max_prompt_tokens: int = 512
    max_tokens: int = 512
    too_long: Literal["drop", "refuse"] = "drop"
    on_bad_row: Literal["error", "skip"] = "error"

    def __post_init__(self):
        require(self, max_prompt_tokens="[1, inf)", max_tokens="[1, inf)")
        self.questions()  # refuses what is wrong with the sources
        for name in ("train", "eval"):
            for source in sources(getattr(self, name)):
                if source.prompt is not None or source.answer is not None:
                    raise UserError(f"{name}: prompt and answer name no columns here; rows have messages, or prompt")
                if source.level is not None:
                    raise UserError(
                        f"{name}: level={source.level!r}: levels are of problems that are sampled; leave it out"
                    )

    def questions(self) -> DataConfig:
        """What `grpojax.data.Tokenize` reads."""
        return DataConfig(train=self.train, eval=self.eval, system=self.system, template=self.template, answer=None)


@dataclasses.dataclass(frozen=True)
class Answered:
    """A prompt with its completions, tokenised; ``uid`` is its number in the list that it stands in."""

    uid: int
    ids: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]
    source: int = 0


@dataclasses.dataclass(frozen=True)
class Answers:
    """What was loaded.

    Attributes:
      kept: prompts with their completions.
      weights: of each source.
      dropped: rows left out for their length.
      skipped: a line for each row left out by ``on_bad_row: skip``: file, line and reason.
      fingerprint: of all rows read.
    """

    kept: tuple[Answered, ...]
    weights: tuple[float, ...]
    dropped: int
    skipped: tuple[str, ...]
    fingerprint: str

    def notes(self, name: str, config: AnsweredConfig) -> list[str]:
        """Lines for the console: what there is, and what was left out; at most ten rows are listed."""
        answers = sum(len(entry.completions) for entry in self.kept)
        lines = [f"{name} data: {answers} answers to {len({entry.ids for entry in self.kept})} prompts"]
        if self.dropped:
            over = f"data.max_prompt_tokens={config.max_prompt_tokens} or data.max_tokens={config.max_tokens}"
            lines.append(f"{name} data: left out {self.dropped} rows over {over}")
        if self.skipped:
            lines.append(f"{name} data: left out {len(self.skipped)} bad rows")
            lines += [f"  {line}" for line in self.skipped[:10]]
        return lines


def read_answer(row: Mapping[str, Any]) -> tuple[Question, tuple[str, ...]]:
    """The question of a row, and its one answer.

    Example:
      >>> read_answer({"prompt": "1+1=", "completion": "2"})
      ('1+1=', ('2',))
    """
    if "messages" not in row:
        return question_of(row, "prompt"), (_answer(row, "completion"),)
    chat = row["messages"]
    if not isinstance(chat, list | tuple) or len(chat) < 2:
        raise UserError(f"column 'messages' is no chat of a question and an answer, but {chat!r:.60}")
    return _question(chat[:-1]), (_answer({"messages": list(chat[-1:])}, "messages"),)


def read_pair(row: Mapping[str, Any]) -> tuple[Question, tuple[str, ...]]:
    """The question of a row, and its chosen and its rejected answer.

    Example:
      >>> read_pair({"prompt": "1+1=", "chosen": "2", "rejected": "3"})
      ('1+1=', ('2', '3'))
    """
    question = _question(row["messages"]) if "messages" in row else question_of(row, "prompt")
    chosen, rejected = _answer(row, "chosen"), _answer(row, "rejected")
    if chosen == rejected:
        raise UserError("has the same text as chosen and as rejected")
    return question, (chosen, rejected)


def _question(chat: Any) -> Question:
    """A chat that is one question is a text, which needs no chat template."""
    question = question_of({"messages": chat}, "messages")
    return question[0]["content"] if len(question) == 1 and not isinstance(question, str) else question


def _answer(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    if isinstance(value, list | tuple):
        roles = [m.get("role") if isinstance(m, Mapping) else None for m in value]
        if roles != ["assistant"]:
            raise UserError(f"column {column!r}: expected one message of the assistant's, got roles {roles!r:.80}")
        used = {name for name, part in value[0].items() if part is not None}
        value = value[0]["content"] if used == {"role", "content"} else value[0]
    if not isinstance(value, str):
        raise UserError(f"column {column!r} has no text for the answer, but {value!r:.60}; it has {sorted(row)}"[:400])
    if not value.strip():
        raise UserError(f"column {column!r}: the answer is empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(f"column {column!r} is no valid Unicode") from None
    return value


def load_answered(
    given: Source | Sequence[Source],
    tokenize: Tokenize,
    config: AnsweredConfig,
    read: Callable[[Mapping[str, Any]], tuple[Question, tuple[str, ...]]],
    *,
    end: int,
    group: int = 1,
) -> Answers:
    """Reads and tokenises answered questions.

    An answer's tokens are those of its text and ``end``, after the prompt's own: as the sampler would have drawn them.

    Args:
      given: what `AnsweredConfig.train` or ``.eval`` says.
      tokenize: question to token ids.
      config: for lengths and what to do with a bad row.
      read: `read_answer` or `read_pair`.
      end: the token that ends an answer.
      group: most answers of one prompt in an entry; a prompt with more has several. Entries stand where their first
        answer stood. Pairs are entries as they are: 1.

    Raises:
      UserError: a source cannot be read; or a row cannot be used, with file and line.
    """
    digest = hashlib.sha256()
    kept: list[Answered] = []
    skipped: list[str] = []
    dropped = 0
    each = sources(given)
    for number, source in enumerate(each):
        before = len(kept)
        for where, row in open_source(source):
            try:
                if isinstance(row, str):
                    raise UserError(row)
                digest.update(canonical(row))
                question, answers = read(row)
                entry = Answered(len(kept), *_encode(question, answers, tokenize, end), number)
                over = _over(entry, config)
            except UserError as e:
                if config.on_bad_row == "error":
                    raise UserError(f"{where}: {e}") from None
                skipped.append(f"{where}: {e}")
                continue
            if not over:
                kept.append(entry)
            elif config.too_long == "drop":
                dropped += 1
            else:
                raise UserError(f"{where}: {over}")
        if len(kept) == before:
            raise UserError(
                f"{source.path}: no row can be used; {dropped} are over data.max_prompt_tokens="
                f"{config.max_prompt_tokens} or data.max_tokens={config.max_tokens}, {len(skipped)} are bad"
            )
    weights = tuple(s.weight for s in each)
    return Answers(_grouped(kept, group), weights, dropped, tuple(skipped), digest.hexdigest()[:32])


def _encode(
    question: Question, answers: Sequence[str], tokenize: Tokenize, end: int
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    ids = tokenize(question)
    if not ids:
        raise UserError("has an empty prompt")
    encode = tokenize.tokenizer.encode
    return ids, tuple((*encode(text, add_special_tokens=False), end) for text in answers)


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
    merged = [(each[0], tuple(c for entry in each for c in entry.completions)) for each in whole]
    return tuple(Answered(n, first.ids, answers, first.source) for n, (first, answers) in enumerate(merged))
