"""The teacher of a run: a frozen model whose log-probs of the policy's own tokens are learned from."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from grpojax import data
from grpojax.host.errors import UserError
from grpojax.models import DecoderConfig, hf
from grpojax.programs.policy import Policy
from grpojax.programs.state import split
from grpojax.run.batch import RolloutBatch
from grpojax.run.packed_batch import PackedBatch, whole
from grpojax.run.parts.part import Part, State, Weighed, mean
from grpojax.run.recipe import Config
from grpojax.run.work import forward_flops
from grpojax.types import Tokens


class Teacher(Part):
    """A model that scores the policy's samples. It runs as the policy does, and no checkpoint has its weights.

    Its folder is the variant's option ``teacher``.

    Raises:
      UserError: it has another tokenizer, or too few tokens or positions.

    Attributes:
      shape: its shape.
      graph: its graph definition.
      params: its weights, cut by the policy's rules.
    """

    options = ("teacher",)
    passes, compares = 1, True

    def __init__(self, config: Config, policy: Policy, *, longest_prompt: int):
        super().__init__(config, policy, longest_prompt=longest_prompt)
        path = self.variant.options["teacher"]
        named, folder = f"variant.teacher={path!r}", str(data.locate(path))
        self.shape = read_shape(path)
        if hf.load_tokenizer(folder).get_vocab() != policy.tokenizer.get_vocab():
            raise UserError(
                f"{named} has another tokenizer than the policy, {policy.folder}: take a teacher with its vocabulary"
            )
        self.shape = hf.fit_tokenizer(self.shape, policy.tokenizer, named)
        longest = config.data.max_prompt_tokens + config.rollout.max_tokens
        if longest > self.shape.max_positions:
            raise UserError(
                f"{named} was made for {self.shape.max_positions} positions, and data.max_prompt_tokens + "
                f"rollout.max_tokens is {longest}: lower one of them, or take another teacher"
            )
        self.graph, self.params = split(hf.load(folder, tokenizer=policy.tokenizer, mesh=policy.mesh))

    def learning(self) -> dict[str, Any]:
        return {"teacher": self.graph}

    def before(self, state: State, minis: Sequence[PackedBatch]) -> dict[str, Tokens]:
        read = [self.run(self.programs.teacher, self.params, m.packed.rows).logps for m in minis]
        return {"ref_logps": whole(minis, read)}

    def weigh(self, weighed: Weighed) -> tuple[Sequence[dict[str, Tokens]], dict[str, float]]:
        own, teacher = (weighed.signals[name] for name in ("behavior_logps", "ref_logps"))
        difference = np.asarray(own, np.float64) - teacher
        return super().weigh(weighed)[0], {"teacher/kl": mean(difference[weighed.learned])}

    def flops(self, batch: RolloutBatch) -> dict[str, float]:
        return {"score": forward_flops(self.shape, batch)}


def read_shape(path: str) -> DecoderConfig:
    """The shape of the model in a teacher's folder; raises `UserError` where there is none."""
    try:
        return hf.read_config(data.locate(path))
    except UserError as e:
        raise UserError(f"variant.teacher={path!r}: {e}") from None
