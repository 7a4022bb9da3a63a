"""The model that learns, and all that its updates are made of."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from grpojax import losses as L
from grpojax.programs import packing, policy_state
from grpojax.programs.policy import Policy
from grpojax.programs.state import Network, abstract_state, bound
from grpojax.run.make_programs import Programs
from grpojax.run.parts.part import Part
from grpojax.run.run_method import RunMethod


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What the functions of `grpojax.run.learn` need. It holds no state of a run.

    Attributes:
      config: the recipe.
      policy: the model on its devices. Its weights are in the state.
      programs: what the devices run, except what samples.
      objective: what the policy's updates optimise.
      parts: what the variant and the settings need besides (`grpojax.run.parts`).
      longest_prompt: most tokens of a prompt in the run.
      ppo_epochs: passes over a step's minibatches.
    """

    config: Any
    policy: Policy
    programs: Programs
    objective: L.Objective
    parts: Sequence[Part] = ()
    longest_prompt: int = 0
    ppo_epochs: int = 1

    @property
    def method(self) -> RunMethod:
        """The variant, rewards and filter of a run that samples."""
        return self.config.method

    @property
    def scores_policy(self) -> bool:
        """Whether the policy scores the samples before its updates."""
        return self.method.scores_policy(self.config.train.updates_a_rollout)

    @property
    def scores_a_step(self) -> int:
        """Forward passes over all samples in a step, besides sampling and updates."""
        return int(self.scores_policy) + sum(part.scorings for part in self.parts)

    @property
    def second(self) -> Part | None:
        """The part with a network that learns with the policy. There is one at most: `grpojax.run.parts.kinds` refuses
        more."""
        return next((part for part in self.parts if part.learns), None)

    @property
    def least_block(self) -> int:
        """Positions below which a smaller block of rows is not faster (`grpojax.programs.packing.block_shapes`)."""
        return packing.LEAST.get(self.policy.compute.platform or jax.default_backend(), packing.LEAST["tpu"])

    def learns_alone(self, number: int) -> bool:
        """Whether only the second network learns in a step, and the policy does not change."""
        return self.second is not None and number <= self.second.warmup_steps(self.config)

    def open_parts(self) -> None:
        """Gives the parts the model and the programs."""
        for part in self.parts:
            part.open(self.policy, self.programs, longest_prompt=self.longest_prompt)

    # ------------------------------------------------------------------------------------------ the networks, by role

    def saved_networks(self) -> dict[str, Network]:
        """The networks that a checkpoint has. Weights that never change are read from the model again."""
        networks = {"policy": policy_state.networks(self.policy.shape, self.programs.optimizer)["policy"]}
        for part in self.parts:
            added = part.networks()
            networks |= {role: added[role] for role in part.saved()}
        return networks

    def abstract(self) -> dict[str, Any]:
        """Shapes, dtypes and shardings of what a checkpoint has."""
        return abstract_state(self.saved_networks(), self.policy.mesh)

    def of_checkpoint(self, networks: Mapping[str, Any]) -> dict[str, Any]:
        """Those of a state's networks that a checkpoint has."""
        return {role: networks[role] for role in self.saved_networks()}

    def start(self, restored: Mapping[str, Any] | None) -> dict[str, Any]:
        """The networks at a run's start (`grpojax.run.run_state.State`). Takes the policy's weights over.

        Args:
          restored: an earlier result of `of_checkpoint`; None in a new run.
        """
        params, self.policy.params = self.policy.params, None
        networks = dict[str, Any]()
        for part in self.parts:
            networks |= part.start(params, restored)
        networks |= restored or {}
        networks |= policy_state.start(
            self.policy,
            params,
            self.programs.optimizer,
            seed=self.config.train.seed,
            restored=networks.get("policy"),
        )
        return bound(networks, self.policy.device)
