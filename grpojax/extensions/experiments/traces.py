"""Verified samples of a run as chats to learn from: which samples are taken, and what is kept with them."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpojax.host.errors import UserError, require

Sample = Mapping[str, Any]  # a line of a step's samples


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """Which samples are exported.

    Attributes:
      decides: the reward that says whether a sample is right.
      success: the least of it.
      least_reward: the least weighted sum of all rewards; None asks for none.
      most: completions of one prompt, the highest rewards first and of equals the earliest; 0 takes all.
    """

    decides: str
    success: float = 1.0
    least_reward: float | None = None
    most: int = 0

    def __post_init__(self) -> None:
        require(self, most="[0, inf)", success="(-inf, inf)", least_reward="(-inf, inf)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traces:
    """The samples taken from a run, in the order of its steps, and how many were left out, by reason.

    Attributes:
      samples: pairs ``(step, sample)``.
      left_out: "wrong" (or without a verdict), "cut" at the length limit, "duplicate" texts of a prompt, "over" the
        largest number for a prompt.
    """

    samples: tuple[tuple[int, Sample], ...]
    left_out: dict[str, int]


def select_traces(steps: Iterable[tuple[int, Sequence[Sample]]], config: TraceConfig) -> Traces:
    """Takes the samples that are right, whole and new.

    A sample that was cut at the limit is left out even if it is right, since a model would learn to end there.

    Args:
      steps: number and samples of each step, in order.
      config: which samples count.

    Raises:
      UserError: no sample has the deciding reward, or samples are episodes of several turns.

    Example:
      >>> usual = {"prompt": "1+1=", "reward": 1.0, "rewards": {"answer": 1.0}, "stop": "eos", "uid": 0}
      >>> samples = [{**usual, "completion": text} for text in ("2", "it is 2", "2")]
      >>> traces = select_traces([(1, samples)], TraceConfig(decides="answer"))
      >>> [sample["completion"] for _, sample in traces.samples], traces.left_out["duplicate"]
      (['2', 'it is 2'], 1)
    """
    left_out = Counter(wrong=0, cut=0, duplicate=0, over=0)
    taken: dict[int, list[tuple[int, int, Sample]]] = {}  # for each prompt: index in the order, step, sample
    texts: set[tuple[int, str]] = set()
    place = 0
    for step, samples in steps:
        for sample in samples:
            place += 1
            if config.decides not in sample["rewards"]:
                raise UserError(f"no reward {config.decides!r} in step {step}; it has {', '.join(sample['rewards'])}")
            if "turns" in sample:
                raise UserError(
                    f"step {step} has episodes of several turns, and a trace is one answer to a question\n"
                    "read `turns` of its samples with grpojax.records.samples.read_samples, and write chats of your own"
                )
            text = sample["uid"], sample["completion"]
            if not _right(sample, config):
                left_out["wrong"] += 1
            elif sample["stop"] != "eos":
                left_out["cut"] += 1
            elif not sample["completion"].strip():
                left_out["wrong"] += 1  # nothing to learn
            elif text in texts:
                left_out["duplicate"] += 1
            else:
                texts.add(text)
                taken.setdefault(sample["uid"], []).append((place, step, sample))
    chosen: list[tuple[int, int, Sample]] = []
    for group in taken.values():
        ranked = sorted(group, key=lambda t: (-_total(t[2]), t[0]))
        kept = ranked[: config.most or None]
        left_out["over"] += len(ranked) - len(kept)
        chosen += kept
    chosen.sort(key=lambda t: t[0])
    return Traces(samples=tuple((step, sample) for _, step, sample in chosen), left_out=dict(left_out))


def _right(sample: Sample, config: TraceConfig) -> bool:
    verdict, total = sample["rewards"][config.decides], sample["reward"]
    if verdict is None or verdict < config.success:
        return False
    return config.least_reward is None or (total is not None and total >= config.least_reward)


def _total(sample: Sample) -> float:
    return float("-inf") if sample["reward"] is None else sample["reward"]


def trace_row(step: int, sample: Sample, messages: Sequence[Mapping[str, str]], run: str, model: str) -> dict[str, Any]:
    """A line of the exported file: the chat and its origin.

    Args:
      step: a step of the run.
      sample: a sample of that step.
      messages: the prompt's messages; the completion is added after them.
      run: the run's directory.
      model: the model that the policy started from.
    """
    answer = {"role": "assistant", "content": sample["completion"]}
    origin = {name: sample[name] for name in ("uid", "sample", "reward", "rewards", "gold")}
    return {"messages": [*messages, answer], "run": run, "step": step, **origin, "model": model}
