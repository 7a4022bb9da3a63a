"""A recipe's memory and least time from its shapes and a data sheet. It is for GPUs, whose compiler is not available.

All figures are estimates. Arrays that are kept (weights, moments, reference, cast weights, keys and values, gradients)
are counted to the byte; of the temporaries, only the arrays of one layer are counted. Time is the larger of FLOPs /
peak and bytes / bandwidth; the bytes are those that have to be moved: weights, keys and values, moments. Links between
chips are not counted.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from grpojax.host.errors import UserError
from grpojax.models import Compute, DecoderConfig, adapters, delta_net, flops, kv_heads
from grpojax.programs import batch_shards as cut
from grpojax.programs import kv_cache, packing
from grpojax.run.calls import times_a_step
from grpojax.run.recipe import Config
from grpojax.tools import plan_run
from grpojax.tools.plan_chips import Target
from grpojax.tools.plan_compile import room
from grpojax.tools.plan_report import ProgramReport
from grpojax.tools.plan_shapes import shape_of

_GIB = 2**30
_BLOCKS = 3 * 2**27  # bytes of a block of logits and of its gradient in 16 bits (`Compute.logits_bytes`)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimated needs of a run.

    Attributes:
      programs: reports on the programs of `PROGRAMS` that a step runs, with sizes in GiB a chip and seconds by
        resource.
      run: the bounds of a step and of the whole run.
    """

    programs: tuple[ProgramReport, ...]
    run: plan_run.RunBound

    @property
    def fits(self) -> bool:
        """Whether all programs fit."""
        return all(p.fits for p in self.programs)


def of_recipe(config: Config, target: Target, *, layers: int | None = None) -> Estimate:
    """Estimates a recipe; its memory lies within 25 % of the TPU compiler's (`tests/tools/test_plan_estimate.py`).

    Args:
      config: the recipe.
      target: the chips.
      layers: number of layers of the model; None for all.

    Raises:
      UserError: sizes do not divide over the mesh, or the variant has programs of its own.
    """
    model = shape_of(config.model.path)
    model = model if layers is None else dataclasses.replace(model, num_layers=layers)
    counts = times_a_step(config)
    _check_known(config, counts)
    work = _Work(model=model, config=config, **_mesh(config, target.chips))
    _check_divides(work, target.chips)
    programs = tuple(
        _report(name, work, target, *make(work, target)) for name, make in PROGRAMS.items() if counts.get(name)
    )
    return Estimate(programs=programs, run=plan_run.bound(config, programs, target.chips))


def format_estimate(found: Estimate) -> str:
    """The estimate as text for people; sizes are GiB a chip."""
    lines = ["estimated from shapes and a data sheet, nothing compiled; GiB a chip"]
    for p in found.programs:
        parts = ", ".join(f"{what} {size:.2f}" for what, size in sorted(p.consumers.items(), key=lambda x: -x[1]))
        busy = ", ".join(f"{what} {s:.3g} s" for what, s in p.seconds.items())
        lines.append(f"{p.name}: about {p.total + p.resident:.1f} of {p.room:.1f}: {parts}")
        lines.append(f"{p.name} takes at least: {busy}")
        if not p.fits:
            lines.append(f"{p.name}: does not fit")
    return "\n".join(lines)


def _check_known(config: Config, counts: Mapping[str, int]) -> None:
    """Raises `UserError` if a recipe has programs, and maybe networks, that are not estimated."""
    if config.rollout.overlap:
        raise UserError(
            f"rollout.overlap={config.rollout.overlap:g} continues unfinished samples, which a plan by data sheet "
            "does not cover: plan it for a TPU, such as --topology v5e:4x4, or with overlap=0"
        )
    if more := [name for name, n in counts.items() if n and name not in PROGRAMS]:
        raise UserError(
            f"variant {config.method.variant.name!r} runs {', '.join(more)}, which a plan by data sheet does not "
            "cover: plan it for a TPU, such as --topology v5e:4x4"
        )


def _mesh(config: Config, chips: int) -> dict[str, int]:
    """The mesh's axes on this number of chips."""
    sizes = {"data": config.mesh.data, "fsdp": config.mesh.fsdp, "tensor": config.mesh.tensor}
    known = math.prod(s for s in sizes.values() if s != -1)
    return {axis: max(1, chips // known) if s == -1 else s for axis, s in sizes.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Work:
    """A chip's part of a step, in bytes and tokens."""

    model: DecoderConfig
    config: Config
    data: int
    fsdp: int
    tensor: int

    @property
    def shards(self) -> int:
        return self.data * self.fsdp

    @property
    def parameters(self) -> int:
        return flops.parameters(self.model)

    @property
    def spread(self) -> DecoderConfig:
        """The model with the number of key and value heads that the chips hold."""
        return dataclasses.replace(self.model, num_kv_heads=kv_heads.over(self.model, self.tensor))

    @property
    def learned(self) -> float:
        """Bytes of the weights that learn on a chip, in float32."""
        if (adapter := self.config.model.adapter) is None:
            return 4 * self.parameters / self.fsdp / self.tensor
        cuts = {"embed": self.fsdp, "heads": self.tensor, "kv_heads": self.tensor, "mlp": self.tensor}
        factors = adapters.abstract(adapter, self.model).items()
        parts = (math.prod(cuts.get(axis, 1) for axis in adapters.FACTORS[name].axes) for name, _ in factors)
        return sum(4 * math.prod(x.shape) / n for (_, x), n in zip(factors, parts, strict=True))

    @property
    def base(self) -> float:
        """Bytes on a chip of the frozen base weights of adapters."""
        if (adapter := self.config.model.adapter) is None:
            return 0.0
        size = 2 if self.config.model.dtype == "bfloat16" else 4
        linear = flops.matmul_weights(self.model)
        total = linear * (1 if adapter.base == "int8" else size) + (self.parameters - linear) * size
        return total / self.fsdp / self.tensor

    @property
    def mlp(self) -> float:
        """Numbers of a token between the two products of an MLP. For a mixture, these are the numbers of its experts,
        and their inputs and outputs."""
        c, experts = self.model, self.model.experts
        if experts is None:
            return c.intermediate_size / self.tensor
        return (experts.chosen * experts.size + experts.shared) / self.tensor + experts.chosen * c.hidden_size / 2

    @property
    def chunks(self) -> float:
        """Bytes that a token takes while a delta net computes its chunk in float32: its products, its rows of matrices
        of token by token, and its share of a state."""
        if (d := self.model.delta) is None:
            return 0.0
        numbers = 8 * d.value_heads * d.value_size + 4 * delta_net.CHUNK * d.value_heads
        return 4 * (numbers + d.value_heads * d.key_size * d.value_size / delta_net.CHUNK) / self.tensor

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight in a rollout."""
        return 1 if self.config.rollout.weights == "int8" else 2

    @property
    def moments(self) -> int:
        """Numbers that the optimiser keeps for each weight."""
        optimizer = self.config.optimizer
        return 2 if optimizer.name == "adamw" else int(optimizer.b1 > 0)

    @property
    def state(self) -> dict[str, float]:
        """GiB that stay on a chip during the whole run."""
        weights = self.learned / _GIB
        parts = {"weights": weights, "optimiser": self.moments * weights}
        if self.base:  # also the reference
            return {"base": self.base / _GIB, **parts}
        if self.config.method.variant.objective.needs_reference:
            half = self.config.model.dtype == "bfloat16" and not self.config.train.reference_every
            parts["reference"] = weights / 2 if half else weights
        return parts

    @property
    def sampled(self) -> tuple[int, int]:
        """Number of prompts of a batch shard, and of samples of each."""
        prompts, group = cut.spread_sizes(self.config.rollout.prompts, self.config.rollout.group, self.shards)
        return prompts // self.shards, group

    @property
    def rows(self) -> tuple[float, float]:
        """Tokens of a micro-batch of a batch shard: of prompts, and of completions."""
        prompts, group = self.sampled
        train = self.config.train
        prompts = prompts / train.minibatches
        held = max(1.0, prompts / train.microbatches)
        completions = prompts * group * self.config.rollout.max_tokens / train.microbatches
        return held * self.config.data.max_prompt_tokens, completions

    @property
    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Prompts and completions of an update on a batch shard, in tokens."""
        prompts, group = self.sampled
        each = max(1, prompts // self.config.train.minibatches)
        longest = self.config.data.max_prompt_tokens, self.config.rollout.max_tokens
        return np.full(each, longest[0]), np.full((each, group), longest[1])


def _check_divides(w: _Work, chips: int) -> None:
    if w.data * w.fsdp * w.tensor != chips:
        raise UserError(f"mesh data={w.data} x fsdp={w.fsdp} x tensor={w.tensor} does not make {chips} chips")
    widths = {"intermediate_size": w.model.intermediate_size}
    if w.model.experts is not None:
        widths = {"moe_intermediate_size": w.model.experts.size, "shared_expert": w.model.experts.shared}
    if w.model.delta is not None:
        widths["linear_num_key_heads"] = w.model.delta.key_heads
    sizes = {"num_heads": w.model.num_heads, **widths, "vocab_size": w.model.vocab_size}
    bad = next((f"{name}={size}" for name, size in sizes.items() if size % w.tensor), "")
    bad = f"hidden_size={w.model.hidden_size}" if not bad and w.model.hidden_size % w.fsdp else bad
    if w.model.num_kv_heads * w.model.head_dim % w.tensor:
        bad = f"num_kv_heads={w.model.num_kv_heads}"
    if bad:
        raise UserError(
            f"{w.model.family} with {bad} does not divide over mesh.fsdp={w.fsdp} and mesh.tensor={w.tensor}"
        )
    rollout, train = w.config.rollout, w.config.train
    prompts, group = cut.spread_sizes(rollout.prompts // train.minibatches, rollout.group, w.shards)
    packing.check_cut(prompts // w.shards, group, train.microbatches)


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
        seconds=dict(seconds),
    )


# ---------------------------------------------------------------------------------- GiB and seconds of each program


def _seconds(target: Target, computed: float, moved: float) -> dict[str, float]:
    """Seconds for FLOPs and for bytes of memory, at the data sheet's rates."""
    busy = {"compute": computed / target.chip.flops, "HBM": moved / target.chip.bandwidth}
    return {what: s for what, s in busy.items() if s}


def _rollout(w: _Work, target: Target) -> tuple[dict[str, float], dict[str, float]]:
    c, (prompts, group) = w.spread, w.sampled
    rollout, length = w.config.rollout, w.config.data.max_prompt_tokens
    slots = min(rollout.decode_slots or group, group)
    platform = "gpu" if target.by_sheet else "tpu"
    compute = Compute(dtype="bfloat16", platform=platform)
    ring = kv_cache.ring(rollout.max_tokens, compute)
    dtype = kv_cache.dtype_of(rollout.cache_dtype, compute)
    rounds = -(-group // slots)
    live = ring.mean_live(rollout.max_tokens, rounds) * ring.size
    read = flops.decode_bytes(c, length, live, prompts=prompts, slots=slots, cache_dtype=dtype) / w.tensor
    read -= (2 - w.weight_bytes) * (flops.all_layers_weights(c) + c.vocab_size * c.hidden_size) / w.tensor
    logits = 4 * prompts * slots * c.vocab_size
    kept = (prompts * length + prompts * slots * ring.size) * flops.kv_bytes(c, dtype) / w.tensor
    consumers = {
        "weights cast for the rollout": w.weight_bytes * w.parameters / w.tensor / _GIB,
        "keys and values": kept / _GIB,
        "logits": 3 * logits / _GIB,  # scaled by temperature, their log-probs, and the noise that draws
    }
    if c.delta is not None:
        consumers["states of delta nets"] = prompts * (slots + 1) * flops.state_bytes(c) / w.tensor / _GIB
    if c.experts is not None:  # the decode loop needs another layout of two of an expert's three matrices
        experts = c.num_layers * c.experts.count * 2 * c.hidden_size * c.experts.size
        consumers["experts laid out for decoding"] = w.weight_bytes * experts / w.tensor / _GIB
    sizes = np.full(prompts, length), np.full((prompts, group), rollout.max_tokens)
    computed = flops.forward_flops(c, *sizes) / w.tensor
    return consumers, _seconds(target, computed, rounds * (rollout.max_tokens - 1) * read)


def _reshard(w: _Work, target: Target) -> tuple[dict[str, float], dict[str, float]]:
    cast = w.weight_bytes * w.parameters / w.tensor
    consumers = {"weights cast for the rollout": cast / _GIB}
    return consumers, _seconds(target, 0.0, cast + w.base + w.learned)


def _score(w: _Work, target: Target) -> tuple[dict[str, float], dict[str, float]]:
    c, tokens = w.spread, sum(w.rows)
    layer = 2 * flops.layer_weights(c) / w.tensor
    activations = tokens * (2 * (4 * w.mlp + 12 * c.hidden_size) + w.chunks)
    consumers = {"temporaries": (2 * layer + activations + _BLOCKS) / _GIB}
    weights = w.config.train.microbatches * 2 * w.parameters / w.tensor
    return consumers, _seconds(target, flops.forward_flops(c, *w.counts) / w.tensor, weights)


def _update(w: _Work, target: Target) -> tuple[dict[str, float], dict[str, float]]:
    c, tokens = w.spread, sum(w.rows)
    remat, micro = w.config.model.remat, w.config.train.microbatches
    inner = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim / w.tensor
    outputs = inner + c.hidden_size + 2 * w.mlp
    kept = {"layer": 0.0, "matmuls": outputs, "none": 2 * outputs + 4 * c.hidden_size}[remat]
    layer = 2 * flops.layer_weights(c) / w.tensor
    working = tokens * (2 * (4 * w.mlp + 4 * inner + 8 * c.hidden_size) + 2 * w.chunks) + 3 * layer
    gradients = w.learned
    consumers = {
        "gradients": gradients * (2 if micro > 1 else 1) / _GIB,
        "activations kept": 2 * c.num_layers * tokens * (c.hidden_size + kept) / _GIB,
        "temporaries": (working + 2 * _BLOCKS) / _GIB,
    }
    # Weights are read forward and backward; then weights, moments and gradients are each read and written.
    moved = micro * 2 * 2 * w.parameters / w.tensor + 2 * (2 + w.moments) * gradients
    computed = flops.update_flops(c, *w.counts, remat=remat, frozen=w.config.model.adapter is not None)
    return consumers, _seconds(target, computed / w.tensor, moved)


PROGRAMS = {
    "rollout": _rollout,
    "reshard": _reshard,
    "score": _score,
    "score with entropy": _score,
    "update": _update,
}
