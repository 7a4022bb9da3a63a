"""Rollouts some of whose groups begin with a part of a solution (`GuidanceConfig`)."""

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from grpojax import data
from grpojax.evaluation import submit
from grpojax.extensions.guidance.guide import Guide
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.programs.policy import DryPolicy
from grpojax.run.batch import Batch, success_of
from grpojax.run.parts.part import Part, mean
from grpojax.run.source import Plain
from grpojax.types import Array, Rollout, Samples


class Guided(Plain):
    """As `Plain`; up to a share of the groups are of prompts that failed, with a prefix of a solution.

    A rollout has as many groups as without guidance. No problem is skipped for them: those that have no place wait for
    the next rollout. Rewards read a prefix and a sample as one completion, and all else reads the sample alone.
    """

    def __init__(self, *given: Any, **options: Any):
        super().__init__(*given, **options)
        rollout: Any = self.config
        self.guidance, positions = rollout.guidance, self.policy.config.max_positions
        state = self.context.state.kept.get("guidance") or {}
        self.guide = Guide(
            self.guidance,
            self.problems,
            functools.partial(self.policy.tokenizer.encode, add_special_tokens=False),
            longest=min(self.longest_prompt, positions - self.config.max_tokens),
            state=state,
        )
        of_uid = {p.uid: p for p in self.problems}
        self._queue = deque((of_uid[uid], number) for uid, number in state.get("queue", ()))
        self._batches, self._warned = state.get("batches", 0), False

    def choose(self, number: int) -> tuple[Sequence[data.Problem], Sequence[int]]:
        """The next problems in their order, with guided ones evenly among them."""
        size = self.config.prompts
        guided = self.guide.take(int(self.guidance.share * size))
        if len(self.guide) and not guided and self.guidance.prefix == "solution" and not self._warned:
            log.warning(
                "none of the %d prompts that failed has a solution in the column %r of which a part fits: raise "
                "data.max_prompt_tokens, or name another column with rollout.guidance.column",
                len(self.guide),
                self.guidance.column,
            )
            self._warned = True
        while len(self._queue) < size - len(guided):
            self._queue.extend(zip(*super().choose(self._batches), strict=True))
            self._batches += 1
        places = {int((n + 0.5) * size / len(guided)) for n in range(len(guided))}
        first = iter(guided)
        chosen = [(next(first), 0) if place in places else self._queue.popleft() for place in range(size)]
        problems, passes = zip(*chosen, strict=True)
        return problems, passes

    def submit(self, problems: Sequence[data.Problem], rollout: Rollout, *more: Rollout) -> Batch:
        """As `Plain`, with the prefixes before the samples for the rewards."""
        prefixes = [self.guide.prefix_of(p) for p in problems]
        wait = submit(self.rewards, problems, after(prefixes, rollout), self.policy.texts, self.columns)
        lengths = np.array([len(prefix) for prefix in prefixes], np.int32)
        return Batch(
            problems=problems,
            rollout=rollout,
            aided=lengths > 0,
            known={"prefix_tokens": lengths},
            pending=[functools.partial(self.rewarded, wait)],
        )

    def note(self, batch: Batch) -> dict[str, float]:
        """As `Plain`; also notes which prompts fail, and how many guided samples pass."""
        for drawn in batch.as_drawn:
            passed = passing(drawn, self.method.deciding, self.guidance.success)
            known = np.isfinite(drawn.by_name[self.method.deciding])
            for p, problem in enumerate(drawn.problems):
                right = self._right(drawn, p, int(passed[p].argmax())) if passed[p].any() else ""
                self.guide.note(problem, passed[p, known[p]].tolist(), right)
        waiting = {"guidance/waiting": float(len(self.guide)), "guidance/length": self.guide.mean_length}
        return super().note(batch) | waiting

    def _right(self, drawn: Batch, p: int, g: int) -> str:
        """The text of a sample with its prefix, if the next prefixes are made of such texts."""
        if self.guidance.prefix != "own":
            return ""
        ids = drawn.rollout.tokens[p, g, : drawn.rollout.lengths[p, g] - int(drawn.rollout.stopped[p, g])].tolist()
        return self.policy.texts([[*self.guide.prefix_of(drawn.problems[p]), *ids]])[0]

    def after_step(self) -> dict[str, Any]:
        """As `Plain`; also the prompts that fail, and the problems that wait for a place."""
        queue = [(p.uid, number) for p, number in self._queue]
        return super().after_step() | {"guidance": {**self.guide.saved(), "queue": queue, "batches": self._batches}}


class Guidance(Part):
    """``rollout.guidance``."""

    draws = Guided
    longer_prompts = True

    def source(self, source: Guided) -> Guided:
        """The source as it is; raises `UserError` if its problems have no solutions. Made-up ones need none."""
        guidance, there = source.guidance, source.columns
        if guidance.prefix == "solution" and guidance.column not in there and not isinstance(source.policy, DryPolicy):
            raise UserError(
                f"rollout.guidance.column={guidance.column!r}: no problem has such a column of its solution; name one "
                f"of {', '.join(there) or 'none'}, or set rollout.guidance.prefix=own"
            )
        return source

    def metrics(self, drawn: Sequence[Batch]) -> dict[str, float]:
        """The share of groups that are guided, and how many samples pass with a prefix and without."""
        rollout: Any = self.config.rollout
        guided = np.concatenate([d.known["prefix_tokens"] > 0 for d in drawn])
        decides = np.concatenate([d.by_name[self.method.deciding] for d in drawn])
        passed = np.concatenate([passing(d, self.method.deciding, rollout.guidance.success) for d in drawn])
        known = np.isfinite(decides)
        return {
            "guidance/share": float(guided.mean()),
            "guidance/solved": mean(passed[known & guided[:, None]]),
            "guidance/plain_solved": mean(passed[known & ~guided[:, None]]),
        }

    def columns(self, batch: Batch) -> dict[str, Array]:
        """Tokens of the prefix before the samples of each prompt."""
        return {"prefix_tokens": batch.known["prefix_tokens"]}


def passing(batch: Batch, deciding: str, success: float | None) -> Samples:
    """``[P, G]`` bool: the samples that are right; one without a reward is not."""
    values = batch.by_name[deciding]
    use, setting = "prompts are guided", "rollout.guidance.success"
    return values >= success_of(values, deciding, success, use=use, setting=setting)


def after(prefixes: Sequence[Sequence[int]], rollout: Rollout) -> Rollout:
    """The samples ``[P, G, T]`` with the prefix of their prompt before them, ``[P, G, T']``.

    Example:
      >>> given = Rollout(tokens=np.array([[[7, 0]], [[8, 9]]]), logps=np.zeros((2, 1, 2)),
      ...     lengths=np.array([[1], [2]]), stopped=np.ones((2, 1), bool))
      >>> made = after([(), (5,)], given)
      >>> made.tokens.tolist(), made.lengths.tolist()
      ([[[7, 0, 0]], [[5, 8, 9]]], [[1], [3]])
    """
    longest = max((len(prefix) for prefix in prefixes), default=0)
    if not longest:
        return rollout
    group, size = rollout.tokens.shape[1:]

    def put(x: Array, before: Any) -> np.ndarray:
        out = np.zeros((len(prefixes), group, longest + size), x.dtype)
        for p, prefix in enumerate(prefixes):
            out[p, :, : len(prefix)] = before(prefix)
            out[p, :, len(prefix) : len(prefix) + size] = x[p]
        return out

    more = np.array([len(prefix) for prefix in prefixes], rollout.lengths.dtype)[:, None]
    drawn = jax.tree.map(np.asarray, rollout)
    return Rollout(
        tokens=put(drawn.tokens, lambda prefix: np.array(prefix, drawn.tokens.dtype)),
        logps=put(drawn.logps, lambda prefix: 0.0),
        lengths=np.where(drawn.lengths > 0, drawn.lengths + more, 0),
        stopped=drawn.stopped,
    )
