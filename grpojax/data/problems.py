"""Problems: what rows must have, and what is left out."""

import dataclasses
import datetime
import decimal
import functools
import hashlib
import json
import math
import pathlib
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from grpojax.data.chats import Question, question_in
from grpojax.data.columns import AUTO, Columns, cell, find, find_columns
from grpojax.data.formats import Row
from grpojax.data.golds import read_gold
from grpojax.data.readers import SourceConfig, open_source
from grpojax.data.texts import lost_backslash
from grpojax.host.errors import UserError, require

# The arguments of a reward function: no column can have their names.
TAKEN = ("prompts", "completions", "tokens", "gold")
# The parts of the data. What a later one has is no problem of an earlier one.
PARTS = ("train", "validation", "test")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """A solved problem to show before each prompt.

    Attributes:
      prompt: the question.
      completion: its solution.
    """

    prompt: str
    completion: str


Source = str | SourceConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    r"""Where problems come from, and what the model is asked.

    Attributes:
      train: a path as in `SourceConfig`, a source, or a list of them.
      validation: held-out problems that are evaluated during the run, as in ``train``. They choose rates and
        checkpoints, and an alarm watches them. None evaluates nothing.
      test: held-out problems that are evaluated once, at the end of the run and with the final weights, as in
        ``train``. None has no test set.
      prompt: column with the question: a text, or a chat whose last message is the user's (`grpojax.data.chats` has the
        forms). ``a.b`` is the column ``b`` in the column ``a``, here and in all columns below. "auto" takes
        ``question``, or finds the column if only one is possible (`grpojax.data.columns.find_columns`).
      answer: column with the reference answer; None if the rewards need none. If an answer has ``####`` (GSM8K), the
        part after the last one counts. "auto" takes ``answer``, or finds the column as for the question.
      level: column with the difficulty, a number or a name, for ``rollout.curriculum``. Rows need not have it.
      columns: the other columns that reward functions get: the function's name for it -> column. None gives all.
      system: system message for the chat template.
      examples: solved problems that are shown first, as earlier turns of the chat or as paragraphs of a plain prompt.
      instruction: the text of a prompt. The question (or a chat's last message) takes the place of ``{prompt}``, as in
        ``{prompt}\nAnswer in \boxed{}.``
      template: "chat" uses the tokenizer's chat template, "plain" the bare question; "auto" takes the chat template
        if the tokenizer has one.
      template_options: values of variables that the chat template reads, such as ``enable_thinking: false``.
      today: the date for a chat template that writes one. None takes the day on which the run starts, and keeps it in
        the run's config.json.
      max_prompt_tokens: most tokens of a prompt.
      too_long: "drop" leaves longer prompts out and counts them, "refuse" makes them an error.
      on_bad_row: "error" stops at a row that cannot be used; "skip" leaves it out, and counts and lists such rows.
    """

    train: Source | tuple[Source, ...]
    validation: Source | tuple[Source, ...] | None = None
    test: Source | tuple[Source, ...] | None = None
    prompt: str = AUTO
    answer: str | None = AUTO
    level: str = "level"
    columns: dict[str, str] | None = None
    system: str | None = None
    examples: tuple[Example, ...] = ()
    instruction: str = "{prompt}"
    template: Literal["auto", "chat", "plain"] = "auto"
    template_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    today: datetime.date | None = None
    max_prompt_tokens: int = 512
    too_long: Literal["drop", "refuse"] = "drop"
    on_bad_row: Literal["error", "skip"] = "error"

    def __post_init__(self):
        require(self, max_prompt_tokens="[1, inf)")
        if self.instruction.count("{prompt}") != 1:
            raise UserError(f"instruction={self.instruction!r}: must have {{prompt}} in it once")
        texts = {"instruction": self.instruction, "system": self.system or ""}
        for n, example in enumerate(self.examples):
            texts |= {f"examples.{n}.prompt": example.prompt, f"examples.{n}.completion": example.completion}
        check_recipe(**texts)
        if self.columns and (bad := sorted(set(self.columns) & set(TAKEN))):
            raise UserError(f"columns.{bad[0]}: reward functions have an argument of that name; take another")
        for name in PARTS:
            given = getattr(self, name)
            if given == ():
                raise UserError(f"{name}: the list of sources is empty")
            each = sources(given)
            if name != "train" and any(not s.path for s in each):
                raise UserError(f"{name}: the name of a source is empty")
            if name != "train" and any(s.weight != 1 for s in each):
                raise UserError(f"{name}: every problem is evaluated once; weights are for train")
            if name != "train" and any(s.level is not None for s in each):
                raise UserError(f"{name}: every problem is evaluated once; levels are for train")


def check_recipe(**texts: str) -> None:
    """Raises `UserError` for a text of a recipe in which a LaTeX command lost its backslash to YAML's double quotes."""
    for name, text in texts.items():
        if (wrong := lost_backslash(text)) is not None:
            raise UserError(f"{name} {wrong}, or put the text into single quotes")


def sources(given: Source | Sequence[Source] | None) -> list[SourceConfig]:
    """The value of `DataConfig.train`, in any of its forms, as a list of sources."""
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
    content: str | None = None  # of a made problem: `SourceConfig.content`


class Loaded(Protocol):
    """A problem, or a prompt with answers."""

    @property
    def ids(self) -> tuple[int, ...]: ...

    @property
    def content(self) -> str | None: ...


@dataclasses.dataclass(frozen=True)
class Known:
    """The problems of the parts that are held out from another part.

    Attributes:
      prompts: their token ids.
      contents: what those of them ask that are made (`SourceConfig.content`).
    """

    prompts: frozenset[tuple[int, ...]] = frozenset()
    contents: frozenset[str] = frozenset()

    def and_those_of(self, loaded: Iterable[Loaded]) -> "Known":
        """These, and the problems of another part."""
        each = list(loaded)
        contents = {x.content for x in each if x.content is not None}
        return Known(self.prompts | {x.ids for x in each}, self.contents | contents)


def held_out_notes(part: str, left_out: int) -> list[str]:
    """A line for the console where made problems of a part were left out, since a held-out part has them."""
    rest = " or ".join(f"data.{name}" for name in PARTS[PARTS.index(part) + 1 :])
    return [f"{left_out} problems of data.{part} are left out, because {rest} has them"] if left_out else []


def held_out_warnings(part: str, shared: int) -> list[str]:
    """A warning where rows of a part are word for word in a held-out part, and how to mend that."""
    rest = " or ".join(f"data.{name}" for name in PARTS[PARTS.index(part) + 1 :])
    why = "was trained on" if part == "train" else "has picked the checkpoint"
    warning = (
        f"{shared} problems of data.{part} are word for word in {rest} too, whose figures are then of what {why}: take "
        "them out of one of the files, or cut a source by rows: [start, stop]"
    )
    return [warning] if shared else []


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
      found: a line for each source whose columns nobody named and that are not ``question`` and ``answer``.
      left_out: made problems that a held-out part has.
      shared: problems that stand word for word in a held-out part.
    """

    kept: tuple[Problem, ...]
    weights: tuple[float, ...]
    dropped: int
    skipped: tuple[str, ...]
    fingerprint: str
    tokenize: Callable[..., tuple[int, ...]] = dataclasses.field(repr=False, compare=False)
    found: tuple[str, ...] = ()
    left_out: int = 0
    shared: int = 0

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
        """Lines for the console: columns that were found, and what was left out; at most ten rows are listed."""
        lines = [f"{name} data: {line}" for line in self.found]
        lines += held_out_notes(name, self.left_out)
        if self.dropped:
            over = f"data.max_prompt_tokens={config.max_prompt_tokens}"
            lines.append(f"{name} data: left out {self.dropped} prompts over {over}")
        if self.skipped:
            lines.append(f"{name} data: left out {len(self.skipped)} bad rows")
            lines += [f"  {line}" for line in self.skipped[:10]]
        return lines

    def warnings(self, name: str) -> list[str]:
        """Warnings for the console: problems that a held-out part has word for word."""
        return held_out_warnings(name, self.shared)


def open_rows(source: SourceConfig, prompt: str, answer: str | None) -> Iterator[tuple[str, Row, Columns]]:
    """`open_source`, each row with the columns of the source."""
    columns: Columns | None = None
    for where, row in open_source(source):
        if columns is None and isinstance(row, dict):
            columns = find_columns(row, source.prompt or prompt, source.answer or answer)
        yield where, row, columns or Columns("question", "answer")


def numbered(given: Source | Sequence[Source], prompt: str = AUTO) -> Iterator[tuple[int, Row, Question | None]]:
    """The uid of each row as `load_problems` numbers them, the row, and its question; None where it has none."""
    uid = 0
    for source in sources(given):
        for _, row, columns in open_rows(source, prompt, None):
            try:
                question = question_of(row, columns.prompt, "data.prompt") if isinstance(row, dict) else None
            except UserError:  # a bad row has no samples
                question = None
            yield uid, row, question
            uid += 1


def read_questions(config: DataConfig) -> dict[int, Question]:
    """The questions of ``config.train`` by uid, as `load_problems` numbers them; rows without one are left out."""
    return {uid: question for uid, _, question in numbered(config.train, config.prompt) if question is not None}


def load_problems(
    given: Source | Sequence[Source],
    tokenize: Callable[[Question], tuple[int, ...]],
    config: DataConfig,
    check_gold: Callable[[str | None], None] | None = None,
    *,
    compared: bool = True,
    known: Known = Known(),  # noqa: B008  frozen
    of_row: Callable[[Mapping[str, Any]], Callable[[Question], tuple[int, ...]]] | None = None,
) -> Problems:
    """Reads and tokenises the problems of one or more sources.

    Args:
      given: what `DataConfig.train` or ``.validation`` says.
      tokenize: question to token ids, such as a `Tokenize`.
      config: for columns, lengths and what to do with a bad row.
      check_gold: raises `UserError` for a reference answer that no reward can be computed from.
      compared: whether reference answers are compared with those of a model (`grpojax.data.golds.read_gold`), and so
        must be short ones.
      known: the problems of held-out parts. Generated problems that are among them are left out here; rows of files
        that are word for word the same are counted.
      of_row: gives what takes the place of ``tokenize`` for a row with these columns (`Tokenize.of_row`).

    Raises:
      UserError: a source cannot be read; or a row cannot be used, with file and line.
    """
    if check_gold is not None and config.answer is None:
        check_gold(None)
    digest = hashlib.sha256()
    kept: list[Problem] = []
    skipped: list[str] = []
    found: list[str] = []
    dropped, uid, left_out = 0, 0, 0
    each = sources(given)
    for number, source in enumerate(each):
        before, left_before = len(kept), left_out
        first, shortest = uid, math.inf
        for where, row, columns in open_rows(source, config.prompt, config.answer):
            try:
                digest.update(canonical(row))
                if isinstance(row, str):
                    raise UserError(row)
                gold_of = functools.partial(_gold, check_gold=check_gold, compared=compared and not source.generated)
                problem = _problem(
                    uid,
                    row,
                    columns,
                    gold_of=gold_of,
                    tokenize_of=(lambda _: tokenize) if of_row is None else of_row,
                    config=config,
                    source=source,
                    number=number,
                )
            except UserError as e:
                if config.on_bad_row == "error":
                    raise UserError(f"{where}: {e}") from None
                skipped.append(f"{where}: {e}")
            else:
                if problem.content in known.contents:
                    left_out += 1
                elif len(problem.ids) <= config.max_prompt_tokens:
                    kept.append(problem)
                elif config.too_long == "drop":
                    dropped, shortest = dropped + 1, min(shortest, len(problem.ids))
                else:
                    raise UserError(
                        f"{where}: the prompt has {len(problem.ids)} tokens, over "
                        f"data.max_prompt_tokens={config.max_prompt_tokens}"
                    )
            uid += 1
        if uid == first:
            raise UserError(f"{source.path}: no rows" + (f" within rows={list(source.rows)}" if source.rows else ""))
        asked = source.prompt or config.prompt, source.answer or config.answer
        if AUTO in asked and not set(columns.names) <= {*asked, "question", "answer"}:
            found.append(f"{source.path}: {columns}; data.prompt and data.answer name others")
        if len(kept) == before:
            why = (
                f"every prompt is longer than data.max_prompt_tokens={config.max_prompt_tokens}; "
                f"the shortest, with its template and tools, has {shortest} tokens"
            )
            if left_out > left_before:
                why = "a held-out part has all its problems; give them another seed or part"
            elif skipped:
                why = f"no row can be used; the first left out is {skipped[0]}"
            raise UserError(f"{source.path}: {why}")
    weights = tuple(s.weight for s in each)
    return Problems(
        kept=tuple(kept),
        weights=weights,
        dropped=dropped,
        skipped=tuple(skipped),
        fingerprint=digest.hexdigest()[:32],
        tokenize=tokenize,
        found=tuple(found),
        left_out=left_out,
        shared=sum(problem.ids in known.prompts for problem in kept),
    )


def canonical(row: Row) -> bytes:
    """The bytes that a row is known by, whatever the order of its columns: the same in every process.

    Raises:
      UserError: it holds something whose bytes nobody can know.

    >>> canonical({"b": {3, 1}, "a": datetime.date(2024, 2, 29)})
    b'{"a": "2024-02-29", "b": [1, 3]}\\n'
    """
    try:
        return json.dumps(row, sort_keys=True, default=_plain).encode() + b"\n"
    except (RecursionError, TypeError, ValueError, OverflowError) as e:  # brackets a thousand deep; keys of many types
        raise UserError(f"a row that cannot be handled: {e}") from None


def _plain(value: Any) -> Any:
    """What JSON has no form for, as what it has one for. Never `repr`, which may hold an address or a set's order."""
    if isinstance(value, datetime.date | datetime.time):  # dates with a time are dates too
        return value.isoformat()
    if isinstance(value, datetime.timedelta | decimal.Decimal | uuid.UUID | pathlib.PurePath):
        return str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return {"bytes": hashlib.sha256(value).hexdigest()}
    if isinstance(value, set | frozenset):
        return sorted(value, key=canonical)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist() if value.dtype == object else {"array": [str(value.dtype), value.shape], **_bytes(value)}
    if callable(getattr(value, "fingerprint", None)):
        return value.fingerprint()
    if all(hasattr(value, name) for name in ("mode", "size", "tobytes")):  # an image of PIL
        return {"image": [value.mode, list(value.size)], **_bytes(value)}
    raise UserError(f"a row that cannot be handled: it holds a {type(value).__module__}.{type(value).__qualname__}")


def _bytes(value: Any) -> dict[str, Any]:
    return {"bytes": hashlib.sha256(value.tobytes()).hexdigest()}


def _gold(
    row: Mapping[str, Any], columns: Columns, *, check_gold: Callable[[str | None], None] | None, compared: bool
) -> str | None:
    """The reference answer of a row; None where no column has one."""
    if columns.answer is None:
        return None
    gold = read_gold(cell(row, columns.answer, "data.answer"), columns.answer, compared=compared, boxed=columns.boxed)
    if check_gold is not None:
        check_gold(gold)
    return gold


def _problem(
    uid: int,
    row: Mapping[str, Any],
    columns: Columns,
    *,
    gold_of: Callable[[Mapping[str, Any], Columns], str | None],
    tokenize_of: Callable[[Mapping[str, Any]], Callable[[Question], tuple[int, ...]]],
    config: DataConfig,
    source: SourceConfig,
    number: int,
) -> Problem:
    question = question_of(row, columns.prompt, "data.prompt")
    prompt = question if isinstance(question, str) else question[-1]["content"]
    if not prompt.strip():
        raise UserError("has an empty prompt")
    gold = gold_of(row, columns)
    if config.columns is None:
        if bad := sorted(set(row) & set(TAKEN)):
            raise UserError(
                f"column {bad[0]!r} has the name of a reward function's argument; "
                "list the columns that rewards need in data.columns"
            )
        given = row
    else:
        given = {name: cell(row, column, "data.columns") for name, column in config.columns.items()}
    ids = tokenize_of(given)(question)
    if not ids:
        raise UserError("has an empty prompt")
    chat = None if isinstance(question, str) else question
    level = _level(find(row, config.level) if source.level is None else source.level)
    return Problem(uid, ids, prompt, gold, given, number, chat, level, source.content(prompt))


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


def question_of(row: Mapping[str, Any], column: str, wanted: str = "the question") -> Question:
    """The question in a column (`question_in`); raises `UserError`, which says what is ``wanted``, without one."""
    return question_in(cell(row, column, wanted), column)
