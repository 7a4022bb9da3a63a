"""The reference of a KL: the policy as the run started, or as it was at the last refresh."""

from collections.abc import Sequence
from typing import Any

from grpojax.programs.policy import Policy
from grpojax.programs.state import Network, decoder_network, frozen_copy
from grpojax.run.batch import RolloutBatch
from grpojax.run.packed_batch import PackedBatch, whole
from grpojax.run.parts.part import Part, State
from grpojax.run.recipe import Config
from grpojax.run.work import forward_flops
from grpojax.types import Tokens

ROLE = "reference"


class Reference(Part):
    """Plain weights that score every batch. A checkpoint has them only where they are refreshed."""

    passes = 1

    def __init__(self, config: Config, policy: Policy, *, longest_prompt: int):
        super().__init__(config, policy, longest_prompt=longest_prompt)
        self.every, self.mix = config.train.reference_every, config.train.reference_mix
        # A KL in the rewards compares by the trainer's own numerics, not the sampler's.
        self.compares = self.variant.objective.kl_in != "loss"

    def networks(self) -> dict[str, Network]:
        if not self.every:
            return {}
        return {ROLE: decoder_network(self.policy.config, None, self.policy.mesh)[1]}

    def start(self, params: Any, restored: State | None) -> dict[str, Any]:
        if ROLE in (restored or {}):
            return {}
        return {ROLE: frozen_copy(params, self.policy.compute, averaged=self.every > 0)}

    def before(self, state: State, minis: Sequence[PackedBatch]) -> dict[str, Tokens]:
        logps = [self.run(self.programs.score, state[ROLE], m.packed.rows).logps for m in minis]
        for mini, rows in zip(minis, logps, strict=True):
            mini.set(ref_logps=rows)
        return {"ref_logps": whole(minis, logps)} if self.compares else {}

    def end_step(self, state: State, number: int) -> dict[str, Any]:
        if not self.every or number % self.every:
            return {}
        return {ROLE: self.programs.refresh(state[ROLE], state["policy"].params, self.mix)}

    def flops(self, batch: RolloutBatch) -> dict[str, float]:
        return {"score": forward_flops(self.policy.config, batch)}
