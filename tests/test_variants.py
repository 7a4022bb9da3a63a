import dataclasses
import types

import jax
import numpy as np
import pytest
from oracles import close

import grpojax.errors
import grpojax.settings
from grpojax import advantages as A
from grpojax import losses as L
from grpojax import variants


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
    variant = variants.get(name, **({"constant": 8.0} if name == "dr_grpo" else {}))
    got = variant.advantage(np.array([[1, 0, 0, 0], [1, 1, 1, 0]], np.float32), signals)
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


# --- the published numbers


def test_names_and_table():
    listed = (
        "grpo grpo_process dr_grpo rloo reinforce_pp reinforce_pp_baseline remax gpg pass_at_k opo lite_ppo dapo gspo "
        "gspo_token gtpo grpo_lambda_length grpo_lambda_traces xrpo ngrpo nthr llds cispo sapo gmpo dual_clip ppo "
        "token_critic rare_token culling negative_advantage gt_likelihood"
    )
    assert variants.names() == sorted(variants.names()) and set(listed.split()) <= set(variants.names())
    rows = variants.table().splitlines()
    assert len(rows) == len(variants.names()) + 2 and len({row.count("|") for row in rows}) == 1
    assert rows[2:] == sorted(rows[2:])


# What the papers state; the options of the objective by their names.
DEFAULTS = {
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, "aggregate": "token_mean", "kl_coef": 0.0},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "aggregate": "sequence_mean"},
    "rloo": {"aggregate": "sequence_sum", "kl_coef": 0.03, "kl_kind": "k1", "kl_in": "reward"},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.05, "aggregate": "sequence_mean"},
    "gmpo": {"clip_low": 0.4, "clip_high": 0.4, "aggregate": "sequence_mean"},
    "dual_clip": {"clip_dual": 3.0},
    "ngrpo": {
        "clip_low": 0.16,
        "clip_high": 0.24,
        "aggregate": "token_mean",
        "kl_coef": 0.0,
        "ddof": 1,
        "eps": 1e-6,
    },
    "llds": {"llds_coef": 0.2, "llds_gate": "action", "kl_coef": 1e-3},
    "nthr": {"kl_coef": 1e-4, "beta": 1.0, "eta": None, "self_term": True, "ddof": 0},
    "grpo_lambda_traces": {"trace_decay": 0.99, "lowest": -0.1},
    "grpo_lambda_length": {"share": 0.2},
    "xrpo": {"novelty": 2.5, "novelty_cap": 0.5},
    "gtpo": {"gamma": 0.1, "threshold": 0.6931471805599453, "count_norm": False, "kl_coef": 0.0},
    "lite_ppo": {"of": "rewards", "clip_low": 0.2, "clip_high": 0.2, "aggregate": "token_mean"},
    "negative_advantage": {"c": 1.0, "aggregate": "sequence_sum"},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_of(name):
    got = variants.parameters(name)
    assert {k: got[k] for k in DEFAULTS[name]} == DEFAULTS[name]


def on_tokens(name, rewards, size=1, options=None, **signals):
    """Advantages of a batch whose samples all have ``size`` tokens (or those of ``mask``)."""
    rewards = np.asarray(rewards, np.float32)
    signals = {"mask": np.ones((*rewards.shape, size), bool)} | signals
    return variants.get(name, **(options or {})).advantage(rewards, A.Signals(**signals))


LENGTHS = np.array([[2, 4, 4, 2], [1, 3, 3, 5]])


# The first number of each variant on [1, 0, 0, 0] and [1, 1, 1, 0]; GRPO's is 1.4997.
@pytest.mark.parametrize(
    ("name", "options", "want"),
    [
        ("grpo", {}, 1.49970006),
        ("rloo", {}, 1.0),
        ("gspo", {}, 1.49970006),
        ("lite_ppo", {"ddof": 0, "eps": 0.0}, 1.5),
        ("lite_ppo", {"ddof": 0, "eps": 0.0, "of": "advantages"}, 1.7320508),
        ("reinforce_pp_baseline", {"weighted_by": "sequences"}, 1.7320508),
        ("reinforce_pp_baseline", {}, 1.99323179),
        ("gpg", {}, 0.75),
        ("pass_at_k", {"k": 1}, 1.73205081),
        ("pass_at_k", {"k": 2}, 1.0),
        ("pass_at_k_margin", {}, 1.0),
        ("ngrpo", {}, 1.095443),
        ("opo", {}, 1 - 2 / 12),
        ("grpo_lambda_traces", {"lowest": -0.1}, 1.49970006),
    ],
)
def test_golden_advantages(name, options, want):
    mask = np.arange(5) < LENGTHS[..., None]
    got = on_tokens(name, [[1, 0, 0, 0], [1, 1, 1, 0]], options=options, mask=mask, lengths=LENGTHS)
    close(got[0, 0, 0], want, atol=2e-6)
    if name == "grpo_lambda_traces":
        close(got[0, 1, 0], -0.1)


def test_golden_dapo_overlong():
    """Punished by tokens: the second of the right ones costs half a reward."""
    options = {"overlong_limit": 100, "overlong_buffer": 20, "ddof": 0, "eps": 0.0}
    got = on_tokens("dapo", [[1, 1, 0, 0]], options=options, lengths=np.array([[50, 90, 10, 10]]))
    close(got[0, :, 0], np.array([0.625, 0.125, -0.375, -0.375]) / 0.41457809)
    with pytest.raises(ValueError, match="overlong_limit=9 with overlong_buffer=None"):
        variants.get("dapo", overlong_limit=9)


def test_needs_are_checked():
    variants.check_needs(variants.get("xrpo"), {"rollout_plan", "critic"})
    for name, need in (("xrpo", "rollout_plan.*allocate"), ("culling", "culling"), ("nthr", "hidden_states")):
        with pytest.raises(ValueError, match=f"'{name}' needs {need}"):
            variants.check_needs(variants.get(name))


def test_filters():
    accuracy = {"accuracy": np.array([[0, 0], [1, 0], [1, 1]], np.float32)}
    keep = lambda name: variants.get(name).keep(accuracy, "accuracy").tolist()  # noqa: E731
    assert keep("dapo") == [False, True, False] and keep("ngrpo") == [True, True, False]
    assert variants.grpo().keep is None


def test_token_kl_is_in_the_chain_and_the_reference_asked_for():
    for name in ("reinforce_pp", "ppo"):
        variant = variants.get(name, kl_coef=0.1)
        assert variant.objective.kl_in == "token_reward" and variant.objective.needs_reference
        assert not variants.get(name).objective.needs_reference
    with pytest.raises(ValueError, match=r"token_rewards.*signals\.behavior_logps"):
        on_tokens("reinforce_pp", [[1, 0]], options={"kl_coef": 0.1})
    with pytest.raises(ValueError, match="weighted_by='words'"):
        variants.get("reinforce_pp_baseline", weighted_by="words")
    with pytest.raises(TypeError, match="clip_hi"):
        variants.grpo(clip_hi=0.3)


def test_rloo_is_dr_grpo_times_a_factor():
    rewards = np.array([[1, 0, 0, 0], [0.5, 1, 0, 0.25]])
    plain = on_tokens("dr_grpo", rewards, options={"constant": 8.0})
    close(on_tokens("rloo", rewards), 4 / 3 * plain)
    close(on_tokens("dr_grpo", rewards, options={"constant": 8.0, "leave_one_out": True}), 4 / 3 * plain)


@pytest.mark.parametrize(
    ("name", "options"), [("gspo_token", {}), ("grpo_lambda_traces", {"trace_decay": 0.0})]
)
def test_variants_that_are_another(name, options):
    """GSPO-token is GSPO at one advantage a sample; traces that decay at once are GRPO."""
    rng = np.random.default_rng(0)
    mask = np.arange(5) < np.array([[5, 3, 2], [1, 4, 5]])[..., None]
    logps = rng.normal(size=mask.shape).astype(np.float32)
    batch = types.SimpleNamespace(
        advantages=np.where(mask, rng.normal(size=(2, 3, 1)), 0).astype(np.float32),
        weights=L.loss_weights(mask, "sequence_mean"), ref_logps=logps,
        behavior_logps=logps + 1e-3 * rng.normal(size=mask.shape).astype(np.float32),
    )  # fmt: skip

    def first(variant):
        return jax.jit(jax.value_and_grad(lambda x: L.policy_loss(x, batch, variant.objective)[0]))(logps)

    got = first(variants.get(name, **options))
    want = first(variants.get("gspo" if name == "gspo_token" else "grpo"))
    jax.tree.map(close, got, want)
    assert np.abs(np.asarray(want[1])).max() > 0.01


def test_each_can_be_configured():
    """Types and defaults are such that a config section can hold them, checked as any other section's."""
    for name in variants.names():
        section = dataclasses.make_dataclass("Section", variants.annotations(name), frozen=True)
        root = dataclasses.make_dataclass("Root", [("variant", section)])
        given = {"constant": 8} if name == "dr_grpo" else {}
        built = grpojax.settings.build(root, {"variant": given | {"entropy_coef": "1e-3"}})
        assert variants.get(name, **dataclasses.asdict(built.variant)).objective.entropy_coef == 1e-3
        with pytest.raises(grpojax.errors.UserError, match="entropy_coef"):
            grpojax.settings.build(root, {"variant": given | {"entropy_coef": "much"}})
    assert variants.get("dr_grpo", aggregate="sequence_sum", constant=None).objective.constant is None
