import dataclasses
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_examples import (
    DELTA,
    HOW,
    LENGTHS,
    LOGITS,
    NAN,
    OBJECTIVES,
    OLD,
    OTHER,
    Batch,
    G,
    P,
    T,
    compiled,
    example,
    masks,
    weigh,
)
from oracles import close

from grpojax import losses as L

# --- aggregation


# Losses [1, 2, 3, 4] and [10, 20] of one prompt's two samples, or of two prompts' one.
@pytest.mark.parametrize(
    ("how", "together", "apart"),
    [
        ("token_mean", 6.6666667, 6.6666667),
        ("sequence_mean", 8.75, 8.75),
        ("prompt_mean", 6.6666667, 8.75),
        ("sequence_sum", 20, 20),
        ("constant", 2.5, 2.5),  # 5.0 without the mean over samples
    ],
)
def test_golden_aggregation(how, together, apart):
    losses, mask = np.array([[1, 2, 3, 4], [10, 20, 0, 0]], np.float32), masks([4, 2], 4)
    for shape, want in (((1, 2, 4), together), ((2, 1, 4), apart)):
        weights = L.loss_weights(mask.reshape(shape), how, **HOW[how])
        assert weights.dtype == jnp.float32
        close((weights * losses.reshape(shape)).sum(), want)
        close(oracles.aggregate(losses.reshape(shape), mask.reshape(shape), how, **HOW[how]), want)


# The same, and a sample (in a prompt of its own) that has no token.
@pytest.mark.parametrize(
    ("how", "counted", "not_counted"),
    [
        ("token_mean", 6.6666667, 6.6666667),
        ("sequence_mean", 17.5 / 3, 8.75),
        ("prompt_mean", 17.5 / 3, 8.75),
        ("sequence_sum", 40 / 3, 20),
        ("constant", 5 / 3, 2.5),
    ],
)
def test_golden_empty_sample(how, counted, not_counted):
    """Divided by a length that is not at least 1, the empty sample's 0 / 0 is NaN."""
    losses = np.array([[[1, 2, 3, 4]], [[10, 20, 0, 0]], [[NAN] * 4]], np.float32)
    mask = masks([[4], [2], [0]], 4)
    for count_empty, want in ((True, counted), (False, not_counted)):
        weights = L.loss_weights(mask, how, count_empty=count_empty, **HOW[how])
        close(jnp.where(mask, weights * losses, 0).sum(), want)
        close(weights, oracles.loss_weights(mask, how, count_empty=count_empty, **HOW[how]))


@pytest.mark.parametrize("how", HOW)
@settings(max_examples=12, deadline=None)
@given(lengths=LENGTHS, count_empty=st.booleans(), seed=st.integers(0, 99))
def test_aggregation_oracle(how, lengths, count_empty, seed):
    mask, losses = masks(lengths), np.random.default_rng(seed).normal(size=(P, G, T)) + 1
    weights = np.asarray(weigh(how, count_empty)(mask))
    assert not weights[~mask].any() and (weights[mask] > 0).all()
    close((weights * losses).sum(), oracles.aggregate(losses, mask, how, count_empty=count_empty, **HOW[how]))


@pytest.mark.parametrize("count_empty", [True, False])
@pytest.mark.parametrize("how", HOW)
def test_weights_of_nothing_are_0(how, count_empty):
    assert not np.asarray(weigh(how, count_empty)(np.zeros((P, G, T), bool))).any()


@pytest.mark.parametrize("how", HOW)
def test_weights_permutations_and_vmap(how):
    mask, rng = masks(np.random.default_rng(0).integers(0, T + 1, (P, G))), np.random.default_rng(1)
    prompts, samples = rng.permutation(P), rng.permutation(G)
    weights = np.asarray(weigh(how)(mask))
    close(weigh(how)(mask[prompts]), weights[prompts])
    close(weigh(how)(mask[:, samples]), weights[:, samples])
    many = jax.vmap(weigh(how))(np.stack([mask, mask[prompts]]))
    close(many, np.stack([weights, weights[prompts]]))


@pytest.mark.parametrize(
    ("how", "constant", "names"),
    [
        ("constant", None, "'constant'.*None"),
        ("token_mean", 8.0, "'token_mean'.*8.0"),
        ("token-mean", None, "'token-mean'.*unknown"),
    ],
)
def test_weights_refuse(how, constant, names):
    with pytest.raises(ValueError, match=names):
        L.loss_weights(np.ones((1, 1, 1), bool), how, constant=constant)


# --- the surrogate


# One sample of four tokens: bounds, advantage, loss and gradient.
@pytest.mark.parametrize(
    ("low", "high", "advantage", "loss", "gradient"),
    [
        (0.2, 0.2, 1, -0.99930464, [0, -0.18520456, -0.27629273, -0.23780736]),
        (0.2, 0.2, -1, 1.05156479, [0.3374647, 0, 0.27629273, 0.23780736]),
        (0.2, 0.28, 1, -1.01930464, [0, -0.18520456, -0.27629273, -0.23780736]),
        (0.2, 0.28, -1, 1.05156479, [0.3374647, 0, 0.27629273, 0.23780736]),
        (0.2, 0.4, 1, -1.03676934, [-0.3374647, -0.18520456, -0.27629273, -0.23780736]),
        (0.2, 0.4, -1, 1.05156479, [0.3374647, 0, 0.27629273, 0.23780736]),
    ],
)
def test_golden_surrogate(low, high, advantage, loss, gradient):
    """Clipped whatever the sign of the advantage, the gradient would be 0 at both of the first two tokens."""
    mask = np.ones((1, 1, 4), bool)
    batch = Batch(
        weights=L.loss_weights(mask, "token_mean"),
        advantages=jnp.full((1, 1, 4), float(advantage)),
        behavior_logps=OLD[None, None],
    )
    objective = L.Objective(surrogate=L.clipped(low=low, high=high), aggregate="token_mean")
    (value, metrics), (got, _) = compiled(objective)((OLD + DELTA)[None, None], batch, jnp.zeros((1, 1, 4)))
    close(value, loss)
    close(got[0, 0], gradient)
    over = advantage > 0 and high < 0.35
    want = {"clip_high_sum": over, "clip_low_sum": advantage < 0, "ratio_sum": 4.14707772, "tokens": 4}
    for name, number in want.items():
        close(metrics[name], float(number))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.5, 1, -1.2, 0),
        (1.5, -1, 1.5, 1.5),
        (0.5, 1, -0.5, -0.5),
        (0.5, -1, 0.8, 0),
        (1.1, 1, -1.1, -1.1),
        (0.9, -1, 0.9, 0.9),
        (1.5, 0, 0, 0),
    ],
)
def test_golden_sides(ratio, advantage, loss, gradient):
    """A clip that knows no sign gives 0 for the first four gradients, an inverted one -1.5, 0, 0 and 0.5."""
    value, got = jax.value_and_grad(L.clipped())(jnp.log(ratio), jnp.float32(advantage))
    close(value, loss)
    close(got, gradient)


def test_on_the_bound_the_gradient_is_whole():
    """`jnp.clip` and `jnp.minimum` share a gradient out among equals: 0.75 here."""
    for advantage in (1.0, -1.0):
        assert jax.grad(L.clipped(low=0.0, high=0.0))(0.0, advantage) == -advantage


def test_no_update_between_rollout_and_loss():
    """At ratio 1 the loss is about 0 and says nothing; the gradient is -Σ w A ∇log π and is not 0."""
    logps, batch, entropy = example()
    advantages = jnp.asarray(batch.advantages - batch.advantages.mean(1, keepdims=True))
    mask = masks(np.random.default_rng(1).integers(1, T + 1, (P, G)))
    own = dataclasses.replace(batch, advantages=advantages, behavior_logps=None, weights=weigh("sequence_mean")(mask))
    (loss, metrics), (gradient, _) = compiled(L.Objective())(logps, own, entropy)
    close(loss, 0)
    close(gradient, -own.weights * advantages)
    assert jnp.linalg.norm(gradient) > 0.05
    assert metrics["clip_low_sum"] == metrics["clip_high_sum"] == 0
    same = dataclasses.replace(own, behavior_logps=logps)
    close(compiled(L.Objective())(logps, same, entropy)[1][0], gradient)


@pytest.mark.parametrize(
    ("how", "advantages", "loss"),
    [
        ("sequence_mean", [1.7320508, -0.5773503, -0.5773503, -0.5773503], 0),
        ("token_mean", [1.7320508, -0.5773503, -0.5773503, -0.5773503], 0.34641016),
        ("constant", [0.75, -0.25, -0.25, -0.25], 0.09375),
    ],
)
def test_golden_loss_at_ratio_1(how, advantages, loss):
    mask = masks([[2, 4, 6, 8]], 8)
    batch = Batch(
        weights=L.loss_weights(mask, how, **HOW[how]),
        advantages=jnp.broadcast_to(jnp.array(advantages)[None, :, None], mask.shape),
    )
    (value, _), (gradient, _) = compiled(L.Objective())(np.full(mask.shape, -1.0, np.float32), batch, None)
    close(value, loss)
    close(gradient, -batch.weights * batch.advantages)
    assert (np.asarray(gradient) != 0).sum() == 20


def test_log_ratio():
    mask = np.array([True, True, True, False])
    logps = np.array([-1, -90, -1, NAN], np.float32)
    old = np.array([-2, -1, -90, NAN], np.float32)
    value, gradient = jax.value_and_grad(lambda x: L.log_ratio(x, old, mask).sum())(logps)
    np.testing.assert_array_equal(L.log_ratio(logps, old, mask), [1, -20, 20, 0])
    np.testing.assert_array_equal(gradient, [1, 0, 0, 0])
    np.testing.assert_array_equal(L.log_ratio(logps, None, mask), [0, 0, 0, 0])
    gradient = jax.grad(lambda x: L.log_ratio(x, None, mask).sum())(logps)
    np.testing.assert_array_equal(gradient, [1, 1, 1, 0])
    assert L.log_ratio(jnp.zeros(4, jnp.bfloat16), None, mask).dtype == jnp.float32
    with pytest.raises(ValueError, match="'word'"):
        L.log_ratio(logps, old, mask, "word")


def test_a_ratio_beyond_float32_stays_finite():
    """exp(300) is inf in float32, and inf * 0 in its gradient is NaN."""
    _, batch, entropy = example()
    far = np.full((P, G, T), -300, np.float32)
    batch = dataclasses.replace(batch, behavior_logps=far, ref_logps=far)
    for (name, objective), logps in itertools.product(OBJECTIVES.items(), (0 * far, 2 * far)):
        got = compiled(objective)(logps, batch, entropy)
        assert jax.tree.all(jax.tree.map(lambda x: bool(jnp.isfinite(x).all()), got)), name


# --- KL to the reference


@pytest.mark.parametrize(
    ("kind", "loss", "gradient"),
    [
        ("k2", 0.0240625, [0.075, -0.075, 0.025, -0.0125]),
        ("k3", 0.02419639, [0.06479544, -0.0874647, 0.02379065, -0.01281777]),
    ],
)
def test_golden_kl_tokens(kind, loss, gradient):
    value, got = jax.value_and_grad(lambda logps: L.kl(logps, OLD, kind).mean())(OLD + DELTA)
    close(value, loss)
    close(got, gradient)


REF = jax.nn.log_softmax(jnp.array([0.0, 0.5, -0.3]))
REVERSE = [-0.00205667, -0.20159464, 0.20365132]  # the gradient of KL(π || π_ref), which is the one wanted
FORWARD = [0.04255921, -0.23632576, 0.19376655]  # that of KL(π_ref || π)


@pytest.mark.parametrize(
    ("kind", "values", "mean"),
    [
        ("k1", [0.13475475, -0.66524525, 0.63475475], 0.14084707),
        ("k2", [0.00907942, 0.22127562, 0.2014568], 0.14146963),
        ("k3", [0.00868497, 0.27972221, 0.16482022], 0.14084707),
    ],
)
def test_golden_kl_values(kind, values, mean):
    logps = jax.nn.log_softmax(LOGITS)
    close(L.kl(logps, REF, kind), values)
    close((jnp.exp(logps) * L.kl(logps, REF, kind)).sum(), mean)
    close(values, [oracles.kl(float(a), float(b), kind) for a, b in zip(logps, REF, strict=True)])


def expected_gradient(token_loss, drawn_from=None):
    """The mean gradient of ``token_loss(logps [3])`` over the three tokens there are, by enumeration."""

    def loss(logits):
        logps = jax.nn.log_softmax(logits)
        drawn = logps if drawn_from is None else drawn_from
        return (jax.lax.stop_gradient(jnp.exp(drawn)) * token_loss(logps)).sum()

    return jax.jit(jax.grad(loss))(LOGITS)


def expected_policy_gradient(objective, drawn_from=None, reward=None):
    """The same of `policy_loss`, in which a token's weight is its probability."""
    logps = jax.lax.stop_gradient(jax.nn.log_softmax(LOGITS))
    drawn = logps if drawn_from is None else drawn_from
    batch = Batch(
        weights=jnp.exp(drawn), advantages=jnp.zeros(3) if reward is None else reward(logps),
        behavior_logps=drawn_from, ref_logps=REF,
    )  # fmt: skip
    loss = lambda logits: L.policy_loss(jax.nn.log_softmax(logits), batch, objective)[0]  # noqa: E731
    return jax.jit(jax.grad(loss))(LOGITS)


def test_the_two_gradients():
    """By automatic differentiation of the sum over the vocabulary."""
    reverse = lambda x: (jax.nn.softmax(x) * (jax.nn.log_softmax(x) - REF)).sum()  # noqa: E731
    forward = lambda x: (jnp.exp(REF) * (REF - jax.nn.log_softmax(x))).sum()  # noqa: E731
    for f, value, gradient in ((reverse, 0.14084707, REVERSE), (forward, 0.14509681, FORWARD)):
        got = jax.jit(jax.value_and_grad(f))(LOGITS)
        close(got[0], value)
        close(got[1], gradient)


def test_k1_as_a_loss_has_no_gradient():
    close(expected_gradient(lambda logps: L.kl(logps, REF, "k1")), 0)


@pytest.mark.parametrize(("kind", "want"), [("k2", REVERSE), ("k3", FORWARD), ("unbiased", REVERSE)])
def test_golden_kl_gradient_on_policy(kind, want):
    close(expected_policy_gradient(L.Objective(kl_coef=1.0, kl_kind=kind)), want)
    close(expected_policy_gradient(L.Objective(kl_coef=0.25, kl_kind=kind)), np.array(want) / 4)


def test_golden_kl_gradient_off_policy():
    """Tokens of an older policy: only "unbiased" still has the gradient of the KL. With its ratio under
    stop_gradient it would have `FORWARD`."""
    close(expected_policy_gradient(L.Objective(kl_coef=1.0, kl_kind="unbiased"), OTHER), REVERSE)
    close(
        expected_policy_gradient(L.Objective(kl_coef=1.0, kl_kind="k3"), OTHER),
        [0.08833488, -0.25378392, 0.16544904],
    )
    ratios = jax.lax.stop_gradient(jax.nn.log_softmax(LOGITS)) - OTHER
    close(expected_gradient(lambda logps: L.kl(logps, REF, "unbiased", log_ratios=ratios), OTHER), FORWARD)


def test_golden_kl_in_the_reward():
    """k1 has the gradient of the KL there; k3 has that of nothing."""
    objective = L.Objective(kl_coef=1.0, kl_kind="k1", kl_in="reward")
    close(expected_policy_gradient(objective, reward=lambda x: -L.kl(x, REF, "k1")), REVERSE)
    close(
        expected_policy_gradient(objective, reward=lambda x: -L.kl(x, REF, "k3")),
        [-0.04461588, 0.03473111, 0.00988477],
    )
    close(expected_policy_gradient(objective), 0)  # nothing of it is in the loss


def test_kl_in_the_reward_is_not_in_the_loss():
    logps, batch, entropy = example()
    (loss, metrics), gradients = compiled(OBJECTIVES["k1 in the reward"])(logps, batch, entropy)
    (want, _), wanted = compiled(OBJECTIVES["policy"])(logps, batch, entropy)
    close(loss, want)
    close(gradients, wanted)
    assert metrics["kl_sum"] > 0


def test_kl_at_the_reference_is_0():
    logps, batch, entropy = example()
    batch = dataclasses.replace(batch, ref_logps=logps)
    for name in ("k2", "k3"):
        (_, metrics), _ = compiled(OBJECTIVES[name])(logps, batch, entropy)
        assert metrics["kl_loss"] == 0 and metrics["kl_sum"] == 0


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"kl_kind": "k1"}, "k1.*loss"),
        ({"kl_kind": "k2", "kl_in": "reward"}, "k2.*reward"),
        ({"kl_kind": "k3", "kl_in": "reward"}, "k3.*reward"),
        ({"kl_kind": "unbiased", "kl_in": "reward"}, "unbiased.*reward"),
        ({"kl_coef": -0.1}, "-0.1"),
    ],
)
def test_wrong_kl_is_refused(options, names):
    with pytest.raises(ValueError, match=names):
        L.Objective(**{"kl_coef": 0.1, **options})


def test_kl_refuses():
    with pytest.raises(ValueError, match="unbiased.*log_ratios"):
        L.kl(jnp.zeros(2), jnp.zeros(2), "unbiased")
    with pytest.raises(ValueError, match="'k4'"):
        L.kl(jnp.zeros(2), jnp.zeros(2), "k4")


# --- the whole loss


@pytest.mark.parametrize("name", [n for n in OBJECTIVES if n != "k1 in the reward"])
@settings(max_examples=15, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 999), how=st.sampled_from(list(HOW)), own=st.booleans())
def test_oracle(name, lengths, seed, how, own):
    objective = OBJECTIVES[name]
    logps, batch, entropy = example(seed, how, lengths)
    if own:
        batch = dataclasses.replace(batch, behavior_logps=None)
    (loss, metrics), _ = compiled(objective)(logps, batch, entropy)
    want = oracles.policy_loss(
        logps, np.asarray(batch.weights), batch.advantages, behavior_logps=batch.behavior_logps,
        ref_logps=batch.ref_logps, entropy=entropy,
        low=objective.surrogate.low, high=objective.surrogate.high,
        kl_coef=objective.kl_coef, kl_kind=objective.kl_kind, entropy_coef=objective.entropy_coef,
    )  # fmt: skip
    close(loss, want, atol=2e-5)
    assert int(metrics["tokens"]) == lengths.sum() and metrics["loss"] == loss


@pytest.mark.parametrize("name", OBJECTIVES)
def test_padding_has_no_part(name):
    """Masked by multiplication, NaN * 0 is NaN; masked after ``exp``, 200 gives inf and a NaN gradient."""
    logps, batch, entropy = example()
    mask = np.asarray(batch.weights) > 0
    run = compiled(OBJECTIVES[name])
    clean = run(logps, batch, entropy)
    assert jax.tree.all(jax.tree.map(lambda x: bool(jnp.isfinite(x).all()), clean))
    for field, garbage in itertools.product(
        ("logps", "entropy", "advantages", "behavior_logps", "ref_logps"), (NAN, np.inf, 200.0, -200.0)
    ):
        plant = lambda x: np.where(mask, x, np.float32(garbage))  # noqa: B023, E731
        if field == "logps":
            planted = run(plant(logps), batch, entropy)
        elif field == "entropy":
            planted = run(logps, batch, plant(entropy))
        else:
            planted = run(logps, dataclasses.replace(batch, **{field: plant(getattr(batch, field))}), entropy)
        jax.tree.map(np.testing.assert_array_equal, planted, clean)
    for gradient in clean[1]:
        assert not np.asarray(gradient)[~mask].any()


@pytest.mark.parametrize("how", HOW)
def test_a_fully_masked_row_and_batch(how):
    logps, batch, entropy = example(how=how)
    run = compiled(OBJECTIVES["all"])
    lengths = (np.asarray(batch.weights) > 0).sum(-1)
    lengths[0, 0] = 0
    lengths[1] = 0  # a prompt
    mask = masks(lengths)
    weights = weigh(how, count_empty=False)(mask)
    (loss, _), gradients = run(logps, dataclasses.replace(batch, weights=weights), entropy)
    assert jnp.isfinite(loss) and all(jnp.isfinite(g).all() for g in gradients)
    assert not np.asarray(gradients[0])[~mask].any() and np.asarray(gradients[1])[mask].all()

    keep = np.array([0, 2])  # as if the prompt had never been there
    without = jax.tree.map(lambda x: x[keep], batch)
    weights = oracles.loss_weights(mask[keep], how, count_empty=False, **HOW[how]).astype(np.float32)
    (other, _), other_gradients = run(logps[keep], dataclasses.replace(without, weights=weights), entropy[keep])
    close(other, loss)
    close(other_gradients, np.asarray(gradients)[:, keep])

    nothing = dataclasses.replace(batch, weights=weigh(how)(np.zeros_like(mask)))
    (loss, metrics), gradients = run(logps, nothing, entropy)
    assert loss == 0 and metrics["tokens"] == 0
    assert not np.asarray(gradients).any()


# --- micro-batches


@jax.jit
def by_parameter(logps, batch, entropy):
    """d loss/d the parameters of a model that has two; what an optimiser would see."""

    def loss(scale, shift):
        return L.policy_loss(scale * logps + shift, batch, OBJECTIVES["all"], entropy=scale * entropy)

    return jax.grad(loss, argnums=(0, 1), has_aux=True)(jnp.float32(1.1), jnp.float32(-0.1))


SPLITS = {
    "prompts": [np.s_[:1], np.s_[1:]],
    "samples": [np.s_[:, :2], np.s_[:, 2:4], np.s_[:, 4:]],
}


@pytest.mark.parametrize("how", HOW)
def test_micro_batches_sum_to_the_same_gradient(how):
    whole = example(how=how)
    gradient, metrics = by_parameter(*whole)
    assert np.abs(gradient).min() > 1e-2
    for parts in SPLITS.values():
        each = [by_parameter(*jax.tree.map(lambda x: x[part], whole)) for part in parts]  # noqa: B023
        close(sum(np.array(g) for g, _ in each), gradient)
        for name, number in metrics.items():
            close(sum(m[name] for _, m in each), number)


def test_golden_micro_batches():
    """Cut in two, with each part divided by its own tokens, this batch has a mean loss of 8.75."""
    losses, mask = np.array([[[1, 2, 3, 4]], [[10, 20, 0, 0]]], np.float32), masks([[4], [2]], 4)
    weights = L.loss_weights(mask, "token_mean")
    close(sum((weights[i] * losses[i]).sum() for i in range(2)), 6.6666667)
    own = [L.loss_weights(mask[i : i + 1], "token_mean") for i in range(2)]
    close(sum((own[i] * losses[i]).sum() for i in range(2)) / 2, 8.75)


# --- entropy


def test_entropy_coefficient():
    """The loss falls by the mean entropy for each unit of the coefficient."""
    logps, batch, entropy = example()
    mean = float((batch.weights * entropy).sum())
    low, high = (compiled(L.Objective(entropy_coef=c))(logps, batch, entropy)[0][0] for c in (0.5, 1.5))
    close(high - low, -mean)
    assert mean > 0.1


def test_entropy_has_a_gradient():
    """Under stop_gradient it would be 0."""
    logps, batch, entropy = example()
    _, (_, gradient) = compiled(L.Objective(entropy_coef=0.5))(logps, batch, entropy)
    close(gradient, -0.5 * batch.weights)
    assert jnp.linalg.norm(gradient) > 0.01


# --- what an objective asks for


def test_what_an_objective_needs():
    assert not L.Objective().needs_reference and not L.Objective().needs_entropy
    assert OBJECTIVES["k3"].needs_reference and OBJECTIVES["k1 in the reward"].needs_reference
    assert L.Objective(entropy_coef=-0.1).needs_entropy


def test_what_is_not_needed_is_not_read():
    logps, batch, entropy = example()
    run = compiled(L.Objective())
    (loss, metrics), (gradient, _) = run(logps, dataclasses.replace(batch, ref_logps=None), None)
    assert not any("kl" in name or "entropy" in name for name in metrics)
    nothing = np.full_like(logps, NAN)
    (other, _), (other_gradient, _) = run(logps, dataclasses.replace(batch, ref_logps=nothing), nothing)
    close(other, loss)
    close(other_gradient, gradient)


def test_missing_arrays_are_named():
    logps, batch, entropy = example()
    with pytest.raises(ValueError, match=r"kl_coef=0\.3.*batch\.ref_logps"):
        L.policy_loss(logps, dataclasses.replace(batch, ref_logps=None), OBJECTIVES["k3"])
    with pytest.raises(ValueError, match=r"entropy_coef=0\.2.*entropy"):
        L.policy_loss(logps, batch, OBJECTIVES["entropy"])


def test_a_surrogate_is_any_function():
    logps, batch, _ = example()
    objective = L.Objective(surrogate=lambda log_ratios, advantages: -log_ratios * advantages)
    loss, metrics = L.policy_loss(logps, batch, objective)
    used = np.asarray(batch.weights) > 0
    close(loss, -(batch.weights * batch.advantages * (logps - batch.behavior_logps))[used].sum())
    assert not any("clip" in name for name in metrics)


# --- symmetries and dtypes


@pytest.mark.parametrize("name", OBJECTIVES)
def test_permutations(name):
    logps, batch, entropy = example()
    rng = np.random.default_rng(1)
    (loss, _), (gradient, _) = compiled(OBJECTIVES[name])(logps, batch, entropy)
    for order in (np.s_[rng.permutation(P)], np.s_[:, rng.permutation(G)]):
        moved = jax.tree.map(lambda x: np.asarray(x)[order], (logps, batch, entropy))  # noqa: B023
        (other, _), (other_gradient, _) = compiled(OBJECTIVES[name])(*moved)
        close(other, loss)
        close(other_gradient, np.asarray(gradient)[order])


@pytest.mark.parametrize("name", ["policy", "unbiased", "all"])
def test_vmap_and_bfloat16(name):
    inputs = [example(seed) for seed in range(2)]
    low = jax.tree.map(lambda *x: jnp.stack(x).astype(jnp.bfloat16), *inputs)
    objective = OBJECTIVES[name]
    run = jax.jit(jax.vmap(lambda x, batch, e: L.policy_loss(x, batch, objective, entropy=e)))
    loss, metrics = run(*low)
    assert {x.dtype for x in (loss, *metrics.values())} == {jnp.dtype("float32")}
    for i in range(2):
        one = jax.tree.map(lambda x: x[i].astype(jnp.float32), low)  # noqa: B023
        (want, wanted), _ = compiled(objective)(*one)
        close(loss[i], want)
        jax.tree.map(close, {k: v[i] for k, v in metrics.items()}, wanted)  # noqa: B023


def test_batch_is_duck_typed():
    logps, batch, _ = example()
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    close(L.policy_loss(logps, types.SimpleNamespace(**fields), L.Objective())[0],
          L.policy_loss(logps, batch, L.Objective())[0])  # fmt: skip
