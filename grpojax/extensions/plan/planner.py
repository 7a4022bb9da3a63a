"""Ahead-of-time compiles of a run's programs for a TPU slice that is not there, and the resources that they need.

The compiler, the trainer's programs, and their shapes and shardings are the real ones: the run takes its steps on
devices that compute nothing (`grpojax.run.dry`). It needs libtpu installed, but no TPU.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from grpojax.extensions.plan.plan_calls import PlannedCall, RunCalls, calls_of, of_other
from grpojax.extensions.plan.plan_chips import Chips, topology_mesh, topology_meshes
from grpojax.extensions.plan.plan_compile import compile_program, per_chip
from grpojax.extensions.plan.plan_report import ProgramReport
from grpojax.extensions.plan.plan_shapes import shape_of
from grpojax.models import DecoderConfig, compute_of, decoder, flops
from grpojax.models.compute import ModelConfig
from grpojax.programs import adapter
from grpojax.programs.policy import PolicyShape, Sampling
from grpojax.run.dry import RecipeKind
from grpojax.run.recipe import Config


class Planned(NamedTuple):
    """The programs of a run by name, and what was found of each that was compiled."""

    calls: Mapping[str, PlannedCall]
    reports: list[ProgramReport]


def plan(
    config: Config,
    *,
    topology: str = "v5e:4x4",
    slices: int = 1,
    model: DecoderConfig | None = None,
    layers: int | None = None,
    programs: Sequence[str] | None = None,
) -> Planned:
    """Compiles the programs of a recipe's run for a TPU slice, every prompt and completion at its longest.

    Args:
      config: the recipe.
      topology: libtpu's name of the slice.
      slices: how many of them.
      model: the shape of the policy; None takes that which ``model.path`` names.
      layers: number of layers of policy and teacher if these are given by their paths; None for all.
      programs: the programs to compile, out of those that `grpojax.extensions.plan.plan_calls.calls_of` names; None
        for all.

    Returns:
      The programs, and a `ProgramReport` for each. If the compiler refuses a program, its ``error`` is set.

    Raises:
      UserError: the topology is unknown, or sizes do not divide over the mesh.
    """
    chips = topology_meshes(topology, config.mesh, slices)
    run = calls_of(
        config,
        policy_shape(config.model, shape_of(config.model.path, layers) if model is None else model, chips),
        read_shape=lambda path: shape_of(path, layers),
    )
    return Planned(run.calls, _reports(run, chips, programs))


def plan_other(
    kind: RecipeKind, config: Any, model: DecoderConfig, *, topology: str = "v5e:4x4", slices: int = 1
) -> list[ProgramReport]:
    """As `plan` for a supervised run: every prompt has the most answers that it may have, at their longest.

    Args:
      config: the recipe.
      model: the shape of the policy.
      topology: the slice.
      slices: how many of them.
    """
    chips = Chips(topology_mesh(topology, config.mesh, slices))
    return _reports(of_other(kind, config, policy_shape(config.model, model, chips)), chips)


def policy_shape(config: ModelConfig, model: DecoderConfig, chips: Chips) -> PolicyShape:
    """A recipe's policy of this shape on chips that are not there. Raises `UserError` if their mesh cannot run its
    adapters."""
    if (learned := adapter.of(config)) is not None:
        learned.check_axes(fsdp=chips.mesh.shape["fsdp"], expert=chips.mesh.shape["expert"])
    compute = compute_of(config, chips.mesh, platform=chips.platform)
    mesh = chips.mesh if chips.sampling is None else chips.sampling
    sampling = Sampling(mesh, dataclasses.replace(compute, mesh=mesh))
    graph = decoder.abstract(model)[0]
    return PolicyShape(config=model, graph=graph, compute=compute, sampling=sampling, adapter=learned)


def _reports(run: RunCalls, chips: Chips, programs: Sequence[str] | None = None) -> list[ProgramReport]:
    """Compiles each program for its own chips. Chips that only sample hold only the weights that they are sent."""
    reports, chip, whole = [], flops.CHIPS.get(chips.mesh.devices.flat[0].device_kind), kept(run.state)
    for name in programs or run.calls:
        call = run.calls[name]
        elsewhere = chips.sampling if call.samples else None
        mesh, here = (chips.mesh, whole) if elsewhere is None else (elsewhere, {})
        seconds = call.flops / mesh.size / chip.flops if chip is not None and call.flops else None
        report = compile_program(name, call, run=here, compute_s=seconds, devices=list(mesh.devices.flat))
        if elsewhere is not None:
            report = dataclasses.replace(report, sampling_chips=mesh.size, sent=per_chip(call.args[0]) / 2**30)
        reports.append(report)
    return reports


def kept(state: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of a run's state on one chip by name: the policy's weights, its optimiser's state, other networks."""
    policy = state["policy"]
    weights = per_chip(policy.params)
    sizes = {"weights": weights, "optimiser": per_chip(policy) - weights}
    for role in state.keys() - {"policy"}:
        name = role.removesuffix("_trunk")  # a critic's frozen trunk counts with it
        sizes[name] = sizes.get(name, 0) + per_chip(state[role])
    return sizes
