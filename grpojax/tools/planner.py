"""Ahead-of-time compiles of a run's programs for a TPU slice that is not there, and what they need of it.

The real compiler, the trainer's own programs, their real shapes and shardings: only the arrays are missing. It needs
libtpu installed, and no TPU.
"""

import dataclasses
import math
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from grpojax.host.errors import UserError
from grpojax.losses import Objective
from grpojax.models import Compute, DecoderConfig, flops, sharding
from grpojax.models.sharding import MeshConfig
from grpojax.models.weight_table import shardings
from grpojax.programs import lanes, packing, policy_update
from grpojax.programs.optimizer import OptimizerConfig, make_optimizer
from grpojax.programs.sampler import SamplerConfig, sample_groups
from grpojax.programs.state import abstract_state, decoder_network, make_reshard
from grpojax.programs.update import make_update
from grpojax.tools.hlo import Traffic, collectives
from grpojax.types import PerToken, Prompts, TrainBatch

PROGRAMS = ("update", "score", "rollout", "reshard")

_GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """What one compiled program needs; sizes are GiB on each chip.

    Attributes:
      name: one of `PROGRAMS`.
      compile_s: seconds that tracing and compiling took here.
      error: why the compiler refused it, such as too little memory; then all that follows is empty or NaN.
      argument: its inputs (weights, optimiser state, batch).
      temp: what it allocates while it runs.
      output: its results.
      alias: the part of its results that is written over donated inputs.
      resident: what else of the run lies on the chip meanwhile (optimiser state, reference).
      collectives: of one run, by kind; a loop's count as often as it iterates.
      at_least: seconds that its useful FLOPs, or the bytes that it must read, take at the chip's data-sheet rates;
        the real program takes longer. NaN for a chip that is not known.
      per_iteration: of one iteration of a loop whose length depends on the data, by kind: in "rollout", of the
        decoding of one token.
    """

    name: str
    compile_s: float
    error: str = ""
    argument: float = math.nan
    temp: float = math.nan
    output: float = math.nan
    alias: float = math.nan
    resident: float = math.nan
    at_least: float = math.nan
    collectives: Mapping[str, Traffic] = dataclasses.field(default_factory=dict)
    per_iteration: Mapping[str, Traffic] = dataclasses.field(default_factory=dict)

    @property
    def total(self) -> float:
        """GiB that the program itself needs on each chip."""
        return self.argument + self.temp + self.output - self.alias


def topology_mesh(topology: str, mesh: MeshConfig) -> Mesh:
    """The mesh of a slice such as "v5e:4x4" or "v5p:2x2x4"; raises `UserError` where libtpu does not know it."""
    from jax.experimental import topologies

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # off a TPU VM, asking for its metadata only waits
    options = {"chip_config_name": "megacore"} if topology.startswith("v4") else {}  # one device a chip
    try:
        devices = topologies.get_topology_desc(topology, platform="tpu", **options).devices
    except Exception as e:  # libtpu raises whatever it likes
        raise UserError(f"no TPU topology {topology!r}: {e} (needs libtpu: pip install libtpu)") from e
    return sharding.make_mesh(mesh, devices)


def plan(
    config: DecoderConfig,
    *,
    prompts: int,
    prompt_tokens: int,
    sampling: SamplerConfig,
    topology: str = "v5e:4x4",
    mesh: MeshConfig = MeshConfig(),  # noqa: B008
    compute: Compute = Compute(dtype="bfloat16"),  # noqa: B008
    objective: Objective = Objective(),  # noqa: B008
    optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008
    minibatches: int = 1,
    microbatches: int = 1,
    programs: Sequence[str] = PROGRAMS,
) -> list[ProgramReport]:
    """Compiles the programs of a run for a TPU slice, every prompt and completion at its longest.

    Args:
      config: the model.
      prompts: prompts of a rollout.
      prompt_tokens: longest prompt.
      sampling: group, longest completion, temperature, slots.
      topology: the slice, as libtpu calls it.
      mesh: how its chips are laid out.
      compute: dtype, remat, attention; its mesh and platform are replaced.
      objective: the loss; one with a reference keeps its weights on the chips.
      optimizer: the optimiser.
      minibatches: updates in a pass over the rollout.
      microbatches: parts of an update.
      programs: which of `PROGRAMS` to compile.

    Returns:
      A `ProgramReport` each. A program that does not fit the chip's memory has its ``error`` set.

    Raises:
      UserError: an unknown topology, or sizes that do not divide over the mesh.
    """
    devices = topology_mesh(topology, mesh)
    compute = dataclasses.replace(compute, mesh=devices, platform="tpu")
    batch = _batch(devices, compute, objective, prompts, prompt_tokens, sampling, minibatches, microbatches)
    limits = _limits(config, devices, prompts, prompt_tokens, sampling, minibatches, batch.prompts, batch.group)
    calls, run = _calls(config, compute, objective, optimizer, sampling, batch)
    return [
        _compile(
            name,
            calls[name].program,
            calls[name].args,
            resident=run - _per_chip(calls[name].own),
            at_least=limits.get(name, math.nan),
        )
        for name in programs
    ]


# ------------------------------------------------------------------------------- the trainer's programs and batch


class _Call(NamedTuple):
    """A jitted program, its arguments, and those of them that are the run's own."""

    program: Any
    args: tuple[Any, ...]
    own: Any


class _Batch(NamedTuple):
    """The rollout's prompts, an update's rows, and the samples of a row of prompts."""

    prompts: Prompts
    packed: packing.Packed
    group: int


def _calls(
    config: DecoderConfig,
    compute: Compute,
    objective: Objective,
    optimizer: OptimizerConfig,
    sampling: SamplerConfig,
    batch: _Batch,
) -> tuple[dict[str, _Call], int]:
    """The programs of a run by name, and the bytes of its state and reference on one chip."""
    mesh, temperature = compute.mesh, sampling.temperature
    optimize = make_optimizer(optimizer, updates=1000)
    graph, network = decoder_network(config, optimize, mesh)
    state = abstract_state({"policy": network}, mesh)["policy"]
    reshard = make_reshard(compute)
    whole = jax.eval_shape(reshard, state.params)
    whole = jax.tree.map(_abstract, whole, shardings(whole, mesh, sharding.ROLLOUT))
    sampling = dataclasses.replace(sampling, group=batch.group, slots=min(sampling.slots, batch.group))
    key = _abstract(jax.eval_shape(lambda: jax.random.key(0)), sharding.named(mesh, ()))
    draw = jax.jit(
        lambda params, prompts, key: sample_groups(graph, params, prompts, key, sampling, eos_ids=(0,), compute=compute)
    )
    loss = policy_update.policy_objective(graph, objective, compute, temperature=temperature, entropy=True)
    update = make_update(loss, optimize, mesh)
    score = policy_update.make_score(graph, compute, temperature=temperature)
    reference = state.params if objective.needs_reference else None
    coef = jax.ShapeDtypeStruct((), np.float32)
    frozen = {} if objective.entropy_target is None else {"entropy_coef": coef}
    return {
        "update": _Call(update, (state, frozen, batch.packed), state),
        "score": _Call(score, (state.params, batch.packed.rows), state.params),
        "rollout": _Call(draw, (whole, batch.prompts, key), ()),
        "reshard": _Call(reshard, (state.params,), state.params),
    }, _per_chip((state, reference))


def _batch(
    mesh: Mesh,
    compute: Compute,
    objective: Objective,
    prompts: int,
    prompt_tokens: int,
    sampling: SamplerConfig,
    minibatches: int,
    microbatches: int,
) -> _Batch:
    """What the trainer would feed, every prompt and completion at its longest."""
    parts = sharding.lanes(mesh)

    def longest(count: int) -> tuple[Prompts, int]:
        zero = np.zeros(count, np.int32)
        tokens = np.zeros((count, prompt_tokens), np.int32)
        whole = Prompts(tokens=tokens, lengths=zero + prompt_tokens, uids=zero.astype(np.uint32), first_sample=zero)
        return lanes.spread(whole, sampling.group, parts)

    spread, group = longest(prompts)
    part, part_group = longest(prompts // minibatches)
    shape = (len(part.lengths), part_group, sampling.max_tokens)
    full = np.zeros(shape, np.float32)

    def given(needed: bool, dtype: Any = np.float32) -> np.ndarray | None:
        return full.astype(dtype) if needed else None

    batch = TrainBatch(
        prompts=part,
        tokens=full.astype(np.int32),
        lengths=np.full(shape[:2], shape[2], np.int32),
        per_token=PerToken(
            advantages=full,
            weights=full,
            sampler_logps=full,
            behavior_logps=given(minibatches > 1 and objective.anchor == "trainer"),
            ref_logps=given(objective.needs_reference),
            displacement_weights=given(objective.needs_displacement_weights),
            covariance_mask=given(objective.needs_covariance_mask, bool),
        ),
    )
    packed, _ = packing.pack(batch, lanes=parts, microbatches=microbatches, seats=compute.needs_seats)

    def place(tree: Any, *before: None) -> Any:
        def placed(x: np.ndarray) -> jax.ShapeDtypeStruct:
            axes = (*before, "lane", *(None,) * (x.ndim - len(before) - 1))
            return _abstract(x, sharding.named(mesh, axes))

        return jax.tree.map(placed, tree)

    return _Batch(place(spread), place(packed, None), group)


# ------------------------------------------------------------------------------------------- time and compiling


def _limits(
    config: DecoderConfig,
    mesh: Mesh,
    prompts: int,
    prompt_tokens: int,
    sampling: SamplerConfig,
    minibatches: int,
    spread: Prompts,
    group: int,
) -> dict[str, float]:
    """Seconds of the programs if nothing but the data sheet held them up. Every chip shares in all work."""
    chip = mesh.devices.flat[0].device_kind
    if chip not in flops.PEAKS:
        return {}
    rate, bandwidth = flops.PEAKS[chip]
    completions = np.full((prompts, sampling.group), sampling.max_tokens)
    forward = flops.forward_flops(config, np.full(prompts, prompt_tokens), completions) / mesh.size / rate
    tensor = mesh.shape["tensor"]
    read = flops.decode_bytes(
        config,
        prompt_tokens,
        sampling.max_tokens,
        prompts=len(spread.lengths) // sharding.lanes(mesh),
        group=group,
        slots=min(sampling.slots, group),
    )
    return {
        "score": forward / minibatches,
        "update": 3 * forward / minibatches,
        "rollout": max(forward, read / tensor / bandwidth),
    }


def _abstract(x: Any, placed: NamedSharding | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed)


def _per_chip(tree: Any) -> int:
    """Bytes of a tree of placed shapes on one chip."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _compile(name: str, program: Any, args: tuple[Any, ...], *, resident: int, at_least: float) -> ProgramReport:
    started = time.perf_counter()
    try:
        compiled, hlo = _with_hlo(program.lower(*args))
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        sizes = re.search(r"[^.:]*\([\d.]+\w\)[^.]*\([\d.]+\w\)", str(e))
        error = (sizes[0] if sizes else str(e).splitlines()[0]).strip()
        return ProgramReport(name=name, compile_s=time.perf_counter() - started, error=error)
    seconds = time.perf_counter() - started
    memory = compiled.memory_analysis()
    once, each = collectives(hlo)
    return ProgramReport(
        name=name,
        compile_s=seconds,
        argument=memory.argument_size_in_bytes / _GIB,
        temp=memory.temp_size_in_bytes / _GIB,
        output=memory.output_size_in_bytes / _GIB,
        alias=memory.alias_size_in_bytes / _GIB,
        resident=resident / _GIB,
        at_least=at_least,
        collectives=once,
        per_iteration=each,
    )


def _with_hlo(lowered: jax.stages.Lowered) -> tuple[Any, str]:
    """``(compiled, optimised HLO)``; as the compiler dumps it, since ``as_text`` cannot read all that libtpu makes."""
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        return compiled, next(Path(folder).glob("*.after_optimizations.txt")).read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------------------ report

_SIZES = ("argument", "temp", "output", "alias", "total", "with the run's state")


def format_table(reports: Sequence[ProgramReport]) -> str:
    """The reports as text for people; sizes in the table are GiB a chip."""
    head = ("program", "compile s", *_SIZES, "at least s")
    rows: list[tuple[str, ...]] = [head]
    for r in reports:
        sizes = (r.argument, r.temp, r.output, r.alias, r.total, r.total + r.resident)
        cells = ("-" if math.isnan(s) else f"{s:.2f}" for s in (*sizes, r.at_least))
        rows.append((r.name, f"{r.compile_s:.0f}", *cells))
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        numbers = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join((f"{name:<{widths[0]}}", *numbers)))
    for r in reports:
        if r.error:
            lines.append(f"{r.name}: does not fit: {r.error}")
        for what, traffic in (("moves", r.collectives), ("moves for each token", r.per_iteration)):
            kinds = (f"{t.count} {kind} ({_human(t.gib)})" for kind, t in sorted(traffic.items()))
            if traffic:
                lines.append(f"{r.name} {what}: {', '.join(kinds)}")
    return "\n".join(lines)


def _human(gib: float) -> str:
    for unit, size in (("GiB", gib), ("MiB", gib * 2**10), ("KiB", gib * 2**20)):
        if size >= 1:
            return f"{size:.3g} {unit}"
    return f"{gib * 2**30:.0f} B"
