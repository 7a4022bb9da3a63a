"""Greedy accuracy on held-out problems."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from grpojax import data, packing
from grpojax.rewards import check_answer, extract_answer
from grpojax.types import Prompts, Rollout


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One problem and what the model made of it."""

    prompt: str
    completion: str
    given: str | None
    gold: str | None
    correct: bool
    tokens: int
    stopped: bool


def attempts(
    problems: Sequence[data.Problem], sample: Callable[[Prompts], Rollout], decode: Callable[[Sequence[int]], str], size: int,
    max_prompt_tokens: int,
) -> list[Attempt]:  # fmt: skip
    """One greedy completion a problem.

    Args:
      problems: what to try.
      sample: prompts to a rollout with one sample each, on the host.
      decode: token ids to text.
      size: problems at a time.
      max_prompt_tokens: as in the data's config.
    """
    longest = packing.bucket(max(len(p.ids) for p in problems), max_prompt_tokens)
    done: list[Attempt] = []
    for batch, real in data.in_order(list(problems), size):
        rollout = sample(data.to_prompts(batch, longest))
        for problem, ids, n, stopped in zip(
            batch[:real], rollout.tokens[:, 0], rollout.lengths[:, 0], rollout.stopped[:, 0], strict=False
        ):
            text = decode(ids[:n].tolist())
            correct = problem.gold is not None and check_answer(text, problem.gold)
            done.append(
                Attempt(
                    problem.prompt, text, extract_answer(text), problem.gold, correct, int(n), bool(stopped)
                )
            )
    return done


def summary(done: Sequence[Attempt]) -> dict[str, float]:
    """Accuracy, mean length in tokens, and the share that was cut at the longest length."""
    return {
        "eval/accuracy": float(np.mean([a.correct for a in done])),
        "eval/mean_length": float(np.mean([a.tokens for a in done])),
        "eval/clipped_ratio": float(np.mean([not a.stopped for a in done])),
    }
