"""What the programs of a run are called with, beside what is said of them."""

import jax
import spies
from runs import Trainer
from tiny_run import make_mixture

from grpojax.run import recipe as recipes
from grpojax.run.calls import calls_of

# As long as the data's longest prompt, and every sample at its longest (`eos_ids=()`).
RUN = [
    "data.max_prompt_tokens=4",
    "rewards.0.name=tiny_run:parity",
    "train.steps=2",
    "train.eval_every=1",
]


def kinds(args):
    """Paths, shapes and dtypes of all that a program is called with."""
    found = jax.tree_util.tree_flatten_with_path(jax.eval_shape(lambda *given: given, *args))[0]
    return [(jax.tree_util.keystr(path), x.shape, str(x.dtype)) for path, x in found]


def places(args):
    """Which part of each array lies on which device; None where it is not bound to any."""
    found = []
    for x in jax.tree.leaves(args):
        bound = getattr(x, "committed", isinstance(x, jax.ShapeDtypeStruct)) and x.sharding is not None
        found.append(x.sharding.devices_indices_map(x.shape) if bound else None)
    return found


ONCE = {"allocate", "optimizer_init", "reference"}  # these are small, or run before the first step: nothing says them


def record(monkeypatch):
    """Name, arguments and places of each call of a program from now on; `check` compares them."""
    seen = []

    def around(program, call, *args):
        if program.name not in ONCE:
            seen.append((program.name, kinds(args), places(args)))
        return call(*args)

    spies.watch(monkeypatch, around)
    return seen


def check(seen, recipe, directory, case, devices=2):
    """Runs a recipe with the settings ``case``; each program has been called with what was said of it."""
    case = [text.replace("FOLDER", str(recipe.parent)) for text in case]
    if "model.path=MIXTURE" in case:
        made = make_mixture(recipe.parent, recipe.parent / "mixture")
        case = [text.replace("MIXTURE", str(made)) for text in case]
    config = recipes.load(recipe, [*RUN, f"run.dir={directory}", *case])
    trainer = Trainer(config, devices, eos_ids=())
    said, _ = calls_of(config, trainer.policy.shape)
    assert trainer.run()

    ragged = {n for n in said if n.startswith("ragged ")}  # no sample is shorter here
    found = {n: (c.program.name, kinds(c.args), places(c.args)) for n, c in said.items()}
    met = set()
    for real_name, real_kinds, real_places in seen:
        same = {n for n, (*what, _) in found.items() if what == [real_name, real_kinds]} - ragged
        assert same, (real_name, real_kinds)
        for n in same:
            assert all(None in (r, p) or r == p for r, p in zip(real_places, found[n][-1], strict=True)), n
        met |= same
    assert met == said.keys() - ragged
