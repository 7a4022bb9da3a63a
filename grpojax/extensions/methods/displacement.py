"""The weights of LLDS's term, which preserves the likelihood of right samples."""

from collections.abc import Sequence

import numpy as np

from grpojax import losses as L
from grpojax.extensions.methods.true_answers import answer_tokens
from grpojax.run.parts.part import Part, Weighed
from grpojax.types import Tokens
from grpojax.variants import Variant


class Displacement(Part):
    """Puts the weights into the rows; tokens of the answer have the variant's option ``answer_weight``."""

    @classmethod
    def rows(cls, variant: Variant) -> tuple[str, ...]:
        return ("displacement_weights",)

    def weigh(self, weighed: Weighed) -> tuple[Sequence[dict[str, Tokens]], dict[str, float]]:
        options, answer = self.variant.options, None
        weight = options.get("answer_weight", 1.0)
        if weight != 1.0:
            answer = answer_tokens(weighed.batch.rollout, self.policy.tokenizer, options.get("marker"))
        rows = []
        for places in weighed.places:
            share = L.displacement_weights(
                weighed.advantages[places],
                weighed.live[places],
                answer=None if answer is None else answer[places],
                answer_weight=weight,
            )
            rows.append({"displacement_weights": np.asarray(share)})
        return rows, {}
