"""The teacher of a run: a frozen model. The policy learns from its log-probs of the policy's own tokens."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from grpojax import data
from grpojax.device import Program
from grpojax.host.errors import UserError
from grpojax.models import DecoderConfig, hf
from grpojax.programs.policy import Policy, PolicyShape
from grpojax.programs.state import Network, decoder_network, split
from grpojax.run.batch import Batch
from grpojax.run.make_programs import ProgramInputs, score_program
from grpojax.run.minibatch import Minibatch
from grpojax.run.parts.part import Declared, InRows, Networks, Part, mean, read_shape
from grpojax.run.recipe import Config
from grpojax.run.work import forward_flops
from grpojax.types import Array, Tokens
from grpojax.variants import Variant

ROLE = "teacher"


class Teacher(Part):
    """A model that scores the policy's samples. It runs as the policy does, and its weights are cut by the same rules.
    They are in the run's state, but not in checkpoints.

    Its folder is the variant's option ``teacher``.

    Raises:
      UserError: the teacher has another tokenizer, or too few tokens or positions.

    Attributes:
      model: its shape.
      graph: its graph definition.
    """

    options = ("teacher",)
    signals = {"ref_logps": Declared("P G T", "log-probs in nats by the teacher")}
    scorings = 1

    @classmethod
    def needs_policy_logps(cls, variant: Variant) -> bool:
        return True

    @classmethod
    def made_up(cls, some: Callable[[str], Array]) -> dict[str, Array]:
        """Made-up signals. The teacher is another model than the policy, so its log-probs differ."""
        return {"ref_logps": -some("P G T")}

    def __init__(self, config: Config, shape: PolicyShape, read_shape: Callable[[str], DecoderConfig] = read_shape):
        super().__init__(config, shape, read_shape)
        try:
            self.model = read_shape(self.variant.options["teacher"])
        except UserError as e:
            raise UserError(f"variant.teacher={self.variant.options['teacher']!r}: {e}") from None
        self.graph, _ = decoder_network(self.model, None)

    def networks(self) -> dict[str, Network]:
        return {ROLE: decoder_network(self.model, None, self.shape.mesh)[1]}

    def make(self, inputs: ProgramInputs) -> Mapping[str, Program]:
        """``(params, rows) -> Scores``."""
        how = {"model": self.model, "compute": inputs.compute, "temperature": inputs.temperature}
        return {ROLE: score_program(ROLE, self.graph, **how)}

    def key(self) -> Any:
        """With its shape."""
        return *super().key(), self.model

    def load(self, policy: Policy) -> None:
        path, config = self.variant.options["teacher"], self.config
        named, folder = f"variant.teacher={path!r}", str(data.locate(path))
        if hf.load_tokenizer(folder).get_vocab() != policy.tokenizer.get_vocab():
            raise UserError(
                f"{named} has another tokenizer than the policy, {policy.folder}: take a teacher with its vocabulary"
            )
        self.model = hf.fit_tokenizer(self.model, policy.tokenizer, named)
        longest = config.data.max_prompt_tokens + config.rollout.max_tokens
        if longest > self.model.max_positions:
            raise UserError(
                f"{named} was made for {self.model.max_positions} positions, and data.max_prompt_tokens + "
                f"rollout.max_tokens is {longest}: lower one of them, or take another teacher"
            )
        self.graph, self._read = split(hf.load(folder, tokenizer=policy.tokenizer, mesh=policy.mesh))

    def saved(self) -> tuple[str, ...]:
        return ()

    def start(self, params: Any, restored: Networks | None) -> dict[str, Any]:
        read, self._read = self._read, None
        return {ROLE: read}

    def before(self, networks: Networks, minis: Sequence[Minibatch]) -> tuple[dict[str, Tokens], InRows]:
        scores = self.on_rows(self.programs.parts[ROLE], minis, networks[ROLE])
        return {"ref_logps": self.whole(minis, [each.logps for each in scores])}, {}

    def weigh(self, batch: Batch) -> tuple[dict[str, Tokens], dict[str, float]]:
        own, teacher = (batch.signals[name] for name in ("behavior_logps", "ref_logps"))
        difference = np.asarray(own, np.float64) - teacher
        return {}, {"teacher/kl": mean(difference[batch.live])}

    def flops(self, batch: Batch) -> dict[str, float]:
        return {"score": forward_flops(self.model, batch)}
