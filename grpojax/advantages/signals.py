"""What a transform is, what it may read besides the values, and how transforms are joined."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp

from grpojax import masked, shapes
from grpojax.types import Array, Hidden, PerPrompt, Samples, Tokens, pytree


@pytree
class Signals:
    """What transforms may read in addition to the values. A field that no transform reads may stay None.

    Numbers are float32 unless a field says otherwise; log-probs are in nats. A pytree.

    Attributes:
      rewards: ``[P, G]`` raw rewards; `chain` fills it with its input.
      outcome: ``[P, G]`` the reward that says whether a sample succeeded, such as accuracy; `chain` fills it with its
        input. If the rewards are sums, give the accuracy here: a format bonus would make a wrong sample look like a
        success.
      valid: ``[P, G]`` bool, samples that have a reward; `chain` leaves those out whose reward is not finite.
      lengths: ``[P, G]`` int32 completion lengths, of the policy's own tokens.
      full_lengths: ``[P, G]`` int32 lengths as the limit counts them, with what an environment answered; None where
        they are ``lengths``.
      mask: ``[P, G, T]`` bool completion tokens; 0 and 1 as numbers do too, here and in ``valid``.
      behavior_logps: ``[P, G, T]`` log-probs of the drawn tokens, as the sampler reported them. Methods that compare
        them with a reference or a teacher get the trainer's own, from before the step's updates.
      entropy: ``[P, G, T]`` entropy of the distributions that the tokens were drawn from, nats.
      tokens: ``[P, G, T]`` int32 token ids.
      token_bias: ``[P, G, T]`` a critic's output, added to advantages.
      step_rewards: ``[P, G, T]`` reward of the step that ends at a token, NaN elsewhere.
      ref_logps: ``[P, G, T]`` log-probs under the frozen reference.
      max_logps: ``[P, G, T]`` log-prob of the most likely token at each position.
      proxy_ratios: ``[P, G, T]`` how much likelier each token is once the unlikely ones are left out: ``1 / Σ p`` over
        those that stay, and 0 for a token that is left out itself.
      values: ``[P, G, T]`` a critic's estimate of the return before each token.
      greedy_rewards: ``[P]`` reward of each prompt's greedy completion.
      likelihood: ``[P, G]`` likelihood of the true answer after a sample's reasoning.
      answer_weights: ``[P, G, T]`` its derivative by the log-prob of each token of that answer, NaN on other tokens.
      hidden: ``[P, G, T, D]`` hidden states that the output head read.
      probs: ``[P, G, T, W]`` probabilities of the ``W`` vocabulary entries kept (`grpojax.credit.group_vocabulary`); 0
        where the entry is -1, which stands for none.
      columns: ``[P, G, T]`` int32, which entry of ``probs`` is the drawn token's.
      influence: ``[P, G, T]`` NTHR's score of each token, in place of the three above (`grpojax.credit.nthr_scores`).
      influence_means: ``[P, G]`` the mean of it over each sample's tokens.
      draws: ``[P, G, T]`` uniform random numbers in [0, 1).
      extra: other signals, by name.

    Example:
      >>> signals = Signals(lengths=jnp.array([[2, 4]]))
      >>> signals.lengths.shape, signals.mask
      ((1, 2), None)
    """

    rewards: Samples = None
    outcome: Samples = None
    valid: Samples = None
    lengths: Samples = None
    full_lengths: Samples = None
    mask: Tokens = None
    behavior_logps: Tokens = None
    entropy: Tokens = None
    tokens: Tokens = None
    token_bias: Tokens = None
    step_rewards: Tokens = None
    ref_logps: Tokens = None
    max_logps: Tokens = None
    proxy_ratios: Tokens = None
    values: Tokens = None
    greedy_rewards: PerPrompt = None
    likelihood: Samples = None
    answer_weights: Tokens = None
    hidden: Hidden = None
    probs: Array = None
    columns: Tokens = None
    influence: Tokens = None
    influence_means: Samples = None
    draws: Tokens = None
    extra: Mapping[str, Array] | None = None


# The axes of the fields, of which P and G are those of the rewards.
_AXES = {
    "P": ("greedy_rewards",),
    "P G": ("rewards", "outcome", "valid", "lengths", "full_lengths", "likelihood", "influence_means"),
    "P G T": (
        "mask",
        "behavior_logps",
        "entropy",
        "tokens",
        "token_bias",
        "step_rewards",
        "ref_logps",
        "max_logps",
        "proxy_ratios",
        "values",
        "answer_weights",
        "columns",
        "influence",
        "draws",
    ),
    "P G T D": ("hidden",),
    "P G T W": ("probs",),
}
_FILLED = ("rewards", "outcome", "valid")  # by `chain`, from its input

# (values, signals) -> values
Transform = Callable[..., Array]
_Arguments = ParamSpec("_Arguments")
_DEEPEST = 8  # functions inside functions that `text_of` looks into


def described(factory: Callable[_Arguments, Transform]) -> Callable[_Arguments, Transform]:
    """A decorator for a function that makes a transform. `text_of` then shows the transform as the call that made it.

    The text has every argument, defaults included, so that a run can record what it did. The transform itself is
    unchanged.

    Example:
      >>> @described
      ... def clip(most: float, *, least: float = -1.0) -> Transform:
      ...     def transform(values, signals=None):
      ...         return jnp.clip(values, least, most)
      ...
      ...     return transform
      >>> text_of(clip(2.0))
      'clip(most=2.0, least=-1.0)'
    """
    signature = inspect.signature(factory)

    @functools.wraps(factory)
    def make(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Transform:
        transform = factory(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        transform.description = _call(factory.__name__, given.arguments)  # pyrefly: ignore
        return transform

    make.makes_transforms = True  # pyrefly: ignore
    return make


def text_of(value: Any) -> str:
    """A transform, a surrogate or an argument of one as text: the same in every process, and complete where it can be.

    A transform of this package is the call that made it, with every argument (`described`), and a chain is its steps
    with ``|`` between them. Any other function is its name and the values it has closed over. An object that is not a
    dataclass is its type.

    Example:
      >>> from grpojax.advantages import center, max_rl
      >>> text_of(chain(center("group"), max_rl()))
      'center(by=group, leave_one_out=False, singleton=zero) | max_rl()'
    """
    return _text(value, _DEEPEST)


def _text(value: Any, depth: int) -> str:
    if isinstance(description := getattr(value, "description", None), str):
        return description
    if value is None or isinstance(value, bool | int | float | complex):
        return str(value)
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(x, depth) for x in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k}: {_text(x, depth)}' for k, x in value.items())}}}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return str(value.item()) if value.shape == () else f"{value.dtype}{list(value.shape)}"
    if isinstance(value, type) or depth == 0:
        return getattr(value, "__qualname__", type(value).__qualname__)
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return _call(type(value).__name__, fields, depth - 1)
    if isinstance(value, functools.partial):
        given = {str(n): x for n, x in enumerate(value.args)} | value.keywords
        return _call(_text(value.func, depth - 1), given, depth - 1)
    if inspect.isfunction(function := inspect.unwrap(value) if callable(value) else value):
        name = function.__qualname__.partition(".<locals>")[0]
        kept = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        inside = {name: cell.cell_contents for name, cell in kept if _is_filled(cell)}
        return _call(name, inside, depth - 1) if inside else name
    return getattr(value, "__qualname__", type(value).__qualname__)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # of a variable that is not set yet
        return False
    return True


def _call(name: str, arguments: dict[str, Any], depth: int = _DEEPEST) -> str:
    return f"{name}({', '.join(f'{key}={_text(value, depth)}' for key, value in arguments.items())})"


def need(signals: Signals, field: str, transform: str) -> Array:
    """A field of ``signals``; raises `ValueError` naming transform and field where it is missing.

    Example:
      >>> need(Signals(lengths=jnp.array([[3, 2]])), "lengths", "mine").tolist()
      [[3, 2]]
    """
    value = getattr(signals, field)
    if value is None:
        remedy = f": chain({transform}(...)) fills it in from the rewards" if field in _FILLED else ""
        raise ValueError(f"{transform} needs signals.{field}, which is missing{remedy}")
    return value


def _given(signals: Signals | None) -> Signals:
    """The signals that a transform was called with; raises `ValueError` where they are of another type."""
    if signals is None:
        return Signals()
    if not isinstance(signals, Signals):
        raise ValueError(f"signals must be advantages.Signals, got {type(signals).__name__}")
    masks = {"mask": signals.mask, "valid": signals.valid}
    return dataclasses.replace(signals, **{name: masked.as_mask(x) for name, x in masks.items() if x is not None})


def _checked(transform: str, values: Array, axes: str, signals: Signals) -> shapes.Sizes:
    """The sizes of the axes; raises `ValueError` where a field of the signals, read or not, has another shape."""
    sizes = shapes.check(transform, axes, values=values)
    for its_axes, names in _AXES.items():
        sizes = shapes.check(
            transform, its_axes, sizes, **{f"signals.{name}": getattr(signals, name) for name in names}
        )
    return sizes


def per_sample(values: Samples, signals: Signals | None, transform: str) -> tuple[Samples, Signals]:
    """``(values [P, G] float32, signals)`` for a transform of samples; every transform begins with this or `per_token`.

    Without ``signals.valid`` the values that are finite are the valid ones, as in `chain`.

    Raises:
      ValueError: the values have other axes, or a signal has another shape than goes with them.

    Example:
      >>> values, signals = per_sample(jnp.array([[1.0, jnp.nan]]), None, "mine")
      >>> values.shape, signals.valid.tolist()
      ((1, 2), [[True, False]])
    """
    signals, shape = _given(signals), shapes.shape_of(values)
    if len(shape) != 2:
        remedy = "a flat batch is values.reshape(P, G)" if len(shape) < 2 else "put it before to_tokens()"
        raise ValueError(f"{transform} takes [P, G], got {shape}: {remedy}")
    _checked(transform, values, "P G", signals)
    (values,) = masked.float32(values)
    if signals.valid is None:
        signals = dataclasses.replace(signals, valid=jnp.isfinite(values))
    return values, signals


def per_token(values: Tokens, signals: Signals | None, transform: str) -> tuple[Tokens, Signals]:
    """``(values [P, G, T] float32, signals)`` for a transform of tokens (`per_sample`).

    Example:
      >>> per_token(jnp.zeros((1, 2, 3)), None, "mine")[0].shape
      (1, 2, 3)
    """
    signals, shape = _given(signals), shapes.shape_of(values)
    if len(shape) != 3:
        raise ValueError(f"{transform} takes [P, G, T], got {shape}: put it after to_tokens()")
    _checked(transform, values, "P G T", signals)
    return masked.float32(values)[0], signals


def along_tokens(
    values: Array, signals: Signals | None, transform: str, *fields: str
) -> tuple[Array, tuple[Array, ...]]:
    """``(values float32, the fields of the signals)`` for a transform that works along tokens and does not use groups.

    All of them are ``[..., T]``: grouped ``[P, G, T]``, or flat ``[B, T]``.

    Example:
      >>> values, (mask,) = along_tokens(jnp.zeros((2, 3)), Signals(mask=jnp.ones((2, 3), bool)), "mine", "mask")
      >>> values.shape == mask.shape
      True
    """
    signals = _given(signals)
    read = {name: need(signals, name, transform) for name in fields}
    shape = shapes.shape_of(values)
    if any(len(shape) + 1 == len(shapes.shape_of(x)) for x in read.values()):
        raise ValueError(f"{transform} takes [P, G, T] or flat [B, T], got {shape}: put it after to_tokens()")
    shapes.check(transform, "... T", values=values, **{f"signals.{name}": x for name, x in read.items()})
    return masked.float32(values)[0], tuple(read.values())


def outcome_of(signals: Signals, transform: str) -> tuple[Samples, Samples]:
    """``(outcome, valid)``, ``[P, G]``: the reward that says which samples succeeded, and where it is known.

    The outcome is float32. ``valid`` is bool: ``signals.valid`` without the samples whose outcome is not finite
    (`Signals`).

    Example:
      >>> signals = Signals(outcome=jnp.array([[1.0, jnp.nan]]), valid=jnp.ones((1, 2), bool))
      >>> outcome_of(signals, "mine")[1].tolist()
      [[True, False]]
    """
    outcome = jnp.asarray(need(signals, "outcome", transform), jnp.float32)
    return outcome, need(signals, "valid", transform) & jnp.isfinite(outcome)


def _name_of(transform: Transform) -> str:
    """The function that made it: of ``center("group")`` it is "center"."""
    name = getattr(transform, "__qualname__", type(transform).__name__)
    return name.removesuffix(".<locals>.transform").removesuffix(".<locals>.reward")


def _check_result(transform: Transform, values: Any, axes: str, sizes: shapes.Sizes) -> shapes.Sizes:
    """The sizes of the axes; raises `ValueError` with the transform's name where its result is None or has others."""
    if values is None:
        raise ValueError(f"{_name_of(transform)}: its result is None; a transform returns the new values")
    return shapes.check(_name_of(transform), axes, sizes, **{"its result": values})


def chain(*transforms: Transform, reward: Transform | None = None) -> Transform:
    """Applies transforms from left to right.

    The result takes ``rewards [P, G]`` and optionally `Signals`. A sample whose reward is not finite is invalid:
    its advantage is 0, and it takes no part in the statistics of this package's transforms. A transform of your own
    gets 0 in its place, and must read ``signals.valid`` to leave it out.
    The result is ``[P, G]`` or, after `to_tokens`, ``[P, G, T]``, float32. `grpojax.variants` has the published chains.
    A flat batch ``[B]`` of prompts with G samples each is ``rewards.reshape(-1, G)``, and ``[B, T]`` in the same way.
    Raises `ValueError` where rewards, a signal, or what a transform returns has another shape, and where a step is not
    a transform, such as ``center`` in place of ``center()``.

    Args:
      transforms: the steps.
      reward: ``(rewards, signals) -> rewards``, a change to the rewards themselves: later steps see its result as the
        raw rewards. A sample that gets NaN has no reward then.

    Example:
      >>> from grpojax.advantages import center
      >>> chain(center("group"))(jnp.array([[1.0, 0.0, jnp.nan]])).tolist()
      [[0.5, -0.5, 0.0]]
    """

    for step in transforms if reward is None else (reward, *transforms):
        if getattr(step, "makes_transforms", False):
            raise ValueError(f"chain: {step.__name__} is not called: give {step.__name__}(...)")
        if not callable(step):
            raise ValueError(f"chain: {step!r} is no transform: give a function, such as center()")

    def apply(rewards: Samples, signals: Signals | None = None) -> Array:
        signals = _given(signals)
        if len(shapes.shape_of(rewards)) != 2:
            raise ValueError(
                f"chain takes rewards [P, G], got {shapes.shape_of(rewards)}: a flat batch is rewards.reshape(P, G)"
            )
        sizes = _checked("chain", rewards, "P G", signals)
        values = jax.lax.stop_gradient(jnp.asarray(rewards, jnp.float32))
        signals = jax.tree.map(jax.lax.stop_gradient, signals)
        raw = values if signals.rewards is None else jnp.asarray(signals.rewards, jnp.float32)
        valid = jnp.isfinite(values) & jnp.isfinite(raw)
        if signals.valid is not None:
            valid = valid & signals.valid
        outcome = raw if signals.outcome is None else signals.outcome
        signals = dataclasses.replace(signals, rewards=raw, outcome=outcome, valid=valid)
        values = jnp.where(valid, values, 0.0)
        if reward is not None:
            values = reward(values, signals)
            _check_result(reward, values, "P G", sizes)
            valid = valid & jnp.isfinite(values)
            values = jnp.where(valid, values, 0.0)
            signals = dataclasses.replace(signals, rewards=values, valid=valid)
        for transform in transforms:
            values = transform(values, signals)
            axes = "P G T" if len(shapes.shape_of(values)) == 3 else "P G"
            sizes = _check_result(transform, values, axes, sizes)
        return jnp.where(valid.reshape(valid.shape + (1,) * (values.ndim - 2)), values, 0.0)

    steps = [text_of(transform) for transform in transforms]
    steps = [f"({step})" if step.startswith("reward=") else step for step in steps]  # a chain with a reward of its own
    if reward is not None:
        steps.insert(0, f"reward={text_of(reward)}")
    apply.description = " | ".join(steps) or "chain()"  # pyrefly: ignore
    return apply
