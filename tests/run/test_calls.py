"""What is said of a run's programs without running any is what the trainer calls them with."""

import jax
import pytest
import spies
from fake_environments import Fake
from runs import Trainer
from tiny_run import make_mixture

from grpojax.programs import episode_sampler, policy, sampler
from grpojax.run import episodes
from grpojax.run import recipe as recipes
from grpojax.run.calls import calls_of

# As long as the data's longest prompt, and every sample at its longest (`eos_ids=()`).
RUN = [
    "data.max_prompt_tokens=4",
    "rewards.0.name=tiny_run:parity",
    "train.steps=2",
    "train.eval_every=1",
]
CRITIC = [
    "variant={name: ppo, kl_coef: 0.1}",
    "critic={layers: 1, warmup_steps: 1}",
    "train.reference_every=1",
    "train.minibatches=2",
    "rollout.weights=int8",
    "rollout.uncorrected=true",
]
CASES = {
    "kl, critic": CRITIC,
    "nthr": ["variant={name: nthr, kl_coef: 0.1}", "train.ppo_epochs=2"],
    "clip_cov": ["variant=clip_cov", "train.ppo_epochs=2"],
    "gt_likelihood": [
        "variant={name: gt_likelihood, train_on: spliced, groups: all}",
        "train.steps=null",
        "train.tokens=400",
    ],
    "critic, by tokens": ["variant=ppo", "critic.warmup_steps=1", "train.steps=null", "train.tokens=400"],
    "distill": ["variant={name: distill, teacher: FOLDER}"],
    "gtpo": ["variant=gtpo"],
    "remax": ["variant=remax"],
    "xrpo": ["variant=xrpo", "rollout.sample_allocation={probe: 2, phases: 2, most: 4}"],
    "adapters": ["model.adapter={rank: 2}", "variant={name: grpo, kl_coef: 0.1}"],
    "adapters that are not merged": ["model.adapter={rank: 2, merged: false}", "mesh.data=2", "mesh.fsdp=1"],
    "router_replay": ["model.path=MIXTURE", "rollout.router_replay=true", "train.ppo_epochs=2"],
    "episodes": ["environment={name: 'a:B', max_turns: 3}", "rollout.max_turn_tokens=5"],
    "overlap": ["variant={name: grpo, importance: truncate}", "rollout.overlap=0.5"],
}


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


@pytest.mark.slow
@pytest.mark.in_ci("kl, critic", "nthr")
@pytest.mark.parametrize("name", CASES)
def test_a_runs_programs_are_called_with_what_is_said_of_them(recipe, tmp_path, monkeypatch, name):
    seen = []

    def note(program, args, static):
        seen.append((program.__name__, kinds(args), places(args), static))

    def around(program, *args, **static):
        note(program, args, static)
        return program(*args, **static)

    def sample(program, graph, weights, prompts, key, *args, partial, **static):
        note(program, (weights, prompts, key) if partial is None else (weights, prompts, key, partial), {})
        return program(graph, weights, prompts, key, *args, partial=partial, **static)

    spies.watch(monkeypatch, around)

    def turns(program, graph, *args, how):
        note(program, args, {})
        return program(graph, *args, how=how)

    monkeypatch.setattr(sampler, "_sample", spies.Spy(sampler._sample, sample))
    for program in ("_begins", "_goes_on"):
        monkeypatch.setattr(episode_sampler, program, spies.Spy(getattr(episode_sampler, program), turns))
    monkeypatch.setattr(episodes, "environments_of", lambda *_: Fake())

    def watched(make):
        def watched(*given, **how):
            made = make(*given, **how)
            return spies.Spy(made, around) if hasattr(made, "lower") else made  # or there is nothing to do

        return watched

    for make in (policy.state.make_reshard, policy.state.make_cast_of_factors):
        monkeypatch.setattr(policy.state, make.__name__, watched(make))
    case = [
        text.replace("FOLDER", str(recipe.parent)).replace("MIXTURE", f"{recipe.parent}/mixture")
        for text in CASES[name]
    ]
    if name == "router_replay":
        make_mixture(recipe.parent, recipe.parent / "mixture")
    config = recipes.load(recipe, [*RUN, f"run.dir={tmp_path}", *case])
    trainer = Trainer(config, 1 if name == "nthr" else 2, eos_ids=())
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
