"""Transforms as text: the call that made them, with every argument, and the same text wherever it is made."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import pytest

from grpojax import advantages as A
from grpojax import allocation, variants
from grpojax import credit as C
from grpojax import losses as L
from grpojax.variants import critics

MODULES = (A, C, allocation, critics)
FACTORIES = {
    name: function
    for module in MODULES
    for name, function in vars(module).items()
    if inspect.isfunction(function)
    and inspect.signature(function).return_annotation is A.Transform
    and name not in ("chain", "text_of")
    and not name.startswith("_")
}
# What must be given, and for each option of a factory another value than its default.
GIVEN = {
    "pass_at_k": {"k": 2}, "penalize_all_fail": {"c": 0.5}, "floor": {"x": -0.5}, "subtract_kl": {"coef": 0.1},
    "soft_overlong": {"limit": 8, "buffer": 2},
}  # fmt: skip
OTHER = {
    "by": "batch", "of": "advantages", "singleton": "reward", "relative_to": "group", "rule": "top", "select": "all",
    "x": -0.25, "buffer": 4, "kappa": 3.0, "share": 0.5,
    "fraction": 0.5, "alpha": 0.5,
}  # fmt: skip


def other(name, value):
    """Another value of an option."""
    if name in OTHER:
        return OTHER[name]
    return not value if isinstance(value, bool) else 0.3 if value is None else type(value)(value + 1)


def test_all_factories_are_looked_at():
    assert {"center", "nthr", "soft_overlong", "add_values"} < FACTORIES.keys() and len(FACTORIES) >= 30


@pytest.mark.parametrize("name", FACTORIES)
def test_every_argument_is_in_the_text(name):
    make, given = FACTORIES[name], GIVEN.get(name, {})
    options = {k: p.default for k, p in inspect.signature(make).parameters.items()} | given
    text = A.text_of(make(**given))
    assert text == f"{name}({', '.join(f'{k}={v}' for k, v in options.items())})"
    assert text == A.text_of(make(**given))
    for option, value in options.items():
        changed = {"by": "batch"} if option == "live_only" else {}
        changed[option] = other(option, value)
        assert f"{option}={changed[option]}" in A.text_of(make(**given | changed))


def test_a_decorated_factory_keeps_its_own_signature_and_errors():
    assert list(inspect.signature(A.center).parameters) == ["by", "leave_one_out", "singleton"]
    assert A.center.__doc__.startswith("Subtracts the mean reward")
    with pytest.raises(TypeError, match=r"center\(\) got an unexpected keyword argument 'bye'"):
        A.center(bye="group")


def test_chains():
    steps = A.max_rl(), A.to_tokens()
    assert A.text_of(A.chain(*steps)) == "max_rl() | to_tokens()" == A.text_of(A.chain(A.chain(steps[0]), steps[1]))
    inner = A.chain(*steps, reward=A.subtract_kl(0.1))
    assert A.text_of(inner) == "reward=subtract_kl(coef=0.1) | max_rl() | to_tokens()"
    assert A.text_of(A.chain(inner)) == f"({A.text_of(inner)})"
    assert A.text_of(A.chain()) == "chain()"


@dataclasses.dataclass(frozen=True)
class Clip:
    most: float
    of: object = None

    def __call__(self, values, signals=None):
        return jnp.minimum(values, self.most)


class Plain:
    def __call__(self, values, signals=None):
        return values


def my_own(factor, inner):
    def transform(values, signals=None):
        return factor * inner(values, signals)

    return transform


def whole(values, signals=None):
    return values


@pytest.mark.parametrize(
    ("transform", "text"),
    [
        (whole, "whole"),
        (my_own(0.5, whole), "my_own(factor=0.5, inner=whole)"),
        (my_own(2, A.max_rl()), "my_own(factor=2, inner=max_rl())"),
        (jax.jit(my_own(0.5, whole)), "my_own(factor=0.5, inner=whole)"),
        (functools.partial(whole, signals=None), "whole(signals=None)"),
        (Clip(0.5, of=[1, (True, "a")]), "Clip(most=0.5, of=[1, [True, a]])"),
        (Plain(), "Plain"),
        (my_own(jnp.float32(0.5), Plain()), "my_own(factor=0.5, inner=Plain)"),
        (my_own(jnp.ones((2, 3)), object()), "my_own(factor=float32[2, 3], inner=object)"),
        (my_own({"a": Clip}, lambda *x: x[0]), "my_own(factor={a: Clip}, inner=<lambda>)"),
        (L.clipped(0.2, 0.28), "clipped(low=0.2, high=0.28, dual=None)"),
    ],
)
def test_others_have_what_they_hold_and_no_address(transform, text):
    assert A.text_of(transform) == text


def test_a_function_that_holds_itself_has_an_end():
    def again(values, signals=None):
        return again(values, signals)

    assert A.text_of(again).count("test_a_function") < 20


@pytest.mark.parametrize("name", variants.names())
def test_every_step_of_every_variant_is_a_call(name):
    given = {"distill": {"teacher": "folder"}, "dr_grpo": {"constant": 8.0}}
    variant = variants.get(name, **given.get(name, {}))
    text = A.text_of(variant.advantage)
    assert "<" not in text and "0x" not in text and "transform" not in text
    own = () if name == "grpo_process" else (step.partition("(")[0] for step in text.split(" | "))
    assert {step.removeprefix("reward=") for step in own} <= FACTORIES.keys()
    assert text in str(variant) and A.text_of(variant.objective.surrogate) in str(variant)
