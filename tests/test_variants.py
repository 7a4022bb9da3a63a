import dataclasses
import functools
import inspect
import types

import jax
import numpy as np
import pytest
from oracles import close

from grpojax import advantages as A
from grpojax import losses as L
from grpojax import variants

P, G, T = 3, 5, 7
REQUIRED = {"dr_grpo": {"constant": 8.0}}  # what a variant must be given
NAN = float("nan")


@functools.cache
def advantage(name):
    return jax.jit(variants.get(name, **REQUIRED.get(name, {})).advantage)


def example(lengths, seed=0):
    """All the signals there are, for samples of these lengths."""
    lengths, rng = np.asarray(lengths), np.random.default_rng(seed)
    shape = (*lengths.shape, T)
    mask = np.arange(T) < lengths[..., None]
    return A.Signals(
        lengths=lengths,
        mask=mask,
        behavior_logps=-rng.exponential(size=shape).astype(np.float32),
        entropy=rng.exponential(size=shape).astype(np.float32),
        tokens=rng.integers(0, 9, shape).astype(np.int32),
        token_bias=rng.normal(size=shape).astype(np.float32),
        step_rewards=np.where(rng.random(shape) < 0.3, rng.random(shape), NAN).astype(np.float32),
    )


def ragged(seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 3, (P, G)).astype(np.float32) / 2, example(rng.integers(0, T + 1, (P, G)), seed)


def first_update(variant, rewards, lengths, size):
    """Loss and its gradient by log-prob, when the policy is still the one that drew the tokens."""
    mask = np.arange(size) < np.asarray(lengths)[..., None]
    objective = variant.objective
    logps = np.full(mask.shape, -1.0, np.float32)
    batch = types.SimpleNamespace(
        advantages=variant.advantage(np.asarray(rewards, np.float32), A.Signals(mask=mask)),
        weights=L.loss_weights(mask, objective.aggregate, constant=objective.constant),
        behavior_logps=None,
        ref_logps=logps,
    )
    entropy = np.ones(mask.shape, np.float32) if objective.needs_entropy else None
    return jax.value_and_grad(lambda x: L.policy_loss(x, batch, objective, entropy=entropy)[0])(logps)


# From rewards [1, 0, 0, 0] to the gradient at one token of each sample; samples of 2, 4, 6 and 8 tokens.
@pytest.mark.parametrize(
    ("name", "options", "loss", "gradient"),
    [
        ("grpo", {}, 0, [-1.49970006 / 8, 0.49990002 / 16, 0.49990002 / 24, 0.49990002 / 32]),
        ("grpo", {"ddof": 0, "eps": 0.0}, 0, [-1.73205081 / 8] + [0.57735027 / 4 / n for n in (4, 6, 8)]),
        (
            "grpo",
            {"ddof": 0, "eps": 0.0, "aggregate": "token_mean", "kl_coef": 0.0},
            0.34641016,
            [-1.73205081 / 20] + [0.57735027 / 20] * 3,
        ),
        ("grpo", {"entropy_coef": 0.5}, -0.5, [-1.49970006 / 8] + [0.49990002 / 4 / n for n in (4, 6, 8)]),
        ("dr_grpo", {"constant": 8.0}, 0.09375, [-0.75 / 32] + [0.25 / 32] * 3),
        ("dr_grpo", {"constant": 8.0, "leave_one_out": True}, 0.125, [-1 / 32] + [1 / 96] * 3),
    ],
)
def test_golden_first_update(name, options, loss, gradient):
    """GRPO with token_mean in place of its sequence_mean gives -0.07499 for the first token, and Dr. GRPO
    divided by the tokens instead of the constant -0.0375."""
    value, got = first_update(variants.get(name, **options), [[1, 0, 0, 0]], [[2, 4, 6, 8]], 8)
    close(value, loss)
    close(got[0, :, 0], gradient)
    assert (np.asarray(got) != 0).sum() == 20


@pytest.mark.parametrize(("name", "high", "low"), [("grpo", 1.49970006, 0.49990002), ("dr_grpo", 0.75, 0.25)])
def test_golden_groups(name, high, low):
    """Each prompt by itself: with the mean of both, 0.5, all rewards would be equally far from it."""
    signals = A.Signals(mask=np.ones((2, 4, 1), bool))
    got = advantage(name)(np.array([[1, 0, 0, 0], [1, 1, 1, 0]], np.float32), signals)
    close(got[..., 0], [[high, -low, -low, -low], [low, low, low, -high]])


def test_defaults_are_the_papers():
    grpo, dr_grpo = variants.grpo(), variants.dr_grpo(constant=8)
    assert grpo.objective == L.Objective(aggregate="sequence_mean", kl_coef=0.04, kl_kind="k3", kl_in="loss")
    assert dr_grpo.objective == L.Objective(aggregate="constant", constant=8)
    assert grpo.objective.needs_reference and not dr_grpo.objective.needs_reference


def test_overrides_reach_the_objective():
    got = variants.get("grpo", clip_low=0.1, clip_high=0.28, aggregate="prompt_mean", kl_kind="k2").objective
    assert got.surrogate == L.clipped(low=0.1, high=0.28)
    assert (got.aggregate, got.kl_kind) == ("prompt_mean", "k2")
    got = variants.get(
        "dr_grpo", constant=3.0, clip_high=0.4, kl_coef=0.1, kl_kind="k1", kl_in="reward"
    ).objective
    assert got == L.Objective(
        surrogate=L.clipped(high=0.4),
        aggregate="constant",
        constant=3.0,
        kl_coef=0.1,
        kl_kind="k1",
        kl_in="reward",
    )


@pytest.mark.parametrize(
    ("name", "options", "names"),
    [
        ("grppo", {}, "'grppo'.*'grpo'"),
        ("zzz", {}, "'zzz'.*dr_grpo.*grpo"),
        ("grpo", {"clip_hi": 0.3}, "'grpo'.*'clip_hi'.*'clip_high'"),
        ("grpo", {"zzz": 0}, "'grpo'.*'zzz'.*kl_coef"),
        ("grpo", {"kl_kind": "k1"}, "k1.*loss"),
        ("grpo", {"kl_in": "reward"}, "k3.*reward"),
    ],
)
def test_get_refuses(name, options, names):
    with pytest.raises(ValueError, match=names):
        variants.get(name, **options)


@pytest.mark.parametrize("name", ["gpro", "zzz"])
def test_parameters_of_an_unknown_variant(name):
    with pytest.raises(ValueError, match=f"'{name}' is unknown"):
        variants.parameters(name)


def test_missing_mask_is_named():
    with pytest.raises(ValueError, match=r"to_tokens.*signals\.mask"):
        variants.grpo().advantage(np.eye(2, dtype=np.float32))


# --- what holds for every variant


def test_names():
    assert variants.names() == sorted(variants.names()) and {"grpo", "dr_grpo"} <= set(variants.names())


@pytest.mark.parametrize("name", variants.names())
def test_is_what_it_says(name):
    variant = variants.get(name, **REQUIRED.get(name, {}))
    assert variant.name == name
    assert "arXiv" in variant.citation and "arXiv" in getattr(variants, name).__doc__
    defaults = variants.parameters(name)
    assert {k for k, v in defaults.items() if v is inspect.Parameter.empty} == set(REQUIRED.get(name, {}))
    section = dataclasses.make_dataclass("Section", variants.annotations(name))(**REQUIRED.get(name, {}))
    assert dataclasses.asdict(section) == {**defaults, **REQUIRED.get(name, {})}


@pytest.mark.parametrize("name", variants.names())
def test_advantages_are_on_the_tokens(name):
    rewards, signals = ragged()
    got = np.asarray(advantage(name)(rewards, signals))
    assert got.shape == (P, G, T) and got.dtype == np.float32
    assert np.isfinite(got).all() and got.any() and not got[~signals.mask].any()
    close(variants.get(name, **REQUIRED.get(name, {})).advantage(rewards, signals), got)


@pytest.mark.parametrize("name", variants.names())
def test_a_missing_group_changes_no_neighbour(name):
    rewards, signals = ragged()
    rewards[1] = NAN
    got = np.asarray(advantage(name)(rewards, signals))
    assert np.isfinite(got).all() and not got[1].any()
    others = jax.tree.map(lambda x: x[[0, 2]], signals)
    close(got[[0, 2]], advantage(name)(rewards[[0, 2]], others))


@pytest.mark.parametrize("name", variants.names())
def test_padding_has_no_part(name):
    rewards, signals = ragged()

    def plant(x):
        return np.where(signals.mask, x, np.float32(NAN)) if x.dtype == np.float32 and x.ndim == 3 else x

    close(advantage(name)(rewards, jax.tree.map(plant, signals)), advantage(name)(rewards, signals))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
@pytest.mark.parametrize("number", [0.0, 0.1, 0.95])
def test_equal_rewards_teach_nothing(name, number):
    _, signals = ragged()
    assert not np.asarray(advantage(name)(np.full((P, G), np.float32(number)), signals)).any()


@pytest.mark.parametrize("name", variants.names())
def test_permutations(name):
    rewards, signals = ragged()
    got, rng = np.asarray(advantage(name)(rewards, signals)), np.random.default_rng(1)
    for order in (np.s_[rng.permutation(P)], np.s_[:, rng.permutation(G)]):
        moved = jax.tree.map(lambda x: x[order], signals)  # noqa: B023
        close(advantage(name)(rewards[order], moved), got[order])
