"""What a variant needs beyond samples, rewards and log-probs: each in a file of its own, behind `part.Part`.

A part is named by what the variant needs, or by what its objective does. It is imported when it is asked for.
"""

import importlib
from typing import Any

from grpojax.variants import Variant

# Keys of `grpojax.variants.NEEDS`, and where the part is that supplies it.
BY_NEED = {
    "critic": "critic:Critic",
    "ground_truth": "true_answers:TrueAnswers",
    "hidden_states": "influence:TokenInfluence",
    "teacher": "teacher:Teacher",
}


def kinds(variant: Variant) -> list[Any]:
    """The classes of the parts of a variant, each a `grpojax.run.parts.part.Part`.

    Example:
      >>> from grpojax import variants
      >>> [kind.__name__ for kind in kinds(variants.get("grpo"))], kinds(variants.get("dapo"))
      (['Reference'], [])
    """
    objective = variant.objective
    wanted = {
        "reference:Reference": objective.needs_reference,
        "displacement:Displacement": objective.needs_displacement_weights,
    }
    paths = [path for path, there in wanted.items() if there]
    return [_load(path) for path in (*paths, *(BY_NEED[need] for need in variant.needs if need in BY_NEED))]


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
