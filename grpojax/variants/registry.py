"""How a variant is defined, and how it is found: by its name, or by an import path for one of your own."""

import dataclasses
import difflib
import functools
import hashlib
import importlib
import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from grpojax import advantages as A
from grpojax import losses as L
from grpojax.losses.surrogates import name_of
from grpojax.variants.method import Method
from grpojax.variants.variant import Grade, Variant, is_path

# Options of other trainers whose names are close to another option here, and what they are here.
_ELSEWHERE = {"epsilon": "clip_low and clip_high", "epsilon_high": "clip_high", "delta": "clip_dual", "beta": "kl_coef"}
_ALL: dict[str, Callable[..., Variant]] = {}
_CONTROLS: dict[Callable[..., Variant], Mapping[str, Any] | None] = {}


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
    control: Mapping[str, Any] | None = None,
    unverified: str = "",
) -> Callable[[type[Method]], Callable[..., Variant]]:
    """Registers a class of options, a `Method`, as a variant. Its name then stands for ``(**options) -> Variant``.

    The class becomes a frozen dataclass; its fields, and those of its bases, are the options.

    Args:
      citation, evidence, needs, keep, resample, retire, combine, equal_groups, bounded_rewards, unverified: as in
        `Variant`.
      control: the result of `control`: the options that switch the variant's one mechanism off, or ``{"name": "grpo"}``
        if another variant is the same without that mechanism.

    Raises:
      ValueError: it is no such class, there is a variant of that name in another module, or ``control`` names an option
        that the variant does not have.

    Example:
      >>> from grpojax.variants import GroupNormalised
      >>> @published("Somebody et al., arXiv 2501.00000", control={"clip_high": 0.2})
      ... class higher(GroupNormalised):
      ...     '''GRPO with a higher upper clip.'''
      ...
      ...     clip_high: float = 0.28
      >>> higher(kl_coef=0.1).objective.surrogate
      clipped(low=0.2, high=0.28, dual=None)
      >>> del _ALL["higher"]
    """
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

    def register(method: type[Method]) -> Callable[..., Variant]:
        name = method.__name__
        if name in _ALL and _ALL[name].__module__ != method.__module__:
            raise ValueError(f"variant {name!r} is there already, in {_ALL[name].__module__}: give it another name")
        if not (isinstance(method, type) and issubclass(method, Method)):
            raise ValueError(f"variant {name!r}: published goes with a class under variants.Method, which has options")
        if missing := getattr(method, "__abstractmethods__", None):
            raise ValueError(f"variant {name!r}: its class must define {' and '.join(sorted(missing))}")
        for option in inspect.get_annotations(method):
            _check_default(name, option, vars(method).get(option))
        dataclasses.dataclass(frozen=True, kw_only=True)(method)
        known = _defaults(method)
        if control is not None and "name" not in control:
            for option in (option for option in control if option not in known):
                raise ValueError(
                    f"variant {name!r}: control={dict(control)}: it has no option {option!r}{_nearest(option, known)}"
                )

        @functools.wraps(method, updated=())
        def variant(**given: Any) -> Variant:
            _check_options(name, known, given)
            options = {**known, **given}
            for option in (option for option in options if options[option] is inspect.Parameter.empty):
                raise ValueError(f"variant {name!r}: missing a required argument: {option!r}")
            return Variant(name=name, options=options, **_made_of(name, method(**options)), **facts)

        fields = inspect.signature(method).parameters  # only for help(), which shows the class's as ``-> None``
        shown = inspect.Signature([fields[option] for option in known], return_annotation=Variant)
        variant.__dict__["__signature__"] = shown
        _ALL[name], _CONTROLS[variant] = variant, control
        return variant

    return register


def _made_of(name: str, method: Method) -> dict[str, Any]:
    """The objective, the advantages and the critic, with a KL in the samples' rewards where the objective says so."""
    objective = method.objective()
    if objective.kl_in == "token_reward" and not method.has_token_rewards:
        raise ValueError(f"variant {name!r} has no token rewards: kl_in='reward' or 'loss'")
    advantage, critic = method.chain(), method.critic()
    if objective.kl_in == "reward" and objective.kl_coef:
        less = A.subtract_kl(objective.kl_coef)
        advantage = A.chain(advantage, reward=less)
        critic = critic and dataclasses.replace(critic, targets=A.chain(critic.targets, reward=less))
    return {"objective": objective, "advantage": advantage, "critic": critic}


def names() -> list[str]:
    """The names that `get` knows."""
    return sorted(_ALL)


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
        raise ValueError(
            f"{path!r} is no variant: give a class under @published(...), or a function that returns a Variant"
        )
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
        if (spelled := re.sub(r"[^a-z0-9]+", "_", name.lower())) in _ALL:
            raise ValueError(f"{name!r} is unknown; did you mean {spelled!r}?")
        own = f"; a variant of your own is {':'.join(name.rsplit('.', 1))}, with a colon" if "." in name else ""
        raise ValueError(f"{name!r} is unknown{own or _nearest(name, _ALL)}")
    return _ALL[name]


def section(name: str) -> type:
    """The dataclass whose fields are the options of a variant, as a recipe gives them.

    It is the class under `published`. For a function of your own that returns a `Variant`, it has a field for each of
    the function's parameters.

    Example:
      >>> section("gspo")(clip_high=0.1).ratio
      'sequence'
    """
    function = _function(name)
    method = inspect.unwrap(function)
    if isinstance(method, type):
        return method
    try:
        options = inspect.signature(function, eval_str=True).parameters.values()
    except NameError as e:
        raise ValueError(f"variant {name!r}: the type of an option is unknown: {e}") from e
    fields = []
    for option in options:
        default = dataclasses.MISSING if option.default is option.empty else option.default
        _check_default(name, option.name, default)
        kind = Any if option.annotation is option.empty else option.annotation
        fields.append((option.name, kind, dataclasses.field(default=default)))
    return dataclasses.make_dataclass(function.__name__, fields, frozen=True, kw_only=True)


def _check_default(name: str, option: str, default: Any) -> None:
    """Raises `ValueError` where a default is a list, or another value that may change."""
    made = getattr(default, "default_factory", dataclasses.MISSING) is not dataclasses.MISSING
    if made or type(default).__hash__ is None:
        raise ValueError(f"variant {name!r}: the default of {option} may change: give a tuple, or None")


def parameters(name: str) -> Mapping[str, Any]:
    """The options of a variant: name to default, `inspect.Parameter.empty` for one that must be given.

    Those of its class stand before those of its bases, and those of the objective last.

    Example:
      >>> list(parameters("nthr"))[:8]
      ['beta', 'eta', 'self_term', 'select', 'ddof', 'eps', 'clip_low', 'clip_high']
    """
    return _defaults(section(name))


def _defaults(section: type) -> dict[str, Any]:
    """The result of `parameters`. A dataclass itself has the fields of its bases first."""
    fields = [f for f in dataclasses.fields(section) if f.init]
    if issubclass(section, Method):
        kinds, terms = typing.get_type_hints(section), typing.get_type_hints(L.Objective)
        bases = [base for base in section.__mro__ if dataclasses.is_dataclass(base)]
        first = {f.name: n for n, base in enumerate(bases) for f in dataclasses.fields(base)}
        # A `ratio` that also says whether there is one (`OnPolicy`) is of another type, and is the method's own option.
        places = {name: n for n, name in enumerate(terms) if kinds.get(name) == terms[name]}
        fields.sort(key=lambda f: (places.get(f.name, -1), first[f.name]))
    return {f.name: inspect.Parameter.empty if f.default is dataclasses.MISSING else f.default for f in fields}


def get(name: str, **overrides: Any) -> Variant:
    """The variant called ``name``; raises `ValueError` for a name or an override that it does not have.

    ``name`` may be the import path ``package.module:function`` of one of your own, under `published` or a plain
    function that takes options by name and returns a `Variant`.

    Example:
      >>> from grpojax import variants
      >>> variants.get("grpo", kl_coef=0.0).objective.needs_reference
      False
    """
    known = parameters(name)
    _check_options(name, known, overrides)
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
            f"variant {name!r} returned a {type(made).__name__}: put a class under @published(...), or return a Variant"
        )
    options = {k: v for k, v in known.items() if v is not inspect.Parameter.empty} | overrides
    return dataclasses.replace(made, name=name, options={**options, **made.options})


def _check_options(name: str, known: Iterable[str], given: Iterable[str]) -> None:
    """Raises `ValueError` for an option that a variant does not have."""
    for key in given:
        if key not in known:
            there = f"; TRL's {key} is {_ELSEWHERE[key]} here" if key in _ELSEWHERE else _nearest(key, known)
            raise ValueError(f"variant {name!r} takes no {key!r}{there}")


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
    known = parameters(name)
    _check_options(name, known, options)
    off = _CONTROLS.get(_function(name))
    if off is None:
        return None
    own = {k: v for k, v in {**known, **options}.items() if v is not inspect.Parameter.empty}
    target = off.get("name", name)
    defaults = parameters(target)
    wanted = {k: v for k, v in own.items() if k in defaults} | {k: v for k, v in off.items() if k != "name"}
    if target == name and wanted == own:
        return None
    return target, {k: v for k, v in wanted.items() if v != defaults[k]}


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
