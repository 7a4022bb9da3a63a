"""What holds for every variant, from rewards to the loss's gradient, in the same few compiled programs."""

import dataclasses
import functools
import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_examples import arrays, covariance_mask
from oracles import close
from variant_examples import NAN, REQUIRED, G, Inputs, P, T, built, example

from grpojax import advantages as A
from grpojax import losses as L
from grpojax import masked, variants

NAMES = variants.names()
# Variants whose advantages depend on the other groups of the batch.
OF_THE_BATCH = {"gdpo", "gpg", "grpo_lambda_length", "high_entropy_tokens", "lite_ppo", "magistral", "ppo"}
OF_THE_BATCH |= {"reinforce_pp", "reinforce_pp_baseline", "scale_rl"}
# Variants that teach something where all rewards of a group are equal, because the method says so.
TEACH_ALWAYS = {"distill", "grpo_process", "ngrpo", "ppo", "remax", "rloo", "token_critic", "rl_zvp", "w_reinforce"}
# Draws go by place: with every candidate drawn, the result does not depend on where a token stands.
ALL_DRAWN = {"clip_cov": {"covariance_fraction": 1.0, "covariance_low": 0.2}}


@functools.cache
def variant(name):
    return built(name)


@functools.cache
def objective_of(name):
    return built(name, **ALL_DRAWN.get(name, {})).objective


def run(name, x: Inputs):
    """``(advantages, loss, d loss / d logps)``, as a trainer puts the pieces together."""
    objective = objective_of(name)
    advantages = variant(name).advantage(x.rewards, x.signals)
    mask = x.signals.mask & jnp.isfinite(jnp.asarray(x.rewards, jnp.float32))[..., None]
    batch = types.SimpleNamespace(
        advantages=advantages,
        weights=L.loss_weights(mask, objective.aggregate, constant=objective.constant),
        old_logps=x.signals.behavior_logps, ref_logps=x.signals.ref_logps, sampler_logps=x.sampler_logps,
        displacement_weights=L.displacement_weights(advantages, mask),
    )  # fmt: skip
    if objective.needs_covariance_mask:
        batch.covariance_mask = covariance_mask(jax.random.key(0), x.logps, batch, objective)
    loss, gradient = jax.value_and_grad(lambda logps: L.policy_loss(logps, objective=objective, **arrays(batch))[0])(
        x.logps
    )
    return advantages, loss, gradient


@jax.jit
def everything(x: Inputs):
    return {name: run(name, x) for name in NAMES}


@functools.cache
def on(scenario):
    """The scenario's results: all variants at once."""
    return jax.tree.map(np.asarray, everything(SCENARIOS[scenario](example())))


def plant(garbage):
    """Puts ``garbage`` on the padding of every array that has some."""

    def on_padding(x, mask):
        if x.ndim < 3 or x.dtype != np.float32:
            return x
        return np.where(mask.reshape(mask.shape + (1,) * (x.ndim - 3)), x, np.float32(garbage))

    return lambda x: jax.tree.map(functools.partial(on_padding, mask=x.signals.mask), x)


def other_tokens(x):
    """Other token ids and columns on the padding."""
    mask, s = x.signals.mask, x.signals

    def change(ids):
        return np.where(mask, ids, 2).astype(np.int32)

    return dataclasses.replace(x, signals=dataclasses.replace(s, tokens=change(s.tokens), columns=change(s.columns)))


ORDER_P, ORDER_G = np.random.default_rng(1).permutation(P), np.random.default_rng(2).permutation(G)


def permute_samples(x):
    return jax.tree.map(lambda a: a[:, ORDER_G] if a.ndim > 1 else a, x)


def no_reward(x):
    """Prompt 3 has no valid reward; whatever its samples look like."""
    rewards = x.rewards.copy()
    rewards[3] = NAN
    return dataclasses.replace(x, rewards=rewards)


def no_reward_and_other_samples(x):
    x, other = no_reward(x), example(seed=9)

    def swap(a, b):
        return np.concatenate([a[:3], b[3:4], a[4:]])

    lengths = {"lengths": x.signals.lengths, "mask": x.signals.mask}  # the weights count them
    signals = dataclasses.replace(jax.tree.map(swap, x.signals, other.signals), **lengths)
    return dataclasses.replace(x, signals=signals, logps=swap(x.logps, other.logps))


def nothing_valid(x):
    return dataclasses.replace(x, rewards=np.full_like(x.rewards, NAN))


def equal_rewards(x):
    return dataclasses.replace(x, rewards=np.full_like(x.rewards, 0.1))


SCENARIOS = {
    "plain": lambda x: x,
    "nan": plant(NAN),
    "+200": plant(200.0),
    "-200": plant(-200.0),
    "ids": other_tokens,
    "prompts": lambda x: jax.tree.map(lambda a: a[ORDER_P], x),
    "samples": permute_samples,
    "no reward": no_reward,
    "no reward, other samples": no_reward_and_other_samples,
    "nothing": nothing_valid,
    "equal": equal_rewards,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_shapes_and_padding(name):
    advantages, loss, gradient = on("plain")[name]
    mask = example().signals.mask
    assert advantages.shape == gradient.shape == mask.shape
    assert {x.dtype for x in (advantages, loss, gradient)} == {np.dtype("float32")}
    assert all(np.isfinite(x).all() for x in (advantages, loss, gradient))
    assert advantages.any() and gradient.any()
    assert not advantages[~mask].any() and not gradient[~mask].any()
    assert not advantages[4, 2].any() and not gradient[4, 2].any()  # no reward


@pytest.mark.parametrize("scenario", ["nan", "+200", "-200", "ids"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_padding_changes_nothing(name, scenario):
    jax.tree.map(np.testing.assert_array_equal, on(scenario)[name], on("plain")[name])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_permutations(name):
    advantages, loss, gradient = on("plain")[name]
    moved = {"prompts": lambda x: x[ORDER_P], "samples": lambda x: x[:, ORDER_G]}
    for scenario, move in moved.items():
        if (name, scenario) == ("grpo_lambda_length", "prompts"):
            continue  # ties between prompts go to the first
        got = on(scenario)[name]
        tell = functools.partial(close, atol=1e-5, rtol=1e-4)
        tell(got[0], move(advantages)), tell(got[1], loss), tell(got[2], move(gradient))


@pytest.mark.parametrize("name", NAMES)
def test_a_group_without_rewards_has_no_part(name):
    """Whatever its samples are, its advantages are 0 and the others' stay; alone in the batch, all is 0."""
    got, other = on("no reward")[name][0], on("no reward, other samples")[name][0]
    assert np.isfinite(got).all() and not got[3].any() and not other[3].any()
    close(other, got)
    if name not in OF_THE_BATCH:
        keep = np.arange(P) != 3
        close(got[keep], on("plain")[name][0][keep])
    assert all(np.isfinite(x).all() and not x.any() for x in on("nothing")[name])


@pytest.mark.parametrize("name", NAMES)
def test_equal_rewards_teach_nothing(name):
    """Nothing at all: told by ``std == 0``, equal floats such as 0.1 get advantages up to 0.99."""
    assert np.isfinite(on("equal")[name][0]).all()
    assert on("equal")[name][0].any() == (name in TEACH_ALWAYS)


@pytest.mark.parametrize("name", ["negative_advantage", "ngrpo", "gt_likelihood", "grpo"])
def test_only_some_learn_where_all_fail(name):
    """Prompt 2 of the example."""
    assert on("plain")[name][0][2].any() == (name != "grpo")
    assert not on("plain")[name][0][1].any()  # all right: nothing, in all of them


def test_no_second_compilation():
    for scenario in SCENARIOS:
        on(scenario)
    assert everything._cache_size() == 1


@functools.cache
def sixteen_prompts():
    return jax.jit(lambda x: {name: run(name, x) for name in NAMES})(example(prompts=16))


@pytest.mark.in_ci("sizes0-a")
@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "spec"), [((8, 1), "a"), ((2, 4), ("a", "b")), ((4, 2), "a")])
def test_prompts_over_eight_devices(sizes, spec):
    """Statistics of the batch are those of the whole batch, wherever its prompts lie."""
    mesh = jax.make_mesh(sizes, ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    placed = jax.device_put(example(prompts=16), jax.NamedSharding(mesh, jax.P(spec)))
    got = jax.jit(lambda x: {name: run(name, x) for name in NAMES})(placed)
    for name in NAMES:
        assert len(got[name][0].sharding.device_set) == 8
        for a, b in zip(got[name], sixteen_prompts()[name], strict=True):
            close(a, b, atol=1e-5, rtol=1e-4)


@functools.cache
def wide_batch():
    """Two examples at once, in bfloat16 and with four more columns of padding."""

    def low(x):
        return jnp.asarray(x, jnp.bfloat16) if x.dtype == np.float32 else jnp.asarray(x)

    stacked = jax.tree.map(lambda *x: low(np.stack(x)), *(example(seed, size=T + 4) for seed in (0, 5)))
    got = jax.jit(jax.vmap(lambda x: {name: run(name, x) for name in NAMES}))(stacked)

    def rounded(x):
        return np.asarray(low(x), np.float32) if x.dtype == np.float32 else x

    want = [everything(jax.tree.map(rounded, example(seed))) for seed in (0, 5)]
    return got, want


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_vmap_bfloat16_and_more_padding(name):
    """As one by one, in float32 of the same numbers, without the columns."""
    got, want = wide_batch()
    for i in range(2):
        advantages, loss, gradient = (x[i] for x in got[name])
        assert advantages.dtype == loss.dtype == jnp.float32
        tell = functools.partial(close, atol=2e-5, rtol=1e-4)
        tell(advantages[..., :T], want[i][name][0])
        tell(loss, want[i][name][1])
        close(jnp.asarray(gradient[..., :T], jnp.float32), want[i][name][2], atol=2e-4, rtol=1e-2)  # in bfloat16
        assert not np.asarray(advantages[..., T:]).any() and not np.asarray(gradient[..., T:], np.float32).any()


@pytest.mark.parametrize("name", ["gtpo", "nthr", "reinforce_pp_baseline", "pass_at_k"])
@pytest.mark.slow
def test_without_jit(name):
    x = example()
    close(variant(name).advantage(x.rewards, x.signals), on("plain")[name][0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_is_what_it_says(name):
    got = variant(name)
    assert got.name == name and set(got.needs) <= set(variants.NEEDS)
    assert "arXiv" in got.citation and "arXiv" in getattr(variants, name).__doc__
    defaults = variants.parameters(name)
    assert {k for k, v in defaults.items() if v is inspect.Parameter.empty} == set(REQUIRED.get(name, {}))
    section = variants.section(name)(**REQUIRED.get(name, {}))
    assert dataclasses.asdict(section) == {**defaults, **REQUIRED.get(name, {})}
    again = variants.get(name, **dataclasses.asdict(section))
    assert again.objective == got.objective and hash(again.objective) == hash(got.objective)
    shown = inspect.signature(getattr(variants, name))  # which help() prints
    assert shown.return_annotation is variants.Variant and list(shown.parameters) == list(defaults)
    with pytest.raises(dataclasses.FrozenInstanceError):
        got.name = "other"


FIELDS = {
    "critic": ("values", "token_bias"), "entropy": ("entropy",), "greedy": ("greedy_rewards",),
    "ground_truth": ("likelihood",), "hidden_states": ("hidden", "probs", "columns"), "step_rewards": ("step_rewards",),
    "teacher": ("ref_logps",), "proxy": ("proxy_ratios",),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_what_it_needs_is_declared(name):
    """With the signals of a plain trainer a variant works, or says which of its needs is missing."""
    x = example()
    fields = ["lengths", "mask", "behavior_logps", "tokens"]
    if variant(name).objective.kl_in != "loss" and variant(name).objective.needs_reference:
        fields.append("ref_logps")
    plain = {f: getattr(x.signals, f) for f in fields}
    missing = [f for need in variant(name).needs for f in FIELDS.get(need, ())]
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (x.rewards, A.Signals(**plain)))
    if missing:
        with pytest.raises(ValueError, match=f"signals.({'|'.join(missing)})"):
            jax.eval_shape(variant(name).advantage, *shapes)
    else:
        assert jax.eval_shape(variant(name).advantage, *shapes).shape == x.signals.mask.shape
    objective = variant(name).objective
    bare = types.SimpleNamespace(
        advantages=x.logps,
        weights=masked.from_lengths(x.signals.lengths, T).astype(jnp.float32),
        old_logps=None,
    )
    needs = {
        "ref_logps": objective.needs_reference, "sampler_logps": objective.needs_sampler_logps,
        "displacement_weights": objective.needs_displacement_weights,
        "covariance_mask": objective.needs_covariance_mask,
    }  # fmt: skip

    def loss(logps):
        return L.policy_loss(logps, objective=objective, **arrays(bare))[0]

    if any(needs.values()):
        with pytest.raises(ValueError, match="|".join(f for f, needed in needs.items() if needed)):
            jax.eval_shape(loss, x.logps)
    else:
        assert jax.eval_shape(loss, x.logps).shape == ()
    assert ("displacement_weights" in variant(name).needs) == objective.needs_displacement_weights


@pytest.mark.parametrize("name", NAMES)
def test_masks_of_numbers_are_masks(name):
    """Masks of 0.0 and 1.0, as other code has them; what is traced knows dtypes only."""
    x = example()
    masks = {"mask": x.signals.mask.astype(np.float32), "valid": np.ones(x.rewards.shape, np.float32)}
    shape = jax.eval_shape(variant(name).advantage, x.rewards, dataclasses.replace(x.signals, **masks))
    assert shape.dtype == jnp.float32
