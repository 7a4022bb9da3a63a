"""Differences between two compared methods, other than the one that the comparison is about."""

import re
from collections.abc import Mapping
from typing import Any

# Parts of `describe`'s trees that repeat the advantage and the objective, or follow from these.
_REPEATED = ("variant", "options", "needs")
_DDOF = re.compile(r"\bddof=(\w+)")


def unmatched(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Settings of the loss that differ between two methods, apart from the difference that makes them two methods.

    It looks at aggregation, KL, ddof, clip and filter. If only one of these differs, and nothing else does, the
    comparison is about it, and nothing is unmatched. A clip is compared only between surrogates of the same name, and a
    ddof only between chains that both divide by a standard deviation: otherwise the methods themselves differ.

    Args:
      a, b: resolved methods, the trees of `grpojax.run.run_method.describe`.

    Returns:
      For each name of a setting its value in a and in b, as text.
    """
    mine, other = _settings(a), _settings(b)
    found = {name: (mine[name], other[name]) for name in mine if name in other and mine[name] != other[name]}
    return found if len(found) > 1 or _rest(a) != _rest(b) else {}


def _settings(tree: Mapping[str, Any]) -> dict[str, str]:
    """The settings that `unmatched` looks at, as text."""
    objective = tree["objective"]
    name, _, clip = str(objective["surrogate"]).partition("(")
    divisor = "" if objective["constant"] is None else f" {objective['constant']:g}"
    empty = "" if objective["count_empty"] else " without empty samples"
    kl = f"{objective['kl_coef']:g} {objective['kl_kind']} in {objective['kl_in']}" if objective["kl_coef"] else "0"
    found = {
        "aggregation": f"{objective['aggregate']}{divisor}{empty}",
        "KL": kl,
        f"clip of {name}": clip.removesuffix(")") or "none",
        "filter": _text(tree["filter"]),
    }
    if ddof := _DDOF.findall(tree["advantage"]):
        found["ddof"] = ", ".join(dict.fromkeys(ddof))
    return found


def _rest(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree without the settings that `unmatched` looks at."""
    own = ("aggregate", "constant", "count_empty", "kl_coef", "kl_kind", "kl_in")
    objective = {k: x for k, x in tree["objective"].items() if k not in own}
    objective["surrogate"] = str(objective["surrogate"]).partition("(")[0]
    rest = {k: x for k, x in tree.items() if k not in (*_REPEATED, "filter")}
    return rest | {"objective": objective, "advantage": _DDOF.sub("", tree["advantage"])}


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_text(x)}" for k, x in value.items() if x is not None) + "}"
    return "none" if value is None else str(value)
