"""The weights of LLDS's term, which preserves the likelihood of right samples."""

import numpy as np

from grpojax import losses as L
from grpojax.extensions.methods.splicing import answer_tokens
from grpojax.run.batch import Batch
from grpojax.run.parts.part import Part
from grpojax.types import Tokens
from grpojax.variants import Variant


class Displacement(Part):
    """Puts the weights into the rows; tokens of the answer have the variant's option ``answer_weight``."""

    @classmethod
    def fills(cls, variant: Variant) -> tuple[str, ...]:
        return ("displacement_weights",)

    def weigh(self, batch: Batch) -> tuple[dict[str, Tokens], dict[str, float]]:
        options, answer = self.variant.options, None
        weight = options.get("answer_weight", 1.0)
        if weight != 1.0:
            answer = answer_tokens(batch.rollout, self.policy.tokenizer, options.get("marker"))
        made = np.zeros(batch.live.shape, np.float32)
        for which in batch.minibatches:
            made[which] = L.displacement_weights(
                batch.advantages[which],
                batch.live[which],
                answer=None if answer is None else answer[which],
                answer_weight=weight,
            )
        return {"displacement_weights": made}, {}
