import dataclasses
import types

import jax
import numpy as np
import pytest
from loss_examples import arrays
from oracles import close
from variant_examples import REQUIRED, built, on_tokens

import grpojax.host.errors
import grpojax.host.settings
from grpojax import advantages as A
from grpojax import losses as L
from grpojax import variants
from grpojax.advantages import Signals


def first_update(variant, rewards, lengths, size):
    """Loss and its gradient by log-prob, when the policy is still the one that drew the tokens."""
    mask = np.arange(size) < np.asarray(lengths)[..., None]
    objective = variant.objective
    logps = np.full(mask.shape, -1.0, np.float32)
    batch = types.SimpleNamespace(
        advantages=variant.advantage(np.asarray(rewards, np.float32), A.Signals(mask=mask)),
        weights=L.loss_weights(mask, objective.aggregate, constant=objective.constant),
        old_logps=None,
        ref_logps=logps,
    )
    entropy = np.ones(mask.shape, np.float32) if objective.needs_entropy else None

    def loss(x):
        return L.policy_loss(x, objective=objective, **arrays(batch), entropy=entropy)[0]

    return jax.jit(jax.value_and_grad(loss))(logps)


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
@pytest.mark.slow
def test_golden_groups(name, high, low):
    """Each prompt by itself: with the mean of both, 0.5, all rewards would be equally far from it."""
    signals = A.Signals(mask=np.ones((2, 4, 1), bool))
    variant = built(name)
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
    got = variants.get("dr_grpo", constant=3.0, clip_high=0.4, kl_coef=0.1, kl_kind="k1", kl_in="reward").objective
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
        ("my_variants.mine", {}, "'my_variants.mine' is unknown; a variant of your own is my_variants:mine"),
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


@pytest.mark.slow
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
    "dapo": {"overlong_factor": 0.5, "clip_low": 0.2, "clip_high": 0.28, "aggregate": "token_mean", "kl_coef": 0.0},
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
    "cispo": {"weight_max": 5.0, "weight_min": 0.0, "aggregate": "token_mean", "kl_coef": 0.0},
    "gpg": {"scaled": False, "aggregate": "token_mean", "kl_coef": 0.0},
    "grpo_process": {"aggregate": "sequence_mean", "kl_coef": 0.04},
    "gspo_token": {
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "aggregate": "sequence_mean",
        "ratio": "sequence_token",
    },
    "opo": {"aggregate": "sequence_sum", "kl_coef": 0.0},
    "remax": {"aggregate": "sequence_sum", "kl_coef": 0.0},
    "ppo": {"gamma": 1.0, "lam": 0.95, "clip_low": 0.2, "clip_high": 0.2, "kl_in": "token_reward"},
    "reinforce_pp": {"aggregate": "token_mean", "kl_kind": "k1", "kl_in": "token_reward", "clip_low": 0.2},
    "reinforce_pp_baseline": {"weighted_by": "tokens", "kl_kind": "k2", "kl_in": "loss"},
    "deepseek_v3_2": {"aggregate": "sequence_mean", "kl_kind": "unbiased", "off_policy_limit": 0.5},
    "high_entropy_tokens": {"fraction": 0.2, "clip_high": 0.28, "aggregate": "token_mean", "kl_coef": 0.0},
    "entropy_shaping": {"alpha": 0.4, "kappa": 2.0},
    "lp_reg": {
        "share": 0.01,
        "coef": 1.0,
        "noise": 0.02,
        "clip_low": 1.0,
        "clip_high": 9.0,
        "aggregate": "token_mean",
    },
    "rl_zvp": {"alpha": 0.1, "success": 1.0, "aggregate": "token_mean"},
    "w_reinforce": {"positive": 0.1, "negative": 1.0, "ratio": "none", "aggregate": "token_mean"},
    "magistral": {"clip_high": 0.28, "aggregate": "prompt_mean", "kl_coef": 0.0},
    "scale_rl": {"weight_max": 5.0, "aggregate": "prompt_mean"},
    "rare_token": {"limit": None, "relative_to": "sample", "positive_only": True, "aggregate": "sequence_sum"},
    "token_critic": {"bound": None, "center_bias": False, "aggregate": "sequence_sum"},
    "max_rl": {"clip_low": 0.2, "clip_high": 0.2, "aggregate": "token_mean", "kl_coef": 0.0},
    "dppo": {"divergence": "tv", "ratio_kl_coef": 0.0, "ratio_denominator": "sampler", "aggregate": "token_mean"},
    "luspo": {"clip_low": 2e-3, "clip_high": 2.5e-3, "ratio": "sequence", "aggregate": "sequence_sum"},
    "vespo": {
        "k_positive": 2.0,
        "lambda_positive": 3.0,
        "k_negative": 3.0,
        "lambda_negative": 2.0,
        "ratio": "joint",
        "aggregate": "token_mean",
    },
    "clip_cov": {
        "covariance": "clip",
        "covariance_fraction": 2e-4,
        "covariance_low": 1.0,
        "covariance_high": 5.0,
        "aggregate": "token_mean",
    },
    "kl_cov": {"covariance": "kl", "covariance_fraction": 2e-4, "covariance_coef": 1.0, "aggregate": "token_mean"},
    "gdpo": {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0, "aggregate": "sequence_mean"},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_of(name):
    got = variants.parameters(name)
    assert {k: got[k] for k in DEFAULTS[name]} == DEFAULTS[name]


LENGTHS = np.array([[2, 4, 4, 2], [1, 3, 3, 5]])


# The first number of each variant on [1, 0, 0, 0] and [1, 1, 1, 0]; GRPO's is 1.4997.
@pytest.mark.parametrize(
    ("name", "options", "want"),
    [
        ("grpo", {}, 1.49970006),
        ("rloo", {"kl_coef": 0.0}, 1.0),
        ("gspo", {}, 1.49970006),
        ("lite_ppo", {"ddof": 0, "eps": 0.0}, 1.5),
        ("lite_ppo", {"ddof": 0, "eps": 0.0, "of": "advantages"}, 1.7320508),
        ("reinforce_pp_baseline", {"weighted_by": "sequences"}, 1.7320508),
        ("reinforce_pp_baseline", {}, 1.99323179),
        ("gpg", {}, 0.75),
        ("gpg", {"scaled": True}, 1.49970006),
        ("scale_rl", {"ddof": 0, "eps": 0.0}, 1.7320508),
        ("deepseek_v3_2", {}, 0.75),
        ("pass_at_k", {"k": 1}, 1.73205081),
        ("pass_at_k", {"k": 2}, 1.0),
        ("pass_at_k_margin", {}, 1.0),
        ("ngrpo", {}, 1.095443),
        ("opo", {}, 1 - 2 / 12),
        ("dppo", {}, 1.49970006),
        ("max_rl", {}, 3.0),
        ("luspo", {}, 1.49970006),
        ("vespo", {}, 1.49970006),
        ("clip_cov", {}, 1.49970006),
        ("kl_cov", {}, 1.49970006),
        ("gdpo", {"ddof": 0, "eps": 0.0}, 1.7320508),
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
    """Punished by tokens: the second of the right ones loses a quarter of a reward, by the paper's factor half."""
    options = {"overlong_limit": 100, "overlong_buffer": 20, "ddof": 0, "eps": 0.0}
    got = on_tokens("dapo", [[1, 1, 0, 0]], options=options, lengths=np.array([[50, 90, 10, 10]]))
    close(got[0, :, 0], np.array([0.5625, 0.3125, -0.4375, -0.4375]) / 0.44633928)
    options["overlong_factor"] = 1.0
    got = on_tokens("dapo", [[1, 1, 0, 0]], options=options, lengths=np.array([[50, 90, 10, 10]]))
    close(got[0, :, 0], np.array([0.625, 0.125, -0.375, -0.375]) / 0.41457809)


def test_a_right_sample_at_the_limit_is_still_better_than_a_wrong_one():
    """Of a group of 8 with four right: A = 0.13; with the paper's factor, for rewards of ±1, -0.72."""
    lengths = np.array([[100, 10, 10, 10, 10, 10, 10, 10]])
    for factor, want in ((0.5, 0.13), (1.0, -0.72)):
        options = {"overlong_limit": 100, "overlong_buffer": 20, "overlong_factor": factor}
        got = on_tokens("dapo", [[1, 1, 1, 1, 0, 0, 0, 0]], options=options, lengths=lengths)
        close(got[0, 0, 0], want, atol=5e-3)
    with pytest.raises(ValueError, match="overlong_limit=9 with overlong_buffer=None"):
        variants.get("dapo", overlong_limit=9)


def test_needs_are_checked():
    variants.check_needs(variants.get("xrpo"), {"rollout_plan", "critic"})
    for name, need in (("xrpo", "rollout_plan.*allocate"), ("culling", "culling"), ("nthr", "hidden_states")):
        with pytest.raises(ValueError, match=f"'{name}' needs {need}"):
            variants.check_needs(variants.get(name))


def test_filters():
    accuracy = {"accuracy": np.array([[0, 0], [1, 0], [1, 1]], np.float32)}

    def keep(name):
        return variants.get(name).keep(accuracy, "accuracy").tolist()

    assert keep("dapo") == [False, True, False] and keep("ngrpo") == [True, True, False]
    assert variants.grpo().keep is None


def test_scale_rl_retires_prompts_and_keeps_the_rest_of_the_step():
    """A pass rate of 0.9 leaves the *later epochs*; this step's group still has a wrong sample to learn from."""
    accuracy = {"accuracy": np.array([[1] * 19 + [0], [1] * 20, [0] * 20], np.float32)}
    scale_rl = variants.scale_rl()
    assert scale_rl.keep(accuracy, "accuracy").tolist() == [True, False, False] and scale_rl.retire == 0.9
    assert {n for n in variants.names() if built(n).retire is not None} == {"scale_rl", "culling"}


SOURCES = {
    "cispo": "2506.13585", "dapo": "2503.14476", "deepseek_v3_2": "2512.02556", "distill": "2306.13649",
    "dr_grpo": "2503.20783", "dual_clip": "1912.09729", "entropy_shaping": "2506.14758", "gmpo": "2507.20673",
    "gpg": "2504.02546",
    "grpo": "2402.03300", "grpo_lambda_length": "2505.18086", "grpo_lambda_traces": "2510.00194",
    "grpo_process": "2402.03300", "gspo": "2507.18071", "gspo_token": "2507.18071", "gtpo": "2508.03772",
    "high_entropy_tokens": "2506.01939", "lite_ppo": "2508.08221", "llds": "2512.04220", "magistral": "2506.10910",
    "ngrpo": "2509.18851", "nthr": "2505.18830", "opo": "2505.23585", "pass_at_k": "2508.10751",
    "pass_at_k_margin": "2503.19595", "ppo": "1707.06347", "reinforce_pp": "2501.03262",
    "reinforce_pp_baseline": "2501.03262", "remax": "2310.10505", "rloo": "2402.14740", "sapo": "2511.20347",
    "scale_rl": "2510.13786", "xrpo": "2510.06672", "dppo": "2602.04879", "max_rl": "2602.02710", "luspo": "2602.05261",
    "vespo": "2602.10693", "rl_zvp": "2509.21880", "lp_reg": "2510.03222", "w_reinforce": "2506.01347",
    "clip_cov": "2505.22617", "kl_cov": "2505.22617", "gdpo": "2601.05242",
}  # fmt: skip
DEPLOYED = {
    "cispo", "deepseek_v3_2", "grpo", "gspo", "gspo_token", "magistral", "ppo", "sapo",
}  # fmt: skip


def test_sources_and_grades():
    for name in variants.names():
        variant = built(name)
        source = SOURCES.get(name)
        assert source in variant.citation if source else "unpublished" in variant.citation
        assert source is None or source in getattr(variants, name).__doc__
        assert (variant.evidence == "deployed") == (name in DEPLOYED), name


def test_success_is_judged_by_the_outcome_where_there_is_one():
    """All wrong, two with a format bonus: judged by the sum of rewards nobody would have failed."""
    signals = {"outcome": np.zeros((1, 4), np.float32)}
    got = on_tokens("negative_advantage", [[0.1, 0, 0, 0.1]], options={"c": 0.5}, **signals)
    close(got, np.full((1, 4, 1), -0.5))
    assert (on_tokens("negative_advantage", [[0.1, 0, 0, 0.1]]) > 0).any()
    outcome = {"outcome": np.array([[1, 0, 0, 0]], np.float32)}
    close(on_tokens("pass_at_k", [[0.9, 0.8, 0, 0]], options={"k": 1}, **outcome)[0, 0, 0], 1.73205081)


def test_golden_negative_advantage():
    """The text's loss, c Σ log p: sums over tokens; with the mean over samples half of it, and NGRPO-like c a third."""
    probs = np.array([[[0.5, 0.4], [0.2, 0.9]]])
    mask = np.ones((1, 2, 2), bool)
    for c, want in ((1.0, -1.66211817), (1 / 3, -1.66211817 / 3)):
        advantages = on_tokens("negative_advantage", [[0, 0]], size=2, options={"c": c})
        batch = types.SimpleNamespace(
            advantages=advantages, weights=L.loss_weights(mask, "sequence_sum"), old_logps=None
        )
        objective = L.Objective(surrogate=L.reinforce(), aggregate="sequence_sum")
        loss = L.policy_loss(np.log(probs).astype(np.float32), objective=objective, **arrays(batch))[0]
        close(loss, want, atol=1e-6)
        close(2 * loss, {1.0: -3.32423634, 1 / 3: -1.10807878}[c], atol=1e-6)


def test_rloo_is_dr_grpo_times_a_factor():
    rewards = np.array([[1, 0, 0, 0], [0.5, 1, 0, 0.25]])
    plain = on_tokens("dr_grpo", rewards, options={"constant": 8.0})
    close(on_tokens("rloo", rewards, options={"kl_coef": 0.0}), 4 / 3 * plain)
    close(on_tokens("dr_grpo", rewards, options={"constant": 8.0, "leave_one_out": True}), 4 / 3 * plain)


@pytest.mark.parametrize(("name", "options"), [("gspo_token", {}), ("grpo_lambda_traces", {"trace_decay": 0.0})])
def test_variants_that_are_another(name, options):
    """GSPO-token is GSPO at one advantage a sample; traces that decay at once are GRPO."""
    rng = np.random.default_rng(0)
    mask = np.arange(5) < np.array([[5, 3, 2], [1, 4, 5]])[..., None]
    logps = rng.normal(size=mask.shape).astype(np.float32)
    batch = types.SimpleNamespace(
        advantages=np.where(mask, rng.normal(size=(2, 3, 1)), 0).astype(np.float32),
        weights=L.loss_weights(mask, "sequence_mean"), ref_logps=logps,
        old_logps=logps + 1e-3 * rng.normal(size=mask.shape).astype(np.float32),
    )  # fmt: skip

    def first(variant):
        return jax.jit(jax.value_and_grad(lambda x: L.policy_loss(x, objective=variant.objective, **arrays(batch))[0]))(
            logps
        )

    got = first(variants.get(name, **options))
    want = first(variants.get("gspo" if name == "gspo_token" else "grpo"))
    jax.tree.map(close, got, want)
    assert np.abs(np.asarray(want[1])).max() > 0.01


def test_options_of_all_are_the_objectives():
    """With its types and defaults; whatever else a method shares with others it has from one more base."""
    objective = {f.name: f for f in dataclasses.fields(L.Objective)}
    for field in dataclasses.fields(variants.Method):
        assert (field.type, field.default) == (objective[field.name].type, objective[field.name].default), field.name
    for name in variants.names():
        section, *bases = [c for c in variants.section(name).__mro__ if dataclasses.is_dataclass(c)]
        assert section.__name__ == name and bases[-1] is variants.Method and len(bases) <= 2


def test_each_can_be_configured():
    """Types and defaults are such that a config section can hold them, checked as any other section's."""
    for name in variants.names():
        root = dataclasses.make_dataclass("Root", [("variant", variants.section(name))])
        given = REQUIRED.get(name, {})
        built = grpojax.host.settings.build(root, {"variant": given | {"entropy_coef": "1e-3"}})
        assert variants.get(name, **dataclasses.asdict(built.variant)).objective.entropy_coef == 1e-3
        with pytest.raises(grpojax.host.errors.UserError, match="entropy_coef"):
            grpojax.host.settings.build(root, {"variant": given | {"entropy_coef": "much"}})
    assert variants.get("dr_grpo", aggregate="sequence_sum", constant=None).objective.constant is None


@pytest.mark.parametrize("groups", ["all_fail", "all"])
def test_joint_likelihoods_teach_in_whatever_unit(groups):
    """Products around 1e-6 are far under eps and would have no advantage."""
    rule = variants.gt_likelihood(likelihood="joint", groups=groups).advantage
    mask, ratios = np.ones((1, 4, 1), bool), np.array([[1, 2, 5, 0.1]], np.float32)

    def advantages(likelihood):
        signals = Signals(mask=mask, likelihood=likelihood.astype(np.float32))
        return np.asarray(rule(np.zeros((1, 4), np.float32), signals))[0, :, 0]

    want = (ratios - ratios.mean()) / ratios.std(ddof=1)
    for unit in (1e-1, 1e-6, 1e-20, 1e-34):
        np.testing.assert_allclose(advantages(unit * ratios), want[0], rtol=3e-4)
    assert not advantages(0 * ratios).any()
    np.testing.assert_allclose(advantages(np.array([[1e-6, np.nan, 1e-6, 0]])) > 0, [True, False, True, False])
    # The geometric mean does not fall with the length, and keeps its unit.
    plain = variants.gt_likelihood(groups=groups).advantage(
        np.zeros((1, 4), np.float32), Signals(mask=mask, likelihood=np.array([[0.4, 0.9, 0.1, 0.3]], np.float32))
    )
    values = np.array([0.4, 0.9, 0.1, 0.3])
    np.testing.assert_allclose(plain[0, :, 0], (values - values.mean()) / (values.std(ddof=1) + 1e-4), rtol=1e-5)


def test_the_table_says_what_was_not_verified():
    rows = {row.split("|")[1].strip(): row.split("|")[9].strip() for row in variants.table().splitlines()[2:]}
    assert rows["pass_at_k"] == "the objective" and "aggregates" in rows["dppo"] and rows["rloo"] == "-"
    for name in variants.names():
        constant = {"constant": 4.0} if name == "dr_grpo" else {"teacher": "x"} if name == "distill" else {}
        made = variants.get(name, **constant)
        text = getattr(variants, name).__doc__
        assert made.unverified or not any(x in text for x in ("not checked", "unconfirmed", "not disclose")), name


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"answer_weight": 1.5}, r"answer_weight=1\.5: must be in \[0, 1\]"),
        ({"marker": "####"}, "marker='####': is not read at answer_weight=1"),
        ({"answer_weight": 0.5, "marker": " "}, "give the text before an answer"),
    ],
)
def test_options_of_llds_that_cannot_be(options, said):
    with pytest.raises(ValueError, match=said):
        variants.llds(**options)
