"""Rollouts whose samples go to the prompts where they tell most: XRPO's plan (arXiv 2510.06672)."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from grpojax import allocation, data
from grpojax.device import Program
from grpojax.extensions.methods.exemplars import Exemplars
from grpojax.extensions.methods.method_sections import AllocationConfig
from grpojax.host.console import log
from grpojax.host.on_host import on_host
from grpojax.programs.sampler_config import SamplerConfig, plain
from grpojax.run.batch import Batch, success_of
from grpojax.run.parts.part import Part, mean
from grpojax.run.sections import RolloutConfig
from grpojax.run.source import Plain
from grpojax.types import Array, PerPrompt, Samples


@functools.cache  # a run asks for it at every phase
def allocation_program(budget: int, bonus: float, confidence: float, most: int) -> Program:
    """``(deviations, counts) -> more`` (`grpojax.allocation.xrpo_allocate`), for the host."""
    how = {"bonus": bonus, "confidence": confidence, "most": most}
    return Program("allocate", functools.partial(allocation.xrpo_allocate, budget=budget, **how))


class Allocated(Plain):
    """As `Plain` with the same total number of samples, but each prompt gets its own number of them.

    Every prompt is probed. Then, phase by phase, the next samples go to the prompts whose mean reward is least known
    (`grpojax.allocation.xrpo_allocate`). A phase always samples the same number of rows of one sample, so that it
    compiles once. Sample n of a prompt is the same draw in any phase. The result is ``[P, most, ...]``, with length 0
    and no reward where a prompt got fewer samples.

    With ``exemplars`` in the plan, a prompt is seeded if all samples of its probe fail: solved problems like it are put
    before it (`Exemplars`), and it is planned again as a prompt without any sample. The policy learns from
    its samples under the prompt that they were drawn with, including exemplars. No source that confirms what the paper
    does was available. This way, the sampler and the policy have the same context, the ratio is 1 before the first
    update, and nothing needs a correction. The failed probe, drawn without exemplars, is in no group
    (`Batch.set_aside`); by itself it would have no advantage. If no exemplars fit, or no sample is left for it, the
    prompt continues as any other.

    Args:
      given, options: as of `Plain`.
    """

    def __init__(self, *given: Any, **options: Any):
        super().__init__(*given, **options)
        plan, positions = self.method.plan, self.policy.config.max_positions
        assert plan is not None
        self.plan, self._exemplars, self._warned = plan, None, False
        if plan.exemplars:
            self._exemplars = Exemplars(
                self.problems,
                shown=plan.exemplars,
                size=plan.pool,
                longest=min(self.longest_prompt, positions - self.config.max_tokens),
                state=self.context.state.kept.get("exemplars", ()),
            )

    def after_step(self) -> dict[str, Any]:
        """As `Plain`, and the solved problems that can be shown."""
        shown = {} if self._exemplars is None else {"exemplars": self._exemplars.state()}
        return super().after_step() | shown

    def note(self, batch: Batch) -> dict[str, float]:
        """As `Plain`; also adds each prompt's first sample that passes and has an end to the exemplars."""
        if self._exemplars is not None:
            for drawn in batch.as_drawn:
                right = self.succeeds(drawn) & drawn.rollout.stopped
                for p in np.flatnonzero(right.any(1)).tolist():
                    g = int(right[p].argmax())
                    tokens = drawn.rollout.tokens[p, g, : drawn.rollout.lengths[p, g]]
                    self._exemplars.add(drawn.problems[p].uid, *self.policy.texts([tokens.tolist()]))
        return super().note(batch)

    def draw(self, params: Any, problems: Sequence[data.Problem], number: int) -> Batch:
        """Dispatches the probe; `_in_phases` draws the rest phase by phase."""
        plan, key = self.plan, self.key(number)
        each = plan.most + (plan.probe if plan.exemplars else 0)  # a seeded prompt's samples come after its probe
        probe = sampler_of(self.config, plan.probe)
        fetches = [self.dispatch_any(params, self.prompts(problems, each), key, probe)]
        arrive = functools.partial(self._in_phases, params, each)
        return Batch(number=number, problems=problems, fetches=fetches, arrive=arrive)

    def _in_phases(self, params: Any, each: int, batch: Batch) -> Batch:
        """Waits for the probe and its rewards, then for each phase; rewards of the last one are still under way.

        Args:
          params: the weights that draw all phases.
          each: the most samples of a problem. If the problem occurs again in the rollout, sample numbers continue from
            there.
          batch: with its probe under way.
        """
        plan, problems, key = self.plan, batch.problems, self.key(batch.number)
        of_phase = _rows_of_a_phase(len(problems), self.config.group, plan)
        allocate = allocation_program(of_phase, plan.bonus, plan.confidence, plan.most)
        counts = np.zeros(len(problems), np.int32)
        probed = self.submit(problems, *(fetch(self.sync) for fetch in batch.fetches))
        probed, seeded = self._seeded(probed)
        first = np.array([plan.probe if new else 0 for new in seeded], np.int32)
        asked = [new or old for new, old in zip(seeded, problems, strict=True)]
        prompts = self.prompts(asked, each)
        phases = [Phase(probed, *_next(counts + plan.probe, counts)).less(first > 0)]
        for _ in range(plan.phases):
            phases = [p.rewarded() for p in phases]
            rows = np.concatenate([p.rows[p.counts] for p in phases])
            counts = np.bincount(rows, minlength=len(problems)).astype(np.int32)
            with on_host():
                more = np.asarray(allocate(_deviations(phases, len(problems)), counts))
            rows, samples = _next(more, counts)
            numbers = (prompts.first_sample + first)[rows] + samples.astype(np.int32)
            these = dataclasses.replace(jax.tree.map(lambda x, at=rows: x[at], prompts), first_sample=numbers)
            drawn = self.dispatch_any(params, these, key, sampler_of(self.config, 1), name="rollout phase")
            phases.append(Phase(self.submit([asked[p] for p in rows], drawn(self.sync)), rows, samples))
        whole = self._joined(phases, problems, asked, first > 0)
        return dataclasses.replace(whole, number=batch.number, version=batch.version, passes=batch.passes)

    def succeeds(self, batch: Batch) -> Samples:
        """``[P, G]`` bool: the samples that succeed."""
        deciding, given = self.method.deciding, self.plan.success
        values = batch.by_name[deciding]
        success = success_of(
            values, deciding, given, use="prompts are seeded", setting="rollout.sample_allocation.success"
        )
        return values >= success  # NaN is no success

    def _seeded(self, probed: Batch) -> tuple[Batch, list[data.Problem | None]]:
        """The probe, and each prompt with exemplars before it, or None if the prompt stays as it is."""
        if self._exemplars is None:
            return probed, [None] * len(probed.problems)
        batch = probed.with_rewards()
        fails = np.isfinite(batch.by_name[self.method.deciding]).any(1) & ~self.succeeds(batch).any(1)
        seeded = [self._exemplars.before(p) if f else None for p, f in zip(batch.problems, fails, strict=True)]
        if fails.any() and len(self._exemplars) > 1 and not any(seeded) and not self._warned:
            why = self._exemplars.refused or "raise data.max_prompt_tokens"
            log.warning("no exemplar can be put before any of %d prompts: %s", fails.sum(), why)
            self._warned = True
        return batch, seeded

    def _joined(
        self,
        phases: Sequence["Phase"],
        problems: Sequence[data.Problem],
        asked: Sequence[data.Problem],
        seeded: PerPrompt,
    ) -> Batch:
        """The phases as one batch. A seeded prompt that got no sample goes back to its probe."""
        probe, *later = phases
        seeded = seeded & np.isin(np.arange(len(problems)), np.concatenate([p.rows for p in later]))
        phases = [probe.less(seeded), *later]
        shape = len(problems), self.plan.most
        rollout = jax.tree.map(lambda *xs: _lay(phases, xs, shape, 0), *(p.drawn.rollout for p in phases))
        learned = [a if s else p for a, p, s in zip(asked, problems, seeded, strict=True)]
        add = functools.partial(joined, phases, None if self._exemplars is None else seeded)
        return Batch(problems=learned, rollout=rollout, pending=[add])


class Allocation(Part):
    """The need "rollout_plan"."""

    draws = Allocated
    longer_prompts = True  # by exemplars

    def metrics(self, drawn: Sequence[Batch]) -> dict[str, float]:
        """With exemplars, the share of samples that were drawn with solved problems in context, and how many of these
        pass."""
        plan = self.method.plan
        assert plan is not None
        return of_seeded(drawn, self.method.deciding, plan.success) if plan.exemplars else {}

    def columns(self, batch: Batch) -> dict[str, Array]:
        """Whether a prompt had solved problems before it."""
        return {} if batch.aided is None else {"seeded": batch.aided}


def of_seeded(drawn: Sequence[Batch], deciding: str, success: float | None) -> dict[str, float]:
    """Metrics of the samples drawn with solved problems in context: their share of all, and how many of them pass.

    Args:
      drawn: the rollouts of the step.
      deciding: the reward that says whether a sample succeeded.
      success: the reward from which on a sample passes; None for 1.
    """
    seeded = [np.zeros(len(d.problems), bool) if d.aided is None else d.aided for d in drawn]
    there = [(d.rollout.lengths > 0) & s[:, None] for d, s in zip(drawn, seeded, strict=True)]
    decides = np.concatenate([d.by_name[deciding] for d in drawn])[np.concatenate(there)]
    return {
        "seeded/share": float(sum(x.sum() for x in there) / sum((d.rollout.lengths > 0).sum() for d in drawn)),
        "seeded/solved": mean((decides >= (1.0 if success is None else success))[np.isfinite(decides)]),
    }


class Phase(NamedTuple):
    """The samples of one phase and their places: ``[n]`` prompts, numbers of their samples, and whether they count."""

    drawn: Batch
    rows: np.ndarray
    samples: np.ndarray
    counts: Any = slice(None)

    def less(self, prompts: PerPrompt) -> "Phase":
        """The phase without the samples of some prompts, ``[P]`` bool."""
        return self._replace(counts=~prompts[self.rows])

    def rewarded(self) -> "Phase":
        """The phase with its rewards."""
        return self._replace(drawn=self.drawn.with_rewards())


def joined(phases: Sequence[Phase], seeded: PerPrompt | None, batch: Batch) -> Batch:
    """The batch with the rewards of all phases, for which it waits.

    Args:
      phases: the probe, and those after it.
      seeded: ``[P]`` bool, the prompts with solved problems before them; None if no prompt can have any.
      batch: the samples of all phases.
    """
    phases, shape = [p.rewarded() for p in phases], batch.rollout.lengths.shape
    each = [p.drawn for p in phases]

    def whole(*xs: Array) -> Samples:
        return _lay(phases, xs, shape, np.nan)

    failed = None
    if seeded is not None and seeded.any():
        failed = _failed(phases[0].drawn, seeded, shape[1])
    return dataclasses.replace(
        batch,
        total=whole(*(j.total for j in each)),
        reward=whole(*(j.reward for j in each)),
        by_name={name: whole(*(j.by_name[name] for j in each)) for name in each[0].by_name},
        invalid=dict(sum((Counter(j.invalid) for j in each), Counter())),
        aided=seeded,
        set_aside=failed,
    )


def _next(more: PerPrompt, counts: PerPrompt) -> tuple[np.ndarray, np.ndarray]:
    """Prompts and sample numbers ``[n]`` of ``more [P]`` further samples of prompts that have ``counts [P]``."""
    rows = np.repeat(np.arange(len(more)), more)
    return rows, np.concatenate([n + np.arange(m) for n, m in zip(counts, more, strict=True)])


def _deviations(phases: Sequence[Phase], prompts: int) -> PerPrompt:
    """``[P]`` float32: standard deviation (ddof 1) of the rewards so far; 0 with fewer than two."""
    rows = np.concatenate([p.rows[p.counts] for p in phases])
    rewards = np.concatenate([p.drawn.total.reshape(-1)[p.counts] for p in phases])
    known = [rewards[(rows == p) & np.isfinite(rewards)] for p in range(prompts)]
    return np.array([x.std(ddof=1) if len(x) > 1 else 0.0 for x in known], np.float32)


def _lay(phases: Sequence[Phase], xs: Sequence[Array], shape: tuple[int, int], fill: float) -> np.ndarray:
    """Puts ``[P', G', ...]`` of every phase at their places in ``[P, most, ...]``."""
    tail = xs[0].shape[2:]
    out = np.full((*shape, *tail), fill, xs[0].dtype)
    for phase, x in zip(phases, xs, strict=True):
        out[phase.rows[phase.counts], phase.samples[phase.counts]] = x.reshape(-1, *tail)[phase.counts]
    return out


def _failed(probe: Batch, seeded: PerPrompt, most: int) -> Batch:
    """The probes of seeded prompts, ``[S, most, ...]``. Their invalid samples count with those of the whole batch."""

    def wide(x: Array, fill: float = np.nan) -> np.ndarray:
        more = np.full((int(seeded.sum()), most - x.shape[1], *x.shape[2:]), fill, x.dtype)
        return np.concatenate([x[seeded], more], 1)

    return Batch(
        problems=[p for p, s in zip(probe.problems, seeded, strict=True) if s],
        rollout=jax.tree.map(lambda x: wide(x, 0), probe.rollout),
        total=wide(probe.total),
        reward=wide(probe.reward),
        by_name={name: wide(x) for name, x in probe.by_name.items()},
        invalid={},
    )


def sampler_of(config: RolloutConfig, group: int) -> SamplerConfig:
    """``group`` samples of a prompt, as a rollout draws them."""
    return plain(config, group=group, decode_slots=min(config.decode_slots, group))


def _rows_of_a_phase(prompts: int, group: int, plan: AllocationConfig) -> int:
    return prompts * (group - plan.probe) // plan.phases
