"""The reference of a KL: the policy as the run started, or as it was at the last refresh."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from grpojax.device import Program, places
from grpojax.models import DecoderConfig
from grpojax.programs import policy_state
from grpojax.programs.adapter import joined
from grpojax.programs.policy import PolicyShape
from grpojax.programs.state import Network, decoder_network, make_frozen_copy, refreshed
from grpojax.run.batch import Batch
from grpojax.run.make_programs import ProgramInputs
from grpojax.run.minibatch import Minibatch
from grpojax.run.parts.part import Declared, InRows, Networks, Part, read_shape
from grpojax.run.recipe import Config
from grpojax.run.work import forward_flops
from grpojax.types import Array, Tokens
from grpojax.variants import Variant

ROLE = "reference"


class Reference(Part):
    """The weights that score every batch: those of the policy as the run started, or of the last refresh.

    If the policy has adapters, no copy of its base is made. With random factors, whose product is 0 at the start, the
    reference is the base. With those of ``model.adapter.path`` it is the base with a copy of these factors. A
    checkpoint has the reference where the recipe does not give it: after refreshes, and the copy of the factors, whose
    folder may change.

    Attributes:
      role: role of what the reference has of its own; that of the base if it has nothing.
    """

    signals = {"ref_logps": Declared("P G T", "log-probs in nats by the reference; only if a KL is in the rewards")}
    scorings = 1

    @classmethod
    def made_up(cls, some: Callable[[str], Array]) -> dict[str, Array]:
        """None: a variant is tried with the policy's own log-probs in place of the reference's."""
        return {}

    @classmethod
    def needs_policy_logps(cls, variant: Variant) -> bool:
        """A KL in the rewards compares log-probs of the trainer's own numerics, not the sampler's."""
        return variant.objective.kl_in != "loss"

    @classmethod
    def fills(cls, variant: Variant) -> tuple[str, ...]:
        return ("ref_logps",)

    def __init__(self, config: Config, shape: PolicyShape, read_shape: Callable[[str], DecoderConfig] = read_shape):
        super().__init__(config, shape, read_shape)
        self.role = ROLE if shape.adapter is None or shape.adapter.path is not None else policy_state.BASE

    @property
    def every(self) -> int:
        """Number of steps between refreshes; 0 for none."""
        return self.config.train.reference_every

    def make(self, inputs: ProgramInputs) -> Mapping[str, Program]:
        """``(reference, params, mix) -> reference``."""
        out = None if inputs.compute.mesh is None else lambda reference, *given: places(reference)
        return {"reference refresh": Program("reference refresh", refreshed, out=out)}

    def networks(self) -> dict[str, Network]:
        if self.role != ROLE:
            return {}
        if (adapter := self.shape.adapter) is not None:
            return {ROLE: Network(params=adapter.abstract(self.shape.config), table=policy_state.table_of(adapter))}
        _, network = decoder_network(self.shape.config, None, self.shape.mesh)
        return {ROLE: dataclasses.replace(network, params=jax.eval_shape(self._copy_program().fn, network.params))}

    def saved(self) -> tuple[str, ...]:
        return tuple(self.networks()) if self.every or self.shape.adapter is not None else ()

    def start(self, params: Any, restored: Networks | None) -> dict[str, Any]:
        if self.role != ROLE or ROLE in (restored or {}):
            return {}
        if (adapter := self.shape.adapter) is not None:
            return {ROLE: adapter.first(self.shape.config, params, self.config.train.seed, self.policy.device)}
        return {ROLE: self.policy.device.call(self._copy_program(), params)}

    def _weights(self, networks: Networks) -> Any:
        """The reference in the form that the score program takes. Copies nothing."""
        own = networks[self.role]
        if self.shape.adapter is None or self.role != ROLE:
            return own
        return joined(networks[policy_state.BASE], own)

    def _copy_program(self) -> Program:
        return make_frozen_copy(self.shape.compute, averaged=self.every > 0)

    def before(self, networks: Networks, minis: Sequence[Minibatch]) -> tuple[dict[str, Tokens], InRows]:
        logps = [scores.logps for scores in self.on_rows(self.programs.score, minis, self._weights(networks))]
        signals = {"ref_logps": self.whole(minis, logps)} if self.needs_policy_logps(self.variant) else {}
        return signals, {"ref_logps": logps}

    def end_step(self, networks: Networks, number: int) -> dict[str, Any]:
        if not self.every or number % self.every:
            return {}
        refresh = self.programs.parts["reference refresh"]
        mix = self.config.train.reference_mix
        return {ROLE: self.policy.device.call(refresh, networks[ROLE], networks["policy"].params, mix)}

    def flops(self, batch: Batch) -> dict[str, float]:
        return {"score": forward_flops(self.shape.config, batch)}
