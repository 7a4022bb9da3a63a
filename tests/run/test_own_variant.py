"""A variant of one's own in a recipe: found by its import path, its options checked, its source compared."""

import collections
import contextlib
import dataclasses
import json

import dry_calls
import jax
import jax.numpy as jnp
import numpy as np
import own_variants
import pytest
import runs
import spies
from own_variants import NUMBER, OWN, load
from plain_decoder import BASE

from grpojax import advantages as A
from grpojax import losses as L
from grpojax import variants
from grpojax.host import settings
from grpojax.host.errors import UserError
from grpojax.models import Compute
from grpojax.programs.optimizer_config import OptimizerConfig
from grpojax.programs.policy import Policy
from grpojax.records.directory import RunDirectory
from grpojax.run import checks, make_programs, parts, weighing
from grpojax.run import recipe as recipes
from grpojax.run.batch import Batch
from grpojax.run.trial import try_out
from grpojax.train import train
from grpojax.types import Rollout

module = own_variants.module


def test_its_options_are_those_of_its_class_and_its_bases(module):
    path = f"{module}:mine"
    variant = load({"name": path, "eps": 1e-3, "clip_high": 0.4, "kl_coef": 0.1}).method.variant
    assert variant.name == path and variant.options.items() >= {"eps": 1e-3, "clip_high": 0.4, "kl_in": "loss"}.items()
    assert variant.objective == L.Objective(surrogate=L.clipped(0.2, 0.4), aggregate="token_mean", kl_coef=0.1)
    assert load({"name": path, "aggregate": "constant"}).method.variant.objective.constant == 40  # rollout.max_tokens
    assert load({"name": f"{module}:plain", "high": 0.5}).method.variant.objective.surrogate == L.clipped(0.2, 0.5)


def test_its_method_is_recorded(module):
    def method(name, **options):
        return load({"name": f"{module}:{name}", **options}).resolved()["method"]

    mine = method("mine", eps=1e-3)
    assert mine["advantage"].split(" | ")[1].startswith("scale(by=batch, of=advantages, ddof=1, eps=0.001, ")
    assert mine["options"].items() >= {"eps": 1e-3, "clip_high": 0.28}.items()
    assert method("with_a_function")["objective"]["surrogate"] == "squared"
    plain = method("plain", high=0.5)
    assert plain["options"]["high"] == 0.5 and "high=0.5" in plain["objective"]["surrogate"]


def test_it_may_bring_a_part_with_signals_of_its_own(module):
    variant = load(f"{module}:lucky", "rollout.group=3").method.variant
    ((need, kind),) = parts.kinds(variant).items()
    assert need == f"{module}:Luck" and kind.signals["luck"].axes == "P G"


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("Misnamed", "Misnamed gives a signal 'lukc' that its `signals` does not declare"),
        ("OfTokens", r"luck is float32 \[8, 4, 8\], declared as float32 \[P, G\] = \[8, 4\]"),
        ("ReadByNobody", "no loss reads an array 'advantage': `arrays` of the part"),
    ],
)
def test_what_its_part_gives_is_what_it_declares(module, recipe, tmp_path, part, said):
    given = json.dumps({"name": f"{module}:with_a_part", "part": part})
    config = recipes.load(recipe, [f"variant={given}", f"run.dir={tmp_path}/run", "train.steps=1"])
    with pytest.raises(ValueError, match=said):
        train(runs.opened(config))


@pytest.mark.usefixtures("fakes")
def test_what_its_part_makes_of_all_samples_is_not_lost_with_those_left_out(module, recipe, tmp_path):
    given = json.dumps({"name": f"{module}:with_a_part", "part": "InRows"})
    options = f"variant={given}", "train.steps=1"
    assert train(runs.opened(recipes.load(recipe, [*options, f"run.dir={tmp_path}/all"])))
    skips = recipes.load(recipe, [*options, f"run.dir={tmp_path}/some", "train.skip_zero_advantage=true"])
    with pytest.raises(UserError, match="skip_zero_advantage=true: 'mine' is made of all samples"):
        train(runs.opened(skips))


@pytest.mark.slow
def test_it_may_draw_in_a_way_of_its_own(module, recipe, tmp_path):
    """In one file: by a source of its own, and by a change of the run's."""

    def seen(name, *more):
        steps = []
        config = recipes.load(recipe, [f"variant={name}", f"run.dir={tmp_path}/{len(more)}", "train.steps=1"])
        trainer = runs.opened(config, eos_ids=())
        assert train(trainer, lambda updates: steps.append([p.uid for p in updates.batch.problems]))
        return trainer, steps

    trainer, own = seen(f"{module}:drawn", "own")
    assert trainer.source.renamed and type(trainer.source).__name__ == "Reversed"
    _, usual = seen(f"{module}:plain")
    assert own == [uids[::-1] for uids in usual] and len(set(own[0])) > 1


@pytest.mark.slow
def test_it_may_bring_a_network_that_learns_beside_the_policy(module, recipe, tmp_path, monkeypatch):
    """In one file: its first step is its own, then both learn in one program; it is planned, saved and restored."""
    more = [
        "rollout.group=8",
        "rollout.max_tokens=24",
        "train.eval_every=0",
        f"run.dir={tmp_path}/run",
        "rewards.0.name=tiny_run:parity",
    ]
    ran = spies.record(monkeypatch)

    def run(steps):
        config = recipes.load(recipe, [f"variant={module}:learns", f"train.steps={steps}", *more])
        made = runs.opened(config, eos_ids=())
        start = jax.tree.map(np.array, made.state.networks)
        assert train(made)
        return config, made, start, made.state.networks

    config, trainer, start, first = run(1)
    jax.tree.map(np.testing.assert_array_equal, first["policy"].params, start["policy"].params)
    assert start["mine"].params["bias"].max() == 0 < np.abs(first["mine"].params["bias"]).max()
    kept = jax.tree.map(np.array, first["mine"].params)

    said = {call.program.name: call for call in dry_calls.every(config, trainer.policy.shape)}
    assert said.keys() == {"rollout", "update", "mine update", "bias of tokens"}
    assert said["update"].args[0].keys() == {"policy", "mine"} and parts.warmup_steps(config) == 1

    _, _, restored, second = run(2)
    np.testing.assert_array_equal(restored["mine"].params["bias"], kept["bias"])
    assert np.abs(second["mine"].params["bias"] - kept["bias"]).max() > 0
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), second["policy"].params, restored["policy"].params)
    assert max(jax.tree.leaves(moved)) > 0
    learned = [name for name, _ in ran if name in ("bias of tokens", "mine update", "update", "score")]
    assert collections.Counter(learned) == {"bias of tokens": 2, "mine update": 1, "update": 1}
    rows = [row for row in runs.numbers(tmp_path / "run") if "mine/grad_norm" in row]
    assert len(rows) == 2 and rows[1]["mine/grad_norm"] > 0 and "mine/skipped" not in rows[1]


@dataclasses.dataclass(frozen=True)
class Same:
    number: int

    def key(self):
        return self.number

    def networks(self):
        return {}

    def make(self, inputs):
        return {"same": len}


def test_its_programs_have_names_of_their_own(module):
    inputs = make_programs.ProgramInputs(
        model=BASE, graph=None, compute=Compute(), objective=L.Objective(), updates=10, temperature=1.0,
        optimizer=OptimizerConfig(learning_rate=1e-3),
    )  # fmt: skip
    with pytest.raises(UserError, match="two parts of the variant bring a program 'same'"):
        make_programs.make_programs(inputs, [Same(1), Same(2)])
    config = load(f"{module}:takes_a_name")
    shape = Policy(config.model, config.mesh, jax.devices()[:1]).load().shape
    with pytest.raises(UserError, match="brings a program 'update', which there is"):
        dry_calls.every(config, shape)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("mine", {"epz": 1}, r"variant\.epz.*unknown key; did you mean 'eps'"),
        ("plain", {"kl_coef": 1}, r"variant\.kl_coef.*unknown key; known keys: high, untyped"),
        ("mine", {"eps": "much"}, r"variant\.eps='much'.*expected a (valid )?number"),
        ("mine", {"clip_low": 2.0}, "variant: low=2.0"),
        ("nothing", {}, "cannot be imported: AttributeError"),
        ("number", {}, "is no variant: give a class under @published"),
        ("not_published", {}, "is no variant: give a class under @published"),
        ("on_samples", {}, r"advantages have shape \(2, 8\), wanted \[P, G, T\].*to_tokens"),
        ("sees_no_shape", {}, "rollout.group=8: AttributeError"),
        ("mean_of_tokens", {}, r"surrogate <lambda>: its result has shape \(\)"),
        ("needs", {"what": "critic"}, "needs 'critic' and critic go together"),
        ("learns", {"others": ["Another"]}, "Learns' and '.*Another' each bring a network that learns"),
        ("drawn", {"needs": ["Draws", "DrawsToo"]}, "Draws' and '.*DrawsToo' each draw samples in a way of their own"),
        ("needs", {"what": "no_module:Luck"}, "the part 'no_module:Luck' cannot be imported"),
        ("needs", {"what": "luck"}, "needs='luck': give a tuple of critic"),
        ("no_variant", {}, "returned a function: put a class under @published"),
        ("fails", {}, "failed: ZeroDivisionError: division by zero"),
        ("any_option", {}, r"takes \*\*options: its options must have names"),
        ("positional", {}, "takes k: its options must have names"),
        ("called_name", {}, "has an option 'name': give it another name"),
        ("changing", {}, "the default of weights may change: give a tuple"),
    ],
)
def test_what_is_refused(module, name, options, said):
    with pytest.raises(UserError, match=said) as raised:
        config = load({"name": f"{module}:{name}"} | options)
        try_out(config.method.variant, config.rollout)
    assert len(str(raised.value).splitlines()) <= 2


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no_such_module:mine", "ModuleNotFoundError.*installed, or in the folder"),
        (":mine", "no import path: give package.module:function"),
        ("module:", "no import path"),
        ("module:a.b", "no import path"),
    ],
)
def test_paths_that_lead_nowhere(path, said):
    with pytest.raises(UserError, match=said):
        load(path)


@pytest.mark.slow
def test_an_advantage_that_is_not_finite_names_its_chain(module):
    """That of a sample that counts; an invalid one has none."""
    method = load(f"{module}:divides_by_nothing", "rollout.group=3").method
    total = np.array([[1.0, 0.0, np.nan], [0.5, 0.5, 0.5]], np.float32)
    rollout = Rollout(
        tokens=np.ones((2, 3, 2), np.int32), logps=np.zeros((2, 3, 2), np.float32),
        lengths=np.full((2, 3), 2, np.int32), stopped=np.ones((2, 3), bool),
    )  # fmt: skip
    batch = Batch(problems=[], rollout=rollout, total=total, reward=total, invalid={}, counted=total,
                         by_name={method.deciding: total}, dropped=np.zeros(2, bool))  # fmt: skip
    with pytest.raises(UserError, match=r"3 samples .* rewards 0.5 0.5 0.5\n.*center\(.*divides \| to_tokens") as error:
        weighing.advantages(method, batch)
    assert str(error.value).count("\n") == 1
    total[1] = np.nan
    assert np.isfinite(weighing.advantages(method, batch)[0]).all()


def test_a_plain_function_is_a_surrogate_under_published(module):
    objective = load(f"{module}:with_a_function").method.variant.objective
    ratios, ones = jnp.array([[0.5, -1.0]]), jnp.ones((1, 2))
    np.testing.assert_array_equal(objective.surrogate(ratios, ones), -ratios)
    loss, metrics = L.policy_loss(ratios, objective=objective, advantages=ones, weights=ones, old_logps=0 * ones)
    assert loss == 0.5 and "clip_high" not in metrics


def test_a_published_name_is_not_taken_over():
    class grpo(variants.GroupNormalised):
        pass

    with pytest.raises(ValueError, match=r"'grpo' is there already, in grpojax\.variants"):
        variants.published()(grpo)


def no_class():
    return None


class Half(variants.Method):
    def chain(self):
        return A.chain(A.center("group"), A.to_tokens())


class Changing(variants.GroupNormalised):
    weights: list = [1.0]


class Made(variants.GroupNormalised):
    weights: list = dataclasses.field(default_factory=list)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (no_class, "'no_class': published goes with a class under variants.Method"),
        (Half, "'Half': its class must define surrogate"),
        (Changing, "'Changing': the default of weights may change: give a tuple"),
        (Made, "'Made': the default of weights may change: give a tuple"),
    ],
)
def test_what_cannot_be_published(what, said):
    with pytest.raises(ValueError, match=said):
        variants.published()(what)
    assert what.__name__ not in variants.names()


def test_a_run_is_of_one_source(module, tmp_path):
    """Its digest is in config.json, and so in what hosts compare; with another one the run is not resumed."""
    config = load(f"{module}:mine")
    stored = config.resolved()
    assert stored["variant"] == {"name": f"{module}:mine", "source": variants.source(f"{module}:mine")}
    assert "source" not in load("grpo").resolved()["variant"]

    def directory(config):
        read = lambda tree: settings.build(recipes.Config, tree).resolved()  # noqa: E731
        return RunDirectory(tmp_path / "run", config.resolved(), config.may_differ, read)

    directory(config).check()
    with contextlib.ExitStack() as held:
        directory(config).claim(held)
        directory(config).write()
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1, "reward": 1}\n')
    directory(config).check()
    again = settings.build(recipes.Config, json.loads((tmp_path / "run/config.json").read_text()))
    assert again.resolved() == stored
    checks.variant_source(again)

    file = tmp_path / f"{module}.py"
    file.write_text(file.read_text() + "# changed\n")
    variants.registry._imported.cache_clear()  # as in another process
    changed = load(f"{module}:mine")
    with pytest.raises(UserError, match=rf"run of {module}:mine, and the file {module}.py has changed since"):
        directory(changed).check()
    with pytest.raises(UserError, match=r"variant\.source='\w{32}': .*:mine has changed since"):
        checks.variant_source(settings.build(recipes.Config, stored))


def test_the_source_is_that_of_the_function_too(tmp_path, monkeypatch):
    """Imported into the named module from another, it changes with either of them."""
    name = f"own_variants_{next(NUMBER)}"
    (tmp_path / f"{name}_inner.py").write_text(OWN)
    (tmp_path / f"{name}.py").write_text(f"from {name}_inner import plain\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(variants.registry, "_ALL", dict(variants.registry._ALL))
    found = set()
    for file in (f"{name}.py", f"{name}_inner.py", None):
        found.add(variants.source(f"{name}:plain"))
        variants.registry._imported.cache_clear()
        if file:
            (tmp_path / file).write_text((tmp_path / file).read_text() + "# more\n")
    assert len(found) == 3
