"""What the programs of a run are called with, beside what is said of them."""

import dry_calls
import jax
import spies
from runs import opened
from tiny_run import make_mixture

from grpojax.run import parts
from grpojax.run import recipe as recipes
from grpojax.run.dry import learner_calls
from grpojax.train import train

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
    trainer = opened(config, devices, eos_ids=())
    said = dry_calls.every(config, trainer.policy.shape)
    dry = list(learned(config, trainer))
    assert train(trainer)
    check_dry(seen, dry)

    found = [(call.program.name, kinds(call.args), places(call.args)) for call in said]
    met = set()
    for real_name, real_kinds, real_places in seen:
        same = [n for n, (*what, _) in enumerate(found) if what == [real_name, real_kinds]]
        assert same, (real_name, real_kinds)
        assert any(lie_alike(real_places, found[n][-1]) for n in same), real_name
        met |= {*same}
    assert not {found[n][0] for n in {*range(len(found))} - met}


def lie_alike(one, other):
    """Whether all arrays lie alike, as far as it is said of both."""
    return all(None in pair or pair[0] == pair[1] for pair in zip(one, other, strict=True))


def learned(config, trainer):
    """What dry steps of a run's updates call."""
    shape = trainer.policy.shape
    added = [kind(config, shape) for kind in parts.of(config).values()]
    return learner_calls(config, shape, trainer.programs, added, longest_prompt=trainer.longest_prompt)


def check_dry(seen, dry):
    """The real run has called what the dry steps of the longest samples did, and of the same programs nothing else but
    scores of other rows than an update's."""
    real = {(name, tuple(args)): at for name, args, at in seen}
    made = {(program.name, tuple(kinds(args))): (places(args), note) for program, args, note in dry}
    names = {name for name, _ in made} - {"score"}
    assert {key for key in real if key[0] in names} <= made.keys()
    for key, (at, note) in made.items():
        if not note.endswith("shorter samples"):
            assert lie_alike(real[key], at), key
