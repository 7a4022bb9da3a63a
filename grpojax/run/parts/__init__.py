"""The needs of variants beyond samples, rewards and log-probs, each in a file of its own, behind `part.Part`.

A part is named by the variant's need, or by what its objective does. It is imported only if it is used.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from grpojax import extension
from grpojax.advantages import Signals
from grpojax.host.errors import UserError
from grpojax.variants import Variant, is_path


def kinds(variant: Variant) -> dict[str, Any]:
    """The classes of a variant's parts by need, each a `grpojax.run.parts.part.Part`.

    The reference is here. The others are of extensions (`grpojax.extension.Names.needs`), or a need is the import path
    ``package.module:class`` of a user's own part.

    Raises:
      UserError: there is no such class, or no extension has it.

    Example:
      >>> from grpojax import variants
      >>> list(kinds(variants.get("grpo"))), kinds(variants.get("dapo"))
      (['reference'], {})
    """
    objective, loaded = variant.objective, dict[str, Any]()
    if objective.needs_reference:
        loaded["reference"] = _load(f"{__name__}.reference:Reference")
    brought = extension.words("needs")
    of_extensions = ["displacement_weights"] if objective.needs_displacement_weights else []
    of_extensions += [need for need in variant.needs if need in brought]
    for need in of_extensions:
        loaded[need] = extension.load("needs", need, f"variant {variant.name!r} needs {need!r}")
    loaded |= {need: _load(need) for need in variant.needs if is_path(need)}
    learning = [name for name, kind in loaded.items() if kind.learns]
    if len(learning) > 1:
        raise UserError(
            f"variant {variant.name!r}: {learning[0]!r} and {learning[1]!r} each bring a network that learns, and only "
            "one may learn with the policy: leave one of them out of needs"
        )
    return loaded


def warmup_steps(config: Any) -> int:
    """The number of first steps in which the policy does not learn, in a run of a `grpojax.run.recipe.Config`."""
    return sum(kind.warmup_steps(config) for kind in kinds(config.method.variant).values())


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
    try:
        return extension.imported(path)
    except (ImportError, AttributeError) as e:
        raise UserError(f"variant: the part {path!r} cannot be imported: {e}") from None
