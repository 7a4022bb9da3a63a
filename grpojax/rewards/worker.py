"""What a reward worker does: it judges some samples."""

import asyncio
import functools
import inspect
import math
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeVar

from grpojax.rewards import builtin, sandbox
from grpojax.rewards.steps import Steps, read_steps

T = TypeVar("T")


class Samples(NamedTuple):
    """Some samples of a batch: lists of one entry a sample."""

    prompts: list[str]
    completions: list[str]
    tokens: list[list[int]]
    columns: Mapping[str, list[Any]]

    def take(self, indices: Sequence[int]) -> "Samples":
        """Those at ``indices``, in that order."""

        def pick(values: Sequence[T]) -> list[T]:
            return [values[i] for i in indices]

        columns = {name: pick(values) for name, values in self.columns.items()}
        return Samples(pick(self.prompts), pick(self.completions), pick(self.tokens), columns)


class Outcome(NamedTuple):
    """A reward, or why there is none: ``reason`` is one of `REASONS`, ``detail`` what to show.

    Where the steps have rewards, ``value`` is their mean, 0 without any.
    """

    value: float
    reason: str = ""
    detail: str = ""
    steps: Steps | None = None


# Of an invalid sample.
REASONS = ("none", "nan", "type", "count", "steps", "error", "memory", "timeout", "crash")


def _none(reason: str, detail: str) -> Outcome:
    return Outcome(math.nan, reason, detail)


@functools.cache
def _reward(name: str, options: str) -> Callable[..., Any]:
    if name in builtin.REWARDS:
        return builtin.make(name, builtin.thaw(options))
    return functools.partial(sandbox.imported(name), **builtin.thaw(options))


def judge(name: str, options: str, samples: Samples) -> tuple[list[Outcome], float]:
    """Outcomes of some samples and the seconds they took. If they fail together, each is judged alone."""
    begin = time.perf_counter()
    outcomes = _judge(name, options, samples)
    return outcomes, time.perf_counter() - begin


def _judge(name: str, options: str, samples: Samples) -> list[Outcome]:
    n = len(samples.completions)
    try:
        return outcomes_of(call(_reward(name, options), samples), samples.tokens)
    except MemoryError:
        os._exit(sandbox.OUT_OF_MEMORY)  # what it holds would fail the samples after it
    except BaseException as e:
        if n == 1:
            return [_none("error", _traceback(e))]
    return [_judge(name, options, samples.take([i]))[0] for i in range(n)]


def _traceback(error: BaseException) -> str:
    """Without this module's own frames."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(error.with_traceback(frames), limit=-20))


def call(function: Callable[..., Any], samples: Samples) -> Any:
    """What a reward function returns, awaited if it is asynchronous."""
    values = function(samples.prompts, samples.completions, samples.tokens, **samples.columns)
    if inspect.isawaitable(values):

        async def finish():
            return await values

        values = asyncio.run(finish())
    return values


def outcomes_of(values: Any, tokens: Sequence[Sequence[int]]) -> list[Outcome]:
    """What a reward function returned for samples of these tokens, as outcomes."""
    n = len(tokens)
    if isinstance(values, str | bytes | Mapping | Set) or not hasattr(values, "__len__"):
        return [_none("type", f"it returned {type(values).__name__}, not a list of numbers")] * n
    if len(values) != n:
        return [_none("count", f"it returned {len(values)} values for {n} completions")] * n
    return [_outcome(v, len(ids)) for v, ids in zip(values, tokens, strict=True)]


def _outcome(value: Any, tokens: int) -> Outcome:
    if value is None:
        return _none("none", "")
    if isinstance(value, list | tuple):
        steps = read_steps(value, tokens)
        if steps and isinstance(steps[0], str):
            return _none(*steps)
        return Outcome(sum(r for _, r in steps) / max(len(steps), 1), steps=steps)
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return _none("type", f"it returned {value!r:.80} for a completion, not a number")
    number = float(value)
    if not abs(number) <= 3.4e38:  # of float32
        return _none("nan", f"it returned {number} for a completion")
    return Outcome(number)
