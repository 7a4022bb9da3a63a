"""Published variants, each a composition of `advantages`, `credit` and `losses`. Imports jax only."""

import dataclasses
import difflib
import inspect
from collections.abc import Mapping
from typing import Any, Literal

from grpojax import advantages as A
from grpojax import losses as L


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One published method.

    Attributes:
      name: as in the config.
      advantage: ``(rewards [P, G], Signals) -> [P, G, T]``.
      objective: what the update minimises.
      citation: paper and arXiv id.
    """

    name: str
    advantage: A.Transform
    objective: L.Objective
    citation: str


def grpo(
    *,
    ddof: int = 1,
    eps: float = 1e-4,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    aggregate: L.Aggregation = "sequence_mean",
    constant: float | None = None,
    kl_coef: float = 0.04,
    kl_kind: L.KLKind = "k3",
    kl_in: Literal["loss", "reward"] = "loss",
    entropy_coef: float = 0.0,
) -> Variant:
    """GRPO with outcome supervision, DeepSeekMath, arXiv 2402.03300.

    ``A_i = (r_i - mean r) / (std r + eps)``; clipped surrogate, mean over a sample's tokens, then over samples;
    k3 in the loss. The paper states kl_coef 0.04; clip, ddof and eps it does not: these are TRL's.
    """
    return Variant(
        name="grpo",
        advantage=A.chain(A.center("group"), A.scale("group", ddof=ddof, eps=eps), A.to_tokens()),
        objective=L.Objective(
            surrogate=L.clipped(low=clip_low, high=clip_high), aggregate=aggregate, constant=constant,
            kl_coef=kl_coef, kl_kind=kl_kind, kl_in=kl_in, entropy_coef=entropy_coef,
        ),
        citation="Shao et al., DeepSeekMath, arXiv 2402.03300",
    )  # fmt: skip


def dr_grpo(
    *,
    constant: float,
    leave_one_out: bool = False,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    kl_kind: L.KLKind = "k3",
    kl_in: Literal["loss", "reward"] = "loss",
    entropy_coef: float = 0.0,
) -> Variant:
    """Dr. GRPO, arXiv 2503.20783: ``A_i = r_i - mean r``, token sums divided by a constant, no KL.

    Args:
      constant: the divisor, the longest completion allowed in tokens (the trainer fills in rollout.max_tokens).
      leave_one_out: the mean of the other samples; as some texts print Dr. GRPO, though it is RLOO's baseline.
    """
    return Variant(
        name="dr_grpo",
        advantage=A.chain(A.center("group", leave_one_out=leave_one_out), A.to_tokens()),
        objective=L.Objective(
            surrogate=L.clipped(low=clip_low, high=clip_high), aggregate="constant", constant=constant,
            kl_coef=kl_coef, kl_kind=kl_kind, kl_in=kl_in, entropy_coef=entropy_coef,
        ),
        citation="Liu et al., Understanding R1-Zero-Like Training, arXiv 2503.20783",
    )  # fmt: skip


_ALL = {f.__name__: f for f in (grpo, dr_grpo)}


def names() -> list[str]:
    """The names that `get` knows."""
    return sorted(_ALL)


def get(name: str, **overrides) -> Variant:
    """The variant called ``name``; raises `ValueError` for a name or an override that it does not have.

    Example:
      >>> get("grpo", kl_coef=0.0).objective.needs_reference
      False
    """
    known = parameters(name)
    for key in overrides:
        if key not in known:
            raise ValueError(f"variant {name!r} takes no {key!r}{_nearest(key, known)}")
    return _ALL[name](**overrides)


def parameters(name: str) -> Mapping[str, Any]:
    """What a variant takes: name to default, `inspect.Parameter.empty` where it must be given."""
    if name not in _ALL:
        raise ValueError(f"{name!r} is unknown{_nearest(name, _ALL)}")
    return {k: p.default for k, p in inspect.signature(_ALL[name]).parameters.items()}


def annotations(name: str) -> list[tuple]:
    """A variant's parameters as the fields of `dataclasses.make_dataclass`, those that must be given first."""
    types = inspect.signature(_ALL[name]).parameters
    required = [(k, types[k].annotation) for k, v in parameters(name).items() if v is inspect.Parameter.empty]
    rest = [
        (k, types[k].annotation, v) for k, v in parameters(name).items() if v is not inspect.Parameter.empty
    ]
    return required + rest


def _nearest(word: str, known) -> str:
    near = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"
