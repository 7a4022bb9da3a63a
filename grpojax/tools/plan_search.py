"""``grpojax plan --search``: the settings of execution with which a step is thought to be fastest.

Candidates are sorted by `grpojax.tools.plan_estimate`; the compiler sees only the first few. What they change (mesh,
micro-batches, remat, slots) changes no result beyond rounding.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from grpojax.host.errors import UserError
from grpojax.models import DecoderConfig
from grpojax.programs import lanes
from grpojax.programs.begun import most_left
from grpojax.run.recipe import Config
from grpojax.tools import plan_estimate, plan_run, planner
from grpojax.tools.plan_chips import Target
from grpojax.tools.plan_estimate import Estimate, Execution
from grpojax.tools.plan_report import ProgramReport

_COMPILED = 3  # candidates that the compiler sees at most
_MARGIN = 1.05  # by which an estimate of memory may be wrong and its candidate still be tried

_REMATS: tuple[Literal["none", "matmuls", "layer"], ...] = ("none", "matmuls", "layer")

Compile = Callable[[Config], Sequence[ProgramReport]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """Settings of execution, and what a run is thought to need with them."""

    execution: Execution
    estimate: Estimate

    @property
    def overrides(self) -> str:
        """To paste behind a command."""
        e = self.execution
        return (
            f"mesh.data={e.data} mesh.fsdp={e.fsdp} mesh.tensor={e.tensor} train.microbatches={e.microbatches} "
            f"model.remat={e.remat} rollout.decode_slots={e.slots}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """The best of a search.

    Attributes:
      candidate: it.
      reports: of its programs by the compiler; those of its estimate where none is at hand.
      run: what a step and the run take.
      tried: candidates there were, and how many of them had room by their estimate.
    """

    candidate: Candidate
    reports: Sequence[ProgramReport]
    run: plan_run.RunBound
    tried: tuple[int, int]


class NothingFits(UserError):
    """Of all settings that divide none has room; ``least`` needs least memory by its estimate."""

    def __init__(self, least: Candidate, target: Target):
        self.least = least
        super().__init__(
            f"no settings fit {target.chips} x {target.kind}: those that need least are thought to need "
            f"{least.estimate.peak:.1f} GiB a chip; take more chips, fewer rollout.prompts or a smaller "
            "rollout.max_tokens"
        )


def candidates(config: Config, model: DecoderConfig, target: Target) -> list[Candidate]:
    """All settings that divide, fastest estimate first; ties in the order of meshes, micro-batches, remat, slots."""
    out = []
    rollout, counts = config.rollout, plan_run.times_a_step(config)
    slots = (0, *(n for n in _divisors(rollout.group) if 1 < n < rollout.group and not rollout.overlap))
    for data, tensor in _meshes(model, target):
        fsdp = target.chips // data // tensor
        for microbatches in _microbatches(config, data * fsdp):
            for remat, held in itertools.product(_REMATS, slots):
                execution = Execution(
                    data=data, fsdp=fsdp, tensor=tensor, microbatches=microbatches, remat=remat, slots=held
                )
                found = plan_estimate.estimate(config, model, target, execution, counts)
                out.append(Candidate(execution=execution, estimate=found))
    return sorted(out, key=lambda c: c.estimate.run.step)


def _microbatches(config: Config, parts: int) -> list[int]:
    """Into how many micro-batches a minibatch of a batch shard may be cut."""
    minibatches = config.train.minibatches
    try:
        lanes.spread_sizes(config.rollout.prompts, config.rollout.group, parts)
        if config.rollout.overlap:
            most_left(config.rollout.overlap, config.rollout.prompts, config.rollout.group, parts)
        prompts, group = lanes.spread_sizes(config.rollout.prompts // minibatches, config.rollout.group, parts)
    except UserError:
        return []
    each = prompts // parts
    return [m for m in _divisors(each * group) if each % m == 0 or m % each == 0 and group % (m // each) == 0]


def _meshes(model: DecoderConfig, target: Target) -> Iterator[tuple[int, int]]:
    """``(data, tensor)`` of every mesh that the model divides over."""
    for tensor in _divisors(target.chips // target.slices):
        for data in _divisors(target.chips // tensor):
            fsdp = target.chips // tensor // data
            if data % target.slices == 0 and not plan_estimate.indivisible(model, fsdp, tensor):
                yield data, tensor


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def search(
    config: Config, target: Target, *, compile_it: Compile, say: Callable[[str], None], layers: int | None = None
) -> Found:
    """The settings with the least bound of a step among those that fit.

    Args:
      config: the recipe; what it says of execution is replaced.
      target: the chips.
      compile_it: a recipe's programs by the compiler; not called where the target has none here.
      say: where progress goes.
      layers: of the model; None for all.

    Raises:
      NothingFits: by the estimate or by the compiler.
      UserError: no settings divide; or a target without a compiler, and a variant with programs of its own.
    """
    if target.by_sheet:
        plan_estimate.check_known(config)
    model = planner.shorter(config.model.path, layers)
    every = candidates(config, model, target)
    if not every:
        raise UserError(
            f"no mesh of {target.chips} chips divides rollout.prompts={config.rollout.prompts} and the model's heads; "
            "take another number of prompts or chips"
        )
    room = [c for c in every if c.estimate.peak <= _MARGIN * c.estimate.programs[0].room]
    say(f"{len(every)} settings divide, {len(room)} have room by their estimate")
    tried, best = (len(every), len(room)), None
    if target.by_sheet:
        best = next((Found(candidate=c, reports=c.estimate.programs, run=c.estimate.run, tried=tried)
                     for c in room if c.estimate.fits), None)  # fmt: skip
        room = []
    for n, candidate in enumerate(room[:_COMPILED], 1):
        say(f"compiling {n} of at most {min(_COMPILED, len(room))}: {candidate.overrides}")
        reports = compile_it(candidate.execution.applied(config))
        run = plan_run.bound(config, reports, target.chips)
        if not all(r.fits for r in reports):
            say("does not fit")
        else:
            say(f"a step takes at least {run.step:.3g} s (estimate {candidate.estimate.run.step:.3g} s)")
            if best is None or run.step < best.run.step:
                best = Found(candidate=candidate, reports=reports, run=run, tried=tried)
    if best is None:
        raise NothingFits(min(every, key=lambda c: c.estimate.peak), target)
    return best
