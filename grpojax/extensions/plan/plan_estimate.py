"""A recipe's memory and least time from its shapes and a data sheet: for GPUs, whose compiler is not available, and
where many plans are compared.

All figures are estimates. Arrays that are kept (weights, moments, reference, cast weights, keys and values, gradients)
are counted to the byte; of the temporaries, only the arrays of one layer are counted. Time is the longest of FLOPs /
peak, bytes / bandwidth, and bytes between chips / the rate of their links. Bytes are those that have to be moved:
weights, keys and values, moments; between chips the weights that are gathered, their gradients, the activations that
are summed over ``tensor``, and the tokens that go to their experts and back.
"""

import dataclasses
import functools
import math
import types
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from grpojax import sharding
from grpojax.extensions.plan import plan_calls, plan_links, plan_run
from grpojax.extensions.plan.plan_chips import PlanTarget
from grpojax.extensions.plan.plan_compile import room
from grpojax.extensions.plan.plan_links import Split
from grpojax.extensions.plan.plan_report import ProgramReport
from grpojax.extensions.plan.plan_shapes import shape_of
from grpojax.host.errors import UserError
from grpojax.models import Compute, DecoderConfig, flops, kv_heads
from grpojax.models.layer_kinds import Spread
from grpojax.models.number_formats import CacheFormat, weight_bytes
from grpojax.models.weight_table import check_axis, widths
from grpojax.programs import adapter, kv_cache, packing
from grpojax.programs import batch_shards as cut
from grpojax.programs.adapter import Adapter
from grpojax.run.recipe import Config

_GIB = 2**30
_BLOCKS = 3 * 2**27  # bytes of a block of logits and of its gradient in 16 bits (`Compute.logits_bytes`)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimated needs of a run.

    Attributes:
      programs: reports on the programs of `PROGRAMS` that a step runs, with sizes in GiB per chip and seconds by
        resource.
      run: the bounds of a step and of the whole run.
    """

    programs: tuple[ProgramReport, ...]
    run: plan_run.RunBound

    @property
    def fits(self) -> bool:
        """Whether all programs fit."""
        return all(p.fits for p in self.programs)


def of_recipe(
    config: Config,
    target: PlanTarget,
    *,
    model: DecoderConfig | None = None,
    split: Split | None = None,
    tokens: int | None = None,
    calls: Mapping[str, plan_calls.PlannedCall] | None = None,
) -> Estimate:
    """Estimates a recipe; its memory lies within 15 % of the TPU compiler's
    (`tests/extensions/plan/test_plan_estimate.py`).

    Args:
      config: the recipe.
      target: the chips.
      model: the shape of the policy; None takes that which ``model.path`` names.
      split: how the work is split, in place of the recipe's mesh and ``train.microbatches``.
      tokens: tokens of a completion, in place of ``rollout.max_tokens``.
      calls: what a step calls (`calls_of_a_step`); None finds it.

    Raises:
      UserError: sizes do not divide over the mesh, or the recipe has programs that are not estimated.
    """
    calls = calls_of_a_step(config) if calls is None else calls
    work = _Work(
        model=shape_of(config.model.path) if model is None else model,
        config=config,
        split=split_of(config, target.chips) if split is None else split,
        tokens=config.rollout.max_tokens if tokens is None else tokens,
    )
    _check_divides(work, target.chips)
    rates = plan_links.rates(target, work.split)
    # Episodes may have later turns also where their first one may take all tokens.
    runs = {*calls, *(["rollout turns"] if config.environment is not None else [])}
    programs = tuple(
        _report(name, work, target, rates, make(work, target)) for name, make in PROGRAMS.items() if name in runs
    )
    return Estimate(programs=programs, run=plan_run.bound(config, calls, programs, target.chips))


def format_estimate(found: Estimate) -> str:
    """The estimate as text for people; sizes are GiB per chip."""
    lines = ["estimated from shapes and a data sheet, nothing compiled; GiB per chip"]
    for p in found.programs:
        parts = ", ".join(f"{what} {size:.2f}" for what, size in sorted(p.consumers.items(), key=lambda x: -x[1]))
        busy = ", ".join(f"{what} {s:.3g} s" for what, s in p.seconds.items())
        lines.append(f"{p.name}: about {p.total + p.resident:.1f} of {p.room:.1f}: {parts}")
        lines.append(f"{p.name} takes at least: {busy}")
        if not p.fits:
            lines.append(f"{p.name}: does not fit")
    return "\n".join(lines)


def calls_of_a_step(config: Config) -> Mapping[str, plan_calls.PlannedCall]:
    """What a step of a recipe calls, by name.

    Raises:
      UserError: the recipe has programs, and maybe networks, that are not estimated.
    """
    if config.mesh.rollout:
        raise UserError(
            f"mesh.rollout={config.mesh.rollout} has chips that only sample, which a plan by data sheet does not "
            "cover: plan it for a TPU, such as --topology v5e:2x4, or with mesh.rollout=0"
        )
    if config.rollout.overlap:
        raise UserError(
            f"rollout.overlap={config.rollout.overlap:g} continues unfinished samples, which a plan by data sheet "
            "does not cover: plan it for a TPU, such as --topology v5e:4x4, or with overlap=0"
        )
    calls = plan_calls.a_step(config)
    if more := [name for name in calls if name not in PROGRAMS]:
        raise UserError(
            f"variant {config.method.variant.name!r} runs {', '.join(more)}, which a plan by data sheet does not "
            "cover: plan it for a TPU, such as --topology v5e:4x4"
        )
    return calls


def split_of(config: Config, chips: int) -> Split:
    """A recipe's own split on this number of chips."""
    sizes = config.mesh.sizes
    known = math.prod(s for s in sizes if s != -1)
    data, fsdp, expert, tensor = (max(1, chips // known) if s == -1 else s for s in sizes)
    return Split(data=data, fsdp=fsdp, expert=expert, tensor=tensor, microbatches=config.train.microbatches)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Work:
    """A chip's part of a step, in bytes and tokens."""

    model: DecoderConfig
    config: Config
    split: Split
    tokens: int

    @property
    def fsdp(self) -> int:
        return self.split.fsdp

    @property
    def expert(self) -> int:
        return self.split.expert

    @property
    def parts(self) -> int:
        """Parts that weights are cut into where they are stored, not counting ``tensor``."""
        return self.fsdp * self.expert

    @property
    def tensor(self) -> int:
        return self.split.tensor

    @property
    def microbatches(self) -> int:
        return self.split.microbatches

    @property
    def shards(self) -> int:
        return self.split.data * self.parts

    @functools.cached_property
    def parameters(self) -> int:
        return flops.parameters(self.model)

    @property
    def mixtures(self) -> int:
        """Layers with another MLP than the dense one."""
        return len(self.model.mlp_layers)

    @functools.cached_property
    def spread_mlp(self) -> Spread:
        """How one of these layers lies on ``expert`` and ``tensor``."""
        c = self.model
        return Spread(0, 0, 0.0, 0, 0.0) if c.mlp is None else c.mlp.spread(c.hidden_size, self.expert, self.tensor)

    @property
    def of_experts(self) -> int:
        """Those of the parameters that ``expert`` cuts, and no device gathers over it."""
        return self.mixtures * self.spread_mlp.weights

    @property
    def whole(self) -> float:
        """Parameters that a chip has while it multiplies: all but those that ``tensor`` and ``expert`` cut."""
        return (self.parameters - self.of_experts * (1 - 1 / self.expert)) / self.tensor

    @property
    def spread(self) -> DecoderConfig:
        """The model with the number of key and value heads that the chips hold."""
        return dataclasses.replace(self.model, num_kv_heads=kv_heads.over(self.model, self.tensor))

    @functools.cached_property
    def adapter(self) -> Adapter | None:
        """What learns in place of the weights."""
        return adapter.of(self.config.model)

    @property
    def samples_with_base(self) -> bool:
        """Whether rollouts sample with the base of an adapter as it is."""
        return self.adapter is not None and not self.adapter.merged

    @functools.cached_property
    def learned(self) -> float:
        """Bytes of the weights that learn on a chip, in float32."""
        if self.adapter is None:
            return 4 * self.parameters / self.parts / self.tensor
        devices = {"fsdp": self.fsdp, "expert": self.expert, "tensor": self.tensor}
        total = 0.0
        for name, x in self.adapter.abstract(self.model).items():
            cut_over = (axis for of_weight in self.adapter.table[name].axes for axis in sharding.TRAIN[of_weight])
            total += 4 * math.prod(x.shape) / math.prod(devices[axis] for axis in cut_over)
        return total

    @property
    def base(self) -> float:
        """Bytes on a chip of the frozen base weights of adapters."""
        if (section := self.config.model.adapter) is None:
            return 0.0
        size = 2 if self.config.model.dtype == "bfloat16" else 4
        linear = flops.all_layers_weights(self.model)
        total = linear * _bytes_of_base(section.base, size) + (self.parameters - linear) * size
        return total / self.parts / self.tensor

    @property
    def mlp(self) -> float:
        """Numbers of a token between the two products of an MLP. For a mixture, these are the numbers of its experts,
        and their inputs and outputs."""
        return max(self.spread_mlp.inside, self.model.intermediate_size / self.tensor if self.model.dense else 0.0)

    @property
    def chunks(self) -> float:
        """Bytes that a token takes while a layer mixes it that does not attend."""
        return 0.0 if self.model.mixer is None else self.model.mixer.working_bytes() / self.tensor

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight in a rollout."""
        return weight_bytes(self.config.rollout.weights, "rollout.weights", 2)

    @property
    def linear_bytes(self) -> int:
        """Bytes of one weight of a linear layer in a rollout."""
        section = self.config.model.adapter
        if section is None or section.merged:
            return self.weight_bytes
        return _bytes_of_base(section.base, 2)

    @property
    def cast(self) -> float:
        """Bytes on a chip that are made for a rollout: weights, or only factors in 16 bits if they are not merged."""
        if self.samples_with_base:
            return self.learned / 2
        return self.weight_bytes * self.whole

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
    def turn(self) -> int:
        """Most tokens of a turn; all tokens of a sample that has one."""
        return min(self.config.rollout.max_turn_tokens or self.tokens, self.tokens)

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
        held = max(1.0, prompts / self.microbatches)
        completions = prompts * group * self.tokens / self.microbatches
        return held * self.config.data.max_prompt_tokens, completions

    @property
    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Prompts and completions of an update on a batch shard, in tokens."""
        prompts, group = self.sampled
        each = max(1, prompts // self.config.train.minibatches)
        return np.full(each, self.config.data.max_prompt_tokens), np.full((each, group), self.tokens)

    @property
    def gathered(self) -> tuple[float, float, float]:
        """Bytes that a chip receives when the weights of all layers but experts are gathered, when the output
        projection is, and when experts are, which is over ``fsdp`` only."""
        section, others = self.config.model.adapter, (self.parts - 1) / self.parts / self.tensor
        each = 2 if section is None else _bytes_of_base(section.base, 2)
        head = self.model.vocab_size * self.model.hidden_size
        layers = self.parameters - (2 if self.model.own_head else 1) * head - self.of_experts
        experts = each * self.of_experts / self.expert * (self.fsdp - 1) / self.fsdp / self.tensor
        return each * layers * others, 2 * head * others, experts

    @property
    def layer(self) -> float:
        """Bytes of a layer's gathered weights."""
        experts = self.of_experts / max(1, self.mixtures) * (1 - 1 / self.expert)
        return 2 * (flops.layer_weights(self.model) - experts) / self.tensor

    @property
    def read(self) -> float:
        """Bytes of weights that a forward pass reads. On shards of their own, experts are read in each round."""
        return 2 * (self.whole + self.spread_mlp.reads * self.of_experts / self.expert / self.tensor)

    def exchanged(self, tokens: float) -> float:
        """Bytes that a chip receives when tokens go to their experts, or when they come back: an even load, with a
        round that is not full."""
        return 2 * self.mixtures * self.model.hidden_size * tokens * self.spread_mlp.rows

    def summed(self, tokens: float) -> float:
        """Bytes that a chip receives when the layers' outputs for these tokens, those of attention and of the MLP, are
        summed over ``tensor``: each is scattered in sums, and gathered."""
        each = 2 * 2 * self.model.num_layers * self.model.hidden_size
        return tokens * each * 2 * (self.tensor - 1) / self.tensor


def _bytes_of_base(base: str, floats: int) -> int:
    return weight_bytes(base, "model.adapter.base", floats)


def _check_divides(w: _Work, chips: int) -> None:
    if w.shards * w.tensor != chips:
        axes = sharding.shown((w.split.data, w.fsdp, w.expert, w.tensor))
        raise UserError(f"mesh {axes} does not make {chips} chips")
    if w.adapter is not None:
        w.adapter.check_axes(fsdp=w.fsdp, expert=w.expert)
    check_axis(w.model, w.expert)
    of_layers = {name: size for name, (size, _) in widths(w.model).items()}
    sizes = {"num_heads": w.model.num_heads, **of_layers, "vocab_size": w.model.vocab_size}
    bad = next((f"{name}={size}" for name, size in sizes.items() if size % w.tensor), "")
    bad = f"hidden_size={w.model.hidden_size}" if not bad and w.model.hidden_size % w.parts else bad
    if w.model.num_kv_heads * w.model.head_dim % w.tensor:
        bad = f"num_kv_heads={w.model.num_kv_heads}"
    if bad:
        expert = f", mesh.expert={w.expert}" if w.expert > 1 else ""
        raise UserError(
            f"{w.model.family} with {bad} does not divide over mesh.fsdp={w.fsdp}{expert} and mesh.tensor={w.tensor}"
        )
    rollout, train = w.config.rollout, w.config.train
    prompts, group = cut.spread_sizes(rollout.prompts // train.minibatches, rollout.group, w.shards)
    packing.check_cut(prompts // w.shards, group, w.microbatches)


class _Needs(NamedTuple):
    """The needs of a program on a chip.

    Attributes:
      consumers: GiB by name.
      computed: FLOPs.
      moved: bytes of memory that are read or written.
      received: bytes that the chip receives from others, by the names of `grpojax.extensions.plan.plan_links.rates`.
    """

    consumers: dict[str, float]
    computed: float
    moved: float
    received: Mapping[str, float] = types.MappingProxyType({})


def _report(name: str, work: _Work, target: PlanTarget, rates: Mapping[str, float], needs: _Needs) -> ProgramReport:
    state, chip = work.state, target.chip
    received = sum(x / rates[a] for a, x in needs.received.items() if rates[a])
    seconds = {
        "compute": float(needs.computed) / chip.flops,
        "HBM": needs.moved / chip.bandwidth,
        "NVLink or PCIe" if target.by_sheet else "ICI": received,
    }
    return ProgramReport(
        name=name,
        compile_s=0.0,
        argument=0.0,
        temp=math.fsum(needs.consumers.values()),
        output=0.0,
        alias=0.0,
        resident=math.fsum(state.values()),
        room=room(target.kind),
        consumers={**state, **needs.consumers},
        seconds={what: s for what, s in seconds.items() if s},
    )


# ----------------------------------------------------------------------------------------- the needs of each program


def _rollout(w: _Work, target: PlanTarget) -> _Needs:
    return _drawn(w, target, w.turn)


def _turns(w: _Work, target: PlanTarget) -> _Needs:
    """A round of an episode after the first, of the extension that plays them. Its least: all tokens are drawn but
    those of an answer of one chunk."""
    c, (prompts, group), ring = w.spread, w.sampled, kv_cache.ring(w.tokens, _compute_of(target))
    first, whole = _drawn(w, target, w.turn), _drawn(w, target, w.tokens)
    later = max(1, -(-w.tokens // w.turn) - 1)
    own = prompts * group * ring.size * flops.kv_bytes(c, _cache(w, target)) / w.tensor
    from grpojax.extensions.episodes import episode_sampler

    length, chunk = w.config.data.max_prompt_tokens + ring.size, group * episode_sampler.CHUNK
    scores = 2 * 4 * chunk * c.num_heads * length / w.tensor  # of one prompt at a time, and their softmax
    activations = 2 * prompts * chunk * (4 * w.mlp + 12 * c.hidden_size)
    consumers = {**whole.consumers, "chunks of answers": (own / c.num_layers + scores + activations) / _GIB}
    moved = (whole.moved - first.moved) / later + _step_bytes(w, target, ring.size) + own
    received = {a: (x - first.received[a]) / later for a, x in whole.received.items()}
    return _Needs(consumers, (whole.computed - first.computed) / later, moved, received)


def _compute_of(target: PlanTarget) -> Compute:
    return Compute(dtype="bfloat16", platform="gpu" if target.by_sheet else "tpu")


def _cache(w: _Work, target: PlanTarget) -> CacheFormat:
    return kv_cache.format_of_cache(w.config.rollout.cache_dtype, _compute_of(target))


def _slots(w: _Work) -> int:
    """Samples of a prompt that are drawn at the same time."""
    return min(w.config.rollout.decode_slots or w.sampled[1], w.sampled[1])


def _step_bytes(w: _Work, target: PlanTarget, live: float) -> float:
    """Bytes that a decode step reads, of slots whose caches have so many positions with tokens."""
    c, cache = w.spread, _cache(w, target)
    sizes = {"prompts": w.sampled[0], "slots": _slots(w)}
    read = flops.decode_bytes(c, w.config.data.max_prompt_tokens, live, **sizes, cache=cache) / w.tensor
    read -= (2 - w.linear_bytes) * flops.all_layers_weights(c) / w.tensor
    read -= w.linear_bytes * w.of_experts * (1 - 1 / w.expert) / w.tensor
    return read - (2 - w.weight_bytes) * c.vocab_size * c.hidden_size / w.tensor


def _drawn(w: _Work, target: PlanTarget, tokens: int) -> _Needs:
    """Prompts are read, and so many tokens of every sample drawn, with caches for all tokens."""
    c, (prompts, group), slots = w.spread, w.sampled, _slots(w)
    length, compute, cache = w.config.data.max_prompt_tokens, _compute_of(target), _cache(w, target)
    ring, rounds = kv_cache.ring(w.tokens, compute), -(-group // slots)
    logits = 4 * prompts * slots * c.vocab_size
    kept = (prompts * length + prompts * slots * ring.size) * flops.kv_bytes(c, cache) / w.tensor
    consumers = {
        "weights cast for the rollout": w.cast / _GIB,
        "keys and values": kept / _GIB,
        "logits": 3 * logits / _GIB,  # scaled by temperature, their log-probs, and the noise that draws
    }
    if c.mixer is not None:
        consumers[f"states of {c.mixer.name} layers"] = prompts * (slots + 1) * flops.state_bytes(c) / w.tensor / _GIB
    if c.mlp is not None:  # the decode loop needs another layout of two of an expert's three matrices
        laid_out = w.mixtures * w.spread_mlp.laid_out
        consumers["experts laid out for decoding"] = w.weight_bytes * laid_out / w.expert / w.tensor / _GIB
    sizes = np.full(prompts, length), np.full((prompts, group), tokens)
    computed, steps = flops.forward_flops(c, *sizes) / w.tensor, rounds * (tokens - 1)
    computed += flops.flops_in_vain(c, compute, prompts * slots, steps * prompts * slots) / w.tensor
    sums = w.summed(prompts * length + steps * prompts * slots)
    # A step gathers the tokens of all shards for the experts, and scatters what they give in sums.
    shared = steps * prompts * slots * (w.expert - 1)
    received = {
        "tensor": sums,
        "expert": 2 * 2 * w.mixtures * c.hidden_size * shared,
        "exchange": 2 * w.exchanged(prompts * length),
    }
    read = _step_bytes(w, target, ring.mean_live(tokens, rounds) * ring.size)
    return _Needs(consumers, computed, steps * read, received)


def _reshard(w: _Work, target: PlanTarget) -> _Needs:
    consumers = {"weights cast for the rollout": w.cast / _GIB}
    read = w.learned + (0.0 if w.samples_with_base else w.base)
    cut = w.weight_bytes * w.of_experts / w.expert / w.tensor
    received = {"all": (w.cast - cut) * (w.parts - 1) / w.parts, "fsdp": cut * (w.fsdp - 1) / w.fsdp}
    return _Needs(consumers, 0.0, w.cast + read, received)


def _score(w: _Work, target: PlanTarget) -> _Needs:
    c, tokens = w.spread, sum(w.rows)
    layer = w.layer
    activations = tokens * (2 * (4 * w.mlp + 12 * c.hidden_size) + w.chunks)
    consumers = {"temporaries": (2 * layer + max(activations, _BLOCKS)) / _GIB}  # logits come after all layers
    moved, (layers, head, of_experts) = w.microbatches * w.read, w.gathered
    received = {
        "all": w.microbatches * (layers + head),
        "fsdp": w.microbatches * of_experts,
        "exchange": 2 * w.exchanged(w.microbatches * tokens),
        "tensor": w.summed(w.microbatches * tokens),
    }
    return _Needs(consumers, flops.forward_flops(c, *w.counts) / w.tensor, moved, received)


def _update(w: _Work, target: PlanTarget) -> _Needs:
    c, tokens = w.spread, sum(w.rows)
    remat, micro, frozen = w.config.model.remat, w.microbatches, w.config.model.adapter is not None
    inner = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim / w.tensor
    outputs = inner + c.hidden_size + 2 * w.mlp
    kept = {"layer": 0.0, "matmuls": outputs, "none": 2 * outputs + 4 * c.hidden_size}[remat]
    layer = w.layer
    working = tokens * (2 * (4 * w.mlp + 4 * inner + 8 * c.hidden_size) + 2 * w.chunks)
    gradients = w.learned
    consumers = {
        "gradients": gradients * (2 if micro > 1 else 1) / _GIB,
        "activations kept": 2 * c.num_layers * tokens * (c.hidden_size + kept) / _GIB,
        "temporaries": (3 * layer + max(working, 2 * _BLOCKS)) / _GIB,  # logits are done before layers go back
    }
    # Weights are read forward and backward; then weights, moments and gradients are each read and written.
    moved = micro * 2 * w.read + 2 * (2 + w.moments) * gradients
    computed = flops.update_flops(c, *w.counts, remat=remat, frozen=frozen)
    # Each micro-batch gathers the weights forward and backward, and scatters their gradients: of layers in 16 bits, of
    # the output projection in 32. Those of factors are nothing beside them.
    # A backward pass sends tokens to their experts again, with their gradients, and takes gradients back.
    layers, head, of_experts = w.gathered
    received = {
        "all": micro * (2 * (layers + head) + (0.0 if frozen else layers + 2 * head)),
        "fsdp": micro * (2 if frozen else 3) * of_experts,
        "exchange": 5 * w.exchanged(micro * tokens),
        "tensor": (3 if remat == "layer" else 2) * w.summed(micro * tokens),
    }
    return _Needs(consumers, computed / w.tensor, moved, received)


PROGRAMS = {
    "rollout": _rollout,
    "rollout turns": _turns,
    "reshard": _reshard,
    "score": _score,
    "score with entropy": _score,
    "update": _update,
}
