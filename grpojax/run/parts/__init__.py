"""The needs of variants beyond samples, rewards and log-probs, each in a file of its own, behind `part.Part`.

A part is named by the variant's need, or by what its objective does. It is imported only if it is used.
"""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from grpojax.advantages import Signals
from grpojax.host.errors import UserError
from grpojax.variants import Variant, is_path

# Keys of `grpojax.variants.NEEDS`, and the part that supplies each.
BY_NEED = {
    "critic": "critic:Critic",
    "ground_truth": "true_answers:TrueAnswers",
    "hidden_states": "influence:TokenInfluence",
    "teacher": "teacher:Teacher",
}


def kinds(variant: Variant) -> dict[str, Any]:
    """The classes of a variant's parts by need, each a `grpojax.run.parts.part.Part`.

    A need that is no key of `BY_NEED` may be the import path ``package.module:class`` of a user's own part; raises
    `UserError` if there is no such class.

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
    learning = [name for name, kind in loaded.items() if hasattr(kind, "role")]  # each is a `LearningPart`
    if len(learning) > 1:
        raise UserError(
            f"variant {variant.name!r}: {learning[0]!r} and {learning[1]!r} each bring a network that learns, and only "
            "one may learn with the policy: leave one of them out of needs"
        )
    return loaded


def warmup_steps(config: Any) -> int:
    """The number of first steps in which the policy does not learn, in a run of a `grpojax.run.recipe.Config`."""
    learning = (kind for kind in kinds(config.method.variant).values() if hasattr(kind, "role"))
    return sum(kind.warmup_steps(config) for kind in learning)


def signals_of(given: Mapping[str, Any]) -> Signals:
    """Signals from arrays by name; names that are not fields go to ``extra``.

    Example:
      >>> signals_of({"lengths": [[2]], "luck": 7}).extra
      {'luck': 7}
    """
    fields = {f.name for f in dataclasses.fields(Signals)}
    extra = {name: x for name, x in given.items() if name not in fields}
    return Signals(**{name: x for name, x in given.items() if name in fields}, extra=extra or None)


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as e:
        raise UserError(f"variant: the part {path!r} cannot be imported: {e}") from None
