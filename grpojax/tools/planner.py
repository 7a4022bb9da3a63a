"""Ahead-of-time compiles of a run's programs for a TPU slice that is not there, and what they need of it.

The real compiler, the trainer's own programs, their real shapes and shardings: only the arrays are missing. It needs
libtpu installed, and no TPU.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from grpojax.evaluation import EvalConfig
from grpojax.host.errors import UserError
from grpojax.losses import Objective
from grpojax.models import Compute, DecoderConfig, compute_of, decoder, flops, sharding
from grpojax.models.sharding import MeshConfig
from grpojax.models.weight_table import shardings
from grpojax.programs import batch_shards, blocks, packing
from grpojax.programs.critic_update import ROLE as CRITIC
from grpojax.programs.critic_update import TRUNK, CriticModel
from grpojax.programs.optimizer import OptimizerConfig, make_optimizer
from grpojax.programs.sampler import SamplerConfig
from grpojax.programs.state import abstract_state, decoder_network, frozen_copy
from grpojax.run import teaching
from grpojax.run.finetune_recipe import DPOConfig, SFTConfig
from grpojax.run.held_out import config_of
from grpojax.run.method import Method
from grpojax.run.parts.critic import critic_model
from grpojax.run.programs import Learning, LearningCritic, make_programs, make_supervised_programs
from grpojax.run.recipe import Config
from grpojax.run.sections import TrainConfig
from grpojax.tools import plan_calls
from grpojax.tools.plan_calls import Call, Shapes, abstract, longest_prompts, place
from grpojax.tools.plan_chips import Chips, topology_mesh, topology_meshes
from grpojax.tools.plan_compile import compile_program, per_chip
from grpojax.tools.plan_report import ProgramReport
from grpojax.tools.plan_shapes import shape_of
from grpojax.types import PerToken, TrainBatch

UPDATES = 1000  # of the run that is planned: schedules have no shape of their own


class PlannedCritic(NamedTuple):
    """The critic of a run: what it is, what it learns with, and whether it learns alone at first."""

    model: CriticModel
    optimizer: OptimizerConfig
    warms_up: bool = False


def shorter(path: str, layers: int | None) -> DecoderConfig:
    """The shape of a recipe's model, with so many layers; None leaves them."""
    shape = shape_of(path)
    return shape if layers is None else dataclasses.replace(shape, num_layers=layers)


def plan_recipe(
    config: Config,
    *,
    topology: str,
    slices: int = 1,
    layers: int | None = None,
    programs: Sequence[str] | None = None,
) -> list[ProgramReport]:
    """As `plan`, of a recipe.

    Args:
      config: the recipe.
      topology: the slice.
      slices: how many of them.
      layers: of model and teacher; None for all.
      programs: as in `plan`.
    """
    model, compute = shorter(config.model.path, layers), compute_of(config.model, platform="tpu")
    own, learned, planned = config.own_critic, config.method.variant.critic, None
    if own is not None and learned is not None:
        described = critic_model(own, model, compute, learned)
        planned = PlannedCritic(described, own.optimizer, own.warmup_steps > 0)
    taught_by = config.method.variant.options.get("teacher")
    return plan(
        model,
        prompts=config.rollout.prompts,
        prompt_tokens=config.data.max_prompt_tokens,
        sampling=config.rollout,
        topology=topology,
        slices=slices,
        mesh=config.mesh,
        compute=compute,
        objective=config.method.variant.objective,
        optimizer=config.optimizer,
        critic=planned,
        method=config.method,
        teacher=None if taught_by is None else shorter(taught_by, layers),
        train=config.train,
        evaluation=config_of(config) if config.data.validation or config.data.test else None,
        weights=config.rollout.weights,
        overlap=config.rollout.overlap,
        programs=programs,
    )


def plan(
    config: DecoderConfig,
    *,
    prompts: int,
    prompt_tokens: int,
    sampling: SamplerConfig,
    topology: str = "v5e:4x4",
    slices: int = 1,
    mesh: MeshConfig = MeshConfig(),  # noqa: B008
    compute: Compute = Compute(dtype="bfloat16"),  # noqa: B008
    objective: Objective = Objective(),  # noqa: B008
    optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008
    critic: PlannedCritic | None = None,
    method: Method | None = None,
    teacher: DecoderConfig | None = None,
    train: TrainConfig = TrainConfig(steps=1),  # noqa: B008
    evaluation: EvalConfig | None = None,
    weights: Literal["compute", "int8"] = "compute",
    overlap: float = 0.0,
    programs: Sequence[str] | None = None,
) -> list[ProgramReport]:
    """Compiles the programs of a run for a TPU slice, every prompt and completion at its longest.

    Args:
      config: the model.
      prompts: prompts of a rollout.
      prompt_tokens: longest prompt.
      sampling: group, longest completion, temperature, slots.
      topology: the slice, as libtpu calls it.
      slices: how many of them.
      mesh: how its chips are laid out.
      compute: dtype, remat, attention; its mesh and platform are replaced.
      objective: the loss; one with a reference keeps its weights on the chips.
      optimizer: the optimiser.
      critic: with one, "update" is that of both networks; its mesh and platform are replaced too.
      method: what the run learns by, for the programs that its variant needs beside those of every run.
      teacher: a frozen model whose weights lie beside the policy's, and which scores what it says.
      train: minibatches, micro-batches, and whether the reference is refreshed.
      evaluation: what is drawn of held-out problems; None without any.
      weights, overlap: of the rollout (`grpojax.run.sections.RolloutConfig`).
      programs: which of `PROGRAMS`, `CRITIC_PROGRAMS` and `VARIANT_PROGRAMS` to compile; None for all that the run has.

    Returns:
      A `ProgramReport` each. A program that the compiler refuses has its ``error`` set.

    Raises:
      UserError: an unknown topology, or sizes that do not divide over the mesh.
    """
    chips = topology_meshes(topology, mesh, slices)
    devices = chips.mesh
    compute = dataclasses.replace(compute, mesh=devices, platform=chips.platform)
    if critic is not None:
        critic = critic._replace(model=dataclasses.replace(critic.model, compute=compute))
    learned = sampling if method is None else dataclasses.replace(sampling, group=method.widest(sampling.group))
    if method is not None and method.replaces_samples:
        learned = dataclasses.replace(learned, max_tokens=learned.max_tokens + plan_calls.ANSWER_TOKENS)
    packed = _batch(devices, compute, objective, prompts, prompt_tokens, learned, train, critic, method)
    shapes = Shapes(
        config=config,
        graph=decoder.abstract(config)[0],
        compute=compute,
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        sampling=sampling,
        evaluation=evaluation,
        weights=weights,
        overlap=overlap,
        apart=chips.apart,
    )
    calls, run = _calls(config, shapes, objective, optimizer, packed, critic, method, train, teacher)
    for args in _ragged(calls["update"].args, prompts, prompt_tokens, learned, train, compute):
        calls["ragged update"] = calls["update"]._replace(args=args)
    beside = None if critic is None else critic.model
    sizes = prompts, prompt_tokens, sampling, train.minibatches
    limits = plan_calls.limits(config, devices, *sizes, critic=beside, teacher=teacher, remat=compute.remat)
    limits |= plan_calls.at_least(config, calls, shapes)
    return _reports(calls, run, limits, chips, programs)


def plan_supervised(
    model: DecoderConfig, config: SFTConfig | DPOConfig, compute: Compute, *, topology: str = "v5e:4x4", slices: int = 1
) -> list[ProgramReport]:
    """As `plan`, of a supervised run: every prompt with as many answers as there may be, at their longest.

    Args:
      model: the model.
      config: the recipe.
      compute: dtype, remat, attention; its mesh and platform are replaced.
      topology: the slice.
      slices: how many of them.
    """
    mesh = topology_mesh(topology, config.mesh, slices)
    compute = dataclasses.replace(compute, mesh=mesh, platform="tpu")
    calls, run, limits = _supervised_calls(model, config, compute, mesh)
    return _reports(calls, run, limits, Chips(mesh))


def _supervised_calls(
    model: DecoderConfig, config: SFTConfig | DPOConfig, compute: Compute, mesh: Mesh
) -> tuple[dict[str, Call], dict[str, int], dict[str, float]]:
    """The programs, bytes of all networks on one chip by what they are, and seconds that their FLOPs take."""
    kind, size = teaching.teaching_of(config), config.train.batch_size
    parts, microbatches = sharding.shards(mesh), config.train.microbatches
    if size % (parts * microbatches):
        raise UserError(
            f"train.batch_size={size} does not divide over {parts} batch shards with train.microbatches={microbatches} "
            f"each: make it a multiple of {parts * microbatches}"
        )
    shapes = teaching.Shapes(
        group=config.train.group if isinstance(config, SFTConfig) else 2,
        prompt=config.data.max_prompt_tokens,
        completion=config.data.max_tokens,
        shards=parts,
        microbatches=microbatches,
        gather=compute.needs_gather,
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
    optimize = make_optimizer(config.optimizer, UPDATES)
    graph, network = decoder_network(model, optimize, mesh)
    state = abstract_state({"policy": network}, mesh)["policy"]
    made = make_supervised_programs(graph, compute, kind.objective(graph, compute), config.optimizer, UPDATES)
    calls = {"update": Call(made.update, (state, None, part), state)}
    if config.data.validation is not None or config.data.test is not None or kind.needs_reference:
        calls["score"] = Call(made.score, (state.params, rows), state.params)
    limits, chip = {}, flops.CHIPS.get(mesh.devices.flat[0].device_kind)
    if chip is not None:
        sizes = np.full(size, shapes.prompt), lengths
        limits = {
            "update": flops.update_flops(model, *sizes, remat=compute.remat) / mesh.size / chip.flops,
            "score": flops.forward_flops(model, *sizes) / mesh.size / chip.flops,
        }
    return calls, _state_bytes(state), limits


def _reports(
    calls: Mapping[str, Call],
    run: Mapping[str, int],
    limits: Mapping[str, float],
    chips: Chips,
    programs: Sequence[str] | None = None,
) -> list[ProgramReport]:
    """Each program on its own chips; those that only sample hold nothing but what they are sent for it."""
    reports = []
    for name in programs or calls:
        call, mesh, kept = calls[name], chips.mesh, run
        if call.apart and chips.apart is not None:
            mesh, kept = chips.apart, {}
        report = compile_program(name, call, run=kept, compute_s=limits.get(name), devices=list(mesh.devices.flat))
        if call.apart:
            report = dataclasses.replace(report, apart=mesh.size, sent=per_chip(call.args[0]) / 2**30)
        reports.append(report)
    return reports


def _state_bytes(state: Any) -> dict[str, int]:
    """Bytes of a network's state on one chip: what it computes with, and what its optimiser keeps."""
    weights = per_chip(state.params)
    return {"weights": weights, "optimiser": per_chip(state) - weights}


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
    teacher: DecoderConfig | None = None,
) -> tuple[dict[str, Call], dict[str, int]]:
    """The programs of a run by name, and the bytes of all its networks on one chip by what they are."""
    compute, mesh = shapes.compute, shapes.mesh
    taught = None if teacher is None else decoder_network(teacher, None, mesh)
    learns = None if critic is None else LearningCritic(model=critic.model, optimizer=critic.optimizer, updates=UPDATES)
    programs = make_programs(
        Learning(
            graph=shapes.graph,
            compute=compute,
            objective=objective,
            optimizer=optimizer,
            updates=UPDATES,
            temperature=shapes.sampling.temperature,
            entropy=method is not None and "entropy" in method.variant.needs,
            critic=learns,
            teacher=None if taught is None else taught[0],
        )
    )
    _, network = decoder_network(config, programs.optimizer, mesh)
    state = abstract_state({"policy": network}, mesh)["policy"]
    run, coef = _state_bytes(state), jax.ShapeDtypeStruct((), np.float32)
    frozen = {} if objective.entropy_target is None else {"entropy_coef": coef}
    calls = {
        "update": Call(programs.update, (state, frozen, packed), state),
        "score": Call(programs.score, (state.params, packed.rows), state.params),
        **plan_calls.rollouts(shapes, state.params, method),
    }
    if method is not None:
        calls |= plan_calls.scores(shapes, programs, state.params, packed, method, train)
    if objective.needs_reference:
        averaged = train.reference_every > 0
        reference = jax.eval_shape(lambda params: frozen_copy(params, compute, averaged=averaged), state.params)
        reference = jax.tree.map(abstract, reference, shardings(reference, mesh))
        run["reference"] = per_chip(reference)
        if train.reference_every:
            args = reference, state.params, coef
            calls["reference refresh"] = Call(programs.refresh, args, (reference, state.params))
    if critic is not None and programs.critic is not None:
        model, own = critic.model, programs.critic
        beside = abstract_state(model.networks(own.optimizer), mesh)
        trunk = {TRUNK: beside[TRUNK]} if model.frozen else {}
        learned, both = beside[CRITIC], {"policy": state, CRITIC: beside[CRITIC]}
        calls["update"] = Call(programs.update, (both, frozen | trunk, packed), (both, trunk))
        calls["critic"] = Call(own.score, (learned.params, trunk, packed.rows), (learned.params, trunk))
        if critic.warms_up:
            calls["critic update"] = Call(own.update, (learned, trunk, packed), (learned, trunk))
        run["critic"] = per_chip(beside)
    if taught is not None:
        params = abstract_state({"teacher": taught[1]}, mesh)["teacher"]
        calls["teacher"] = Call(programs.teacher, (params, packed.rows), params)
        run["teacher"] = per_chip(params)
    return calls, run


def _ragged(
    args: tuple[Any, ...],
    prompts: int,
    prompt_tokens: int,
    sampling: SamplerConfig,
    train: TrainConfig,
    compute: Compute,
) -> list[tuple[Any, ...]]:
    """The arguments of an update whose samples are shorter: it takes blocks of rows, as many as hold a token.

    None where such blocks would save nothing.
    """
    parts = sharding.shards(compute.mesh)
    rows, group = batch_shards.spread_sizes(prompts // train.minibatches, sampling.group, parts)
    how = {"microbatches": train.microbatches, "least": blocks.LEAST["tpu"], "gaps": train.skip_zero_advantage}
    sizes = blocks.sizes(rows // parts, group, sampling.max_tokens, prompt_tokens, **how)
    return blocks.others(sizes, group if compute.needs_gather else 0, args)


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
    parts = sharding.shards(mesh)
    part, part_group = batch_shards.spread(
        longest_prompts(prompts // train.minibatches, prompt_tokens), sampling.group, parts
    )
    shape = (len(part.lengths), part_group, sampling.max_tokens)
    full = np.zeros(shape, np.float32)

    def given(needed: bool, dtype: Any = np.float32) -> np.ndarray | None:
        return full.astype(dtype) if needed else None

    learned = None if critic is None else critic.model.loss
    moves = train.updates_a_rollout > 1 and objective.ratio_denominator == "trainer"
    if method is not None:
        moves = method.scores_old(train.updates_a_rollout)
    batch = TrainBatch(
        prompts=part,
        tokens=full.astype(np.int32),
        lengths=np.full(shape[:2], shape[2], np.int32),
        per_token=PerToken(
            advantages=full,
            weights=full,
            sampler_logps=given(method is None or not method.replaces_samples),
            behavior_logps=given(moves),
            ref_logps=given(objective.needs_reference),
            displacement_weights=given(objective.needs_displacement_weights),
            covariance_mask=given(objective.needs_covariance_mask, bool),
            critic_targets=given(learned is not None),
            critic_outputs=given(learned is not None and learned.needs_outputs),
            critic_weights=given(learned is not None and learned.own_weights),
        ),
    )
    packed, _ = packing.pack(batch, shards=parts, microbatches=train.microbatches, gather=compute.needs_gather)

    return place(packed, mesh, None)
