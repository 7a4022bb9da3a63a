import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import close

from grpojax import losses as L
from grpojax.types import pytree

P, G, T = 3, 5, 7
NAN = float("nan")
HOW = {
    "token_mean": {},
    "sequence_mean": {},
    "prompt_mean": {},
    "sequence_sum": {},
    "constant": {"constant": 8.0},
}
OBJECTIVES = {
    "policy": L.Objective(),
    "k2": L.Objective(kl_coef=0.3, kl_kind="k2"),
    "k3": L.Objective(kl_coef=0.3),
    "unbiased": L.Objective(kl_coef=0.3, kl_kind="unbiased"),
    "k1 in the reward": L.Objective(kl_coef=0.3, kl_kind="k1", kl_in="reward"),
    "entropy": L.Objective(entropy_coef=0.2),
    "all": L.Objective(surrogate=L.clipped(low=0.1, high=0.3), kl_coef=0.3, kl_kind="k2", entropy_coef=-0.2),
}


@pytree
class Batch:
    """What `policy_loss` reads of a batch."""

    weights: jax.Array
    advantages: jax.Array
    behavior_logps: jax.Array | None = None
    ref_logps: jax.Array | None = None


@functools.cache
def weigh(how, count_empty=True):
    return jax.jit(lambda mask: L.loss_weights(mask, how, count_empty=count_empty, **HOW[how]))


def masks(lengths, size=T):
    return np.arange(size) < np.asarray(lengths)[..., None]


def example(seed=0, how="sequence_mean", lengths=None):
    """Log-probs, batch and entropy of ragged samples, two of them empty; ratios beyond both bounds."""
    rng = np.random.default_rng(seed)
    if lengths is None:
        lengths = rng.integers(1, T + 1, (P, G))
        lengths[0, 1] = lengths[2, 4] = 0
    mask = masks(lengths)
    normal = lambda scale: rng.normal(size=mask.shape, scale=scale).astype(np.float32)  # noqa: E731
    logps = normal(0.5) - 2
    advantages = np.broadcast_to(rng.normal(size=(*mask.shape[:2], 1)), mask.shape).astype(np.float32)
    batch = Batch(
        weights=np.asarray(weigh(how)(mask)),
        advantages=advantages,
        behavior_logps=logps + normal(0.3),
        ref_logps=logps + normal(0.5),
    )
    return logps, batch, np.abs(normal(1.0))


@functools.cache
def compiled(objective):
    """``(logps, batch, entropy) -> (loss, metrics), (d loss/d logps, d loss/d entropy)``."""

    def loss(logps, batch, entropy):
        return L.policy_loss(logps, batch, objective, entropy=entropy)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 2), has_aux=True))


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


LENGTHS = st.lists(st.integers(0, T), min_size=P * G, max_size=P * G).map(lambda n: np.reshape(n, (P, G)))


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

DELTA = np.array([0.3, -0.3, 0.1, -0.05], np.float32)
OLD = np.array([-1, -2, -0.5, -1.5], np.float32)


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
    own = dataclasses.replace(
        batch, advantages=advantages, behavior_logps=None, weights=weigh("sequence_mean")(mask)
    )
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


LOGITS = jnp.array([0.2, -0.1, 0.4])
REF = jax.nn.log_softmax(jnp.array([0.0, 0.5, -0.3]))
OTHER = jax.nn.log_softmax(jnp.array([0.5, 0.1, 0.0]))  # an older policy that drew the tokens
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
    (other, _), other_gradients = run(
        logps[keep], dataclasses.replace(without, weights=weights), entropy[keep]
    )
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
    packed = {
        name: np.concatenate([x[0, :a], x[1, :b], np.zeros(2, x.dtype)])[None] for name, x in rows.items()
    }
    packed["segments"] = np.array([[1] * a + [2] * b + [0] * 2], np.int32)
    packed["actions"] = np.array([[1, 1, 2, 2, 3, 3, 4, 0, 0]], np.int32)
    objectives = {level: L.Objective(ratio=level, trace_decay=decay) for level, decay in LEVELS.items()}
    objectives["gmpo"] = L.Objective(surrogate=SURROGATES["gmpo"])
    objectives["weights"] = L.Objective(importance="mask", importance_level="geometric", importance_high=5.0)
    objectives["joint"] = L.Objective(
        importance="truncate", importance_level="sequence", off_policy_limit=0.1
    )
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
    gradient = jax.grad(lambda x: L.importance_correction(x, SAMPLER, np.ones(4, bool), **options).sum())(
        TRAIN
    )
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
        with_sampler = types.SimpleNamespace(
            **fields | {"behavior_logps": behavior, "sampler_logps": sampler}
        )
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


@pytest.mark.parametrize(
    ("advantage", "limit", "kept"), [(-1, 0.7, 0), (-1, 0.9, 1), (1, 0.7, 1), (0, 0.7, 1)]
)
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
    np.testing.assert_array_equal(
        L.clip_cov(jax.random.key(0), cov, mask, fraction=0.9, skip=skip), [1, 1, 1, 0, 1]
    )
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
    terms = L.displacement(
        -jnp.array([[[0.2, -0.5, 0.5, 0], [9, 9, 9, 9]]]), mask, actions=np.repeat(ACTIONS, 2, 1)
    )
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
    gradient = jax.grad(lambda x: L.displacement(L.log_ratio(x, None, MASK4), MASK4, "token").sum())(
        jnp.zeros(4)
    )
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
    return {
        gate: L.displacement(ratios, mask, gate, actions=actions) for gate in ("token", "action", "response")
    }


# --- critic and preferences


def test_golden_value_loss():
    """The smaller of the two squares would give 0.045."""
    one = lambda x: jnp.array([x, NAN])  # noqa: E731
    weights = jnp.array([1.0, 0.0])
    loss = lambda v: L.value_loss(v, one(0.4), weights, old_values=one(0.5), clip=0.2)  # noqa: E731
    value, gradient = jax.value_and_grad(loss)(one(0.9))
    close(value, 0.125)
    close(gradient, [0.5, 0])
    value, gradient = jax.value_and_grad(loss)(
        one(0.1)
    )  # far under V_old: the clipped square, 0.01, is not larger
    close(value, 0.045)
    close(gradient, [-0.3, 0])
    value, gradient = jax.value_and_grad(
        lambda v: L.value_loss(v, one(1.4), weights, old_values=one(0.5), clip=0.2)
    )(one(0.9))  # clipped: 0.7 is farther from 1.4
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
        ({"importance_high": 2.0}, "importance_high.*importance='truncate'"),
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
