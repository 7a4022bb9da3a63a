"""A module with variants of one's own, and recipes of them."""

import itertools
import json

import pytest
from refusals import RECIPE

from grpojax import variants
from grpojax.run import recipe as recipes

NUMBER = itertools.count()  # a name once imported stays imported
OWN = """
import dataclasses
import jax, optax
import jax.numpy as jnp
from grpojax import advantages as A, losses as L, variants
from grpojax.run.parts.part import Declared, Network, Part, Program, Weight, zeros
from grpojax.run.source import Plain

class Learns(Part):  # a number for each token, which learns what samples with it are worth
    learns, signals = "mine", {"bias": Declared("P G T", "what samples with a token are worth")}

    @classmethod
    def warmup_steps(cls, config):
        return 1

    def networks(self):
        def loss(params, frozen, micro):
            assert frozen["policy"]  # there in a step of the warm-up too
            said, given = params["bias"][micro.tokens], micro.arrays
            return (given["weights"] * (said - given["advantages"]) ** 2).sum(), {}

        shape = jax.ShapeDtypeStruct((self.shape.config.vocab_size,), jnp.float32)
        own = Network(
            params={"bias": shape}, optimizer=optax.sgd(0.5), table={"bias": Weight((None,), zeros)},
            loss=loss, read=lambda params, frozen, rows: (), first=lambda: {"bias": jnp.zeros(shape.shape)},
        )
        return {self.learns: own}

    def make(self, inputs):
        return {"bias of tokens": Program("bias of tokens", lambda params, rows: params["bias"][rows.tokens])}

    def before(self, networks, minis):
        said = self.on_rows(self.programs.parts["bias of tokens"], minis, networks["mine"].params)
        return {"bias": self.whole(minis, said)}, {}

class Another(Learns):
    learns = "another"

class Reversed(Plain):  # draws the last problem first
    def choose(self, number):
        problems, passes = super().choose(number)
        return problems[::-1], passes[::-1]

class Draws(Part):
    draws = Reversed

class DrawsToo(Part):
    draws = Reversed

class Renames(Part):
    def source(self, source):
        source.renamed = True
        return source

def drawn(needs=("Draws", "Renames")):
    return dataclasses.replace(plain(), needs=tuple(f"{__name__}:{name}" for name in needs))

class Update(Part):
    def make(self, inputs):
        return {"mine": Program("update", len)}

def takes_a_name():
    return variants.Variant(
        name="x", advantage=plain().advantage, objective=L.Objective(), needs=(f"{__name__}:Update",)
    )

class Luck(Part):
    signals = {"luck": Declared("P G", "a number")}

class Misnamed(Luck):  # a signal that it does not declare
    def after(self, networks, batch, counted):
        return {"lukc": counted}, {}

class OfTokens(Luck):  # a signal of another shape than it declares
    def after(self, networks, batch, counted):
        return {"luck": batch.rollout.logps}, {}

class ReadByNobody(Luck):  # an array that no loss reads
    def after(self, networks, batch, counted):
        return {"luck": 0 * counted}, {}

    def weigh(self, batch):
        return {"advantage": batch.advantages}, {}

class InRows(Luck):  # an array of the rows, from before the rewards
    arrays = {"mine": Declared("P G T", "a number")}

    def before(self, networks, minis):
        return {}, {"mine": [m.rows.arrays["sampler_logps"] for m in minis]}

    def after(self, networks, batch, counted):
        return {"luck": 0 * counted}, {}

def with_a_part(part="Misnamed"):
    return dataclasses.replace(lucky(), needs=(f"{__name__}:{part}",))

def lucky():
    chain = A.chain(A.center(), lambda values, signals: values * signals.extra["luck"], A.to_tokens())
    return variants.Variant(name="x", advantage=chain, objective=L.Objective(), needs=(f"{__name__}:Luck",))

def squared(log_ratios, advantages):
    return -log_ratios * advantages

@variants.published()
class mine(variants.Clipped):
    eps: float = 1e-4
    clip_high: float = 0.28
    aggregate: L.Aggregation = "token_mean"

    def chain(self):
        return A.chain(A.center("group"), A.scale("batch", of="advantages", eps=self.eps), A.to_tokens())

@variants.published()
class with_a_function(variants.Method):
    def chain(self):
        return A.chain(A.center("group"), A.to_tokens())

    def surrogate(self):
        return squared

class not_published(variants.Clipped):
    def chain(self):
        return A.chain(A.center("group"), A.to_tokens())

def plain(high: float = 0.3, untyped="x") -> variants.Variant:
    objective = L.Objective(surrogate=L.clipped(0.2, high))
    return variants.Variant(name="plain", advantage=A.chain(A.center(), A.to_tokens()), objective=objective)

def on_samples():
    return variants.Variant(name="x", advantage=A.chain(A.center()), objective=L.Objective())

def sees_no_shape():
    return variants.Variant(name="x", advantage=lambda r, s: r.no_such, objective=L.Objective())

def mean_of_tokens():
    own = L.Objective(surrogate=lambda r, a: (r * a).mean())
    return variants.Variant(name="x", advantage=plain().advantage, objective=own)

def learns(others=()):
    chain = A.chain(A.center(), A.to_tokens(), lambda values, signals: values - signals.extra["bias"])
    needs = tuple(f"{__name__}:{name}" for name in ("Learns", *others))
    return variants.Variant(name="x", advantage=chain, objective=L.Objective(), needs=needs)

def divides(values, signals):
    return values / values.std(1, keepdims=True)

def divides_by_nothing():
    return variants.Variant(name="x", advantage=A.chain(A.center(), divides, A.to_tokens()), objective=L.Objective())

def needs(what="teacher"):
    return variants.Variant(name="x", advantage=plain().advantage, objective=L.Objective(), needs=(what,))

def no_variant():
    return A.chain(A.center())

def fails():
    return 1 / 0

def any_option(**options):
    return plain()

def positional(k, /):
    return plain()

def called_name(name="x"):
    return plain()

def changing(weights=[1.0]):
    return plain()

number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Its name; a module of tests takes it up by ``module = own_variants.module``."""
    name = f"own_variants_{next(NUMBER)}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(variants.registry, "_ALL", dict(variants.registry._ALL))
    return name


def load(variant, *more):
    return recipes.load(RECIPE, (f"variant={json.dumps(variant)}", *more))
