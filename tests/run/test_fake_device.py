"""A fake device (`fake_device`) is called as a real one is, and answers in the same form.

That a run on it goes on bit for bit is in `test_faults.py`; here is that it takes no less and gives no less.
"""

import dataclasses
import functools

import dry_calls
import fake_checks
import fake_device
import jax
import numpy as np
import pytest
from fake_checks import kinds, numbers_for
from runs import numbers, opened

from grpojax.models import Compute
from grpojax.programs import sampler
from grpojax.programs.sampler import no_samples
from grpojax.programs.sampler_config import SamplerConfig
from grpojax.run import recipe as recipes
from grpojax.train import train
from grpojax.types import Prompts

CASES = {"clip_cov": ("variant=clip_cov", "train.ppo_epochs=2")}
policy = fake_checks.policy


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_it_takes_and_gives_for_every_program_what_a_real_one_does(recipe, policy, tmp_path, case):
    config = recipes.load(recipe, [f"run.dir={tmp_path}", "rewards.0.name=tiny_run:parity", *CASES[case]])
    fake_checks.check_every(config, policy)


@pytest.mark.slow
def test_it_refuses_what_the_real_program_does_not_take(recipe, policy, tmp_path):
    every = dry_calls.every(recipes.load(recipe, [f"run.dir={tmp_path}"]), policy.shape)
    call = next(call for call in every if call.program.name == "update")
    state, frozen, packed = numbers_for(dry_calls.shapes(call))
    fake = functools.partial(fake_device.Fake().call, call.program)
    for given in ((state, frozen, packed.bare), (state, frozen), (state.params, frozen, packed)):
        with pytest.raises((AttributeError, KeyError, TypeError)):
            fake(*given)
    after, _ = fake(state, frozen, packed)
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        fake(state, frozen, packed)
    assert int(after.step) == 2


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_a_run_on_it_follows_from_all_of_its_state(recipe, tmp_path):
    """Weights, moments and samples: one of them changed a little, every number after it is another."""

    def run(name, change=lambda state: state):
        given = ["train.steps=2", "train.eval_every=0", "data.validation=null", "rewards.0.name=tiny_run:parity"]
        trainer = opened(recipes.load(recipe, [f"run.dir={tmp_path / name}", *given]))
        trainer.state.networks["policy"] = change(trainer.state.networks["policy"])
        assert train(trainer)
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
    made = functools.partial(sampler.rollout_program, policy.graph, config, eos_ids=(1,), compute=Compute())
    draws, goes_on, ends = made(), made(left=7), made(left=0)
    key, fake = jax.random.key(0), fake_device.Fake().call
    want = jax.eval_shape(lambda params: draws.fn(params, prompts, key), policy.params)
    got = fake(draws, policy.params, prompts, key)
    assert kinds(got) == kinds(want)
    there = np.arange(40) < np.asarray(got.lengths)[..., None]
    assert not np.asarray(got.tokens)[~there].any() and not np.asarray(got.logps)[~there].any()
    np.testing.assert_array_equal(got.stopped, (np.asarray(got.tokens) == 1).any(-1))
    assert (np.asarray(got.lengths)[~np.asarray(got.stopped)] == 40).all()

    flipped = jax.tree.map(lambda x: x[::-1], prompts)
    again = fake(draws, policy.params, flipped, key)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[::-1]), got, again)
    part = fake(goes_on, policy.params, prompts, key, no_samples(2, 4, 40))
    open_ = np.asarray(sampler.unfinished(part))
    assert 0 < open_.sum() <= 7 and not open_.any(1).all()
    whole = fake(ends, policy.params, prompts, key, part)
    jax.tree.map(np.testing.assert_array_equal, whole, got)
