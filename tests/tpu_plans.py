"""Plans of recipes for TPUs, in the process of `tpu_compiler`."""

import dataclasses
import json

import tpu_compiler
from refusals import RECIPE

from grpojax.extensions.plan.plan_report import ProgramReport
from grpojax.models import DecoderConfig

# What a program of `tpu_compiler.run` has to begin with to plan recipes: `planned(model, topology, programs, recipe)`.
PLANNED = """
import dataclasses, json, sys
from unittest import mock
from grpojax.models import DecoderConfig, compute_of
from grpojax.extensions.mixtures.experts import Experts
from grpojax.run import recipe
from grpojax.extensions.plan import planner

def planned(model, topology, programs, given, **more):
    def compute(*args, **how):
        return dataclasses.replace(compute_of(*args, **how), **more)

    if model["mlp"] is not None:
        model = model | {"mlp": Experts(**model["mlp"])}
    with mock.patch.object(planner, "compute_of", compute):
        config, model = recipe.load(*given), DecoderConfig(**model)
        return planner.plan(config, topology=topology, model=model, programs=programs).reports
"""


def recipe(*overrides: str) -> tuple[str, list[str]]:
    """Arguments of `recipe.load`: the recipe of `refusals` in bfloat16, nothing held out, and with these settings."""
    plain = ["data.validation=null", "data.test=null", "model.dtype=bfloat16", "model.remat=layer"]
    return RECIPE, [*plain, *overrides]


def plan(model: DecoderConfig, topology: str, *overrides: str, programs: tuple[str, ...] | None = None, **compute):
    """The reports of a `recipe` by name; ``compute`` are fields of `Compute` that no recipe sets."""
    made = """
given, compute = map(json.loads, sys.argv[1:])
print(json.dumps([dataclasses.asdict(r) for r in planned(*given, **compute)]))
"""
    given = dataclasses.asdict(model), topology, programs, recipe(*overrides)
    done = tpu_compiler.run(PLANNED + made, json.dumps(given), json.dumps(compute))
    assert done.returncode == 0, done.stderr[-3000:]
    return {r["name"]: ProgramReport(**r) for r in json.loads(done.stdout.splitlines()[-1])}
