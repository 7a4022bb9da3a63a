"""What a variant is, how one is defined, and how it is found: by its name, or by an import path for one of your own."""

import dataclasses
import difflib
import functools
import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from grpojax import advantages as A
from grpojax import losses as L
from grpojax.losses.surrogates import check_surrogate, name_of
from grpojax.variants.choices import SurrogateChoice, keyword_option
from grpojax.variants.critics import Critic, WithCritic

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


# Fields of `losses.Objective` that every variant offers; those that only some have are offered where they are given.
OPTIONS = (
    "ratio_denominator",
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
# Options of other trainers whose names are close to another option here, and what they are here.
_ELSEWHERE = {"epsilon": "clip_low and clip_high", "epsilon_high": "clip_high", "delta": "clip_dual", "beta": "kl_coef"}
_FIELDS = {f.name: f for f in dataclasses.fields(L.Objective)}
_ALL: dict[str, Callable[..., Variant]] = {}
_CLIPPED = L.clipped()


def published(
    citation: str = "",
    evidence: Grade = "single team",
    *,
    needs: tuple[str, ...] = (),
    keep: Callable[..., Any] | None = None,
    resample: bool = True,
    retire: float | None = None,
    combine: Literal["sum", "normalize"] | None = None,
    equal_groups: bool = False,
    bounded_rewards: bool = False,
    token_kl: bool = False,
    control: Mapping[str, Any] | None = None,
    unverified: str = "",
    surrogate: Any = _CLIPPED,
    **objective: Any,
) -> Callable[[Callable[..., A.Transform | WithCritic]], Callable[..., Variant]]:
    """Registers a function ``(options) -> advantage chain`` as a variant; with a critic, it returns `WithCritic`.

    Args:
      citation, evidence, needs, keep, resample, retire, combine, equal_groups, bounded_rewards, unverified: as in
        `Variant`.
      token_kl: whether the chain can take the KL off tokens' rewards, by its option ``kl_coef``. Then ``kl_in`` may be
        "token_reward"; with another ``kl_in`` the chain gets 0.
      control: the result of `control`: the options that switch the variant's one mechanism off, or ``{"name": "grpo"}``
        if another variant is the same without that mechanism.
      surrogate, objective: fields of `losses.Objective`. The surrogate may be a `SurrogateChoice`, or a function of
        your own, which has no options. With ``aggregate="constant"`` and no constant, that is an option that must be
        given.

    Raises:
      ValueError: there is a variant of that name in another module, the surrogate is none, ``control`` names an option
        that the variant does not have, or only one of ``token_kl`` and an option ``kl_coef`` of the chain is there.
    """
    for each in surrogate.of.values() if isinstance(surrogate, SurrogateChoice) else (surrogate,):
        check_surrogate(each)
    choice = surrogate if isinstance(surrogate, SurrogateChoice) else SurrogateChoice("", {"": surrogate})
    facts = {
        "citation": citation,
        "evidence": evidence,
        "needs": needs,
        "keep": keep,
        "resample": resample,
        "retire": retire,
        "combine": combine,
        "equal_groups": equal_groups,
        "bounded_rewards": bounded_rewards,
        "unverified": unverified,
    }

    def register(chain: Callable[..., A.Transform | WithCritic]) -> Callable[..., Variant]:
        name, own = chain.__name__, inspect.signature(chain, eval_str=True).parameters
        if name in _ALL and _ALL[name].__module__ != chain.__module__:
            raise ValueError(f"variant {name!r} is there already, in {_ALL[name].__module__}: give it another name")
        if token_kl != ("kl_coef" in own):
            takes = "a" if "kl_coef" in own else "no"
            raise ValueError(
                f"variant {name!r}: token_kl={token_kl}, and its chain takes {takes} kl_coef: token_kl=True is for a "
                "chain that takes the KL off tokens' rewards by that option"
            )
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
            arguments = {name: chosen[name] for name in own}
            if token_kl and loss.kl_in != "token_reward":
                arguments["kl_coef"] = 0.0  # it is the sample's reward, or the loss, that has the KL
            if loss.kl_in == "token_reward" and not token_kl:
                raise ValueError(f"variant {name!r} has no token rewards: kl_in='reward' or 'loss'")
            advantage, critic = _advantage(chain(**arguments), loss)
            return Variant(name=name, advantage=advantage, critic=critic, objective=loss, options=dict(chosen), **facts)

        if control is not None and "name" not in control:
            for option in (option for option in control if option not in signature.parameters):
                raise ValueError(
                    f"variant {name!r}: control={dict(control)}: it has no option {option!r}"
                    f"{_nearest(option, signature.parameters)}"
                )
        variant.__signature__ = signature  # pyrefly: ignore
        variant.control = control  # pyrefly: ignore
        _ALL[name] = variant
        return variant

    return register


def _offered(choice: SurrogateChoice, objective: Mapping[str, Any]) -> list[str]:
    """Fields of `losses.Objective` that are options; the choice's own option is not among them."""
    return [name for name in _FIELDS if name in {*OPTIONS, *objective} - {choice.option}]


def _signature(
    own: Mapping[str, inspect.Parameter], choice: SurrogateChoice, objective: Mapping[str, Any]
) -> inspect.Signature:
    """The chain's options, the surrogate's, and the objective's."""
    options = dict(own) | choice.parameters()
    for name in (n for n in _offered(choice, objective) if n not in own):
        default = objective.get(name, _FIELDS[name].default)
        if name == "constant" and objective.get("aggregate") == "constant" and default is None:
            default = inspect.Parameter.empty
        options[name] = keyword_option(name, default, _FIELDS[name].type)
    return inspect.Signature(list(options.values()), return_annotation=Variant)


def _advantage(made: A.Transform | WithCritic, loss: L.Objective) -> tuple[A.Transform, Critic | None]:
    """The chain and the critic, with a KL in the samples' rewards where the objective says that it is there."""
    advantage, critic = (made.advantage, made.critic) if isinstance(made, WithCritic) else (made, None)
    if loss.kl_in == "reward" and loss.kl_coef:
        advantage = A.chain(advantage, reward=A.subtract_kl(loss.kl_coef))
        if critic is not None:
            targets = A.chain(critic.targets, reward=A.subtract_kl(loss.kl_coef))
            critic = dataclasses.replace(critic, targets=targets)
    return advantage, critic


def group_normalised(ddof: int, eps: float) -> tuple[A.Transform, A.Transform]:
    """GRPO's steps before `to_tokens`: subtract the group's mean, divide by its deviation."""
    return A.center("group"), A.scale("group", ddof=ddof, eps=eps)


def names() -> list[str]:
    """The names that `get` knows."""
    return sorted(_ALL)


def is_path(name: str) -> bool:
    """Whether ``name`` is the import path ``package.module:function`` of a variant that is not of this package.

    Example:
      >>> is_path("my_variants:mine"), is_path("grpo")
      (True, False)
    """
    return ":" in name


def source(name: str) -> str | None:
    """A digest of the file, or the two files, that a variant's function and its import path are in.

    None for a variant of this package. The file is that which was imported: later changes to it are not seen.
    """
    return _imported(name)[1] if is_path(name) else None


@functools.cache
def _imported(path: str) -> tuple[Callable[..., Variant], str]:
    """The function behind ``package.module:function``, and `source`."""
    module, _, name = path.partition(":")
    if not (module and name.isidentifier()):
        raise ValueError(f"{path!r} is no import path: give package.module:function")
    try:
        function = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as e:
        where = "; it must be installed, or in the folder that you are in" if isinstance(e, ImportError) else ""
        raise ValueError(f"{path!r} cannot be imported: {type(e).__name__}: {' '.join(str(e).split())}{where}") from e
    if not callable(function) or isinstance(function, type):
        raise ValueError(f"{path!r} is no function: give one under @published(...), or one that returns a Variant")
    kinds = inspect.Parameter
    for option in inspect.signature(function).parameters.values():
        if option.kind in (kinds.POSITIONAL_ONLY, kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD):
            raise ValueError(f"{path!r} takes {option}: its options must have names")
        if option.name in ("name", "source"):
            raise ValueError(f"{path!r} has an option {option.name!r}: give it another name")
    modules = (sys.modules[m] for m in (module, function.__module__) if m in sys.modules)
    files = sorted({file for m in modules if (file := getattr(m, "__file__", None))})
    if not files:
        raise ValueError(f"{path!r} is in no file: put it into one")
    return function, hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()[:32]


def _function(name: str) -> Callable[..., Variant]:
    if is_path(name):
        return _imported(name)[0]
    if name not in _ALL:
        own = f"; a variant of your own is {':'.join(name.rsplit('.', 1))}, with a colon" if "." in name else ""
        raise ValueError(f"{name!r} is unknown{own or _nearest(name, _ALL)}")
    return _ALL[name]


def get(name: str, **overrides: Any) -> Variant:
    """The variant called ``name``; raises `ValueError` for a name or an override that it does not have.

    ``name`` may be the import path ``package.module:function`` of one of your own, under `published` or a plain
    function that takes options by name and returns a `Variant`.

    Example:
      >>> from grpojax import variants
      >>> variants.get("grpo", kl_coef=0.0).objective.needs_reference
      False
    """
    known = _check_options(name, overrides)
    function = _function(name)
    if not is_path(name):
        return function(**overrides)
    try:
        made = function(**overrides)
    except ValueError:
        raise
    except Exception as e:
        raise ValueError(f"variant {name!r} failed: {type(e).__name__}: {' '.join(str(e).split())}") from e
    if not isinstance(made, Variant):
        raise ValueError(
            f"variant {name!r} returned a {type(made).__name__}: put it under @published(...), or return a Variant"
        )
    options = {k: v for k, v in known.items() if v is not inspect.Parameter.empty} | overrides
    return dataclasses.replace(made, name=name, options={**options, **made.options})


def _check_options(name: str, options: Iterable[str]) -> Mapping[str, Any]:
    """The parameters of a variant; raises `ValueError` for an option that is none of them."""
    known = parameters(name)
    for key in options:
        if key not in known:
            there = f"; TRL's {key} is {_ELSEWHERE[key]} here" if key in _ELSEWHERE else _nearest(key, known)
            raise ValueError(f"variant {name!r} takes no {key!r}{there}")
    return known


def control(name: str, **options: Any) -> tuple[str, dict[str, Any]] | None:
    """The control of a variant under these options: the same chain and objective, with its one mechanism off.

    The variant's definition states it (`published`). A comparison with the control shows what the mechanism does. A
    comparison with any other method also shows the other differences.

    Args:
      name: as in `get`.
      options: the options that the variant runs with, as in `get`.

    Returns:
      The name of the control and the options that differ from their defaults; None if the variant states no control, or
      is its own control already.

    Raises:
      ValueError: there is no such variant, or it has no such option.

    Example:
      >>> control("negative_advantage", eps=1e-6)
      ('negative_advantage', {'c': 0.0, 'eps': 1e-06})
      >>> control("culling")
      ('grpo', {'aggregate': 'sequence_sum', 'kl_coef': 0.0})
      >>> control("grpo")
    """
    known = _check_options(name, options)
    off = getattr(_function(name), "control", None)
    if off is None:
        return None
    own = {k: v for k, v in {**known, **options}.items() if v is not inspect.Parameter.empty}
    target = off.get("name", name)
    defaults = parameters(target)
    wanted = {k: v for k, v in own.items() if k in defaults} | {k: v for k, v in off.items() if k != "name"}
    if target == name and wanted == own:
        return None
    return target, {k: v for k, v in wanted.items() if v != defaults[k]}


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


def parameters(name: str) -> Mapping[str, Any]:
    """The options of a variant: name to default, `inspect.Parameter.empty` for one that must be given."""
    return {k: p.default for k, p in inspect.signature(_function(name)).parameters.items()}


def annotations(name: str) -> list[tuple]:
    """A variant's parameters as the fields of `dataclasses.make_dataclass`, those that must be given first."""
    try:
        options = inspect.signature(_function(name), eval_str=True).parameters.values()
    except NameError as e:
        raise ValueError(f"variant {name!r}: the type of an option is unknown: {e}") from e
    empty, required, rest = inspect.Parameter.empty, [], []
    for option in options:
        kind = Any if option.annotation is empty else option.annotation
        if option.default is empty:
            required.append((option.name, kind))
            continue
        if type(option.default).__hash__ is None:
            raise ValueError(f"variant {name!r}: the default of {option.name} may change: give a tuple, or None")
        rest.append((option.name, kind, option.default))
    return required + rest


def table() -> str:
    """All variants as a Markdown table: name, evidence, loss, what it needs, source, and what of it is not verified.

    Example:
      >>> print(table().splitlines()[0])
      | variant | evidence | surrogate | ratio | aggregate | kl | needs | source | not verified |
    """
    rows = [
        ("variant", "evidence", "surrogate", "ratio", "aggregate", "kl", "needs", "source", "not verified"),
        ("---",) * 9,
    ]
    for name in names():
        required = {k: 1.0 for k, v in parameters(name).items() if v is inspect.Parameter.empty}
        variant = get(name, **required)
        objective = variant.objective
        row = (
            name,
            variant.evidence,
            name_of(objective.surrogate),
            objective.ratio,
            objective.aggregate,
            f"{objective.kl_coef:g} {objective.kl_kind} in the {objective.kl_in}" if objective.kl_coef else "-",
            ", ".join(variant.needs) or "-",
            variant.citation,
            variant.unverified or "-",
        )
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"
