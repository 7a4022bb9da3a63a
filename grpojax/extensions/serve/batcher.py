"""Samples for requests that arrive at any time: those that wait together are decoded together."""

import concurrent.futures
import dataclasses
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from grpojax.cli.engine import Engine
from grpojax.host.console import log
from grpojax.programs.sampler_config import DrawConfig, SamplerConfig
from grpojax.types import Prompts

# An idle batcher waits this long after a request, so that a burst of requests is one batch.
GATHER_SECONDS = 0.005
# Numbers of prompts for requests without a seed start here. Those of requests with a seed are the seed itself.
_OWN_NUMBERS = 2**31


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt, and what to draw for it.

    Attributes:
      ids: the prompt's tokens, at least one.
      n: number of completions.
      max_tokens: the most tokens of each.
      draw: temperature and truncation.
      seed: the same seed, prompt and settings give the same completions, up to rounding; None takes another each time.
    """

    ids: tuple[int, ...]
    n: int = 1
    max_tokens: int = 256
    draw: DrawConfig = dataclasses.field(default_factory=DrawConfig)
    seed: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawnCompletion:
    """A drawn completion.

    Attributes:
      tokens: its ids, with the token that ended it.
      logps: the log-probability of each under the distribution that it was drawn from.
      stopped: whether a token ended it; otherwise it has the request's ``max_tokens``.
    """

    tokens: list[int]
    logps: list[float]
    stopped: bool


class Batcher:
    """Draws for requests of many threads, one batch at a time. Those whose future is cancelled before are not drawn.

    A batch has the requests that wait when the one before it ends, and that agree in temperature, truncation and
    (rounded up to a power of two) in ``max_tokens``. Requests for the same prompt share one prefill and the prompt's
    keys and values, as the samples of a group do. Shapes are rounded up to powers of two, so that few programs compile.

    Args:
      engine: with its weights loaded.
      most: completions of one batch. A request for more has a batch of its own.
      seed: seed of all draws.
    """

    def __init__(self, engine: Engine, *, most: int, seed: int = 0):
        self._engine, self._most, self._key = engine, most, jax.random.key(seed)
        self._numbers = itertools.count(_OWN_NUMBERS)
        self._waiting: list[tuple[Request, concurrent.futures.Future[list[DrawnCompletion]]]] = []
        self._changed, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> "concurrent.futures.Future[list[DrawnCompletion]]":
        """Adds a request; the future gets its completions, or the error that its batch met."""
        future: concurrent.futures.Future[list[DrawnCompletion]] = concurrent.futures.Future()
        with self._changed:
            if self._closed:
                _cancel(future)
            else:
                self._waiting.append((request, future))
                self._changed.notify()
        return future

    def close(self) -> None:
        """Ends after the batch that is being drawn. Requests that still wait are canceled."""
        with self._changed:
            self._closed = True
            for _, future in self._waiting:
                _cancel(future)
            self._waiting.clear()
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                idle = not self._waiting
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
            if idle:
                time.sleep(GATHER_SECONDS)
            batch = [one for one in self._next() if one[1].set_running_or_notify_cancel()]
            if not batch:
                continue
            requests = [request for request, _ in batch]
            try:
                found = self._draw(requests)
            except BaseException as e:  # the requests' threads report it, and the next batch may be well
                for _, future in batch:
                    future.set_exception(e)
                continue
            for (_, future), completions in zip(batch, found, strict=True):
                future.set_result(completions)

    def _next(self) -> list[tuple[Request, "concurrent.futures.Future[list[DrawnCompletion]]"]]:
        """Takes the oldest request, and those that can be drawn with it."""
        with self._changed:
            waiting, room = self._waiting, self._most
            batch, self._waiting = [], []
            for one in waiting:
                if not batch or (_alike(one[0]) == _alike(batch[0][0]) and one[0].n <= room):
                    batch.append(one)
                    room -= one[0].n
                else:
                    self._waiting.append(one)
        return batch

    def _draw(self, requests: Sequence[Request]) -> list[list[DrawnCompletion]]:
        started = time.monotonic()
        rows, group = rows_of(requests, self._numbers)
        draw, max_tokens = _alike(requests[0])
        config = SamplerConfig(group=group, max_tokens=max_tokens, **dataclasses.asdict(draw))
        rollout = jax.tree.map(np.asarray, self._engine.draw(_prompts(rows), self._key, config))
        found: list[list[DrawnCompletion]] = [[] for _ in requests]
        for i, row in enumerate(rows):
            for j, owner in enumerate(row.owners):
                length = min(int(rollout.lengths[i, j]), requests[owner].max_tokens)
                completion = DrawnCompletion(
                    tokens=rollout.tokens[i, j, :length].tolist(),
                    logps=rollout.logps[i, j, :length].tolist(),
                    stopped=bool(rollout.stopped[i, j]) and length == rollout.lengths[i, j],
                )
                found[owner].append(completion)
        tokens = sum(len(c.tokens) for completions in found for c in completions)
        taken = time.monotonic() - started
        log.info("%d requests: %d tokens in %.2f s, %.0f a second", len(requests), tokens, taken, tokens / taken)
        return found


def _cancel(future: "concurrent.futures.Future[Any]") -> None:
    """Cancels a future, and tells those that wait for it."""
    if future.cancel():
        future.set_running_or_notify_cancel()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A prompt of a batch, with samples of one group.

    Attributes:
      ids: the prompt's tokens.
      number: the prompt's number, on which its draws depend.
      first: number of the first sample.
      owners: for each sample, the index of the request that gets it.
    """

    ids: tuple[int, ...]
    number: int
    first: int
    owners: tuple[int, ...]


def rows_of(requests: Sequence[Request], numbers: Iterator[int]) -> tuple[list[Row], int]:
    """The rows of a batch, and its group size.

    Requests without a seed share a prompt's samples. The group is the size that all prompts can fill: their number of
    samples if it is the same, else the largest power of two that is at most the smallest.

    Args:
      requests: of one batch.
      numbers: gives each prompt without a seed its number.

    Example:
      >>> one, two = Request(ids=(1, 2)), Request(ids=(3,), n=2)
      >>> rows, group = rows_of([one, two, one], iter([7, 8]))
      >>> group, [(row.ids, row.number, row.owners) for row in rows]
      (2, [((1, 2), 7, (0, 2)), ((3,), 8, (1, 1))])
    """
    owners: dict[tuple[tuple[int, ...], int | None], list[int]] = {}
    for i, request in enumerate(requests):
        owners.setdefault((request.ids, None if request.seed is None else i), []).extend([i] * request.n)
    counts = {len(of) for of in owners.values()}
    group = counts.pop() if len(counts) == 1 else 2 ** (min(counts).bit_length() - 1)
    rows = []
    for (ids, _), of in owners.items():
        seed = requests[of[0]].seed
        number = next(numbers) if seed is None else seed
        for first in range(0, len(of), group):
            rows.append(Row(ids=ids, number=number, first=first, owners=tuple(of[first : first + group])))
    return rows, group


def _prompts(rows: Sequence[Row]) -> Prompts:
    """The rows' prompts; copies of the first fill up their number, since those end with it."""
    padded = [*rows, *[rows[0]] * (_power_of_two(len(rows)) - len(rows))]
    tokens = np.zeros((len(padded), max(16, _power_of_two(max(len(row.ids) for row in rows)))), np.int32)
    for i, row in enumerate(padded):
        tokens[i, : len(row.ids)] = row.ids
    return Prompts(
        tokens=tokens,
        lengths=np.array([len(row.ids) for row in padded], np.int32),
        uids=np.array([row.number for row in padded], np.uint32),
        first_sample=np.array([row.first for row in padded], np.int32),
    )


def _alike(request: Request) -> tuple[DrawConfig, int]:
    """What the requests of a batch have in common: the distribution, and the most tokens of a completion."""
    return request.draw, max(16, _power_of_two(request.max_tokens))


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()
