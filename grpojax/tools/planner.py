"""Ahead-of-time compiles of a run's programs for a TPU slice that is not there, and what they need of it.

The real compiler, the trainer's own programs, their real shapes and shardings (`grpojax.run.calls`): only the arrays
are missing. It needs libtpu installed, and no TPU.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from grpojax.models import DecoderConfig, compute_of, decoder, flops
from grpojax.models.compute import ModelConfig
from grpojax.programs.calls import Call
from grpojax.programs.critic_update import ROLE as CRITIC
from grpojax.programs.critic_update import TRUNK
from grpojax.programs.policy import PolicyShape, Sampling
from grpojax.run.calls import calls_of, supervised_calls_of
from grpojax.run.finetune_recipe import DPOConfig, SFTConfig
from grpojax.run.recipe import Config
from grpojax.tools.plan_chips import Chips, topology_mesh, topology_meshes
from grpojax.tools.plan_compile import compile_program, per_chip
from grpojax.tools.plan_report import ProgramReport
from grpojax.tools.plan_shapes import shape_of


def shorter(path: str, layers: int | None) -> DecoderConfig:
    """The shape of a recipe's model, with so many layers; None leaves them."""
    shape = shape_of(path)
    return shape if layers is None else dataclasses.replace(shape, num_layers=layers)


def plan(
    config: Config,
    *,
    topology: str = "v5e:4x4",
    slices: int = 1,
    model: DecoderConfig | None = None,
    layers: int | None = None,
    programs: Sequence[str] | None = None,
) -> list[ProgramReport]:
    """Compiles the programs of a recipe's run for a TPU slice, every prompt and completion at its longest.

    Args:
      config: the recipe.
      topology: the slice, as libtpu calls it.
      slices: how many of them.
      model: the shape of the policy; None takes that which ``model.path`` names.
      layers: of policy and teacher where they are named by their paths; None for all.
      programs: which to compile, of those that `grpojax.run.calls.calls_of` names; None for all that the run has.

    Returns:
      A `ProgramReport` each. A program that the compiler refuses has its ``error`` set.

    Raises:
      UserError: an unknown topology, or sizes that do not divide over the mesh.
    """
    chips = topology_meshes(topology, config.mesh, slices)
    calls, state = calls_of(
        config,
        policy_shape(config.model, shorter(config.model.path, layers) if model is None else model, chips),
        read_shape=lambda path: shorter(path, layers),
    )
    return _reports(calls, state, chips, programs)


def plan_supervised(
    config: SFTConfig | DPOConfig, model: DecoderConfig, *, topology: str = "v5e:4x4", slices: int = 1
) -> list[ProgramReport]:
    """As `plan`, of a supervised run: every prompt with as many answers as there may be, at their longest.

    Args:
      config: the recipe.
      model: the shape of the policy.
      topology: the slice.
      slices: how many of them.
    """
    chips = Chips(topology_mesh(topology, config.mesh, slices))
    calls, state = supervised_calls_of(config, policy_shape(config.model, model, chips))
    return _reports(calls, state, chips)


def policy_shape(config: ModelConfig, model: DecoderConfig, chips: Chips) -> PolicyShape:
    """A recipe's policy of some shape on chips that are not there."""
    compute = compute_of(config, chips.mesh, platform=chips.platform)
    mesh = chips.mesh if chips.sampling is None else chips.sampling
    sampling = Sampling(mesh, dataclasses.replace(compute, mesh=mesh))
    graph = decoder.abstract(model)[0]
    return PolicyShape(config=model, graph=graph, compute=compute, sampling=sampling, adapter=config.adapter)


def _reports(
    calls: Mapping[str, Call], state: Mapping[str, Any], chips: Chips, programs: Sequence[str] | None = None
) -> list[ProgramReport]:
    """Each program on its own chips; those that only sample hold nothing but what they are sent for it."""
    reports, chip, here = [], flops.CHIPS.get(chips.mesh.devices.flat[0].device_kind), kept(state)
    for name in programs or calls:
        call = calls[name]
        elsewhere = chips.sampling if call.samples else None
        mesh, run = (chips.mesh, here) if elsewhere is None else (elsewhere, {})
        seconds = call.flops / mesh.size / chip.flops if chip is not None and call.flops else None
        report = compile_program(name, call, run=run, compute_s=seconds, devices=list(mesh.devices.flat))
        if elsewhere is not None:
            report = dataclasses.replace(report, sampling_chips=mesh.size, sent=per_chip(call.args[0]) / 2**30)
        reports.append(report)
    return reports


def kept(state: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of a run's state on one chip by what it is: what the policy computes with, what its optimiser keeps, and
    the other networks with theirs."""
    policy = state["policy"]
    weights = per_chip(policy.params)
    sizes = {"weights": weights, "optimiser": per_chip(policy) - weights}
    for role in state.keys() - {"policy"}:
        name = CRITIC if role == TRUNK else role
        sizes[name] = sizes.get(name, 0) + per_chip(state[role])
    return sizes
