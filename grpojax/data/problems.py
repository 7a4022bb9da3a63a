"""Problems: what rows must have, and what is left out."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from grpojax.data.formats import Row
from grpojax.data.readers import SourceConfig, open_source
from grpojax.host.errors import UserError, require

# A question as text, or as the messages of a chat so far: [{"role": "user", "content": "..."}].
Question = str | Sequence[Mapping[str, str]]

# The arguments of a reward function: no column can have their names.
TAKEN = ("prompts", "completions", "tokens", "gold")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """A solved problem to show before each prompt."""

    prompt: str
    completion: str


Source = str | SourceConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    r"""Where problems come from, and what the model is asked.

    Attributes:
      train: a path as in `SourceConfig`, a source, or a list of them.
      eval: the same, for evaluation; None evaluates nothing.
      prompt: column with the question: a text, or a chat so far as a list of ``{"role", "content"}`` messages, the
        last of them the user's.
      answer: column with the reference answer; None if the rewards need none. Of an answer with ``####`` (GSM8K) the
        part after the last one counts.
      level: column with the difficulty, a number or a name, for ``rollout.curriculum``; rows need not have it.
      columns: what reward functions get of the other columns: name for the function -> column. None gives all.
      system: system message for the chat template.
      examples: solved problems shown first: earlier turns of the chat, or paragraphs before a plain prompt.
      instruction: what to ask, with ``{prompt}`` where the question (a chat's last message) goes, as in
        ``{prompt}\nAnswer in \boxed{}.``
      template: "chat" uses the tokenizer's chat template, "plain" the bare question; "auto" takes the chat template
        if the tokenizer has one.
      max_prompt_tokens: most tokens of a prompt.
      too_long: "drop" leaves longer prompts out and counts them, "refuse" makes them an error.
      on_bad_row: "error" stops at a row that cannot be used, "skip" leaves it out, counts and lists it.
    """

    train: Source | tuple[Source, ...]
    eval: Source | tuple[Source, ...] | None = None
    prompt: str = "question"
    answer: str | None = "answer"
    level: str = "level"
    columns: dict[str, str] | None = None
    system: str | None = None
    examples: tuple[Example, ...] = ()
    instruction: str = "{prompt}"
    template: Literal["auto", "chat", "plain"] = "auto"
    max_prompt_tokens: int = 512
    too_long: Literal["drop", "refuse"] = "drop"
    on_bad_row: Literal["error", "skip"] = "error"

    def __post_init__(self):
        require(self, max_prompt_tokens="[1, inf)")
        if self.instruction.count("{prompt}") != 1:
            raise UserError(f"instruction={self.instruction!r}: must have {{prompt}} in it once")
        if self.columns and (bad := sorted(set(self.columns) & set(TAKEN))):
            raise UserError(f"columns.{bad[0]}: reward functions have an argument of that name; take another")
        for name in ("train", "eval"):
            given = getattr(self, name)
            if given == ():
                raise UserError(f"{name}: the list of sources is empty")
            each = sources(given)
            if name == "eval" and any(not s.path for s in each):
                raise UserError("eval: the name of a source is empty")
            if name == "eval" and any(s.weight != 1 for s in each):
                raise UserError("eval: every problem is evaluated once; weights are for train")
            if name == "eval" and any(s.level is not None for s in each):
                raise UserError("eval: every problem is evaluated once; levels are for train")


def sources(given: Source | Sequence[Source] | None) -> list[SourceConfig]:
    """What `DataConfig.train` may be, as a list of sources."""
    if given is None:
        return []
    each = [given] if isinstance(given, str | SourceConfig) else list(given)
    return [SourceConfig(path=s) if isinstance(s, str) else s for s in each]


@dataclasses.dataclass(frozen=True)
class Problem:
    """One row: ``uid`` is its number in all that was read, ``ids`` the tokenised prompt, ``columns`` for rewards.

    ``prompt`` is the question as text; of a chat, its last message; ``chat`` is all of it, None where there is none.
    """

    uid: int
    ids: tuple[int, ...]
    prompt: str
    gold: str | None
    columns: Mapping[str, Any]
    source: int = 0
    chat: Question | None = None
    level: str | None = None


@dataclasses.dataclass(frozen=True)
class Problems(Sequence[Problem]):
    """What was loaded.

    Attributes:
      kept: the problems, in the order they stand in the sources.
      weights: of each source.
      dropped: prompts left out for their length.
      skipped: a line for each row left out by ``on_bad_row: skip``: file, line and reason.
      fingerprint: of all rows read, whatever their file is called or how it is compressed.
      tokenize: what made their ids.
    """

    kept: tuple[Problem, ...]
    weights: tuple[float, ...]
    dropped: int
    skipped: tuple[str, ...]
    fingerprint: str
    tokenize: Callable[..., tuple[int, ...]] = dataclasses.field(repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, i: Any) -> Any:
        return self.kept[i]

    def shown_after(self, examples: Sequence[Example], problem: Problem) -> tuple[int, ...]:
        """The ids of a problem's prompt with solved ones before it, after those of the config.

        Raises `UserError` where the tokenizer's chat template refuses them.
        """
        return self.tokenize(problem.chat or problem.prompt, examples)

    def notes(self, name: str, config: DataConfig) -> list[str]:
        """Lines for the console on what was left out; at most ten rows are listed."""
        lines = []
        if self.dropped:
            over = f"data.max_prompt_tokens={config.max_prompt_tokens}"
            lines.append(f"{name} data: left out {self.dropped} prompts over {over}")
        if self.skipped:
            lines.append(f"{name} data: left out {len(self.skipped)} bad rows")
            lines += [f"  {line}" for line in self.skipped[:10]]
        return lines


def read_rows(path: str) -> list[dict[str, Any]]:
    """The rows of a source; a bad one raises `UserError` with file and line."""
    rows = []
    for where, row in open_source(SourceConfig(path=path)):
        if isinstance(row, str):
            raise UserError(f"{where}: {row}")
        rows.append(row)
    if not rows:
        raise UserError(f"{path}: no rows")
    return rows


def read_questions(config: DataConfig) -> dict[int, Question]:
    """The questions of ``config.train`` by uid, as `load_problems` numbers them; rows without one are left out."""
    questions: dict[int, Question] = {}
    uid = 0
    for source in sources(config.train):
        for _, row in open_source(source):
            try:
                questions[uid] = question_of(row if isinstance(row, dict) else {}, source.prompt or config.prompt)
            except UserError:  # a bad row has no samples
                questions.pop(uid, None)
            uid += 1
    return questions


def gold_answer(text: str) -> str:
    """The answer proper: what follows the last ``####``, or all of it."""
    return text.rsplit("####", 1)[-1].strip()


def load_problems(
    given: Source | Sequence[Source],
    tokenize: Callable[[Question], tuple[int, ...]],
    config: DataConfig,
    check_gold: Callable[[str | None], None] | None = None,
) -> Problems:
    """Reads and tokenises the problems of one or more sources.

    Args:
      given: what `DataConfig.train` or ``.eval`` says.
      tokenize: question to token ids, such as a `Tokenize`.
      config: for columns, lengths and what to do with a bad row.
      check_gold: raises `UserError` for a reference answer that no reward can be computed from.

    Raises:
      UserError: a source cannot be read; or a row cannot be used, with file and line.
    """
    if check_gold is not None and config.answer is None:
        check_gold(None)
    digest = hashlib.sha256()
    kept: list[Problem] = []
    skipped: list[str] = []
    dropped, uid = 0, 0
    each = sources(given)
    for number, source in enumerate(each):
        before = len(kept)
        first = uid
        for where, row in open_source(source):
            try:
                digest.update(canonical(row))
                problem = _problem(uid, row, tokenize, config, source, number, check_gold)
            except UserError as e:
                if config.on_bad_row == "error":
                    raise UserError(f"{where}: {e}") from None
                skipped.append(f"{where}: {e}")
            else:
                if len(problem.ids) <= config.max_prompt_tokens:
                    kept.append(problem)
                elif config.too_long == "drop":
                    dropped += 1
                else:
                    raise UserError(
                        f"{where}: the prompt has {len(problem.ids)} tokens, over "
                        f"data.max_prompt_tokens={config.max_prompt_tokens}"
                    )
            uid += 1
        if uid == first:
            raise UserError(f"{source.path}: no rows")
        if len(kept) == before:
            why = f"every prompt is longer than data.max_prompt_tokens={config.max_prompt_tokens}"
            if skipped:
                why = f"no row can be used; the first left out is {skipped[0]}"
            raise UserError(f"{source.path}: {why}")
    weights = tuple(s.weight for s in each)
    return Problems(tuple(kept), weights, dropped, tuple(skipped), digest.hexdigest()[:32], tokenize)


def canonical(row: Row) -> bytes:
    """The bytes that a row is told by, whatever the order of its columns."""
    try:
        return json.dumps(row, sort_keys=True, default=repr).encode() + b"\n"
    except (RecursionError, TypeError, ValueError) as e:  # brackets a thousand deep; keys of several types
        raise UserError(f"a row that cannot be handled: {e}") from None


def _problem(
    uid: int,
    row: Row,
    tokenize: Callable[[Question], tuple[int, ...]],
    config: DataConfig,
    source: SourceConfig,
    number: int,
    check_gold: Callable[[str | None], None] | None,
) -> Problem:
    if isinstance(row, str):
        raise UserError(row)
    question = question_of(row, source.prompt or config.prompt)
    prompt = question if isinstance(question, str) else question[-1]["content"]
    if not prompt.strip():
        raise UserError("has an empty prompt")
    gold = None
    if config.answer is not None:
        gold = gold_answer(str(_cell(row, source.answer or config.answer, "answer")))
        if not gold:
            raise UserError("has an empty answer")
        if check_gold is not None:
            check_gold(gold)
    if config.columns is None:
        if bad := sorted(set(row) & set(TAKEN)):
            raise UserError(
                f"column {bad[0]!r} has the name of a reward function's argument; "
                "list the columns that rewards need in data.columns"
            )
        columns = row
    else:
        if lacking := sorted(set(config.columns.values()) - set(row)):
            raise UserError(f"has no column {lacking[0]!r}; it has {sorted(map(str, row))}"[:400])
        columns = {name: row[column] for name, column in config.columns.items()}
    ids = tokenize(question)
    if not ids:
        raise UserError("has an empty prompt")
    chat = None if isinstance(question, str) else question
    level = _level(row.get(config.level) if source.level is None else source.level)
    return Problem(uid, ids, prompt, gold, columns, number, chat, level)


def _level(value: Any) -> str | None:
    """A level as its name; None for what is neither a number nor a name.

    Example:
      >>> _level(2), _level(2.0), _level("Level 5"), _level(True), _level("")
      ('2', '2', 'Level 5', None, None)
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if isinstance(value, float):
        return f"{value:g}" if math.isfinite(value) else None
    return str(value).strip() or None


def question_of(row: Mapping[str, Any], column: str) -> Question:
    """The question in a column, a text or a chat that ends with the user; raises `UserError` where it is neither."""
    value = row.get(column)
    if not isinstance(value, list | tuple):
        text = _cell(row, column, "question")
        if not isinstance(text, str):
            raise UserError(f"column {column!r} is no text but {text!r:.60}")
        return text
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UserError(f"column {column!r} has {message!r:.60}, no message with a role and a content")
        _cell(message, "content", f"message in {column!r}")
        used = {name for name, part in message.items() if part is not None}
        if used != {"role", "content"} or not isinstance(message["content"], str):
            raise UserError(f"column {column!r} has a message of more than role and text: {message!r:.60}")
    if not value or value[-1]["role"] != "user":
        raise UserError(f"column {column!r} is a list of messages that does not end with the user's")
    return [{"role": m["role"], "content": m["content"]} for m in value]


def _cell(row: Mapping[str, Any], column: str, what: str) -> str | int | float:
    if column not in row:
        raise UserError(f"has no column {column!r} for the {what}; it has {sorted(map(str, row))}"[:400])
    value = row[column]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(f"has no text in column {column!r}, but {value!r:.60}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"has no text in column {column!r}, but {value}")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UserError(f"column {column!r} is no valid Unicode") from None
    return value
