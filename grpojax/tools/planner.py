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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from grpojax.host.errors import UserError
from grpojax.losses import Objective
from grpojax.models import Compute, DecoderConfig, flops, sharding
from grpojax.models import critic as models
from grpojax.models.sharding import MeshConfig
from grpojax.models.weight_table import shardings
from grpojax.programs import lanes, packing, policy_update
from grpojax.programs.critic_update import ROLE as CRITIC
from grpojax.programs.critic_update import TRUNK, CriticModel, make_critic_score
from grpojax.programs.optimizer import OptimizerConfig, make_optimizer
from grpojax.programs.sampler import SamplerConfig, sample_groups
from grpojax.programs.state import abstract_state, decoder_network, make_reshard
from grpojax.programs.update import Learns, make_joint_update, make_update
from grpojax.tools.hlo import collectives
from grpojax.tools.plan_report import ProgramReport
from grpojax.types import PerToken, Prompts, TrainBatch

_GIB = 2**30


class PlannedCritic(NamedTuple):
    """The critic of a run: what it is, what it learns with, and whether it learns alone at first."""

    model: CriticModel
    optimizer: OptimizerConfig
    warms_up: bool = False


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
    critic: PlannedCritic | None = None,
    programs: Sequence[str] | None = None,
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
      critic: with one, "update" is that of both networks; its mesh and platform are replaced too.
      programs: which of `PROGRAMS`, and of `CRITIC_PROGRAMS`, to compile; None for all that the run has.

    Returns:
      A `ProgramReport` each. A program that does not fit the chip's memory has its ``error`` set.

    Raises:
      UserError: an unknown topology, or sizes that do not divide over the mesh.
    """
    devices = topology_mesh(topology, mesh)
    compute = dataclasses.replace(compute, mesh=devices, platform="tpu")
    if critic is not None:
        critic = critic._replace(model=dataclasses.replace(critic.model, compute=compute))
    batch = _batch(devices, compute, objective, prompts, prompt_tokens, sampling, minibatches, microbatches, critic)
    limits = _limits(config, devices, prompts, prompt_tokens, sampling, minibatches, batch.prompts, batch.group, critic)
    calls, run = _calls(config, compute, objective, optimizer, sampling, batch, critic)
    return [
        _compile(
            name,
            calls[name].program,
            calls[name].args,
            resident=run - _per_chip(calls[name].own),
            at_least=limits.get(name, math.nan),
        )
        for name in programs or calls
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
    critic: PlannedCritic | None,
) -> tuple[dict[str, _Call], int]:
    """The programs of a run by name, and the bytes of all its networks on one chip."""
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
    score = policy_update.make_score(graph, compute, temperature=temperature)
    reference = state.params if objective.needs_reference else None
    coef = jax.ShapeDtypeStruct((), np.float32)
    frozen = {} if objective.entropy_target is None else {"entropy_coef": coef}
    calls = {
        "update": _Call(make_update(loss, optimize, mesh), (state, frozen, batch.packed), state),
        "score": _Call(score, (state.params, batch.packed.rows), state.params),
        "rollout": _Call(draw, (whole, batch.prompts, key), ()),
        "reshard": _Call(reshard, (state.params,), state.params),
    }
    if critic is None:
        return calls, _per_chip((state, reference))
    learns = Learns(loss=loss, optimizer=optimize)
    calls, beside = _with_critic(calls, critic, learns, state, frozen, batch.packed)
    return calls, _per_chip((state, reference, beside))


def _with_critic(
    calls: dict[str, _Call], critic: PlannedCritic, policy: Learns, state: Any, frozen: dict[str, Any], packed: Any
) -> tuple[dict[str, _Call], dict[str, Any]]:
    """The programs of a run with a critic, and the critic's state by role."""
    model, mesh = critic.model, critic.model.compute.mesh
    optimize = make_optimizer(critic.optimizer, 1000, models.CRITIC)
    beside = abstract_state(model.networks(optimize), mesh)
    trunk = {TRUNK: beside[TRUNK]} if model.frozen else {}
    own, both = beside[CRITIC], {"policy": state, CRITIC: beside[CRITIC]}
    joint = make_joint_update({"policy": policy, CRITIC: model.learns(optimize)}, mesh)
    calls |= {
        "update": _Call(joint, (both, frozen | trunk, packed), (both, trunk)),
        "critic": _Call(make_critic_score(model), (own.params, trunk, packed.rows), (own.params, trunk)),
    }
    if critic.warms_up:
        alone = make_update(model.objective, optimize, mesh, table=models.CRITIC)
        calls["critic update"] = _Call(alone, (own, trunk, packed), (own, trunk))
    return calls, beside


def _batch(
    mesh: Mesh,
    compute: Compute,
    objective: Objective,
    prompts: int,
    prompt_tokens: int,
    sampling: SamplerConfig,
    minibatches: int,
    microbatches: int,
    critic: PlannedCritic | None = None,
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

    learned = None if critic is None else critic.model.loss
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
            critic_targets=given(learned is not None),
            critic_outputs=given(learned is not None and learned.needs_outputs),
            critic_weights=given(learned is not None and learned.own_weights),
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
    critic: PlannedCritic | None = None,
) -> dict[str, float]:
    """Seconds of the programs if nothing but the data sheet held them up. Every chip shares in all work."""
    chip = mesh.devices.flat[0].device_kind
    if chip not in flops.PEAKS:
        return {}
    rate, bandwidth = flops.PEAKS[chip]
    completions = np.full((prompts, sampling.group), sampling.max_tokens)
    sizes = np.full(prompts, prompt_tokens), completions
    forward = flops.forward_flops(config, *sizes) / mesh.size / rate
    said, learned = 0.0, 0.0
    if critic is not None:
        said = models.forward_flops(critic.model.config, *sizes) / mesh.size / rate
        learned = said if critic.model.frozen else 3 * said
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
        "update": (3 * forward + learned) / minibatches,
        "critic": said / minibatches,
        "critic update": learned / minibatches,
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
