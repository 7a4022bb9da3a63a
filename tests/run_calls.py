"""What the programs of a run are called with, beside what is said of them."""

import jax
import spies
from runs import Trainer
from tiny_run import make_mixture

from grpojax.programs import policy, sampler
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


class Seen(list):
    """Name, arguments and places of each call of a program; `check` compares those of a run."""

    def note(self, program, args, static):
        self.append((program.__name__, kinds(args), places(args), static))


def record(monkeypatch):
    """What every program is called with from now on."""
    seen = Seen()

    def around(program, *args, **static):
        seen.note(program, args, static)
        return program(*args, **static)

    def sample(program, graph, weights, prompts, key, *args, partial, **static):
        seen.note(program, (weights, prompts, key) if partial is None else (weights, prompts, key, partial), {})
        return program(graph, weights, prompts, key, *args, partial=partial, **static)

    spies.watch(monkeypatch, around)
    monkeypatch.setattr(sampler, "_sample", spies.Spy(sampler._sample, sample))

    def watched(make):
        def watched(*given, **how):
            made = make(*given, **how)
            return spies.Spy(made, around) if hasattr(made, "lower") else made  # or there is nothing to do

        return watched

    for make in (policy.state.make_reshard, policy.state.make_cast_of_factors):
        monkeypatch.setattr(policy.state, make.__name__, watched(make))
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
    found = {n: (c.program.__name__, kinds(c.args), places(c.args), dict(c.static)) for n, c in said.items()}
    met = set()
    for real_name, real_kinds, real_places, static in seen:
        same = {n for n, (*what, _, _) in found.items() if what == [real_name, real_kinds]} - ragged
        assert same, (real_name, real_kinds)
        for n in same:
            *_, planned, given = found[n]
            assert given == static
            assert all(None in (r, p) or r == p for r, p in zip(real_places, planned, strict=True)), n
        met |= same
    assert met == said.keys() - ragged
