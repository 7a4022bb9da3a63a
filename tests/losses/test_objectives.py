"""Ratios, surrogates, corrections and terms beyond PPO's: `test_losses` holds the loss itself."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_examples import DELTA, LENGTHS, LOGITS, OLD, OTHER, Batch, G, P, T, compiled, example, masks
from oracles import close

from grpojax import losses as L

NAN = float("nan")

# --- further surrogates and ratios

SURROGATES = {
    "clipped": L.clipped(low=0.2, high=0.2),
    "dual": L.clipped(low=0.2, high=0.2, dual=1.2),
    "unclipped": L.unclipped(),
    "reinforce": L.reinforce(),
    "cispo": L.cispo(weight_max=1.28),
    "cispo capped": L.cispo(weight_max=5.0),
    "sapo": L.soft_adaptive(),
    "gmpo": L.geometric(low=0.2, high=0.2),
}
WIDE = L.clipped(low=1.0, high=9.0)


# One sample of four tokens, log-ratios `DELTA`: objective, advantage, loss, gradient. A broken version gives the row of
# a neighbour: joint for geometric mean, an inverted side, a weight that is differentiated.
@pytest.mark.parametrize(
    ("options", "advantage", "loss", "gradient"),
    [
        ({"surrogate": SURROGATES["dual"]}, 1, -0.99930464, [0, -0.18520456, -0.27629273, -0.23780736]),
        ({"surrogate": SURROGATES["dual"]}, -1, 1.01410009, [0, 0, 0.27629273, 0.23780736]),
        ({"surrogate": SURROGATES["cispo"]}, 1, 1.12908897, [-0.32, -0.18520456, -0.27629273, -0.23780736]),
        ({"surrogate": SURROGATES["cispo"]}, -1, -1.12908897, [0.32, 0.18520456, 0.27629273, 0.23780736]),
        (
            {"surrogate": SURROGATES["cispo capped"]},
            1,
            1.14131426,
            [-0.3374647, -0.18520456, -0.27629273, -0.23780736],
        ),
        ({"surrogate": SURROGATES["reinforce"]}, 1, 1.2375, [-0.25] * 4),
        ({"surrogate": SURROGATES["reinforce"]}, -1, -1.2375, [0.25] * 4),
        ({"surrogate": WIDE, "ratio": "sequence"}, 1, -1.01257845, [-0.25314461] * 4),
        ({"surrogate": WIDE, "ratio": "sequence_token"}, 1, -1.01257845, [-0.25314461] * 4),
        ({"surrogate": WIDE, "ratio": "sequence_token"}, -1, 1.01257845, [0.25314461] * 4),
        ({"surrogate": L.clipped(low=3e-4, high=4e-4), "ratio": "sequence"}, 1, -1.0004, [0] * 4),
        (
            {"surrogate": L.clipped(low=3e-4, high=4e-4), "ratio": "sequence"},
            -1,
            1.01257845,
            [0.25314461] * 4,
        ),
        (
            {"surrogate": SURROGATES["gmpo"], "aggregate": "sequence_mean"},
            1,
            -0.9875778,
            [0, -0.24689445, -0.24689445, -0.24689445],
        ),
        (
            {"surrogate": SURROGATES["gmpo"], "aggregate": "sequence_mean"},
            -1,
            1.038212,
            [0.259553, 0, 0.259553, 0.259553],
        ),
        (
            {"surrogate": SURROGATES["sapo"]},
            1,
            -2.03622649,
            [-0.32734525, -0.18212876, -0.27553012, -0.237666],
        ),
        ({"surrogate": SURROGATES["sapo"]}, -1, 1.94093368, [0.32633097, 0.18181735, 0.27545211, 0.23765152]),
        ({"surrogate": L.unclipped(), "ratio": "own"}, 1, -1, [-0.25] * 4),
        ({"surrogate": L.unclipped(), "ratio": "own"}, -1, 1, [0.25] * 4),
        (
            {"ratio": "trace", "trace_decay": 0.9},
            1,
            -1.06549999,
            [-0.62131958, -0.69035509, -0.49749301, -0.25395597],
        ),
        (
            {"ratio": "trace", "trace_decay": 0.9},
            -1,
            1.10296469,
            [0.95878429, 0.69035509, 0.49749301, 0.25395597],
        ),
    ],
)
def test_golden_objectives(options, advantage, loss, gradient):
    mask = np.ones((1, 1, 4), bool)
    options = {"aggregate": "token_mean"} | options
    batch = Batch(
        weights=L.loss_weights(mask, "token_mean"),
        advantages=jnp.full((1, 1, 4), float(advantage)),
        behavior_logps=OLD[None, None],
    )
    (value, _), (got, _) = compiled(L.Objective(**options))((OLD + DELTA)[None, None], batch, None)
    close(value, loss)
    close(got[0, 0], gradient)


@pytest.mark.parametrize(
    ("advantage", "loss", "broken"),
    [(1, -1.0004, "the joint ratio is 1.22140276"), (-1, 1.0512711, "the joint ratio is 1.22140276")],
)
def test_golden_gspo(advantage, loss, broken):
    """Without 1/|y| the second loss would be the joint ratio, 1.2214."""
    delta = jnp.array([[0.1, -0.2, 0.3, 0.0]])
    ratios = L.log_ratio(delta, jnp.zeros((1, 4)), jnp.ones((1, 4), bool), "sequence")
    close(jnp.exp(ratios), 1.0512711)
    close(L.clipped(low=3e-4, high=4e-4)(ratios, jnp.full((1, 4), float(advantage))), loss)


def test_golden_gmpo():
    for advantage, loss in ((1.0, -0.95122942), (-1.0, 1.16183424)):
        got = L.geometric()(jnp.array([0.9, -0.1, 0.2, -0.7]), advantage, sequence_mean=jnp.mean)
        close(got, loss)


@pytest.mark.parametrize(
    ("tau", "ratio", "value", "weight"),
    [
        (1.0, 0.5, 1.51016268, 0.94001485),
        (1.0, 2.0, 2.92424341, 0.78644773),
        (1.05, 2.0, 2.82199962, 0.76810979),
    ],
)
def test_golden_sapo(tau, ratio, value, weight):
    """The weight is on the log-prob's gradient: times the ratio."""
    f = L.soft_adaptive(tau_positive=tau, tau_negative=9.0)
    loss, gradient = jax.value_and_grad(f)(jnp.log(ratio), 1.0)
    close(loss, -value)
    close(gradient, -weight * ratio)


def test_golden_dual_clip():
    close(L.clipped(dual=3.0)(jnp.log(5.0), -1.0), 3.0)  # 5 without
    close(L.clipped(dual=3.0)(jnp.log(5.0), 1.0), -1.2)
    with pytest.raises(ValueError, match="dual=1.0"):
        L.clipped(dual=1.0)


@pytest.mark.parametrize(
    ("level", "decay", "traces"),
    [
        ("trace", 0.9, [0.1, -0.11, -0.049]),
        ("trace_both", 0.9, [0.1, -0.1, -0.03]),
        ("trace", 1.0, [0.1, -0.1, -0.05]),
        ("trace_both", 1.0, [0.1, -0.1, -0.05]),
        ("trace", 0.0, [0.1, -0.2, 0.05]),  # GRPO
    ],
)
def test_golden_traces(level, decay, traces):
    """Decayed by position in place of lag, the second would be -0.08."""
    got = L.log_ratio(jnp.array([0.1, -0.2, 0.05]), jnp.zeros(3), jnp.ones(3, bool), level, decay=decay)
    close(got, traces)


def test_traces_weigh_early_tokens_more():
    """At ratio 1: (1 - 0.9^(T - j)) / (1 - 0.9) times."""
    mask = jnp.array([True] * 4 + [False])
    gradient = jax.grad(lambda x: L.log_ratio(x, None, mask, "trace", decay=0.9).sum())(jnp.zeros(5))
    close(gradient, [3.439, 2.71, 1.9, 1, 0])


LEVELS = {
    "token": None,
    "sequence": None,
    "sequence_token": None,
    "trace": 0.9,
    "trace_both": 0.8,
    "own": None,
}


@jax.jit
def all_levels(logps, behavior, mask):
    def ratio(level, logps):
        return L.log_ratio(logps, behavior, mask, level, decay=LEVELS[level])

    weights = jnp.arange(1.0, T + 1)  # tells the tokens of a gradient apart
    gradient = lambda level: jax.grad(lambda x: (weights * ratio(level, x)).sum())(logps)  # noqa: E731
    return {level: (ratio(level, logps), gradient(level)) for level in LEVELS}


@settings(max_examples=20, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 999))
def test_log_ratio_oracle(lengths, seed):
    mask, rng = masks(lengths), np.random.default_rng(seed)
    plant = lambda x: np.where(mask, x, NAN).astype(np.float32)  # noqa: E731
    logps, behavior = (plant(rng.normal(scale=0.3, size=mask.shape)) for _ in range(2))
    got = all_levels(logps, behavior, mask)
    for level, decay in LEVELS.items():
        close(got[level][0], oracles.log_ratio(logps, behavior, mask, level, decay), atol=1e-5)
        if level in ("token", "sequence_token", "own"):
            close(got[level][1], np.where(mask, np.arange(1.0, T + 1), 0))
        elif level == "sequence":
            totals = np.where(mask, np.arange(1.0, T + 1), 0).sum(-1, keepdims=True)
            close(got[level][1], np.where(mask, totals / np.maximum(mask.sum(-1, keepdims=True), 1), 0))


def test_ratio_1_is_exact():
    """Of ``lp - sg(lp) + s`` from left to right a rounding of s is left; and at ratio 1 all clips have one gradient."""
    logps, batch, _ = example()
    same = dataclasses.replace(batch, behavior_logps=logps)
    ratios = all_levels(logps, logps, np.ones((P, G, T), bool))
    for level in ("token", "sequence", "sequence_token", "own"):
        assert not np.asarray(ratios[level][0]).any()
    gradients = {
        name: compiled(L.Objective(surrogate=surrogate))(logps, same, None)[1][0]
        for name, surrogate in SURROGATES.items()
    }
    for name, gradient in gradients.items():
        close(gradient, -batch.weights * batch.advantages), name


@pytest.mark.parametrize("name", [n for n in SURROGATES if n != "gmpo"])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 999))
def test_surrogate_oracle(name, seed):
    surrogate = SURROGATES[name]
    logps, batch, _ = example(seed)
    (loss, _), _ = compiled(L.Objective(surrogate=surrogate))(logps, batch, None)
    options = dataclasses.asdict(surrogate)
    want = sum(
        float(batch.weights[i])
        * oracles.token_loss(type(surrogate).__name__, float(logps[i]) - float(batch.behavior_logps[i]),
                             float(batch.advantages[i]), float(logps[i]), **options)
        for i in zip(*np.nonzero(batch.weights), strict=True)
    )  # fmt: skip
    close(loss, want, atol=2e-5)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 999))
def test_geometric_oracle(seed):
    logps, batch, _ = example(seed)
    (loss, _), _ = compiled(L.Objective(surrogate=SURROGATES["gmpo"]))(logps, batch, None)
    mask, want = np.asarray(batch.weights) > 0, 0.0
    for p, g in np.argwhere(mask.any(-1)):
        deltas = (logps - batch.behavior_logps)[p, g][mask[p, g]].astype(float)
        want += oracles.geometric(deltas, float(batch.advantages[p, g, 0]), 0.2, 0.2) / (P * G)
    close(loss, want, atol=2e-5)


def test_kl_and_llds_are_of_tokens_whatever_the_ratio():
    """With the sample's ratio the unbiased KL would no longer be one."""
    logps, batch, _ = example(4)
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    share = L.displacement_weights(np.where(batch.weights > 0, batch.advantages, -1), batch.weights > 0)
    batch = types.SimpleNamespace(**fields, displacement_weights=share)
    terms = {"kl_coef": 0.3, "kl_kind": "unbiased", "llds_coef": 0.2}
    levels = [L.Objective(**terms), L.Objective(ratio="sequence", **terms), L.Objective(ratio="own", **terms)]
    token, *others = (L.policy_loss(logps, batch, objective)[1] for objective in levels)
    for other in others:
        assert abs(other["policy_loss"] - token["policy_loss"]) > 1e-4
        for name in ("kl_loss", "llds_loss"):
            close(other[name], token[name])
            assert token[name] > 1e-3


def test_wide_cispo_is_reinforce_with_a_weight():
    logps, batch, _ = example()
    _, (got, _) = compiled(L.Objective(surrogate=L.cispo(weight_max=1e9)))(logps, batch, None)
    used = np.asarray(batch.weights) > 0
    ratio = np.where(used, np.exp(logps - batch.behavior_logps), 0)
    close(got, -batch.weights * batch.advantages * ratio)


# --- samples that share rows


def test_rows_of_several_samples_give_the_same_loss():
    """A mean over the row in place of the sample would change all of the sequence levels."""
    rng = np.random.default_rng(0)
    a, b = 4, 3  # two samples, alone and back to back; then two places of padding
    rows = {}
    for field, scale in (("logps", 1), ("behavior_logps", 1), ("sampler_logps", 1), ("advantages", 0)):
        x = np.full((2, T), NAN, np.float32)
        x[0, :a], x[1, :b] = (rng.normal(size=a), rng.normal(size=b)) if scale else (-1.0, 0.7)
        rows[field] = x
    mask = masks([a, b])
    weights = np.asarray(L.loss_weights(mask[None], "sequence_mean"))[0]
    share = np.asarray(L.displacement_weights(np.nan_to_num(rows["advantages"]), mask))
    rows |= {
        "weights": weights,
        "displacement_weights": share,
        "actions": np.array([[1, 1, 2, 2, 0, 0, 0]] * 2),
    }
    packed = {name: np.concatenate([x[0, :a], x[1, :b], np.zeros(2, x.dtype)])[None] for name, x in rows.items()}
    packed["segments"] = np.array([[1] * a + [2] * b + [0] * 2], np.int32)
    packed["actions"] = np.array([[1, 1, 2, 2, 3, 3, 4, 0, 0]], np.int32)
    objectives = {level: L.Objective(ratio=level, trace_decay=decay) for level, decay in LEVELS.items()}
    objectives["gmpo"] = L.Objective(surrogate=SURROGATES["gmpo"])
    objectives["weights"] = L.Objective(importance="mask", importance_level="geometric", importance_high=5.0)
    objectives["joint"] = L.Objective(importance="truncate", importance_level="sequence", off_policy_limit=0.1)
    for gate in ("token", "action", "response"):
        objectives[gate] = L.Objective(llds_coef=1.0, llds_gate=gate)

    @jax.jit
    def losses(batch):
        batch = {"segments": None, "ref_logps": None} | batch
        logps = batch.pop("logps")
        f = lambda x, o: L.policy_loss(x, types.SimpleNamespace(**batch), o)[0]  # noqa: E731
        return {name: jax.value_and_grad(f)(logps, o) for name, o in objectives.items()}

    apart, together = losses(rows), losses(packed)
    for name in objectives:
        close(together[name][0], apart[name][0]), name
        gradient = np.asarray(apart[name][1])
        close(together[name][1][0], np.concatenate([gradient[0, :a], gradient[1, :b], [0, 0]]))
        assert np.abs(gradient).sum() > 0.01 or name == "joint"


# --- importance weights

TRAIN, SAMPLER = (np.log(np.array(x, np.float32)) for x in ([0.5, 0.3, 0.2, 0.1], [0.4, 0.5, 0.05, 0.1]))


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, [1.25, 0.6, 2, 1]),
        ({"mode": "truncate", "high": 5.0}, [1.25, 0.6, 4, 1]),
        ({"mode": "mask"}, [1.25, 0.6, 0, 1]),  # clamped instead it would be [1.25, 0.6, 2, 1]
        ({"mode": "mask", "low": 0.7}, [1.25, 0, 0, 1]),
        ({"level": "sequence"}, [2.0] * 4),
        ({"level": "sequence", "high": 9.0}, [3.0] * 4),
        ({"level": "sequence", "mode": "mask"}, [0.0] * 4),
        ({"level": "geometric", "mode": "mask"}, [1.31607401] * 4),
    ],
)
def test_golden_importance(options, want):
    close(L.importance_correction(TRAIN, SAMPLER, np.ones(4, bool), **options), want)
    gradient = jax.grad(lambda x: L.importance_correction(x, SAMPLER, np.ones(4, bool), **options).sum())(TRAIN)
    assert not np.asarray(gradient).any()


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_importance_oracle(mode, level):
    logps, batch, _ = example(5)
    mask = np.asarray(batch.weights) > 0
    plant = lambda x: np.where(mask, x, np.float32(200))  # noqa: E731
    got = L.importance_correction(plant(logps), plant(batch.ref_logps), mask, mode, level=level)
    close(got, oracles.importance(logps, batch.ref_logps, mask, mode, level), atol=1e-4)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"mode": "clip"}, "'clip'.*truncate"),
        ({"level": "word"}, "'word'.*geometric"),
        ({"mode": "truncate", "low": 0.5}, "low=0.5.*'mask'"),
    ],
)
def test_importance_refuses(options, names):
    with pytest.raises(ValueError, match=names):
        L.importance_correction(TRAIN, SAMPLER, np.ones(4, bool), **options)


def test_importance_in_the_loss():
    """It multiplies the policy's term, not the KL, and is between behaviour (or the policy itself) and the sampler."""
    logps, batch, _ = example(2)
    mask = np.asarray(batch.weights) > 0
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    sampler = logps + np.random.default_rng(1).normal(scale=0.3, size=logps.shape).astype(np.float32)
    objective = L.Objective(surrogate=L.unclipped(), kl_coef=0.5, importance="truncate", importance_high=1.1)
    assert objective.needs_sampler_logps and not L.Objective().needs_sampler_logps
    for own in (True, False):
        behavior = None if own else batch.behavior_logps
        with_sampler = types.SimpleNamespace(**fields | {"behavior_logps": behavior, "sampler_logps": sampler})
        loss, metrics = L.policy_loss(logps, with_sampler, objective)
        weight = np.minimum(np.exp((logps if own else behavior) - sampler), 1.1)
        ratio = 1.0 if own else np.exp(logps - behavior)
        want = -(np.where(mask, batch.weights * weight * ratio * batch.advantages, 0)).sum()
        close(metrics["policy_loss"], want)
        close(metrics["importance_sum"], weight[mask].sum(), atol=1e-4)
        close(loss, want + 0.5 * metrics["kl_loss"])
    with pytest.raises(ValueError, match="importance='truncate'.*batch.sampler_logps"):
        L.policy_loss(logps, batch, objective)
    with pytest.raises(ValueError, match="off_policy_limit=0.5.*batch.sampler_logps"):
        L.policy_loss(logps, batch, L.Objective(off_policy_limit=0.5))


@pytest.mark.parametrize(("advantage", "limit", "kept"), [(-1, 0.7, 0), (-1, 0.9, 1), (1, 0.7, 1), (0, 0.7, 1)])
def test_golden_off_policy_mask(advantage, limit, kept):
    """The mean fall is 0.8; the sum, 1.6, would mask at a limit of 0.9 too. Right samples stay."""
    new, old = jnp.array([-1.2, -1.4, NAN]), jnp.array([-0.5, -0.5, NAN])
    mask = jnp.array([True, True, False])
    close(L.off_policy_mask(new, old, jnp.full(3, float(advantage)), mask, limit)[:2], kept)
    batch = types.SimpleNamespace(
        weights=jnp.array([0.5, 0.5, 0]), advantages=jnp.full(3, float(advantage)), behavior_logps=None, sampler_logps=old
    )  # fmt: skip
    loss, metrics = L.policy_loss(new, batch, L.Objective(off_policy_limit=limit))
    close(loss, -advantage * kept)
    close(metrics["off_policy_sum"], 2.0 * (1 - kept))


# --- covariance

COV = {
    "advantages": np.array([1, 1, -1, -1], np.float32),
    "logps": np.array([-0.1, -2, -0.5, -3], np.float32),
}


def test_golden_covariance():
    """Not centred, it would be [-0.1, -2, 0.5, 3]."""
    mask = np.ones(4, bool)
    cov = L.covariance(COV["logps"], COV["advantages"], mask)
    close(cov, [1.3, -0.6, -0.9, 1.6])
    np.testing.assert_array_equal(L.kl_cov(cov, mask), [0, 0, 0, 1])
    np.testing.assert_array_equal(L.kl_cov(cov, mask, fraction=0.5), [1, 0, 0, 1])
    padded = L.covariance(
        *(np.append(COV[n], np.float32(NAN)) for n in ("logps", "advantages")), np.append(mask, False)
    )
    close(padded, [1.3, -0.6, -0.9, 1.6, 0])


def test_clip_cov_draws_from_its_range():
    mask = np.append(np.ones(4, bool), False)
    cov = jnp.array([1.3, 6.0, -0.9, 1.6, 2.0])
    dropped = [~np.asarray(L.clip_cov(jax.random.key(i), cov, mask)) for i in range(20)]
    assert {int(d.sum()) for d in dropped} == {1}
    np.testing.assert_array_equal(np.any(dropped, axis=0), [1, 0, 0, 1, 0])
    np.testing.assert_array_equal(L.clip_cov(jax.random.key(0), cov, mask, fraction=0.9), [0, 1, 1, 0, 1])
    skip = np.array([True, False, False, False, False])
    np.testing.assert_array_equal(L.clip_cov(jax.random.key(0), cov, mask, fraction=0.9, skip=skip), [1, 1, 1, 0, 1])
    assert np.asarray(L.clip_cov(jax.random.key(0), 0 * cov, mask)).all()


def test_kl_cov_loss():
    f = lambda d: L.kl_cov_loss(d, jnp.array([1.0, -1.0]), jnp.array([True, False]), coef=0.5).sum()  # noqa: E731
    value, gradient = jax.value_and_grad(f)(jnp.array([-0.2, 0.3]))
    close(value, -np.exp(-0.2) + np.exp(0.3) + 0.1)
    close(gradient, [-np.exp(-0.2) - 0.5, np.exp(0.3)])


# --- LLDS

ACTIONS = np.array([[[0, 0, 1, 1]]], np.int32)


# Falls of the likelihood, gate, term.
@pytest.mark.parametrize(
    ("fall", "gate", "want"),
    [
        ([0.2, -0.1, 0.5, 0], "token", 0.175),
        ([0.2, -0.1, 0.5, 0], "action", 0.175),
        ([0.2, -0.1, 0.5, 0], "response", 0.175),
        ([0.2, -0.5, 0.5, 0], "token", 0.175),
        ([0.2, -0.5, 0.5, 0], "action", 0.125),
        ([0.2, -0.5, 0.5, 0], "response", 0.175),
    ],
)
def test_golden_llds(fall, gate, want):
    """Without the gate, the action's row is 0.175 too; without the maximum, the token's is 0.05."""
    mask = np.ones((1, 1, 4), bool)
    batch = types.SimpleNamespace(
        weights=0.25 * mask.astype(np.float32), advantages=jnp.zeros((1, 1, 4)),
        behavior_logps=jnp.zeros((1, 1, 4)), actions=ACTIONS,
        displacement_weights=L.displacement_weights(np.zeros((1, 1, 4)), mask),
    )  # fmt: skip
    loss = lambda x, c=1.0: L.policy_loss(x, batch, L.Objective(llds_coef=c, llds_gate=gate))  # noqa: E731
    logps = -jnp.array([[fall]])
    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(logps)
    close(value, want)
    close(loss(logps, 0.2)[0], 0.2 * want)
    close(metrics["llds_loss"], want)
    open_ = np.array([True, True, True, True] if want == 0.175 else [False, False, True, True])
    close(gradient[0, 0], np.where(open_ & (np.array(fall) > 0), -0.25, 0))
    with pytest.raises(ValueError, match=r"llds_coef=1\.0.*batch\.displacement_weights"):
        L.policy_loss(
            logps, types.SimpleNamespace(**vars(batch) | {"displacement_weights": None}), L.Objective(llds_coef=1.0)
        )  # fmt: skip


def test_golden_llds_weights():
    """Of the wrong sample's tokens none counts, but "all" divides by them: 0.0625 in place of 0.125."""
    mask = np.ones((1, 2, 4), bool)
    advantages = np.array([[[0.0] * 4, [-1.0] * 4]])
    terms = L.displacement(-jnp.array([[[0.2, -0.5, 0.5, 0], [9, 9, 9, 9]]]), mask, actions=np.repeat(ACTIONS, 2, 1))
    for options, want in (
        ({}, 0.125),
        ({"normalise": "all"}, 0.0625),
        ({"answer": ACTIONS == 1, "answer_weight": 0.25}, 0.03125),
    ):
        close((L.displacement_weights(advantages, mask, **options) * terms).sum(), want)
    for options, names in (
        ({"normalise": "none"}, "'none'"),
        ({"answer_weight": 0.5}, "answer_weight=0.5.*answer"),
    ):
        with pytest.raises(ValueError, match=names):
            L.displacement_weights(advantages, mask, **options)
    with pytest.raises(ValueError, match="'word'"):
        L.displacement(terms, mask, "word")


def test_llds_does_nothing_at_ratio_1():
    """`jnp.maximum` would push all tokens up with half of the weight."""
    gradient = jax.grad(lambda x: L.displacement(L.log_ratio(x, None, MASK4), MASK4, "token").sum())(jnp.zeros(4))
    assert not np.asarray(gradient).any()


MASK4 = np.ones(4, bool)


@settings(max_examples=15, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 999))
def test_llds_oracle(lengths, seed):
    mask, rng = masks(lengths), np.random.default_rng(seed)
    ratios = np.where(mask, rng.normal(size=mask.shape), 0).astype(np.float32)
    actions = np.sort(rng.integers(0, 3, mask.shape), -1).astype(np.int32)
    got = llds_gates(ratios, mask, actions)
    for gate in got:
        close(got[gate], oracles.displacement(ratios, mask, gate, actions))


@jax.jit
def llds_gates(ratios, mask, actions):
    return {gate: L.displacement(ratios, mask, gate, actions=actions) for gate in ("token", "action", "response")}


# --- critic and preferences


def test_golden_value_loss():
    """The smaller of the two squares would give 0.045."""
    one = lambda x: jnp.array([x, NAN])  # noqa: E731
    weights = jnp.array([1.0, 0.0])
    loss = lambda v: L.value_loss(v, one(0.4), weights, old_values=one(0.5), clip=0.2)  # noqa: E731
    value, gradient = jax.value_and_grad(loss)(one(0.9))
    close(value, 0.125)
    close(gradient, [0.5, 0])
    value, gradient = jax.value_and_grad(loss)(one(0.1))  # far under V_old: the clipped square, 0.01, is not larger
    close(value, 0.045)
    close(gradient, [-0.3, 0])
    value, gradient = jax.value_and_grad(lambda v: L.value_loss(v, one(1.4), weights, old_values=one(0.5), clip=0.2))(
        one(0.9)
    )  # clipped: 0.7 is farther from 1.4
    close(value, 0.245)
    close(gradient, [0, 0])
    close(L.value_loss(one(0.9), one(0.4), weights), 0.125)
    with pytest.raises(ValueError, match="clip=0.2.*together"):
        L.value_loss(one(0.9), one(0.4), weights, clip=0.2)


def test_golden_dpo():
    """The margin is 0.3; without the reference it would be 0.5 and the loss 0.4741."""
    close(L.dpo_loss(-10, -15, -12, -14), 0.55435524)
    gradient = jax.grad(lambda w, l: L.dpo_loss(w, l, -12.0, -14.0).sum(), argnums=(0, 1))(-10.0, -15.0)
    close(gradient, [-0.1 * 0.42555748, 0.1 * 0.42555748])


# --- what an objective refuses


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"ratio": "word"}, "ratio='word'.*sequence_token"),
        ({"ratio": "trace"}, "trace_decay=None"),
        ({"trace_decay": 0.9}, "ratio='token' with trace_decay=0.9"),
        ({"ratio": "trace", "trace_decay": 1.5}, "1.5"),
        ({"surrogate": L.geometric(), "aggregate": "token_mean"}, "geometric.*'token_mean'"),
        ({"surrogate": L.geometric(), "ratio": "sequence"}, "geometric.*'sequence'"),
        ({"importance": "clip"}, "importance='clip'"),
        ({"importance_high": 2.0}, "importance_level, _low and _high go with importance='truncate'"),
        ({"importance_level": "sequence"}, "importance_level"),
        ({"importance": "mask", "importance_low": 3.0, "importance_high": 2.0}, "no range"),
        ({"surrogate": L.reinforce(), "ratio": "sequence"}, "reinforce.*reads no ratio"),
        ({"importance": "truncate", "importance_low": 0.5}, "importance_low=0.5.*'mask'"),
        ({"llds_coef": -1.0}, "llds_coef=-1.0"),
        ({"llds_gate": "word"}, "llds_gate='word'"),
        ({"kl_in": "token_reward", "kl_coef": 0.1}, "k3.*token_reward"),
        ({"kl_in": "prompt"}, "kl_in='prompt'"),
    ],
)
def test_objective_refuses(options, names):
    with pytest.raises(ValueError, match=names):
        L.Objective(**options)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: L.cispo(weight_max=0.28), "weight_max=0.28.*ratio"),
        (lambda: L.soft_adaptive(tau_positive=0.0), "tau_positive=0.0"),
        (lambda: L.log_ratio(MASK4, None, MASK4, "token", decay=0.5), "'token'.*0.5"),
    ],
)
def test_surrogates_refuse(make, names):
    with pytest.raises(ValueError, match=names):
        make()


def test_objectives_are_values():
    assert L.Objective(surrogate=L.cispo()) == L.Objective(surrogate=L.cispo(weight_max=5.0))
    assert len({L.Objective(), L.Objective(), L.Objective(ratio="sequence")}) == 2


# --- policy gradients, exactly


@pytest.mark.parametrize("off", [False, True])
@pytest.mark.parametrize("name", ["clipped", "unclipped", "reinforce", "cispo"])
def test_policy_gradient_is_exact(name, off):
    """Enumerated over the three tokens: the gradient of Σ π A. The clips are too wide to matter, and off-policy the
    ratio corrects exactly; REINFORCE, which has none, is off there."""
    surrogate = {"clipped": WIDE, "cispo": L.cispo(weight_max=99.0)}.get(name, SURROGATES[name])
    drawn = OTHER if off else jax.nn.log_softmax(LOGITS)
    a = jnp.array([1.0, -0.5, 0.25])
    batch = Batch(weights=jnp.exp(drawn), advantages=a, behavior_logps=drawn)
    objective = L.Objective(surrogate=surrogate)
    got = jax.jit(jax.grad(lambda x: L.policy_loss(jax.nn.log_softmax(x), batch, objective)[0]))(LOGITS)
    want = -jax.grad(lambda x: (jax.nn.softmax(x) * a).sum())(LOGITS)
    if name == "reinforce" and off:
        assert np.abs(got - want).max() > 0.01
    else:
        close(got, want)


# --- constants for the gradient, masks, dtypes


def test_only_the_policy_is_differentiated():
    """Behaviour, reference and advantages are constants, even where they are made of the same array."""
    mask = np.ones((1, 2, 3), bool)
    logps = -np.abs(np.random.default_rng(0).normal(size=mask.shape)).astype(np.float32)
    advantages = np.array([[[1.0], [-1.0]]], np.float32) * mask

    def loss(logps, behavior, ref, advantages):
        batch = types.SimpleNamespace(
            weights=L.loss_weights(mask, "sequence_sum"),
            advantages=advantages,
            behavior_logps=behavior,
            ref_logps=ref,
        )
        return L.policy_loss(logps, batch, L.Objective(aggregate="sequence_sum", kl_coef=0.1))[0]

    own, *others = jax.grad(loss, (0, 1, 2, 3))(logps, logps, logps - 0.3, advantages)
    assert own.any() and not any(np.asarray(x).any() for x in others)
    close(jax.grad(lambda x: loss(x, x, x - 0.3, advantages))(logps), own)
    pair = jax.grad(L.dpo_loss, (0, 1, 2, 3))(*map(jnp.float32, (-10, -15, -12, -14)))
    assert pair[0] < 0 < pair[1] and not pair[2] and not pair[3]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "unbiased"])
def test_kl_of_a_masked_slot_is_0_in_value_and_gradient(kind):
    ref = np.array([-1.0, np.nan, 200.0], np.float32)
    mask = np.array([True, False, False])
    total = lambda lp: L.kl(lp, ref, kind, log_ratios=lp + 1.0, mask=mask).sum()  # noqa: E731
    value, gradient = jax.value_and_grad(total)(np.array([-1.5, -1.0, np.nan], np.float32))
    assert np.isfinite(value) and np.isfinite(gradient[0]) and not np.asarray(gradient[1:]).any()


def test_full_kl_is_what_the_estimators_estimate():
    p, q = jnp.array([0.2, -0.1, 0.4]), jnp.array([0.0, 0.5, -0.3])
    close(L.full_kl(p, q), 0.14084707, atol=1e-7)
    close(L.full_kl(q, p), 0.14509681, atol=1e-7)
    close(jax.grad(L.full_kl)(p, q), [-0.00205667, -0.20159464, 0.20365132], atol=1e-7)


def test_golden_joint_ratio():
    """The product of a sample's ratios; GSPO's geometric mean of them is 1.0512711."""
    delta, mask = np.array([[0.1, -0.2, 0.3, 0.0]], np.float32), np.ones((1, 4), bool)
    zero = np.zeros_like(delta)
    close(np.exp(L.log_ratio(delta, zero, mask, "joint")), np.full((1, 4), 1.22140276), atol=1e-6)
    close(np.exp(L.log_ratio(delta, zero, mask, "sequence")), np.full((1, 4), 1.0512711), atol=1e-6)
    gradient = jax.grad(lambda x: (-0.25 * jnp.exp(L.log_ratio(x, zero, mask, "sequence"))).sum())(delta)
    close(-gradient, np.full((1, 4), 0.26281777), atol=1e-6)


def test_golden_verl_sum_norm():
    """Σ l / L without the mean over samples; Dr. GRPO's constant gives half of it for two samples."""
    mask = np.arange(4) < np.array([[4, 2]])[..., None]
    losses = np.array([[[1, 2, 3, 4], [10, 20, 0, 0]]], np.float32)
    close((L.loss_weights(mask, "constant", constant=8 / 2) * losses).sum(), 5.0)
    close((L.loss_weights(mask, "constant", constant=8.0) * losses).sum(), 2.5)
    for constant in (0.0, -8.0):
        with pytest.raises(ValueError, match="must be over 0"):
            L.loss_weights(mask, "constant", constant=constant)


def test_a_prefix_that_all_share_gets_no_update_from_sums():
    """Σ A = 0 at ratio 1 under sums over tokens; under means over samples the shorter wrong ones pull it down."""
    advantages = np.array([[[1.5], [-0.5], [-0.5], [-0.5]]]) * np.ones((1, 4, 6))
    mask = np.arange(6) < np.array([[6, 2, 3, 4]])[..., None]
    push = lambda how: float((L.loss_weights(mask, how) * advantages)[..., 0].sum())  # noqa: E731
    assert abs(push("sequence_sum")) < 1e-7 and abs(push("token_mean")) < 1e-7
    assert push("sequence_mean") < -0.05


@pytest.mark.parametrize("surrogate", [L.clipped(), L.unclipped(), L.soft_adaptive()], ids=lambda s: type(s).__name__)
def test_surrogates_are_float32_inside(surrogate):
    x = jnp.array([0.1, -0.3], jnp.bfloat16)
    assert surrogate(x, x).dtype == jnp.float32


def test_surrogates_take_their_bounds_by_position():
    assert L.clipped(0.2, 0.28) == L.clipped(low=0.2, high=0.28) and L.cispo(4.0) == L.cispo(weight_max=4.0)
    for make in (lambda: L.clipped(-0.2), lambda: L.clipped(0.2, -3.0), lambda: L.geometric(low=-0.1)):
        with pytest.raises(ValueError, match="low="):
            make()


def test_clip_metrics_tell_the_side_that_was_passed():
    """A dual-clipped token has a ratio far over 1: it is no lower clip."""
    mask = np.ones((1, 1, 3), bool)
    batch = types.SimpleNamespace(
        weights=L.loss_weights(mask, "token_mean"), advantages=np.array([[[-1.0, -1.0, 1.0]]], np.float32),
        behavior_logps=np.zeros(mask.shape, np.float32),
    )  # fmt: skip
    logps = np.log(np.array([[[5.0, 0.5, 1.5]]], np.float32))
    _, metrics = L.policy_loss(logps, batch, L.Objective(surrogate=L.clipped(dual=3.0)))
    assert (metrics["clip_low_sum"], metrics["clip_high_sum"]) == (1, 2)


def test_golden_llds_token_row():
    """The row of the gradient table: 0.0875, and no half gradients where nothing fell."""
    delta = np.array([0.3, -0.3, 0.1, -0.05], np.float32)
    mask = np.ones(4, bool)
    term = lambda x: L.displacement(x, mask, "token").mean()  # noqa: E731
    close(term(delta), 0.0875)
    close(jax.grad(term)(delta), [0, -0.25, 0, -0.25])


def test_clip_cov_by_advantages_leaves_kl_and_ratios_alone():
    mask = np.ones((1, 1, 4), bool)
    rng = np.random.default_rng(1)
    logps, ref = (-np.abs(rng.normal(size=mask.shape)).astype(np.float32) for _ in range(2))
    keep = np.array([[[True, True, False, True]]])

    def metrics(advantages):
        batch = types.SimpleNamespace(
            weights=L.loss_weights(mask, "token_mean"),
            advantages=advantages,
            behavior_logps=logps - 0.1,
            ref_logps=ref,
        )
        return L.policy_loss(logps, batch, L.Objective(kl_coef=0.1, aggregate="token_mean"))[1]

    ones = np.ones(mask.shape, np.float32)
    plain, cut = metrics(ones), metrics(np.where(keep, ones, 0))
    assert plain["kl_loss"] == cut["kl_loss"] and plain["tokens"] == cut["tokens"]
    close(cut["policy_loss"], 0.75 * plain["policy_loss"], atol=1e-6)
