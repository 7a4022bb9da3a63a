"""What a variant is: a method with all its options chosen, ready for a trainer."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args

from grpojax import advantages as A
from grpojax import losses as L
from grpojax.variants.critics import Critic

Grade = Literal["deployed", "replicated", "ablated", "single team"]
# What a trainer may lack, and what it is.
NEEDS = {
    "critic": "a critic: signals.values, or signals.token_bias, and a loss of its own",
    "culling": "a data order that leaves out solved prompts (data.RetiringBatches)",
    "displacement_weights": "the weights of losses.displacement_weights",
    "entropy": "signals.entropy, of the full vocabulary at every token",
    "greedy": "signals.greedy_rewards, of one greedy completion a prompt",
    "ground_truth": "signals.likelihood of the true answer",
    "hidden_states": "signals.influence and influence_means, or signals.hidden, probs and columns",
    "proxy": "signals.proxy_ratios, with an option ``noise`` that says which tokens are left out",
    "rollout_plan": "samples given to prompts by allocation.xrpo_allocate",
    "step_rewards": "signals.step_rewards",
    "teacher": "signals.ref_logps, under a teacher",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One method: a published one, or one of your own.

    Attributes:
      name: as in the recipe; the import path for one of your own.
      advantage: ``(rewards [P, G], Signals) -> [P, G, T]``.
      objective: what the update minimises.
      citation: paper and arXiv id; empty for one of your own.
      evidence: "deployed" in a named model, "replicated" by others, "ablated" at length by its team, or "single team".
      needs: its inputs beyond rewards, lengths, tokens and log-probs: keys of `NEEDS`, or the import path
        ``package.module:class`` of a part of your own for the trainer.
      keep: the filter ``(metrics, on) -> [P] bool`` that decides which prompts train (`allocation.keep_prompts`),
        None for all.
      resample: whether other prompts are drawn in place of those that the filter drops (dynamic sampling). False if the
        method only leaves them out of the loss.
      retire: a prompt is not drawn in later epochs once its pass rate is at least this; None draws all.
      combine: how several rewards must become one: "sum", or "normalize", each scaled in its group first
        (`grpojax.rewards`); None for either.
      equal_groups: whether its mechanism is for groups whose rewards are all the same, so that a filter that drops them
        would switch it off.
      bounded_rewards: whether its rewards must stay in a range, which a KL in the reward would leave.
      unverified: what the text of its paper did not confirm or does not state; empty if all was confirmed.
      options: every option with its value; a trainer reads from it how signals are computed.
      critic: the network that learns with the policy; None for none.

    A printed variant shows its advantage chain and its objective. It also shows its filter (``keep``), what it needs,
    and which log-probs and other arrays its loss reads (`grpojax.losses.Objective.reads`), where there are any.

    Example:
      >>> from grpojax import variants
      >>> print(variants.max_rl())
      max_rl
      advantage: max_rl() | to_tokens()
      objective: clipped(low=0.2, high=0.2, dual=None), ratio=token, aggregate=token_mean, no KL
      >>> str(variants.dapo(kl_coef=0.1)).splitlines()[3:]
      ['keep: keep_prompts, draws others for the rest', 'reads: ref_logps (kl_coef=0.1)']
    """

    name: str
    advantage: A.Transform
    objective: L.Objective
    citation: str = ""
    evidence: Grade = "single team"
    needs: tuple[str, ...] = ()
    keep: Callable[..., Any] | None = None
    resample: bool = True
    retire: float | None = None
    combine: Literal["sum", "normalize"] | None = None
    equal_groups: bool = False
    bounded_rewards: bool = False
    unverified: str = ""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    critic: Critic | None = None

    def __post_init__(self):
        if not callable(self.advantage) or isinstance(self.advantage, type):
            raise ValueError(
                f"variant {self.name!r}: advantage={self.advantage!r}: give a chain, advantages.chain(...)"
            )
        if not isinstance(self.objective, L.Objective):
            raise ValueError(f"variant {self.name!r}: objective={self.objective!r}: give a losses.Objective")
        if self.evidence not in get_args(Grade):
            raise ValueError(f"variant {self.name!r}: evidence={self.evidence!r}: {', '.join(get_args(Grade))}")
        if isinstance(self.needs, str) or (unknown := [n for n in self.needs if n not in NEEDS and not is_path(n)]):
            wrong = self.needs if isinstance(self.needs, str) else unknown[0]
            raise ValueError(f"variant {self.name!r}: needs={wrong!r}: give a tuple of {', '.join(NEEDS)}")

        if ("critic" in self.needs) != (self.critic is not None):
            raise ValueError(f"variant {self.name!r}: needs 'critic' and critic go together: give both or neither")

    def __str__(self) -> str:
        terms = {f.name: getattr(self.objective, f.name) for f in dataclasses.fields(self.objective)}
        usual = {f.name: f.default for f in dataclasses.fields(L.Objective)}
        shown = ["surrogate", "ratio", "aggregate"]
        shown += [name for name, value in terms.items() if name not in shown and value != usual[name]]
        text = ", ".join(f"{n}={A.text_of(terms[n])}" if n != "surrogate" else A.text_of(terms[n]) for n in shown)
        text += "" if self.objective.needs_reference else ", no KL"
        lines = [self.name, f"advantage: {A.text_of(self.advantage)}", f"objective: {text}"]
        if self.keep is not None:
            others = "draws others for the rest" if self.resample else "leaves the rest out of the loss"
            lines.append(f"keep: {A.text_of(self.keep)}, {others}")
        if self.needs:
            lines.append(f"needs: {', '.join(self.needs)}")
        if reads := self.objective.reads:
            lines.append(f"reads: {', '.join(f'{name} ({term})' for name, term in reads.items())}")
        return "\n".join(lines)


def is_path(name: str) -> bool:
    """Whether ``name`` is the import path ``package.module:function`` of a variant that is not of this package.

    Example:
      >>> is_path("my_variants:mine"), is_path("grpo")
      (True, False)
    """
    return ":" in name


def check_needs(variant: Variant, provided: Iterable[str] = ()) -> None:
    """Raises `ValueError` naming what ``variant`` needs beyond ``provided``, keys of `NEEDS`: trainers call it first.

    Without it some needs would go unnoticed: without its rollout plan, XRPO runs but is another method.

    Example:
      >>> from grpojax import variants
      >>> check_needs(variants.grpo())
      >>> check_needs(variants.remax())
      Traceback (most recent call last):
      ValueError: variant 'remax' needs greedy: signals.greedy_rewards, of one greedy completion a prompt
    """
    missing = [f"{name}: {NEEDS.get(name, 'a part of your own')}" for name in variant.needs if name not in provided]
    if missing:
        raise ValueError(f"variant {variant.name!r} needs {'; '.join(missing)}")
