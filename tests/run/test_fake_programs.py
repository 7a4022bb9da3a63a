"""Fakes of a run's programs (`fake_programs`) are called as the real ones are, and answer in the same form.

That a run of fakes goes on bit for bit is in `test_faults.py`; here is that a fake takes no less and gives no less.
"""

import dataclasses
import functools
from collections.abc import Mapping

import fake_programs
import jax
import numpy as np
import pytest
from runs import Trainer, numbers

from grpojax.models import Compute
from grpojax.programs import sampler
from grpojax.programs.policy import Policy
from grpojax.programs.sampler import SamplerConfig, no_samples
from grpojax.run import calls
from grpojax.run import recipe as recipes
from grpojax.types import Prompts

CRITIC = ("variant={name: ppo, kl_coef: 0.1}", "critic={layers: 1, warmup_steps: 1}", "train.reference_every=1")
CASES = {"critic": CRITIC, "nthr": ("variant=nthr",), "clip_cov": ("variant=clip_cov", "train.ppo_epochs=2")}


@pytest.fixture(scope="module")
def policy(recipe):
    config = recipes.load(recipe)
    return Policy(config.model, config.mesh, jax.devices()[:1]).load()


def numbers_for(shapes):
    """Arrays of these shapes, of ones."""

    def one(x):
        return jax.random.key(1) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else np.ones(x.shape, x.dtype)

    return jax.tree.map(lambda x: jax.device_put(one(x)), shapes)


def kinds(tree):
    return jax.tree.structure(tree), [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("case", CASES)
def test_every_program_has_a_fake_that_takes_and_gives_the_same(recipe, policy, tmp_path, case, monkeypatch):
    made, make = [], calls.make_programs
    monkeypatch.setattr(calls, "make_programs", lambda learning: made.append(make(learning)) or made[0])
    config = recipes.load(recipe, [f"run.dir={tmp_path}", "rewards.0.name=tiny_run:parity", *CASES[case]])
    planned = calls.calls_of(config, policy.shape).calls.values()
    fakes = dict(pairs(made[0], fake_programs.fakes_of(made[0])))
    learning = [call for call in planned if call.program in fakes]
    assert {call.program.__name__ for call in learning} >= {"update", "score"}
    for call in learning:
        args, want = numbers_for(call.args), jax.eval_shape(call.program, *call.args, **call.static)
        assert kinds(fakes[call.program](*args, **call.static)) == kinds(want), call.program.__name__
        took = [info.donated for info in jax.tree.leaves(call.program.trace(*call.args, **call.static).args_info[0])]
        assert [x.is_deleted() for x in jax.tree.leaves(args)] == took
        assert any(took) == ("update" in call.program.__name__)


def pairs(real, fake):
    """Programs of two values, one beside the other; what is no program is the same in both."""
    for field in dataclasses.fields(real):
        one, other = getattr(real, field.name), getattr(fake, field.name)
        if isinstance(one, Mapping):
            assert one.keys() == other.keys()
            yield from ((one[name], other[name]) for name in one)
        elif isinstance(other, fake_programs.Fake):
            yield one, other
        else:
            assert one is other and not hasattr(one, "lower"), field.name


def test_what_the_real_program_does_not_take_the_fake_refuses(recipe, policy, tmp_path):
    call = calls.calls_of(recipes.load(recipe, [f"run.dir={tmp_path}"]), policy.shape).calls["update"]
    state, frozen, packed = numbers_for(call.args)
    fake = fake_programs.Fake(call.program)
    for given in ((state, frozen, packed.rows), (state, frozen), (state.params, frozen, packed)):
        with pytest.raises((AttributeError, TypeError)):
            fake(*given)
    after, _ = fake(state, frozen, packed)
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        fake(state, frozen, packed)
    assert int(after.step) == 2


@pytest.mark.usefixtures("fakes")
def test_a_run_of_fakes_follows_from_all_of_its_state(recipe, tmp_path):
    """Weights, moments and samples: one of them changed a little, every number after it is another."""

    def run(name, change=lambda state: state):
        given = ["train.steps=2", "train.eval_every=0", "data.validation=null", "rewards.0.name=tiny_run:parity"]
        trainer = Trainer(recipes.load(recipe, [f"run.dir={tmp_path / name}", *given]))
        trainer.learner.state["policy"] = change(trainer.learner.state["policy"])
        assert trainer.run()
        return [(line["entropy"], line["completions/mean_length"]) for line in numbers(tmp_path / name)]

    def moments(state):
        moved = jax.tree.map(lambda x: x + 1 if x.dtype == np.float32 else x, state.opt_state)
        return dataclasses.replace(state, opt_state=moved)

    plain = run("plain")
    assert run("again") == plain
    other = run("moments", moments)
    assert other[0][0] != plain[0][0] and other[0][1] == plain[0][1] and other[1] != plain[1]


def test_samples_have_the_form_of_the_real_ones(policy):
    config = SamplerConfig(group=4, max_tokens=40)
    prompts = Prompts(
        tokens=np.array([[5, 6, 7], [8, 0, 0]], np.int32),
        lengths=np.array([3, 1], np.int32),
        uids=np.array([3, 9], np.uint32),
        first_sample=np.zeros(2, np.int32),
    )
    how = {"eos_ids": (1,), "compute": Compute()}
    draw = functools.partial(sampler.sample_groups, policy.graph, **how)
    fake = functools.partial(fake_programs.sample_groups, policy.graph, **how)
    key = jax.random.key(0)
    want = jax.eval_shape(lambda params: draw(params, prompts, key, config), policy.params)
    got = fake(policy.params, prompts, key, config)
    assert kinds(got) == kinds(want)
    there = np.arange(40) < np.asarray(got.lengths)[..., None]
    assert not np.asarray(got.tokens)[~there].any() and not np.asarray(got.logps)[~there].any()
    np.testing.assert_array_equal(got.stopped, (np.asarray(got.tokens) == 1).any(-1))
    assert (np.asarray(got.lengths)[~np.asarray(got.stopped)] == 40).all()

    flipped = jax.tree.map(lambda x: x[::-1], prompts)
    again = fake(policy.params, flipped, key, config)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[::-1]), got, again)
    part = fake(policy.params, prompts, key, config, partial=no_samples(2, 4, 40), left=7)
    open_ = np.asarray(sampler.unfinished(part))
    assert 0 < open_.sum() <= 7 and not open_.any(1).all()
    whole = fake(policy.params, prompts, key, config, partial=part, left=0)
    jax.tree.map(np.testing.assert_array_equal, whole, got)
