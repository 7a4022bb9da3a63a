"""Rollouts whose samples go where they tell most: XRPO's plan (arXiv 2510.06672)."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from grpojax import allocation, data
from grpojax.programs import packing
from grpojax.programs.sampler import SamplerConfig
from grpojax.run.groups import Drawn, Groups
from grpojax.run.judged import Judged
from grpojax.types import Array, PerPrompt, Rollout, Samples

_allocate = jax.jit(allocation.xrpo_allocate, static_argnums=2, static_argnames=("bonus", "confidence", "most"))


class PlannedGroups(Groups):
    """`Groups` of as many samples in all, of which each prompt gets its own number.

    Every prompt is probed; then, phase by phase, the next samples go to where a prompt's mean reward is least known
    (`grpojax.allocation.xrpo_allocate`). A phase samples as many rows of one sample whatever the plan, so that it
    compiles once; sample n of a prompt is the same draw in whatever phase it is drawn. What comes out is
    ``[P, most, ...]``, with length 0 and no reward where a prompt got fewer. There is no in-context seeding.
    """

    def start(self, problems: Sequence[data.Problem], number: int) -> Callable[[], Drawn]:
        """Dispatches the probe; what it returns waits for its rewards, and draws the rest phase by phase."""
        plan, config = self.method.plan, self.config
        assert plan is not None
        params, key = self._params(), self._key(number)
        longest = packing.bucket(max(len(p.ids) for p in problems), self.max_prompt_tokens)
        prompts = data.to_prompts(problems, longest, plan.most)
        probe = self._rows(params, prompts, key, self._sampler(plan.probe))
        of_phase = len(problems) * (config.group - plan.probe) // plan.phases
        options = {"bonus": plan.bonus, "confidence": plan.confidence, "most": plan.most}

        def finish() -> Drawn:
            counts = np.zeros(len(problems), np.int32)
            parts = [_Part(self._submit(problems, probe()), *_next(counts + plan.probe, counts))]
            for _ in range(plan.phases):
                counts = np.bincount(np.concatenate([p.rows for p in parts]), minlength=len(problems)).astype(np.int32)
                more = _allocate(_deviations(parts, len(problems)), counts, of_phase, **options)
                rows, samples = _next(np.asarray(more), counts)
                first = prompts.first_sample[rows] + samples.astype(np.int32)
                these = dataclasses.replace(jax.tree.map(lambda x, at=rows: x[at], prompts), first_sample=first)
                sampled = self._rows(params, these, key, self._sampler(1))
                parts.append(_Part(self._submit([problems[p] for p in rows], sampled()), rows, samples))
            shape = len(problems), plan.most
            rollout = jax.tree.map(lambda *xs: _lay(parts, xs, shape, 0), *(p.drawn.rollout for p in parts))
            return Drawn(problems, rollout, functools.cache(lambda: _merge(parts, problems, rollout)))

        return finish

    def _sampler(self, group: int) -> SamplerConfig:
        config = self.config
        return SamplerConfig(
            group=group,
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            cache_dtype=config.cache_dtype,
            slots=min(config.slots, group),
        )


class _Part(NamedTuple):
    """What one phase drew, and where it goes: ``[n]`` prompts and numbers of their samples."""

    drawn: Drawn
    rows: np.ndarray
    samples: np.ndarray


def _next(more: PerPrompt, counts: PerPrompt) -> tuple[np.ndarray, np.ndarray]:
    """Prompts and sample numbers ``[n]`` of ``more [P]`` further samples of prompts that have ``counts [P]``."""
    rows = np.repeat(np.arange(len(more)), more)
    return rows, np.concatenate([n + np.arange(m) for n, m in zip(counts, more, strict=True)])


def _deviations(parts: Sequence[_Part], prompts: int) -> PerPrompt:
    """``[P]`` float32 standard deviation (ddof 1) of the rewards so far; 0 of less than two."""
    rows = np.concatenate([p.rows for p in parts])
    rewards = np.concatenate([p.drawn.judged().total.reshape(-1) for p in parts])
    known = [rewards[(rows == p) & np.isfinite(rewards)] for p in range(prompts)]
    return np.array([x.std(ddof=1) if len(x) > 1 else 0.0 for x in known], np.float32)


def _lay(parts: Sequence[_Part], xs: Sequence[Array], shape: tuple[int, int], fill: float) -> np.ndarray:
    """``[P', G', ...]`` of every part at their places in ``[P, most, ...]``."""
    tail = xs[0].shape[2:]
    out = np.full((*shape, *tail), fill, xs[0].dtype)
    for part, x in zip(parts, xs, strict=True):
        out[part.rows, part.samples] = x.reshape(-1, *tail)
    return out


def _merge(parts: Sequence[_Part], problems: Sequence[data.Problem], rollout: Rollout) -> Judged:
    """The parts' rewards as those of the whole."""
    each = [p.drawn.judged() for p in parts]

    def whole(*xs: Array) -> Samples:
        return _lay(parts, xs, rollout.lengths.shape, np.nan)

    return Judged(
        problems=problems,
        rollout=rollout,
        total=whole(*(j.total for j in each)),
        reward=whole(*(j.reward for j in each)),
        by_name={name: whole(*(j.by_name[name] for j in each)) for name in each[0].by_name},
        invalid=dict(sum((Counter(j.invalid) for j in each), Counter())),
    )
