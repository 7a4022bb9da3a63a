"""A recipe's memory and time from its shapes alone: for GPUs, whose compiler is not at hand, and to sort candidates."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

import numpy as np

from grpojax.host.errors import UserError
from grpojax.models import Compute, DecoderConfig, flops, kv_heads
from grpojax.programs import lanes as cut
from grpojax.programs import packing, slot_cache
from grpojax.run.recipe import Config
from grpojax.tools import plan_run
from grpojax.tools.plan_chips import Target
from grpojax.tools.plan_compile import room
from grpojax.tools.plan_report import ProgramReport
from grpojax.tools.plan_shapes import shape_of

_GIB = 2**30
_BLOCKS = 2**27  # bytes of logits and their like, a block of the vocabulary at a time
_START_S = 5e-6  # that a collective takes to start, for those of a token; no data sheet has it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a run is thought to need.

    Attributes:
      programs: reports of "rollout", "reshard", "score" (or "score with entropy", or both) and "update" with sizes in
        GiB a chip and seconds by resource.
      run: its step and its whole.
    """

    programs: tuple[ProgramReport, ...]
    run: plan_run.RunBound

    @property
    def fits(self) -> bool:
        """Whether all programs do."""
        return all(p.fits for p in self.programs)

    @property
    def peak(self) -> float:
        """GiB of the program that needs most."""
        return max(p.total + p.resident for p in self.programs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """How a recipe is executed: the settings that a search may change."""

    data: int
    fsdp: int
    tensor: int
    microbatches: int
    remat: Literal["layer", "matmuls", "none"]
    slots: int

    @classmethod
    def of(cls, config: Config, chips: int) -> "Execution":
        """A recipe's own, on so many chips."""
        sizes = {"data": config.mesh.data, "fsdp": config.mesh.fsdp, "tensor": config.mesh.tensor}
        known = math.prod(s for s in sizes.values() if s != -1)
        whole = {axis: max(1, chips // known) if s == -1 else s for axis, s in sizes.items()}
        train, model = config.train, config.model
        return cls(**whole, microbatches=train.microbatches, remat=model.remat, slots=config.rollout.decode_slots)

    def applied(self, config: Config) -> Config:
        """The recipe with it."""
        return dataclasses.replace(
            config,
            mesh=dataclasses.replace(config.mesh, data=self.data, fsdp=self.fsdp, tensor=self.tensor),
            model=dataclasses.replace(config.model, remat=self.remat),
            train=dataclasses.replace(config.train, microbatches=self.microbatches),
            rollout=dataclasses.replace(config.rollout, decode_slots=self.slots),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Work:
    """A chip's part of a step; bytes and tokens."""

    model: DecoderConfig
    config: Config
    data: int
    fsdp: int
    tensor: int
    microbatches: int
    remat: str
    slots: int

    @property
    def lanes(self) -> int:
        return self.data * self.fsdp

    @property
    def parameters(self) -> int:
        return flops.parameters(self.model)

    @property
    def spread(self) -> DecoderConfig:
        """The model with as many heads of keys and values as there are on the chips."""
        return dataclasses.replace(self.model, num_kv_heads=kv_heads.over(self.model, self.tensor))

    @property
    def weight_bytes(self) -> int:
        """Of one weight in a rollout."""
        return 1 if self.config.rollout.weights == "int8" else 2

    @property
    def state(self) -> dict[str, float]:
        """GiB that stay on a chip all the time."""
        weights = 4 * self.parameters / self.fsdp / self.tensor / _GIB
        optimizer = self.config.optimizer
        moments = 2 if optimizer.name == "adamw" else int(optimizer.b1 > 0)
        parts = {"weights": weights, "optimiser": moments * weights}
        if self.config.method.variant.objective.needs_reference:
            half = self.config.model.dtype == "bfloat16" and not self.config.train.reference_every
            parts["reference"] = weights / 2 if half else weights
        return parts

    @property
    def sampled(self) -> tuple[int, int]:
        """Prompts of a lane, and samples of each."""
        prompts, group = cut.spread_sizes(self.config.rollout.prompts, self.config.rollout.group, self.lanes)
        return prompts // self.lanes, group

    @property
    def rows(self) -> tuple[float, float]:
        """Tokens of a micro-batch of a lane: of prompts, and of completions."""
        prompts, group = self.sampled
        train = self.config.train
        prompts = prompts / train.minibatches
        held = max(1.0, prompts / self.microbatches)
        completions = prompts * group * self.config.rollout.max_tokens / self.microbatches
        return held * self.config.data.max_prompt_tokens, completions


def of_recipe(config: Config, target: Target, *, layers: int | None = None) -> Estimate:
    """Estimates a recipe.

    Memory is what is kept (weights, moments, reference, cast weights, keys and values) to the byte, and of temporaries
    a fit to what the TPU compiler allocates: together within 25 % of it (`tests/tools/test_plan_estimate.py`).

    Args:
      config: the recipe.
      target: the chips.
      layers: of the model; None for all.

    Raises:
      UserError: sizes that do not divide over the mesh, or a variant with programs of its own.
    """
    model = shape_of(config.model.path)
    model = model if layers is None else dataclasses.replace(model, num_layers=layers)
    execution = Execution.of(config, target.chips)
    check_known(config)
    _check_divides(config, model, execution, target.chips)
    return estimate(config, model, target, execution)


def check_known(config: Config) -> None:
    """Raises `UserError` where a recipe has programs, and maybe networks, that no estimate has."""
    if config.rollout.overlap:
        raise UserError(
            f"rollout.overlap={config.rollout.overlap:g} reads samples that were begun, which no plan by data sheet "
            "knows: plan it for a TPU, such as --topology v5e:4x4, or with overlap=0"
        )
    counts = plan_run.times_a_step(config)
    if more := [name for name, n in counts.items() if n and name not in PROGRAMS]:
        raise UserError(
            f"variant {config.method.variant.name!r} runs {', '.join(more)}, which no plan by data sheet knows: plan "
            "it for a TPU, such as --topology v5e:4x4"
        )


def _check_divides(config: Config, model: DecoderConfig, e: Execution, chips: int) -> None:
    if e.data * e.fsdp * e.tensor != chips:
        raise UserError(f"mesh data={e.data} x fsdp={e.fsdp} x tensor={e.tensor} does not make {chips} chips")
    if bad := indivisible(model, e.fsdp, e.tensor):
        raise UserError(f"{model.family} with {bad} does not divide over mesh.fsdp={e.fsdp} and mesh.tensor={e.tensor}")
    rollout, parts = config.rollout, e.data * e.fsdp
    prompts, group = cut.spread_sizes(rollout.prompts // config.train.minibatches, rollout.group, parts)
    packing.check_cut(prompts // parts, group, e.microbatches)


def indivisible(model: DecoderConfig, fsdp: int, tensor: int) -> str:
    """The first size of a model that these mesh axes do not divide; empty where there is none."""
    cut_by = {"num_heads": tensor, "intermediate_size": tensor, "vocab_size": tensor}
    sizes = cut_by | {"hidden_size": fsdp}
    if model.num_kv_heads * model.head_dim % tensor:
        return f"num_kv_heads={model.num_kv_heads}"
    return next((f"{name}={getattr(model, name)}" for name, n in sizes.items() if getattr(model, name) % n), "")


def estimate(
    config: Config,
    model: DecoderConfig,
    target: Target,
    execution: Execution,
    counts: Mapping[str, int] | None = None,
) -> Estimate:
    """As `of_recipe`, of this model, and executed like this in place of what the recipe says.

    ``counts`` is `plan_run.times_a_step` of the recipe, for a caller that asks often.
    """
    work = _Work(model=model, config=config, **vars(execution))
    counts = plan_run.times_a_step(config) if counts is None else counts
    programs = tuple(
        _report(name, work, target, *make(work, target))
        for name, make in PROGRAMS.items()
        if name != "score with entropy" or counts.get(name)
    )
    return Estimate(programs=programs, run=plan_run.bound(config, programs, target.chips, counts))


def _report(
    name: str, work: _Work, target: Target, consumers: Mapping[str, float], seconds: Mapping[str, float]
) -> ProgramReport:
    state = work.state
    return ProgramReport(
        name=name,
        compile_s=0.0,
        argument=0.0,
        temp=math.fsum(consumers.values()),
        output=0.0,
        alias=0.0,
        resident=math.fsum(state.values()),
        room=room(target.kind),
        consumers={**state, **consumers},
        seconds={what: s for what, s in seconds.items() if s},
    )


# ---------------------------------------------------------------------------------- GiB and seconds of each program


def _link(target: Target) -> float:
    """Bytes/s that a chip receives from those of its slice."""
    axes = sum(n > 1 for n in target.shape)
    return target.chip.link * (1 if target.by_sheet else max(1, axes))


def _between(work: _Work, target: Target, size: float) -> float:
    """Seconds of an all-reduce of ``size`` bytes of each chip between slices."""
    if target.slices == 1 or not target.chip.network:
        return 0.0
    return 2 * size * (1 - 1 / target.slices) / target.chip.network


def _rollout(w: _Work, target: Target) -> tuple[dict[str, float], dict[str, float]]:
    c, (prompts, group) = w.spread, w.sampled
    rollout, length = w.config.rollout, w.config.data.max_prompt_tokens
    slots = min(w.slots or group, group)
    platform = "gpu" if target.by_sheet else "tpu"
    compute = Compute(dtype="bfloat16", platform=platform)
    ring = slot_cache.ring(rollout.max_tokens, compute)
    dtype = slot_cache.dtype_of(rollout.cache_dtype, compute)
    rounds = -(-group // slots)
    iterations = rounds * (rollout.max_tokens - 1)
    live = ring.mean_live(rollout.max_tokens, rounds) * ring.size
    read = flops.decode_bytes(c, length, live, prompts=prompts, slots=slots, cache_dtype=dtype) / w.tensor
    read -= (2 - w.weight_bytes) * (flops.matmul_weights(c) + c.vocab_size * c.hidden_size) / w.tensor
    logits = 4 * prompts * slots * c.vocab_size
    read += 6 * logits if logits > 2**26 else 0  # fewer stay in a chip's fast memory
    kept = (prompts * length + prompts * slots * ring.size) * flops.kv_bytes(c, dtype) / w.tensor
    counts = np.full(prompts, length), np.full((prompts, group), rollout.max_tokens)
    share = (w.tensor - 1) / w.tensor
    joined = 2 * c.num_layers * (w.tensor > 1)  # sums over the tensor axis for a token
    wire = joined * prompts * slots * c.hidden_size * 2 * 2 * share
    consumers = {
        "weights cast for the rollout": w.weight_bytes * w.parameters / w.tensor / _GIB,
        "keys and values": kept / _GIB,
        "logits": 3 * logits / _GIB,
    }
    return consumers, {
        "compute": flops.forward_flops(c, *counts) / w.tensor / target.chip.flops,
        "HBM": iterations * read / target.chip.bandwidth,
        "ICI": iterations * (wire / _link(target) + joined * _START_S) if joined else 0.0,
    }


def _reshard(w: _Work, target: Target) -> tuple[dict[str, float], dict[str, float]]:
    cast = w.weight_bytes * w.parameters / w.tensor
    gathered = cast * (w.fsdp - 1) / w.fsdp
    consumers = {"weights cast for the rollout": cast / _GIB}
    return consumers, {
        "HBM": (cast + 4 * w.parameters / w.fsdp / w.tensor) / target.chip.bandwidth,
        "ICI": gathered / _link(target) if gathered else 0.0,
    }


def _counts(w: _Work) -> tuple[np.ndarray, np.ndarray]:
    """Prompts and completions of an update on a lane, in tokens."""
    prompts, group = w.sampled
    each = max(1, prompts // w.config.train.minibatches)
    return np.full(each, w.config.data.max_prompt_tokens), np.full((each, group), w.config.rollout.max_tokens)


def _passes(w: _Work, target: Target, layers: float, logits: float, gathers: int) -> dict[str, float]:
    """Seconds of memory and links: activations so many times a forward pass's, bytes of each logit, weights gathered.

    A forward pass of a layer moves about 8 bytes for each of a token's MLP activations and 24 for each of its hidden
    size in the programs that the TPU compiler makes of it.
    """
    c, micro = w.model, w.microbatches
    before, completed = w.rows
    tokens = before + completed
    moved = layers * tokens * c.num_layers * (8 * c.intermediate_size / w.tensor + 24 * c.hidden_size)
    moved += completed * logits * c.vocab_size / w.tensor + gathers * 2 * w.parameters / w.tensor
    gathered = gathers * 2 * w.parameters / w.tensor * (w.fsdp - 1) / w.fsdp
    joined = 2 * gathers * 2 * c.num_layers * tokens * c.hidden_size * 2 * (w.tensor - 1) / w.tensor
    busy = {"HBM": micro * moved / target.chip.bandwidth}
    return busy | {"ICI": micro * (gathered + joined) / _link(target)}


def _score(w: _Work, target: Target) -> tuple[dict[str, float], dict[str, float]]:
    c, (before, completed) = w.spread, w.rows
    layer = 2 * flops.matmul_weights(c) / c.num_layers / w.tensor
    activations = 2 * (before + completed) * (4 * c.intermediate_size / w.tensor + 12 * c.hidden_size)
    busy = {"compute": flops.forward_flops(c, *_counts(w)) / w.tensor / target.chip.flops}
    consumers = {"temporaries": (2 * layer + activations + _BLOCKS) / _GIB}
    return consumers, busy | _passes(w, target, layers=1, logits=1, gathers=1)


def _update(w: _Work, target: Target) -> tuple[dict[str, float], dict[str, float]]:
    c, (before, completed), remat = w.spread, w.rows, w.remat
    tokens, shards, micro = before + completed, w.fsdp * w.tensor, w.microbatches
    inner = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim / w.tensor
    outputs = inner + c.hidden_size + 2 * c.intermediate_size / w.tensor
    kept = {"layer": 0.0, "matmuls": outputs, "none": 2 * outputs + 4 * c.hidden_size}[remat]
    layer = 2 * flops.matmul_weights(c) / c.num_layers / w.tensor
    working = 2 * tokens * (4 * c.intermediate_size / w.tensor + 4 * inner + 8 * c.hidden_size) + 3 * layer
    gradients = 4 * w.parameters / shards
    consumers = {
        "gradients": gradients * (2 if micro > 1 else 1) / _GIB,
        "activations kept": 2 * c.num_layers * tokens * (c.hidden_size + kept) / _GIB,
        "temporaries": (working + 2 * _BLOCKS) / _GIB,
    }
    computed = flops.update_flops(c, *_counts(w), remat=remat) / w.tensor / target.chip.flops
    passes = {"layer": 5.75, "matmuls": 5.0, "none": 4.75}[remat]
    busy = _passes(w, target, layers=passes, logits=14, gathers=2)
    busy["HBM"] += 8 * gradients / target.chip.bandwidth  # weights and moments read and written, gradients too
    inside = w.data // target.slices
    reduced = micro * 2 * w.parameters / w.tensor * (w.fsdp - 1) / w.fsdp + 2 * gradients * (inside - 1) / inside
    busy["ICI"] += reduced / _link(target)
    return consumers, {"compute": computed, **busy, "DCN": _between(w, target, gradients)}


PROGRAMS = {
    "rollout": _rollout,
    "reshard": _reshard,
    "score": _score,
    "score with entropy": _score,
    "update": _update,
}


def format_estimate(found: Estimate) -> str:
    """For people; sizes are GiB a chip."""
    lines = ["by data sheets and shapes alone, nothing compiled; GiB a chip"]
    for p in found.programs:
        parts = ", ".join(f"{what} {size:.2f}" for what, size in sorted(p.consumers.items(), key=lambda x: -x[1]))
        busy = ", ".join(f"{what} {s:.3g} s" for what, s in p.seconds.items())
        lines.append(f"{p.name}: about {p.total + p.resident:.1f} of {p.room:.1f}: {parts}")
        lines.append(f"{p.name} is busy: {busy}")
        if not p.fits:
            lines.append(f"{p.name}: does not fit")
    return "\n".join(lines)
