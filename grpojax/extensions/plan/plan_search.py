"""The split of a run over chips that fits them, and the longest completion that fits; by shapes, without compiling."""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping

from grpojax import extension
from grpojax.extensions.plan import plan_estimate
from grpojax.extensions.plan.plan_calls import PlannedCall
from grpojax.extensions.plan.plan_chips import PlanTarget
from grpojax.extensions.plan.plan_estimate import Estimate
from grpojax.extensions.plan.plan_links import Split
from grpojax.extensions.plan.plan_report import ProgramReport
from grpojax.extensions.plan.plan_shapes import shape_of
from grpojax.host.errors import UserError
from grpojax.models import DecoderConfig
from grpojax.models.weight_table import check_axis
from grpojax.programs.adapter import SETTING
from grpojax.run.recipe import Config

SLACK = 1.05  # a split that takes up to this times as long as the fastest is as good
LEAST = 8192  # positions of a micro-batch on a shard; one with fewer may take just as long
Calls = Mapping[str, PlannedCall]
STEP = 128  # tokens; the longest completion is a multiple of it
RANK = 16  # of adapters that a recipe does not have


@dataclasses.dataclass(frozen=True)
class Fit:
    """A split of a run, its estimate, and whether its model has experts."""

    split: Split
    estimate: Estimate
    experts: bool

    @property
    def fits(self) -> bool:
        """Whether every program fits."""
        return self.estimate.fits

    @property
    def largest(self) -> ProgramReport:
        """The program that needs most."""
        return max(self.estimate.programs, key=lambda p: p.total + p.resident)

    @property
    def needs(self) -> float:
        """GiB per chip that this program needs, with the run's state."""
        return self.largest.total + self.largest.resident

    @property
    def missing(self) -> float:
        """GiB that every chip lacks; 0 if the run fits."""
        return max(0.0, self.needs - self.largest.room)

    @property
    def settings(self) -> str:
        """The settings that make it, as ``grpojax train`` takes them."""
        s = self.split
        expert = f"mesh.expert={s.expert} " if self.experts else ""
        mesh = f"mesh.data={s.data} mesh.fsdp={s.fsdp} {expert}mesh.tensor={s.tensor}"
        return f"{mesh} train.microbatches={s.microbatches}"


@dataclasses.dataclass(frozen=True)
class Longest:
    """The longest completion that fits.

    Attributes:
      tokens: its tokens, a multiple of `STEP`; 0 if not even the shortest fits.
      why: what a longer one would exceed.
    """

    tokens: int
    why: str


def own(config: Config, target: PlanTarget, model: DecoderConfig | None = None) -> Fit:
    """A recipe's own split; arguments as in `best`."""
    return _fit(config, target, _shape(config, model), plan_estimate.split_of(config, target.chips))


def _shape(config: Config, model: DecoderConfig | None) -> DecoderConfig:
    return shape_of(config.model.path) if model is None else model


def _fit(config: Config, target: PlanTarget, model: DecoderConfig, split: Split, calls: Calls | None = None) -> Fit:
    estimate = plan_estimate.of_recipe(config, target, model=model, split=split, calls=calls)
    return Fit(split, estimate, model.mlp is not None)


def best(
    config: Config,
    target: PlanTarget,
    model: DecoderConfig | None = None,
    *,
    under: float = math.inf,
    calls: Calls | None = None,
) -> Fit:
    """The split with which a recipe fits its chips, whatever its own ``mesh`` and ``train.microbatches`` are.

    Every division of the chips over ``fsdp``, ``tensor`` and, for a mixture of experts, ``expert`` is tried, each with
    every number of micro-batches that is a power of two. Of those that fit, micro-batches of at least `LEAST` positions
    come first, or else the fewest. Of those that are about as fast as the fastest, the one that needs the least memory
    is taken. If none fits, it is the one that lacks the least. None changes what the run learns.

    Args:
      config: the recipe.
      target: the chips.
      model: the shape of the policy; None takes that which ``model.path`` names.
      under: GiB per chip; what needs less is preferred to all else that fits.
      calls: what a step calls (`grpojax.extensions.plan.plan_estimate.calls_of_a_step`); None finds it.

    Raises:
      UserError: sizes divide over none of the meshes, or the recipe has programs that are not estimated.
    """
    model, found, refused = _shape(config, model), list[Fit](), list[UserError]()
    calls = plan_estimate.calls_of_a_step(config) if calls is None else calls
    for split in _splits(config, target, model):
        try:
            found.append(_fit(config, target, model, split, calls))
        except UserError as e:
            refused.append(e)
    if not found:
        raise refused[0]
    fitting = [fit for fit in found if fit.fits and fit.needs < under] or [fit for fit in found if fit.fits]
    if not fitting:
        return min(found, key=lambda fit: (fit.missing, fit.split.tensor, fit.split.microbatches))
    fewest = min(_too_many(config, fit.split) for fit in fitting)
    whole = [fit for fit in fitting if _too_many(config, fit.split) == fewest]
    fastest = min(fit.estimate.run.step for fit in whole)
    return min((fit for fit in whole if fit.estimate.run.step <= SLACK * fastest), key=lambda fit: fit.needs)


def changes(config: Config, target: PlanTarget, model: DecoderConfig | None = None) -> Iterator[tuple[str, Fit]]:
    """Settings with which a recipe fits its chips, each with the split that is best then, in three ways.

    Adapters learn in place of weights, are not merged for rollouts, have a base in eight bits, and get fewer prompts;
    each of these is taken beside those before it. Fewer slots hold fewer keys and values at a time. With fewer prompts
    a step learns from fewer samples. Of each way the first that fits is taken.

    Args:
      config, target, model: as in `best`.
    """
    model = _shape(config, model)
    for way in (
        _adapted(config),
        _fewer_slots(config),
        _fewer_prompts(config),
    ):
        for settings, changed in way:
            with contextlib.suppress(UserError):  # it divides over no mesh, or does not go with another setting
                if (found := best(changed, target, model)).fits:
                    yield settings, found
                    break


def _adapted(config: Config) -> Iterator[tuple[str, Config]]:
    adapter, section = config.model.adapter, extension.words("sections").get(SETTING)
    if adapter is None and section is not None:
        adapter = extension.imported(section)(rank=RANK)
    if adapter is None or adapter.dora:
        return
    unmerged = dataclasses.replace(adapter, merged=False)
    eight = dataclasses.replace(unmerged, base="int8")
    said, before, changed = list[str](), config.model.adapter, config
    for setting, after in ((f"rank={adapter.rank}", adapter), ("merged=false", unmerged), ("base=int8", eight)):
        if after != before:
            said.append(f"model.adapter.{setting}")
            changed = dataclasses.replace(config, model=dataclasses.replace(config.model, adapter=after))
            yield " ".join(said), changed
        before = after
    for fewer, of_fewer in _fewer_prompts(changed):
        yield " ".join((*said, fewer)), of_fewer


def _fewer_prompts(config: Config) -> Iterator[tuple[str, Config]]:
    for n in _halves(config.rollout.prompts):
        rollout = dataclasses.replace(config.rollout, prompts=n)
        yield f"rollout.prompts={n}", dataclasses.replace(config, rollout=rollout)


def _fewer_slots(config: Config) -> Iterator[tuple[str, Config]]:
    for n in _halves(config.rollout.decode_slots or config.rollout.group):
        rollout = dataclasses.replace(config.rollout, decode_slots=n)
        yield f"rollout.decode_slots={n}", dataclasses.replace(config, rollout=rollout)


def _halves(most: int) -> Iterator[int]:
    return itertools.takewhile(bool, (most >> n for n in itertools.count(1)))


def _too_many(config: Config, split: Split) -> int:
    """The number of micro-batches if each has fewer than `LEAST` positions, 0 otherwise."""
    each = config.data.max_prompt_tokens + config.rollout.group * config.rollout.max_tokens
    positions = config.rollout.prompts // config.train.minibatches * each / (split.data * split.fsdp * split.expert)
    return split.microbatches if split.microbatches > 1 and positions < LEAST * split.microbatches else 0


def _splits(config: Config, target: PlanTarget, model: DecoderConfig) -> Iterator[Split]:
    """Those to try."""
    data = max(config.mesh.data, 1)
    inside = target.chips // data
    samples = config.rollout.prompts // config.train.minibatches * config.rollout.group
    sizes = [n for n in range(1, inside + 1) if inside % n == 0]
    for tensor, expert in itertools.product(sizes, [n for n in sizes if _fits(model, n)]):
        if inside % (tensor * expert):
            continue
        fsdp = inside // tensor // expert
        for power in range(max(1, samples // (data * fsdp * expert)).bit_length()):
            yield Split(data=data, fsdp=fsdp, expert=expert, tensor=tensor, microbatches=2**power)


def _fits(model: DecoderConfig, expert: int) -> bool:
    """Whether the model divides over so many chips of ``mesh.expert``."""
    try:
        check_axis(model, expert)
    except UserError:
        return False
    return True


def longest(config: Config, target: PlanTarget, model: DecoderConfig | None = None) -> Longest:
    """The longest completion (``rollout.max_tokens``) with which a recipe fits its chips, with its own split.

    Args:
      config, target, model: as in `best`.

    Raises:
      UserError: as `grpojax.extensions.plan.plan_estimate.of_recipe`.
    """
    model = _shape(config, model)
    positions = max(0, model.max_positions - config.data.max_prompt_tokens)
    calls = plan_estimate.calls_of_a_step(config)

    @functools.cache
    def too_large(tokens: int) -> str:
        programs = plan_estimate.of_recipe(config, target, model=model, tokens=tokens, calls=calls).programs
        return ", ".join(p.name for p in programs if not p.fits)

    least, most = 0, positions // STEP + 1  # in steps: the first fits, the last does not
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if too_large(middle * STEP) else (middle, most)
    if most * STEP > positions:
        return Longest(least * STEP, f"the model has {model.max_positions} positions")
    return Longest(least * STEP, f"memory of {too_large(most * STEP)}")
