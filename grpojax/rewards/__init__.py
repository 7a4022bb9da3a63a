"""Rewards: functions ``fn(prompts, completions, tokens, **columns) -> list[float | None]``.

``prompts`` and ``completions`` are texts, ``tokens`` the sampled ids, ``columns`` the data's columns plus ``gold``,
all lists of one entry a sample. None (or a number that is not finite) marks a sample as invalid: it is left out of
its group's statistics and of the loss.
"""

import dataclasses
import importlib
import math
import re
from collections.abc import Callable, Sequence

import numpy as np

from grpojax.errors import UserError

MARKERS = ("## Answer:", "####")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """One reward: a name of `REWARDS` or an import path ``package.module:function``, and its weight in the sum."""

    name: str
    weight: float = 1.0


def extract_answer(completion: str, marker: str | None = None) -> str | None:
    r"""The answer that a completion gives: the rest of the line after its last marker, or in its last ``\boxed{}``.

    Args:
      completion: the text.
      marker: the only marker to look for; None looks for any of `MARKERS`, then for a box.

    Returns:
      The answer without surrounding blanks, or None where there is none.
    """
    found = max((completion.rfind(m), m) for m in ((marker,) if marker else MARKERS))
    if found[0] >= 0:
        line = completion[found[0] + len(found[1]) :].split("\n", 1)[0].strip()
        return line or None
    if marker:
        return None
    return _boxed(completion)


def _boxed(text: str) -> str | None:
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len(r"\boxed{")
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin:i].strip() or None
    return None


def normal_form(answer: str) -> str:
    """Spelling that does not matter removed: case, blanks, ``$``, thousands commas, a final full stop, ``5.0``."""
    text = answer.strip().strip("$").rstrip(".").replace(" ", "").lower()
    if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?", text):
        text = text.replace(",", "")
    if re.fullmatch(r"[+-]?\d{1,15}(\.0+)?", text):
        text = str(int(text.split(".")[0]))
    return text


def answer(prompts, completions, tokens, *, gold, **columns) -> list[float | None]:
    """1 where the marked answer equals the gold answer up to spelling, otherwise 0."""
    return [
        float((given := extract_answer(text)) is not None and normal_form(given) == normal_form(want))
        for text, want in zip(completions, gold, strict=True)
    ]


def answer_format(prompts, completions, tokens, **columns) -> list[float | None]:
    """1 where a completion marks an answer at all, otherwise 0."""
    return [float(extract_answer(text) is not None) for text in completions]


REWARDS: dict[str, Callable[..., list[float | None]]] = {"answer": answer, "answer_format": answer_format}


def resolve(config: RewardConfig) -> Callable[..., list[float | None]]:
    """The function that a reward names."""
    if config.name in REWARDS:
        return REWARDS[config.name]
    module, _, function = config.name.partition(":")
    if not function:
        raise UserError(
            f"reward {config.name!r} is unknown; known: {', '.join(REWARDS)}, or package.module:function"
        )
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as e:
        raise UserError(f"reward {config.name!r} cannot be imported: {e}") from None


class Rewards:
    """The weighted sum of a run's rewards."""

    def __init__(self, configs: Sequence[RewardConfig]):
        if not configs:
            raise UserError("rewards: at least one is needed")
        self.configs = tuple(configs)
        self._functions = [resolve(c) for c in configs]

    def __call__(self, prompts, completions, tokens, columns) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """``(total [N], by name [N])`` float32, NaN where a sample is invalid."""
        by_name = {}
        for config, function in zip(self.configs, self._functions, strict=True):
            values = function(prompts, completions, tokens, **columns)
            if len(values) != len(completions):
                raise UserError(
                    f"reward {config.name!r} gave {len(values)} values for {len(completions)} completions"
                )
            array = np.array([math.nan if v is None else v for v in values], np.float32)
            by_name[config.name] = np.where(np.isfinite(array), array, np.nan)
        weighted = np.stack([np.float32(c.weight) * by_name[c.name] for c in self.configs])
        return np.asarray(weighted.sum(0)), by_name
