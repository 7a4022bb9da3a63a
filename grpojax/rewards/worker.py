"""What a reward worker does: it judges some samples."""

import functools
import math
import os
import pickle
import time
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeVar

from grpojax.host.errors import UserError
from grpojax.rewards import builtin, sandbox
from grpojax.rewards.steps import LARGEST, Steps, read_steps, real

T = TypeVar("T")


class SampleTexts(NamedTuple):
    """Some samples of a batch: lists of one entry a sample."""

    prompts: list[str]
    completions: list[str]
    tokens: list[list[int]]
    columns: Mapping[str, list[Any]]

    def take(self, indices: Sequence[int]) -> "SampleTexts":
        """Those at ``indices``, in that order."""

        def pick(values: Sequence[T]) -> list[T]:
            return [values[i] for i in indices]

        columns = {name: pick(values) for name, values in self.columns.items()}
        return SampleTexts(pick(self.prompts), pick(self.completions), pick(self.tokens), columns)


class RewardOutcome(NamedTuple):
    """A reward, or why there is none: ``reason`` is one of `REASONS`, ``detail`` what to show.

    Where the steps have rewards, ``value`` is their mean, 0 without any.
    """

    value: float
    reason: str = ""
    detail: str = ""
    steps: Steps | None = None


LONGEST_DETAIL = 8000  # characters of a traceback

# Why a sample is invalid, and what the reward did then.
HAPPENED = {
    "none": "returned None",
    "nan": "returned no finite number",
    "type": "returned no number",
    "count": "returned a wrong number of values",
    "steps": "returned steps that are wrong",
    "error": "raised",
    "memory": "took too much memory",
    "timeout": "took too long",
    "crash": "ended its worker",
}
REASONS = tuple(HAPPENED)


def happened(name: str, reason: str) -> str:
    """Why a sample is invalid, for people: by a reward or by "environment".

    >>> happened("exact", "error"), happened("environment", "reset")
    ('exact raised', 'environment: reset')
    """
    return f"{name} {HAPPENED[reason]}" if reason in HAPPENED else f"{name}: {reason}"


def _none(reason: str, detail: str) -> RewardOutcome:
    return RewardOutcome(math.nan, reason, detail)


@functools.cache
def _builtin(name: str, options: str) -> Callable[..., Any]:
    return builtin.make(name, builtin.thaw(options))


def _reward(name: str, options: str) -> Callable[..., Any]:
    """The reward with its options; a function gets new ones for each call, since it may change them."""
    if name in builtin.REWARDS:
        return _builtin(name, options)
    return functools.partial(sandbox.imported(name), **builtin.thaw(options))


@sandbox.job
def judge(name: str, options: str, samples: SampleTexts, twice: bool = False) -> tuple[list[RewardOutcome], float]:
    """Outcomes of some samples and the seconds they took. If a call with all of them raises, each gets its own call.

    Args:
      name, options: of the reward.
      samples: what it gets: a copy, since it may change what it is given.
      twice: never call it with one sample only: a single one is given twice. Of one sample, a function that returns
        one value whatever it is given would look right.
    """
    begin = time.perf_counter()
    outcomes = _judge(name, options, samples, twice)
    return outcomes, time.perf_counter() - begin


def _judge(name: str, options: str, samples: SampleTexts, twice: bool) -> list[RewardOutcome]:
    n = len(samples.completions)
    given = samples.take([0, 0]) if twice and n == 1 else samples
    try:
        values = call(_reward(name, options), pickle.loads(pickle.dumps(given)))
        return outcomes_of(values, given.tokens)[:n]
    except MemoryError:
        os._exit(sandbox.OUT_OF_MEMORY)  # what it holds would fail the samples after it
    except UserError:
        raise
    except BaseException as e:
        if n == 1:
            return [_none("error", _traceback(e))]
    return [_judge(name, options, samples.take([i]), twice)[0] for i in range(n)]


def _traceback(error: BaseException) -> str:
    """Without the worker's own frames, and no longer than is read."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, sandbox.__file__):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(error.with_traceback(frames), limit=-20))
    half = LONGEST_DETAIL // 2
    return text if len(text) <= LONGEST_DETAIL else f"{text[:half]}\n...\n{text[-half:]}"


def call(function: Callable[..., Any], samples: SampleTexts) -> Any:
    """What a reward function returns for samples."""
    return sandbox.call(function, samples.prompts, samples.completions, samples.tokens, **samples.columns)


def outcomes_of(values: Any, tokens: Sequence[Sequence[int]]) -> list[RewardOutcome]:
    """What a reward function returned for samples of these tokens, as outcomes."""
    n, shape = len(tokens), getattr(values, "shape", None)
    if isinstance(shape, tuple) and len(shape) != 1:
        return [_none("type", f"it returned an array of shape {tuple(shape)}, not one of shape ({n},)")] * n
    if isinstance(values, str | bytes | Mapping | Set) or not hasattr(values, "__len__"):
        return [_none("type", f"it returned {type(values).__name__}, not a list of numbers")] * n
    if len(values) != n:
        return [_none("count", f"it returned {len(values)} values for {n} completions")] * n
    return [_outcome(v, len(ids)) for v, ids in zip(values, tokens, strict=True)]


def _outcome(value: Any, tokens: int) -> RewardOutcome:
    if value is None:
        return _none("none", "it returned None for a completion")
    if isinstance(value, list | tuple):
        steps = read_steps(value, tokens)
        if steps and isinstance(steps[0], str):
            return _none(*steps)
        return RewardOutcome(sum(r for _, r in steps) / max(len(steps), 1), steps=steps)
    number = real(value)
    if number is None:
        return _none("type", f"it returned {value!r:.80} for a completion, not a number")
    if not abs(number) <= LARGEST:
        return _none("nan", f"it returned {number:g} for a completion, not a number up to {LARGEST:g}")
    return RewardOutcome(number)
