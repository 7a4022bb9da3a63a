"""What a variant needs beyond samples, rewards and log-probs: each in a file of its own, behind `part.Part`.

A part is named by what the variant needs, or by what its objective does. It is imported when it is asked for.
"""

import importlib
from typing import Any

from grpojax.host.errors import UserError
from grpojax.variants import Variant, is_path

# Keys of `grpojax.variants.NEEDS`, and where the part is that supplies it.
BY_NEED = {
    "critic": "critic:Critic",
    "ground_truth": "true_answers:TrueAnswers",
    "hidden_states": "influence:TokenInfluence",
    "teacher": "teacher:Teacher",
}


def kinds(variant: Variant) -> dict[str, Any]:
    """The classes of the parts of a variant by what they are for, each a `grpojax.run.parts.part.Part`.

    A need that is no key of `BY_NEED` may be the import path ``package.module:class`` of a part of one's own; raises
    `UserError` where there is none.

    Example:
      >>> from grpojax import variants
      >>> list(kinds(variants.get("grpo"))), list(kinds(variants.get("ppo"))), kinds(variants.get("dapo"))
      (['reference'], ['critic'], {})
    """
    by_objective = {
        "reference": ("reference:Reference", variant.objective.needs_reference),
        "displacement_weights": ("displacement:Displacement", variant.objective.needs_displacement_weights),
    }
    found = {name: f"{__name__}.{path}" for name, (path, there) in by_objective.items() if there}
    found |= {need: f"{__name__}.{BY_NEED[need]}" for need in variant.needs if need in BY_NEED}
    found |= {need: need for need in variant.needs if is_path(need)}
    loaded = {name: _load(path) for name, path in found.items()}
    for need in filter(is_path, variant.needs):
        if hasattr(loaded[need], "learns_alone"):  # a `LearningPart`: `make_programs` knows no joint update for it
            raise UserError(
                f"variant {variant.name!r}: the part {need!r} brings a network that learns, which only 'critic' may; "
                "derive it from Part"
            )
    return loaded


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as e:
        raise UserError(f"variant: the part {path!r} cannot be imported: {e}") from None
