"""What a variant is, how one is stated, and how it is found by name."""

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from grpojax import advantages as A
from grpojax import losses as L
from grpojax.variants.choices import Choice, keyword_option
from grpojax.variants.critics import Critic, WithCritic

Grade = Literal["deployed", "replicated", "ablated", "single team"]
# What a trainer may lack, and what it is.
NEEDS = {
    "critic": "a critic: signals.values, or signals.token_bias, and a loss of its own",
    "culling": "a data order that leaves out solved prompts (allocation.cull)",
    "displacement_weights": "batch.displacement_weights (losses.displacement_weights)",
    "entropy": "signals.entropy, of the full vocabulary at every token",
    "greedy": "signals.greedy_rewards, of one greedy completion a prompt",
    "ground_truth": "signals.likelihood of the true answer",
    "hidden_states": "signals.influence and influence_means, or signals.hidden, probs and columns",
    "rollout_plan": "samples given to prompts by allocation.xrpo_allocate",
    "step_rewards": "signals.step_rewards",
    "teacher": "signals.ref_logps, under a teacher",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One published method.

    Attributes:
      name: as in the config.
      advantage: ``(rewards [P, G], Signals) -> [P, G, T]``.
      objective: what the update minimises.
      citation: paper and arXiv id.
      evidence: "deployed" in a named model, "replicated" by others, "ablated" by its team at length, "single team".
      needs: what it takes beyond rewards, lengths, tokens and log-probs; keys of `NEEDS`.
      keep: the filter ``(metrics, on) -> [P] bool`` that decides which prompts train (`allocation.keep_prompts`),
        None for all.
      retire: the pass rate from which on a prompt is not drawn in later epochs; None for never.
      combine: how several rewards must become one: "sum", or "normalize", each scaled in its group first
        (`grpojax.rewards`); None for either.
      options: what its advantage was made with; a trainer reads there how a signal is to be computed.
      critic: the network that learns beside the policy; None for none.
    """

    name: str
    advantage: A.Transform
    objective: L.Objective
    citation: str
    evidence: Grade
    needs: tuple[str, ...] = ()
    keep: Callable[..., Any] | None = None
    retire: float | None = None
    combine: Literal["sum", "normalize"] | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    critic: Critic | None = None


# Fields of `losses.Objective` that every variant offers; those that only some have are offered where they are given.
OPTIONS = (
    "anchor",
    "aggregate",
    "constant",
    "count_empty",
    "kl_coef",
    "kl_kind",
    "kl_in",
    "entropy_coef",
    "entropy_target",
    "entropy_step",
    "importance",
    "importance_level",
    "importance_low",
    "importance_high",
    "off_policy_limit",
    "covariance",
    "covariance_fraction",
    "covariance_low",
    "covariance_high",
    "covariance_coef",
)
_FIELDS = {f.name: f for f in dataclasses.fields(L.Objective)}
_ALL: dict[str, Callable[..., Variant]] = {}
_CLIPPED = L.clipped()


def published(
    citation: str,
    evidence: Grade,
    *,
    needs: tuple[str, ...] = (),
    keep: Callable[..., Any] | None = None,
    retire: float | None = None,
    combine: Literal["sum", "normalize"] | None = None,
    surrogate: Any = _CLIPPED,
    **objective: Any,
) -> Callable[[Callable[..., A.Transform | WithCritic]], Callable[..., Variant]]:
    """Registers a function ``(options) -> advantage chain`` as a variant; of one with a critic, both (`WithCritic`).

    Args:
      citation, evidence, needs, keep, retire, combine: as in `Variant`.
      surrogate, objective: fields of `losses.Objective`. The surrogate may be a `Choice`. ``aggregate="constant"``
        without a constant makes that an option that must be given.
    """
    choice = surrogate if isinstance(surrogate, Choice) else Choice("", {"": surrogate})
    facts = {
        "citation": citation,
        "evidence": evidence,
        "needs": needs,
        "keep": keep,
        "retire": retire,
        "combine": combine,
    }

    def register(chain: Callable[..., A.Transform | WithCritic]) -> Callable[..., Variant]:
        name, own = chain.__name__, inspect.signature(chain).parameters
        signature = _signature(own, choice, objective)

        @functools.wraps(chain)
        def variant(**given: Any) -> Variant:
            try:
                bound = signature.bind(**given)
            except TypeError as e:
                raise ValueError(f"variant {name!r}: {e}") from None
            bound.apply_defaults()
            chosen = bound.arguments
            terms = objective | {field: chosen[field] for field in _offered(choice, objective)}
            if choice.option in _FIELDS and chosen[choice.option] != "none":
                terms[choice.option] = chosen[choice.option]
            loss = L.Objective(surrogate=choice.pick(name, chosen), **terms)
            advantage, critic = _advantage(chain, own, chosen, loss)
            options = {option: chosen[option] for option in own}
            return Variant(name=name, advantage=advantage, critic=critic, objective=loss, options=options, **facts)

        variant.__signature__ = signature  # pyrefly: ignore
        _ALL[name] = variant
        return variant

    return register


def _offered(choice: Choice, objective: Mapping[str, Any]) -> list[str]:
    """Fields of `losses.Objective` that are options; the choice's own option is not among them."""
    return [name for name in _FIELDS if name in {*OPTIONS, *objective} - {choice.option}]


def _signature(own: Mapping[str, inspect.Parameter], choice: Choice, objective: Mapping[str, Any]) -> inspect.Signature:
    """The chain's options, the surrogate's, and the objective's."""
    options = dict(own) | choice.parameters()
    for name in (n for n in _offered(choice, objective) if n not in own):
        default = objective.get(name, _FIELDS[name].default)
        if name == "constant" and objective.get("aggregate") == "constant" and default is None:
            default = inspect.Parameter.empty
        options[name] = keyword_option(name, default, _FIELDS[name].type)
    return inspect.Signature(list(options.values()), return_annotation=Variant)


def _advantage(
    chain: Callable[..., A.Transform | WithCritic],
    own: Mapping[str, inspect.Parameter],
    chosen: Mapping[str, Any],
    loss: L.Objective,
) -> tuple[A.Transform, Critic | None]:
    """The chain under the options ``chosen``, with the KL in it where the objective says that it is, and the critic."""
    arguments = {name: chosen[name] for name in own}
    if loss.kl_in == "token_reward" and "kl_coef" not in own:
        raise ValueError(f"variant {chain.__name__!r} has no token rewards: kl_in='reward' or 'loss'")
    if loss.kl_in != "token_reward" and "kl_coef" in own:
        arguments["kl_coef"] = 0.0  # it is the sample's reward, or the loss, that has the KL
    made = chain(**arguments)
    advantage, critic = (made.advantage, made.critic) if isinstance(made, WithCritic) else (made, None)
    if loss.kl_in == "reward" and loss.kl_coef:
        advantage = A.chain(advantage, reward=A.subtract_kl(loss.kl_coef))
        if critic is not None:
            targets = A.chain(critic.targets, reward=A.subtract_kl(loss.kl_coef))
            critic = dataclasses.replace(critic, targets=targets)
    return advantage, critic


def group_normalised(ddof: int, eps: float) -> tuple[A.Transform, A.Transform]:
    """GRPO's own steps, before `to_tokens`: the group's mean and deviation."""
    return A.center("group"), A.scale("group", ddof=ddof, eps=eps)


def names() -> list[str]:
    """The names that `get` knows."""
    return sorted(_ALL)


def get(name: str, **overrides: Any) -> Variant:
    """The variant called ``name``; raises `ValueError` for a name or an override that it does not have.

    Example:
      >>> from grpojax import variants
      >>> variants.get("grpo", kl_coef=0.0).objective.needs_reference
      False
    """
    known = parameters(name)
    for key in overrides:
        if key not in known:
            raise ValueError(f"variant {name!r} takes no {key!r}{_nearest(key, known)}")
    return _ALL[name](**overrides)


def check_needs(variant: Variant, provided: Iterable[str] = ()) -> None:
    """Raises `ValueError` naming what ``variant`` needs beyond ``provided``, keys of `NEEDS`: trainers call it first.

    Some needs would not be noticed otherwise: without its rollout plan, XRPO is another method that runs.

    Example:
      >>> from grpojax import variants
      >>> check_needs(variants.grpo())
      >>> check_needs(variants.remax())
      Traceback (most recent call last):
      ValueError: variant 'remax' needs greedy: signals.greedy_rewards, of one greedy completion a prompt
    """
    missing = [f"{name}: {NEEDS[name]}" for name in variant.needs if name not in provided]
    if missing:
        raise ValueError(f"variant {variant.name!r} needs {'; '.join(missing)}")


def parameters(name: str) -> Mapping[str, Any]:
    """What a variant takes: name to default, `inspect.Parameter.empty` where it must be given."""
    if name not in _ALL:
        raise ValueError(f"{name!r} is unknown{_nearest(name, _ALL)}")
    return {k: p.default for k, p in inspect.signature(_ALL[name]).parameters.items()}


def annotations(name: str) -> list[tuple]:
    """A variant's parameters as the fields of `dataclasses.make_dataclass`, those that must be given first."""
    types = inspect.signature(_ALL[name]).parameters
    required = [(k, types[k].annotation) for k, v in parameters(name).items() if v is inspect.Parameter.empty]
    rest = [(k, types[k].annotation, v) for k, v in parameters(name).items() if v is not inspect.Parameter.empty]
    return required + rest


def table() -> str:
    """All variants as a Markdown table: name, evidence, loss, what it needs, source.

    Example:
      >>> print(table().splitlines()[0])
      | variant | evidence | surrogate | ratio | aggregate | kl | needs | source |
    """
    rows = [("variant", "evidence", "surrogate", "ratio", "aggregate", "kl", "needs", "source"), ("---",) * 8]
    for name in names():
        required = {k: 1.0 for k, v in parameters(name).items() if v is inspect.Parameter.empty}
        variant = get(name, **required)
        objective = variant.objective
        row = (
            name,
            variant.evidence,
            type(objective.surrogate).__name__,
            objective.ratio,
            objective.aggregate,
            f"{objective.kl_coef:g} {objective.kl_kind} in the {objective.kl_in}" if objective.kl_coef else "-",
            ", ".join(variant.needs) or "-",
            variant.citation,
        )
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"
