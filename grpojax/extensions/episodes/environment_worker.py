"""What a worker of the environments does: it holds instances, resets them, and calls their tools."""

import contextlib
import dataclasses
import functools
import inspect
import json
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from grpojax.extensions.episodes.environment_types import Episode
from grpojax.host import console
from grpojax.rewards import sandbox

# Methods of a class that are no tools; and what an instance may have besides, which the guide explains.
NO_TOOLS = ("reset", "get_reward")
LONGEST_ERROR = 2000  # characters of an exception's text
CUT = "\n[cut: the answer was longer]"


class InstanceRecipe(NamedTuple):
    """How an instance is made: import path of its class, its options, and import paths of functions."""

    path: str | None
    options: Mapping[str, Any]
    tools: tuple[str, ...]


class Asked(NamedTuple):
    """A call with arguments that fit its schema."""

    name: str
    arguments: Mapping[str, Any]


class ToolAnswer(NamedTuple):
    """What a call returned, as text, and whether its tool raised."""

    text: str
    failed: bool


class PlayedTurn(NamedTuple):
    """What a turn came to.

    Attributes:
      answers: of each call.
      done: whether the instance has ended the episode.
      invalid: why the episode does not count; None if it does.
      detail: what to show of that; else the beginning of what its tools printed.
    """

    answers: tuple[ToolAnswer, ...] = ()
    done: bool = False
    invalid: str | None = None
    detail: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class History:
    """What it takes to make an instance anew.

    Attributes:
      made: how.
      row: the columns that ``reset`` gets.
      observed: what ``reset`` returned, None before it was called.
      turns: the calls of earlier turns, with their answers.
      kept: what the instance keeps between calls. Nothing: then a new one is as good. "again": what the same calls
        bring about again. Or "unknown": then only a new one after its ``reset`` can be made.
    """

    made: InstanceRecipe
    row: Mapping[str, Any]
    observed: tuple[Any] | None = None
    turns: tuple[tuple[tuple[Asked, ...], tuple[ToolAnswer, ...]], ...] = ()
    kept: Literal["nothing", "again", "unknown"] = "unknown"


_instances: dict[Episode, Any] = {}


class _Stateless:
    """Stands for a class where there are only functions."""

    def reset(self) -> None:
        pass


def make(made: InstanceRecipe) -> Any:
    """A new instance. Raises whatever its class does."""
    return _Stateless() if made.path is None else sandbox.call(sandbox.imported(made.path), **made.options)


def tools_of(made: InstanceRecipe, instance: Any) -> list[Callable[..., Any]]:
    """The functions and methods that a policy may call. Properties are not read, as that may do anything."""
    names = [name for name in dir(instance) if not name.startswith("_") and name not in NO_TOOLS]
    read = property | functools.cached_property
    plain = [name for name in names if not isinstance(inspect.getattr_static(instance, name, None), read)]
    members = [getattr(instance, name, None) for name in plain]
    return [*map(sandbox.imported, made.tools), *filter(inspect.ismethod, members)]


# ------------------------------------------------------------------------------------------------ what they are


class EnvironmentProbe(NamedTuple):
    """What is known of an environment before a run.

    Attributes:
      problem: why it cannot be one; "" where it can.
      schemas: the JSON schemas of its tools.
      deterministic: whether the same actions give the same observations.
      stateless: whether an instance keeps nothing between calls, so that a new one is as good.
      rewards: whether it has ``get_reward``.
      needs: columns that ``reset`` cannot do without.
    """

    problem: str
    schemas: tuple[dict[str, Any], ...] = ()
    deterministic: bool = False
    stateless: bool = False
    rewards: bool = False
    needs: tuple[str, ...] = ()


def probe(made: InstanceRecipe) -> EnvironmentProbe:
    """Looks at an environment, of which it makes an instance."""
    from transformers.utils import get_json_schema

    for path in (*made.tools, *([] if made.path is None else [made.path])):
        try:
            found = sandbox.imported(path)
        except BaseException as e:
            return EnvironmentProbe(f"{path} cannot be imported: {type(e).__name__}: {e}")
        if path in made.tools and not inspect.isroutine(found):
            return EnvironmentProbe(
                f"tool {path} is no function; give one made by def or async def, or its class as name"
            )
    try:
        instance = make(made)
    except BaseException as e:
        return EnvironmentProbe(
            f"{made.path} cannot be made with options {dict(made.options)}: {type(e).__name__}: {e}"
        )
    if not callable(getattr(instance, "reset", None)):
        return EnvironmentProbe(f"{made.path} has no method reset")
    every = tools_of(made, instance)
    tools = {tool.__name__: tool for tool in every}
    if twice := [tool.__name__ for tool in every if tools[tool.__name__] != tool]:
        return EnvironmentProbe(
            f"two of its tools have the same name, {twice[0]!r}; a decorator keeps names by functools.wraps"
        )
    schemas = []
    for name, tool in tools.items():
        try:
            schemas.append(get_json_schema(tool))
        except Exception as e:
            return EnvironmentProbe(f"tool {name}: {e}")
    of_functions = [bool(getattr(f, "deterministic", False)) for f in every if not inspect.ismethod(f)]
    own = made.path is None or bool(getattr(instance, "deterministic", False))
    parameters = inspect.signature(instance.reset).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return EnvironmentProbe(
        "",
        tuple(schemas),
        own and all(of_functions),
        made.path is None or bool(getattr(instance, "stateless", False)),
        callable(getattr(instance, "get_reward", None)),
        tuple(p.name for p in parameters if p.kind in named and p.default is p.empty),
    )


# ------------------------------------------------------------------------------------------------ what they do


def prepare(all_made: Sequence[InstanceRecipe], most_bytes: int) -> None:
    """Prepares this process: keeps what it prints, and makes an instance of each environment.

    The first instance may read and index much, which a class keeps for the next ones. A job would be too short for it.
    """
    keep_output(most_bytes)
    for made in all_made:
        with contextlib.suppress(BaseException):  # `probe` reports it, or the episodes do
            make(made)
    _printed()


@sandbox.job
def open_(episode: Episode, history: History, most_bytes: int) -> tuple[Any, PlayedTurn]:
    """Makes an instance and resets it; gives what ``reset`` returned."""
    observed, played = None, PlayedTurn()
    _printed()  # what was printed before is not of this job, here and below
    try:
        _instances[episode] = instance = make(history.made)
        observed = _reset(instance, history.row)
    except MemoryError:
        os._exit(sandbox.OUT_OF_MEMORY)
    except BaseException as e:
        played = PlayedTurn(invalid="reset", detail=_traceback(e))
    played = _with_printed(played, most_bytes)
    if played.invalid is not None:
        _instances.pop(episode, None)
    return observed, played


def _with_printed(played: PlayedTurn, most_bytes: int) -> PlayedTurn:
    """What a job came to, with what it printed; more than ``most_bytes`` makes its episode invalid."""
    printed, text = _printed()
    if printed > most_bytes:
        return PlayedTurn(invalid="flood", detail=f"it printed over {most_bytes} bytes at once, such as\n{text}")
    return played if played.invalid is not None else played._replace(detail=text)


@sandbox.job
def revive(episode: Episode, history: History, most_bytes: int) -> PlayedTurn:
    """Makes an episode's instance anew, in a process that does not have it.

    If what it keeps is unknown, it stands after its ``reset``.
    """
    observed, played = open_(episode, history, most_bytes)
    if played.invalid or history.kept == "nothing":
        return played
    instance = _instances[episode]
    same = history.observed is None or _same(observed, history.observed[0])
    for asked, answers in history.turns:
        _printed()  # each turn has the limit for itself
        same = same and _turn(history.made, instance, asked, most_bytes)[0] == answers
    _printed()
    if not same:
        del _instances[episode]
        return PlayedTurn(invalid="replay", detail="played again, the same calls gave other answers")
    return PlayedTurn()


@sandbox.job
def play(episode: Episode, made: InstanceRecipe, asked: Sequence[Asked], most_bytes: int) -> PlayedTurn | None:
    """Calls tools of an episode's instance; None where this process does not have it.

    Args:
      episode, made: of the instance.
      asked: the calls, which are made one after the other.
      most_bytes: of an answer; of what tools print, more than this makes the episode invalid.
    """
    instance = _instances.get(episode)
    if instance is None:
        return None
    _printed()
    answers, done = _turn(made, instance, asked, most_bytes)
    played = _with_printed(PlayedTurn(answers, done), most_bytes)
    if played.invalid is not None:
        del _instances[episode]
    return played


@sandbox.job
def reward(episode: Episode, most_bytes: int) -> tuple[float | None, PlayedTurn] | None:
    """``get_reward()`` of an episode; None where this process does not have its instance."""
    instance = _instances.get(episode)
    if instance is None:
        return None
    value, played = None, PlayedTurn()
    _printed()
    try:
        given = sandbox.call(instance.get_reward)
        value = None if given is None else float(given)
    except MemoryError:
        os._exit(sandbox.OUT_OF_MEMORY)
    except BaseException as e:
        played = PlayedTurn(invalid="reward", detail=_traceback(e))
    return value, _with_printed(played, most_bytes)


@sandbox.job
def snapshot(episode: Episode) -> tuple[bytes | str, PlayedTurn] | None:
    """An episode's instance, pickled, or why it cannot be; None where this process does not have it."""
    instance = _instances.get(episode)
    if instance is None:
        return None
    _printed()
    try:
        pickle.loads(content := pickle.dumps(instance))  # a reward's worker must be able to
        return content, PlayedTurn()
    except Exception as e:
        return f"{type(e).__name__}: {e}", PlayedTurn()


def close(episodes: Sequence[Episode]) -> None:
    """Drops instances."""
    for episode in episodes:
        _instances.pop(episode, None)


def _same(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:
        return False


def _reset(instance: Any, row: Mapping[str, Any]) -> Any:
    parameters = inspect.signature(instance.reset).parameters.values()
    takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters}
    return _observation(sandbox.call(instance.reset, **{k: v for k, v in row.items() if takes_all or k in names}))


def _observation(value: Any) -> str | list[Mapping[str, Any]] | None:
    """What ``reset`` returned: a text, or messages. The parts of a text, which TRL takes too, are one text."""
    if value is None:
        return None
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, list) and all(isinstance(part, Mapping) for part in value):
        if all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in value):
            return encodable("".join(part["text"] for part in value))
        if (
            all(isinstance(m.get(key), str) for m in value for key in ("role", "content"))
            and value[-1]["role"] == "user"
        ):
            with contextlib.suppress(TypeError, ValueError):  # what is more than JSON
                return json.loads(json.dumps([{**m, "content": encodable(m["content"])} for m in value]))
    raise TypeError(
        f"reset returned {value!r:.80}: give a text, None, or a list, of parts that have a text, or of messages that "
        "have role and content and nothing that JSON lacks, of which the last is the user's"
    )


def encodable(text: str) -> str:
    """Without lone surrogates, which a tokenizer does not take."""
    return str.encode(text, errors="replace").decode()  # of a subclass too


def _turn(
    made: InstanceRecipe, instance: Any, asked: Sequence[Asked], most_bytes: int
) -> tuple[tuple[ToolAnswer, ...], bool]:
    """The answers of a turn's calls, and whether the episode is over then."""
    tools = {tool.__name__: tool for tool in tools_of(made, instance)}
    answers = tuple(_answer(tools, call, most_bytes) for call in asked)
    try:
        done = getattr(instance, "done", False)
        return answers, bool(done) and not callable(done)
    except Exception:  # of a property
        return answers, False


def _answer(tools: Mapping[str, Callable[..., Any]], asked: Asked, most_bytes: int) -> ToolAnswer:
    try:
        value = sandbox.call(tools[asked.name], **asked.arguments)
        if inspect.isgenerator(value) or inspect.isasyncgen(value):
            raise TypeError("the tool returned a generator; a tool returns its answer")
        if isinstance(value, bytes | bytearray | memoryview):
            value = bytes(value[: most_bytes + 1]).decode(errors="replace")
        return ToolAnswer(_cut(str(value), most_bytes), False)
    except MemoryError:
        os._exit(sandbox.OUT_OF_MEMORY)
    except BaseException as e:  # also SystemExit: a tool that exits must not take the worker with it
        return ToolAnswer(_cut(f"Error: {_said(e)}", most_bytes), True)


def _said(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        text = ""
    kind = type(error).__name__
    return (f"{kind}: {text}" if text else kind)[:LONGEST_ERROR]


def _cut(text: str, most_bytes: int) -> str:
    """At most so many bytes of UTF-8; without halves of characters."""
    text = encodable(text)
    if len(text) <= most_bytes // 4:
        return text
    encoded = text.encode()
    if len(encoded) <= most_bytes:
        return text
    return encoded[: max(most_bytes - len(CUT), 0)].decode(errors="ignore") + CUT


def _traceback(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error, limit=-20))
    return text if len(text) <= 8000 else f"{text[:4000]}\n...\n{text[-4000:]}"


# ------------------------------------------------------------------------------------------------ what they print


def keep_output(most_bytes: int) -> None:
    """Sends what this process prints to a file without a name; on Linux one that holds twice as many bytes at most."""
    sys.stdout.flush(), sys.stderr.flush()
    if sys.platform == "linux":
        import fcntl

        file = os.memfd_create("printed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, 2 * most_bytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    else:
        file = os.dup(tempfile.TemporaryFile().fileno())
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    console.prepare_streams()


def _printed() -> tuple[int, str]:
    """Bytes printed since the last call, and the beginning of the text."""
    size = 0
    for _ in range(2):  # what did not fit is still to be written then
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        size += os.lseek(1, 0, os.SEEK_CUR)
        os.lseek(1, 0, os.SEEK_SET)
    return size, os.pread(1, min(size, LONGEST_ERROR), 0).decode(errors="replace")
