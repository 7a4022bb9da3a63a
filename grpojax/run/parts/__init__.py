"""What a run needs beyond samples, rewards and log-probs, each in a file of its own, behind `part.Part`.

A part is named by the variant's need, by what its objective does, or by a setting of the recipe. It is imported only if
it is used.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from grpojax import extension
from grpojax.advantages import Signals
from grpojax.host.errors import UserError
from grpojax.variants import Variant, is_path

# Settings of the core that a part of an extension carries out. Without it they may not be set. rollout.ahead stands
# last, since its part wraps the source that the others have made.
SETTINGS = ("environment", "rollout.curriculum", "rollout.overlap", "rollout.ahead")


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
    _only_one(loaded, "learns", f"variant {variant.name!r}", "each bring a network that learns with the policy")
    return loaded


def of(config: Any) -> dict[str, Any]:
    """The classes of all parts of a `grpojax.run.recipe.Config`: the variant's by need, then those that its settings
    ask for by setting.

    Raises:
      UserError: no extension has one, or two draw samples each in a way of its own.
    """
    found = kinds(config.method.variant)
    sections = extension.words("settings").keys() & extension.words("sections").keys() - {*SETTINGS}
    more = sorted(key for key in sections if key.rpartition(".")[0] in extension.OPEN)
    for setting in [*more, *SETTINGS]:
        if functools.reduce(getattr, setting.split("."), config):
            found[setting] = extension.load("settings", setting, setting)
    _only_one(found, "draws", f"variant {config.method.variant.name!r}", "each draw samples in a way of their own")
    return found


def _only_one(found: Mapping[str, Any], attribute: str, whose: str, what: str) -> None:
    """Raises `UserError` if two parts have the attribute, of which a run may have one."""
    names = [name for name, kind in found.items() if getattr(kind, attribute)]
    if len(names) > 1:
        raise UserError(f"{whose}: {names[0]!r} and {names[1]!r} {what}: leave one of them out")


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
