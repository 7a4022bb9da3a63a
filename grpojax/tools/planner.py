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
from jax.sharding import Mesh

from grpojax.evaluation import EvalConfig
from grpojax.host.errors import UserError
from grpojax.losses import Objective
from grpojax.models import Compute, DecoderConfig, decoder, flops, sharding
from grpojax.models import critic as models
from grpojax.models.sharding import MeshConfig
from grpojax.models.weight_table import shardings
from grpojax.programs import lanes, packing, policy_update
from grpojax.programs.critic_update import ROLE as CRITIC
from grpojax.programs.critic_update import TRUNK, CriticModel, make_critic_score
from grpojax.programs.optimizer import OptimizerConfig, make_optimizer
from grpojax.programs.sampler import SamplerConfig
from grpojax.programs.state import abstract_state, decoder_network, make_reshard
from grpojax.programs.update import Learns, make_joint_update, make_update
from grpojax.run import teaching
from grpojax.run.finetune_recipe import DPOConfig, SFTConfig
from grpojax.run.learner import refreshed
from grpojax.run.method import Method
from grpojax.run.sections import TrainConfig
from grpojax.tools import plan_calls
from grpojax.tools.hlo import collectives
from grpojax.tools.plan_calls import Call, Shapes, abstract, longest_prompts, place
from grpojax.tools.plan_report import ProgramReport
from grpojax.types import PerToken, TrainBatch

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
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")  # libtpu complains without these, and goes by neither
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
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
    critic: PlannedCritic | None = None,
    method: Method | None = None,
    teacher: DecoderConfig | None = None,
    train: TrainConfig = TrainConfig(steps=1),  # noqa: B008
    evaluation: EvalConfig | None = None,
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
      critic: with one, "update" is that of both networks; its mesh and platform are replaced too.
      method: what the run learns by, for the programs that its variant needs beside those of every run.
      teacher: a frozen model whose weights lie beside the policy's, and which scores what it says.
      train: minibatches, micro-batches, and whether the reference is refreshed.
      evaluation: what is drawn of held-out problems; None without any.
      programs: which of `PROGRAMS`, `CRITIC_PROGRAMS` and `VARIANT_PROGRAMS` to compile; None for all that the run has.

    Returns:
      A `ProgramReport` each. A program that does not fit the chip's memory has its ``error`` set.

    Raises:
      UserError: an unknown topology, or sizes that do not divide over the mesh.
    """
    devices = topology_mesh(topology, mesh)
    compute = dataclasses.replace(compute, mesh=devices, platform="tpu")
    if critic is not None:
        critic = critic._replace(model=dataclasses.replace(critic.model, compute=compute))
    learned = sampling if method is None else dataclasses.replace(sampling, group=method.widest(sampling.group))
    if method is not None and method.replaces_samples:
        learned = dataclasses.replace(learned, max_tokens=learned.max_tokens + plan_calls.ANSWER_TOKENS)
    packed = _batch(devices, compute, objective, prompts, prompt_tokens, learned, train, critic, method)
    shapes = Shapes(
        graph=decoder.abstract(config)[0],
        compute=compute,
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        sampling=sampling,
        evaluation=evaluation,
    )
    calls, run = _calls(config, shapes, objective, optimizer, packed, critic, method, train)
    if teacher is not None:
        run += _with_teacher(calls, teacher, shapes, packed)
    beside = None if critic is None else critic.model
    sizes = prompts, prompt_tokens, sampling, train.minibatches
    limits = plan_calls.limits(config, devices, *sizes, critic=beside, teacher=teacher)
    chip = devices.devices.flat[0].device_kind
    if chip in flops.PEAKS:
        limits |= plan_calls.at_least(config, calls, shapes, *flops.PEAKS[chip])
    return _reports(calls, run, limits, programs)


def plan_supervised(
    model: DecoderConfig, config: SFTConfig | DPOConfig, compute: Compute, *, topology: str = "v5e:4x4"
) -> list[ProgramReport]:
    """As `plan`, of a supervised run: every prompt with as many answers as there may be, at their longest.

    Args:
      model: the model.
      config: the recipe.
      compute: dtype, remat, attention; its mesh and platform are replaced.
      topology: the slice.
    """
    mesh = topology_mesh(topology, config.mesh)
    compute = dataclasses.replace(compute, mesh=mesh, platform="tpu")
    calls, run, limits = _supervised_calls(model, config, compute, mesh)
    return _reports(calls, run, limits)


def _supervised_calls(
    model: DecoderConfig, config: SFTConfig | DPOConfig, compute: Compute, mesh: Mesh
) -> tuple[dict[str, Call], int, dict[str, float]]:
    """The programs, bytes of all networks on one chip, and seconds that they take at least."""
    kind, size = teaching.teaching_of(config), config.train.batch_size
    parts, microbatches = sharding.lanes(mesh), config.train.microbatches
    if size % (parts * microbatches):
        raise UserError(
            f"train.batch_size={size} does not divide over {parts} batch shards with train.microbatches={microbatches} "
            f"each: make it a multiple of {parts * microbatches}"
        )
    shapes = teaching.Shapes(
        group=config.train.group if isinstance(config, SFTConfig) else 2,
        prompt=config.data.max_prompt_tokens,
        completion=config.data.max_tokens,
        lanes=parts,
        microbatches=microbatches,
        seats=compute.needs_seats,
    )
    lengths = np.full((size, shapes.group), shapes.completion, np.int32)
    batch = TrainBatch(
        prompts=longest_prompts(size, shapes.prompt),
        tokens=np.zeros((*lengths.shape, shapes.completion), np.int32),
        lengths=lengths,
        per_token=PerToken(),
    )
    part = place(kind.part(batch, shapes, np.zeros(lengths.shape, np.float32))[0], mesh, None)
    rows = place(teaching.pack(batch, shapes)[0].rows, mesh, None)
    optimize = make_optimizer(config.optimizer, updates=1000)
    graph, network = decoder_network(model, optimize, mesh)
    state = abstract_state({"policy": network}, mesh)["policy"]
    calls = {"update": Call(make_update(kind.objective(graph, compute), optimize, mesh), (state, None, part), state)}
    if config.data.eval is not None or kind.needs_reference:
        calls["score"] = Call(policy_update.make_score(graph, compute), (state.params, rows), state.params)
    limits, chip = {}, mesh.devices.flat[0].device_kind
    if chip in flops.PEAKS:
        forward = flops.forward_flops(model, np.full(size, shapes.prompt), lengths) / mesh.size / flops.PEAKS[chip][0]
        limits = {"update": 3 * forward, "score": forward}
    return calls, _per_chip(state), limits


def _reports(
    calls: Mapping[str, Call], run: int, limits: Mapping[str, float], programs: Sequence[str] | None = None
) -> list[ProgramReport]:
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


def _calls(
    config: DecoderConfig,
    shapes: Shapes,
    objective: Objective,
    optimizer: OptimizerConfig,
    packed: packing.Packed,
    critic: PlannedCritic | None,
    method: Method | None = None,
    train: TrainConfig = TrainConfig(steps=1),  # noqa: B008
) -> tuple[dict[str, Call], int]:
    """The programs of a run by name, and the bytes of all its networks on one chip."""
    compute, mesh, temperature = shapes.compute, shapes.mesh, shapes.sampling.temperature
    optimize = make_optimizer(optimizer, updates=1000)
    graph, network = decoder_network(config, optimize, mesh)
    state = abstract_state({"policy": network}, mesh)["policy"]
    reshard = make_reshard(compute)
    whole = jax.eval_shape(reshard, state.params)
    whole = jax.tree.map(abstract, whole, shardings(whole, mesh, sharding.ROLLOUT))
    loss = policy_update.policy_objective(graph, objective, compute, temperature=temperature, entropy=True)
    score = policy_update.make_score(graph, compute, temperature=temperature)
    reference = state.params if objective.needs_reference else None
    coef = jax.ShapeDtypeStruct((), np.float32)
    frozen = {} if objective.entropy_target is None else {"entropy_coef": coef}
    calls = {
        "update": Call(make_update(loss, optimize, mesh), (state, frozen, packed), state),
        "score": Call(score, (state.params, packed.rows), state.params),
        **plan_calls.rollouts(shapes, whole, method),
        "reshard": Call(reshard, (state.params,), state.params),
    }
    if method is not None:
        calls |= plan_calls.scores(shapes, state.params, packed, method, train)
    if train.reference_every:
        calls["reference refresh"] = Call(refreshed, (reference, state.params, coef), (reference, state.params))
    if critic is None:
        return calls, _per_chip((state, reference))
    learns = Learns(loss=loss, optimizer=optimize)
    calls, beside = _with_critic(calls, critic, learns, state, frozen, packed)
    return calls, _per_chip((state, reference, beside))


def _with_critic(
    calls: dict[str, Call], critic: PlannedCritic, policy: Learns, state: Any, frozen: dict[str, Any], packed: Any
) -> tuple[dict[str, Call], dict[str, Any]]:
    """The programs of a run with a critic, and the critic's state by role."""
    model, mesh = critic.model, critic.model.compute.mesh
    optimize = make_optimizer(critic.optimizer, 1000, models.CRITIC)
    beside = abstract_state(model.networks(optimize), mesh)
    trunk = {TRUNK: beside[TRUNK]} if model.frozen else {}
    own, both = beside[CRITIC], {"policy": state, CRITIC: beside[CRITIC]}
    joint = make_joint_update({"policy": policy, CRITIC: model.learns(optimize)}, mesh)
    calls |= {
        "update": Call(joint, (both, frozen | trunk, packed), (both, trunk)),
        "critic": Call(make_critic_score(model), (own.params, trunk, packed.rows), (own.params, trunk)),
    }
    if critic.warms_up:
        alone = make_update(model.objective, optimize, mesh, table=models.CRITIC)
        calls["critic update"] = Call(alone, (own, trunk, packed), (own, trunk))
    return calls, beside


def _with_teacher(calls: dict[str, Call], teacher: DecoderConfig, shapes: Shapes, packed: packing.Packed) -> int:
    """Adds the program in which a teacher scores; the bytes of its weights on one chip."""
    graph, network = decoder_network(teacher, None, shapes.mesh)
    params = abstract_state({"teacher": network}, shapes.mesh)["teacher"]
    score = policy_update.make_score(graph, shapes.compute, temperature=shapes.sampling.temperature)
    calls["teacher"] = Call(score, (params, packed.rows), params)
    return _per_chip(params)


def _batch(
    mesh: Mesh,
    compute: Compute,
    objective: Objective,
    prompts: int,
    prompt_tokens: int,
    sampling: SamplerConfig,
    train: TrainConfig,
    critic: PlannedCritic | None = None,
    method: Method | None = None,
) -> packing.Packed:
    """What the trainer would feed, every prompt and completion at its longest.

    Where a plan gives prompts different numbers of samples, each is taken to have the most: more than there ever are.
    """
    parts = sharding.lanes(mesh)
    part, part_group = lanes.spread(longest_prompts(prompts // train.minibatches, prompt_tokens), sampling.group, parts)
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
            sampler_logps=given(method is None or not method.replaces_samples),
            behavior_logps=given(train.updates_a_rollout > 1 and objective.anchor == "trainer"),
            ref_logps=given(objective.needs_reference),
            displacement_weights=given(objective.needs_displacement_weights),
            covariance_mask=given(objective.needs_covariance_mask, bool),
            critic_targets=given(learned is not None),
            critic_outputs=given(learned is not None and learned.needs_outputs),
            critic_weights=given(learned is not None and learned.own_weights),
        ),
    )
    packed, _ = packing.pack(batch, lanes=parts, microbatches=train.microbatches, seats=compute.needs_seats)

    return place(packed, mesh, None)


# ------------------------------------------------------------------------------------------- time and compiling


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
