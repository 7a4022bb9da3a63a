"""Rollouts whose samples go where they tell most: XRPO's plan (arXiv 2510.06672)."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from grpojax import allocation, data
from grpojax.host.console import log
from grpojax.programs import batch_shards, calls, packing
from grpojax.programs.calls import Call
from grpojax.programs.compiling import program
from grpojax.programs.policy import PolicyShape
from grpojax.programs.sampler import SamplerConfig
from grpojax.run.batch import RolloutBatch, success_of
from grpojax.run.groups import Groups
from grpojax.run.in_flight import InFlight
from grpojax.run.recipe import Config
from grpojax.run.run_state import RunState
from grpojax.run.sections import AllocationConfig, RolloutConfig
from grpojax.types import Array, PerPrompt, Rollout, Samples

_allocate = program("allocate", allocation.xrpo_allocate, static=("budget", "bonus", "confidence", "most"))


class PlannedGroups(Groups):
    """`Groups` of as many samples in all, of which each prompt gets its own number.

    Every prompt is probed; then, phase by phase, the next samples go to where a prompt's mean reward is least known
    (`grpojax.allocation.xrpo_allocate`). A phase samples as many rows of one sample whatever the plan, so that it
    compiles once; sample n of a prompt is the same draw in whatever phase it is drawn. What comes out is
    ``[P, most, ...]``, with length 0 and no reward where a prompt got fewer.

    With ``exemplars`` in the plan, a prompt whose probe fails as a whole is seeded: solved problems like it are put
    before it (`grpojax.data.Exemplars`), and it is planned anew as a prompt without any sample yet. It is learned under
    the prompt that its samples were drawn under, exemplars included: a source that confirms what the paper does was not
    to be had, and so the sampler and the policy have one context, the ratio is 1 before the first update, and nothing
    is to be corrected. The failed probe, drawn without exemplars, is in no group (`RolloutBatch.failed`); by itself it
    would have no advantage. Where nothing fits, or no sample is left for it, the prompt goes on as any other.

    Args:
      given, options: as of `Groups`.
      state: of a run that goes on.
    """

    def __init__(self, *given: Any, state: RunState, **options: Any):
        super().__init__(*given, **options)
        plan, positions = self.method.plan, self.policy.config.max_positions
        assert plan is not None
        self.plan, self._exemplars, self._warned = plan, None, False
        if plan.exemplars:
            self._exemplars = data.Exemplars(
                given[-1],
                shown=plan.exemplars,
                size=plan.pool,
                longest=min(self.max_prompt_tokens, positions - self.config.max_tokens),
                state=state.exemplars or (),
            )

    def write(self, state: RunState) -> None:
        """Puts down the solved problems that can be shown."""
        if self._exemplars is not None:
            state.exemplars = self._exemplars.state()

    def note(self, batch: RolloutBatch) -> None:
        """Adds each prompt's first sample that passes and has an end to what can be shown."""
        if self._exemplars is None:
            return
        right = self._passes(batch) & batch.rollout.stopped
        for p in np.flatnonzero(right.any(1)).tolist():
            g = int(right[p].argmax())
            tokens = batch.rollout.tokens[p, g, : batch.rollout.lengths[p, g]]
            self._exemplars.add(batch.problems[p].uid, *self.policy.texts([tokens.tolist()]))

    def start(self, problems: Sequence[data.Problem], number: int, carried: Rollout | None = None) -> InFlight:
        """Dispatches the probe; once it is collected, the rest is drawn phase by phase."""
        assert carried is None, "a rollout of several phases is not gone on with"
        plan, config = self.plan, self.config
        params, key = self._params(), self._key(number)
        each = plan.most + (plan.probe if plan.exemplars else 0)  # a seeded prompt's samples come after its probe
        probe = self._rows(params, self._prompts(problems, each), key, self._sampler(plan.probe))
        of_phase = _rows_of_a_phase(len(problems), config.group, plan)
        options = {"bonus": plan.bonus, "confidence": plan.confidence, "most": plan.most}

        def finish() -> RolloutBatch:
            counts = np.zeros(len(problems), np.int32)
            probed = self._submit(problems, probe(self.sync))
            seeded = self._seeded(probed)
            first = np.array([plan.probe if new else 0 for new in seeded], np.int32)
            asked = [new or old for new, old in zip(seeded, problems, strict=True)]
            prompts = self._prompts(asked, each)
            parts = [_Part(probed, *_next(counts + plan.probe, counts)).less(first > 0)]
            for _ in range(plan.phases):
                rows = np.concatenate([p.rows[p.counts] for p in parts])
                counts = np.bincount(rows, minlength=len(problems)).astype(np.int32)
                more = _allocate(_deviations(parts, len(problems)), counts, of_phase, **options)
                rows, samples = _next(np.asarray(more), counts)
                numbers = (prompts.first_sample + first)[rows] + samples.astype(np.int32)
                these = dataclasses.replace(jax.tree.map(lambda x, at=rows: x[at], prompts), first_sample=numbers)
                sampled = self._rows(params, these, key, self._sampler(1))
                parts.append(_Part(self._submit([asked[p] for p in rows], sampled(self.sync)), rows, samples))
            return self._whole(parts, problems, asked, first > 0)

        return InFlight(number=number, problems=problems, submit=finish, sync=self.sync)

    def _prompts(self, problems: Sequence[data.Problem], each: int) -> Any:
        longest = packing.bucket(max(len(p.ids) for p in problems), self.max_prompt_tokens)
        return data.to_prompts(problems, longest, each)

    def _sampler(self, group: int) -> SamplerConfig:
        return _sampler_of(self.config, group)

    def _passes(self, batch: RolloutBatch) -> Samples:
        """``[P, G]`` bool: the samples that succeed."""
        deciding, given = self.method.deciding, self.plan.success
        values = batch.by_name[deciding]
        success = success_of(
            values, deciding, given, use="prompts are seeded", setting="rollout.sample_allocation.success"
        )
        return values >= success  # NaN is no success

    def _seeded(self, probed: RolloutBatch) -> list[data.Problem | None]:
        """For each prompt itself with exemplars before it, or None where it stays as it is."""
        if self._exemplars is None:
            return [None] * len(probed.problems)
        batch = probed.with_rewards()
        fails = np.isfinite(batch.by_name[self.method.deciding]).any(1) & ~self._passes(batch).any(1)
        seeded = [self._exemplars.before(p) if f else None for p, f in zip(probed.problems, fails, strict=True)]
        if fails.any() and len(self._exemplars) > 1 and not any(seeded) and not self._warned:
            why = self._exemplars.refused or "raise data.max_prompt_tokens"
            log.warning("no exemplar can be put before any of %d prompts: %s", fails.sum(), why)
            self._warned = True
        return seeded

    def _whole(
        self,
        parts: Sequence["_Part"],
        problems: Sequence[data.Problem],
        asked: Sequence[data.Problem],
        seeded: PerPrompt,
    ) -> RolloutBatch:
        """The parts as one; a seeded prompt that got no sample goes back to its probe."""
        probe, *phases = parts
        seeded = seeded & np.isin(np.arange(len(problems)), np.concatenate([p.rows for p in phases]))
        parts = [probe.less(seeded), *phases]
        shape = len(problems), self.plan.most
        rollout = jax.tree.map(lambda *xs: _lay(parts, xs, shape, 0), *(p.drawn.rollout for p in parts))
        learned = [a if s else p for a, p, s in zip(asked, problems, seeded, strict=True)]

        @functools.cache
        def rewarded() -> RolloutBatch:
            whole = _merge(parts, learned, rollout)
            if self._exemplars is None:
                return whole
            failed = None if not seeded.any() else _failed(probe, seeded, self.plan.most)
            return dataclasses.replace(whole, seeded=seeded, failed=failed)

        return RolloutBatch(problems=learned, rollout=rollout, pending=rewarded)


class _Part(NamedTuple):
    """What one phase drew, and where it goes: ``[n]`` prompts, numbers of their samples, and whether they count."""

    drawn: RolloutBatch
    rows: np.ndarray
    samples: np.ndarray
    counts: Any = slice(None)

    def less(self, prompts: PerPrompt) -> "_Part":
        """Without the samples of some prompts, ``[P]`` bool."""
        return self._replace(counts=~prompts[self.rows])


def _next(more: PerPrompt, counts: PerPrompt) -> tuple[np.ndarray, np.ndarray]:
    """Prompts and sample numbers ``[n]`` of ``more [P]`` further samples of prompts that have ``counts [P]``."""
    rows = np.repeat(np.arange(len(more)), more)
    return rows, np.concatenate([n + np.arange(m) for n, m in zip(counts, more, strict=True)])


def _deviations(parts: Sequence[_Part], prompts: int) -> PerPrompt:
    """``[P]`` float32 standard deviation (ddof 1) of the rewards so far; 0 of less than two."""
    rows = np.concatenate([p.rows[p.counts] for p in parts])
    rewards = np.concatenate([p.drawn.with_rewards().total.reshape(-1)[p.counts] for p in parts])
    known = [rewards[(rows == p) & np.isfinite(rewards)] for p in range(prompts)]
    return np.array([x.std(ddof=1) if len(x) > 1 else 0.0 for x in known], np.float32)


def _lay(parts: Sequence[_Part], xs: Sequence[Array], shape: tuple[int, int], fill: float) -> np.ndarray:
    """``[P', G', ...]`` of every part at their places in ``[P, most, ...]``."""
    tail = xs[0].shape[2:]
    out = np.full((*shape, *tail), fill, xs[0].dtype)
    for part, x in zip(parts, xs, strict=True):
        out[part.rows[part.counts], part.samples[part.counts]] = x.reshape(-1, *tail)[part.counts]
    return out


def _merge(parts: Sequence[_Part], problems: Sequence[data.Problem], rollout: Rollout) -> RolloutBatch:
    """The parts' rewards as those of the whole."""
    each = [p.drawn.with_rewards() for p in parts]

    def whole(*xs: Array) -> Samples:
        return _lay(parts, xs, rollout.lengths.shape, np.nan)

    return RolloutBatch(
        problems=problems,
        rollout=rollout,
        total=whole(*(j.total for j in each)),
        reward=whole(*(j.reward for j in each)),
        by_name={name: whole(*(j.by_name[name] for j in each)) for name in each[0].by_name},
        invalid=dict(sum((Counter(j.invalid) for j in each), Counter())),
    )


def _failed(probe: _Part, seeded: PerPrompt, most: int) -> RolloutBatch:
    """The probes of seeded prompts, ``[S, most, ...]``; what is invalid of them counts with the whole."""
    batch = probe.drawn.with_rewards()

    def wide(x: Array, fill: float = np.nan) -> np.ndarray:
        more = np.full((int(seeded.sum()), most - x.shape[1], *x.shape[2:]), fill, x.dtype)
        return np.concatenate([x[seeded], more], 1)

    return RolloutBatch(
        problems=[p for p, s in zip(batch.problems, seeded, strict=True) if s],
        rollout=jax.tree.map(lambda x: wide(x, 0), batch.rollout),
        total=wide(batch.total),
        reward=wide(batch.reward),
        by_name={name: wide(x) for name, x in batch.by_name.items()},
        invalid={},
    )


def _sampler_of(config: RolloutConfig, group: int) -> SamplerConfig:
    """``group`` samples of a prompt, as a rollout draws them."""
    return SamplerConfig(
        group=group,
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        cache_dtype=config.cache_dtype,
        decode_slots=min(config.decode_slots, group),
    )


def _rows_of_a_phase(prompts: int, group: int, plan: AllocationConfig) -> int:
    return prompts * (group - plan.probe) // plan.phases


def abstract_phases(config: Config, policy: PolicyShape, weights: Any) -> dict[str, Call]:
    """The programs of `PlannedGroups`, as of `grpojax.run.groups.abstract_rollouts`: a probe, and each phase."""
    plan, rollout, longest = config.method.plan, config.rollout, config.data.max_prompt_tokens
    assert plan is not None
    sizes = {
        "rollout": (rollout.prompts, plan.probe),
        "rollout phase": (_rows_of_a_phase(rollout.prompts, rollout.group, plan), 1),
    }
    found = {}
    for name, (count, group) in sizes.items():
        prompts = calls.longest_prompts(batch_shards.filled(count, policy.sampling.shards), longest)
        found[name] = calls.rollout(policy, weights, prompts, _sampler_of(rollout, group))
    return found
