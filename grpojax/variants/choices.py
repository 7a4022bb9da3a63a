"""Options of a variant that come from its surrogate, or that choose it."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, Literal

from grpojax import losses as L

# Fields of surrogates whose names would say too little, or something else, among a variant's options.
_RENAMED = {"low": "clip_low", "high": "clip_high", "dual": "clip_dual", "kl_coef": "ratio_kl_coef"}


def _surrogate_options(surrogate: Any) -> dict[str, dataclasses.Field]:
    """Option name to field of the surrogate; none for a surrogate that is a plain function."""
    if not dataclasses.is_dataclass(surrogate):
        return {}
    return {_RENAMED.get(f.name, f.name): f for f in dataclasses.fields(surrogate)}


def keyword_option(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    """A parameter of a variant's signature."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


@dataclasses.dataclass(frozen=True)
class SurrogateChoice:
    """Surrogates of which an option of the variant picks one.

    All their fields are options. One whose default is not the same in all of them is None until it is given, which
    leaves the surrogate picked its own; given to a surrogate that lacks it, it is refused.

    Attributes:
      option: its name. If it is also a field of `losses.Objective`, the value is that field's, except "none".
      of: value to surrogate, the published one first.
    """

    option: str
    of: Mapping[str, Any]

    def defaults(self) -> dict[str, Any]:
        """Option name to default."""
        found: dict[str, list[Any]] = {}
        for surrogate in self.of.values():
            for name, field in _surrogate_options(surrogate).items():
                found.setdefault(name, []).append(getattr(surrogate, field.name))
        agreed = {k: len(v) == len(self.of) and all(x == v[0] for x in v) for k, v in found.items()}
        return {name: values[0] if agreed[name] else None for name, values in found.items()}

    def parameters(self) -> dict[str, inspect.Parameter]:
        """The options, for the variant's signature."""
        fields = {name: f for s in self.of.values() for name, f in _surrogate_options(s).items()}
        options = {}
        if len(self.of) > 1:
            options[self.option] = keyword_option(self.option, next(iter(self.of)), self.annotation)
        for name, default in self.defaults().items():
            annotation = fields[name].type if default is not None else fields[name].type | None  # pyrefly: ignore
            options[name] = keyword_option(name, default, annotation)
        return options

    @property
    def annotation(self) -> Any:
        """The type of the option."""
        return Literal[tuple(self.of)]  # pyrefly: ignore

    def pick(self, name: str, chosen: Mapping[str, Any]) -> Any:
        """The surrogate that the options ``chosen`` of variant ``name`` ask for."""
        value = chosen.get(self.option, next(iter(self.of)))
        if value not in self.of:
            raise ValueError(f"variant {name!r}: {self.option}={value!r}: must be one of {', '.join(self.of)}")
        surrogate, given = self.of[value], {}
        fields = _surrogate_options(surrogate)
        for option, default in self.defaults().items():
            if option in fields and (chosen[option] is not None or default is not None):
                given[fields[option].name] = chosen[option]
            elif option not in fields and chosen[option] is not None:
                raise ValueError(
                    f"variant {name!r}: {option}={chosen[option]} with {self.option}={value!r} has no meaning"
                )
        return dataclasses.replace(surrogate, **given) if given else surrogate


def on_policy(surrogate: Any, *levels: Literal["token", "sequence"]) -> SurrogateChoice:
    """``surrogate``, which reads no ratio, as published; by the option ``ratio`` PPO's clip at one of ``levels``.

    Without a ratio a method is for one update a rollout. A sequence's ratio is the geometric mean of its tokens'; TRL's
    RLOO clips their product.
    """
    return SurrogateChoice("ratio", {"none": surrogate, **{level: L.clipped() for level in levels}})
