"""The whole loss: its surrogate, its metrics, micro-batches, symmetries."""

import dataclasses
import functools
import itertools
import operator
import types

import jax
import jax.numpy as jnp
import loss_oracles
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_examples import (
    DELTA,
    HOW,
    LENGTHS,
    NAN,
    OBJECTIVES,
    OLD,
    Batch,
    G,
    P,
    T,
    arrays,
    compiled,
    example,
    four_tokens,
    weigh,
)
from oracles import close
from ragged import prefix

from grpojax import losses as L


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
    batch = four_tokens(advantage)
    objective = L.Objective(surrogate=L.clipped(low=low, high=high), aggregate="token_mean")
    (value, metrics), (got, _) = compiled(objective)((OLD + DELTA)[None, None], batch, jnp.zeros((1, 1, 4)))
    close(value, loss)
    close(got[0, 0], gradient)
    over = advantage > 0 and high < 0.35
    want = {"clip_high": over, "clip_low": advantage < 0, "ratio": 4.14707772}
    for name, number in want.items():
        close(metrics[name].total, float(number))
        assert metrics[name].count == 4


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
    mask = prefix(np.random.default_rng(1).integers(1, T + 1, (P, G)))
    own = dataclasses.replace(batch, advantages=advantages, old_logps=None, weights=weigh("sequence_mean")(mask))
    (loss, metrics), (gradient, _) = compiled(L.Objective())(logps, own, entropy)
    close(loss, 0)
    close(gradient, -own.weights * advantages)
    assert jnp.linalg.norm(gradient) > 0.05
    assert metrics["clip_low"].total == metrics["clip_high"].total == 0
    same = dataclasses.replace(own, old_logps=logps)
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
    mask = prefix([[2, 4, 6, 8]], 8)
    batch = Batch(
        weights=L.loss_weights(mask, how, **HOW[how]),
        advantages=jnp.broadcast_to(jnp.array(advantages)[None, :, None], mask.shape),
    )
    (value, _), (gradient, _) = compiled(L.Objective())(np.full(mask.shape, -1.0, np.float32), batch, None)
    close(value, loss)
    close(gradient, -batch.weights * batch.advantages)
    assert (np.asarray(gradient) != 0).sum() == 20


def test_a_ratio_beyond_float32_stays_finite():
    """exp(300) is inf in float32, and inf * 0 in its gradient is NaN."""
    _, batch, entropy = example()
    far = np.full((P, G, T), -300, np.float32)
    batch = dataclasses.replace(batch, old_logps=far, ref_logps=far)
    for (name, objective), logps in itertools.product(OBJECTIVES.items(), (0 * far, 2 * far)):
        got = compiled(objective)(logps, batch, entropy)
        assert jax.tree.all(jax.tree.map(lambda x: bool(jnp.isfinite(x).all()), got)), name


@pytest.mark.parametrize("name", [n for n in OBJECTIVES if n != "k1 in the reward"])
@settings(max_examples=15)
@given(lengths=LENGTHS, seed=st.integers(0, 999), how=st.sampled_from(list(HOW)), own=st.booleans())
def test_oracle(name, lengths, seed, how, own):
    objective = OBJECTIVES[name]
    logps, batch, entropy = example(seed, how, lengths)
    if own:
        batch = dataclasses.replace(batch, old_logps=None)
    (loss, metrics), _ = compiled(objective)(logps, batch, entropy)
    want = loss_oracles.policy_loss(
        logps, np.asarray(batch.weights), batch.advantages, old_logps=batch.old_logps,
        ref_logps=batch.ref_logps, entropy=entropy,
        low=objective.surrogate.low, high=objective.surrogate.high,
        kl_coef=objective.kl_coef, kl_kind=objective.kl_kind, entropy_coef=objective.entropy_coef,
    )  # fmt: skip
    close(loss, want, atol=2e-5)
    assert int(metrics["ratio"].count) == lengths.sum() and metrics["loss"] == loss


@pytest.mark.parametrize("name", OBJECTIVES)
def test_padding_has_no_part(name):
    """Masked by multiplication, NaN * 0 is NaN; masked after ``exp``, 200 gives inf and a NaN gradient."""
    logps, batch, entropy = example()
    mask = np.asarray(batch.weights) > 0
    run = compiled(OBJECTIVES[name])
    clean = run(logps, batch, entropy)
    assert jax.tree.all(jax.tree.map(lambda x: bool(jnp.isfinite(x).all()), clean))
    for field, garbage in itertools.product(
        ("logps", "entropy", "advantages", "old_logps", "ref_logps"), (NAN, np.inf, 200.0, -200.0)
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
    mask = prefix(lengths)
    weights = weigh(how, count_empty=False)(mask)
    (loss, _), gradients = run(logps, dataclasses.replace(batch, weights=weights), entropy)
    assert jnp.isfinite(loss) and all(jnp.isfinite(g).all() for g in gradients)
    assert not np.asarray(gradients[0])[~mask].any() and np.asarray(gradients[1])[mask].all()

    keep = np.array([0, 2])  # as if the prompt had never been there
    without = jax.tree.map(lambda x: x[keep], batch)
    weights = loss_oracles.loss_weights(mask[keep], how, count_empty=False, **HOW[how]).astype(np.float32)
    (other, _), other_gradients = run(logps[keep], dataclasses.replace(without, weights=weights), entropy[keep])
    close(other, loss)
    close(other_gradients, np.asarray(gradients)[:, keep])

    nothing = dataclasses.replace(batch, weights=weigh(how)(np.zeros_like(mask)))
    (loss, metrics), gradients = run(logps, nothing, entropy)
    assert loss == 0 and metrics["ratio"].count == 0
    assert not np.asarray(gradients).any()


@jax.jit
def by_parameter(logps, batch, entropy):
    """d loss/d the parameters of a model that has two; what an optimiser would see."""

    def loss(scale, shift):
        return L.policy_loss(
            scale * logps + shift, objective=OBJECTIVES["all"], **arrays(batch), entropy=scale * entropy
        )

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
            total = functools.reduce(operator.add, (m[name] for _, m in each))
            jax.tree.map(close, total, number)


def test_golden_micro_batches():
    """Cut in two, with each part divided by its own tokens, this batch has a mean loss of 8.75."""
    losses, mask = np.array([[[1, 2, 3, 4]], [[10, 20, 0, 0]]], np.float32), prefix([[4], [2]], 4)
    weights = L.loss_weights(mask, "token_mean")
    close(sum((weights[i] * losses[i]).sum() for i in range(2)), 6.6666667)
    own = [L.loss_weights(mask[i : i + 1], "token_mean") for i in range(2)]
    close(sum((own[i] * losses[i]).sum() for i in range(2)) / 2, 8.75)


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
    with pytest.raises(ValueError, match=r"kl_coef=0\.3.*ref_logps"):
        L.policy_loss(logps, objective=OBJECTIVES["k3"], **arrays(dataclasses.replace(batch, ref_logps=None)))
    with pytest.raises(ValueError, match=r"entropy_coef=0\.2.*entropy"):
        L.policy_loss(logps, objective=OBJECTIVES["entropy"], **arrays(batch))


def test_a_surrogate_is_any_function():
    logps, batch, _ = example()
    objective = L.Objective(surrogate=lambda log_ratios, advantages: -log_ratios * advantages)
    loss, metrics = L.policy_loss(logps, objective=objective, **arrays(batch))
    used = np.asarray(batch.weights) > 0
    close(loss, -(batch.weights * batch.advantages * (logps - batch.old_logps))[used].sum())
    assert not any("clip" in name for name in metrics)


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
    run = jax.jit(jax.vmap(lambda x, batch, e: L.policy_loss(x, objective=objective, **arrays(batch), entropy=e)))
    loss, metrics = run(*low)
    assert {x.dtype for x in (loss, *jax.tree.leaves(metrics))} == {jnp.dtype("float32")}
    for i in range(2):
        one = jax.tree.map(lambda x: x[i].astype(jnp.float32), low)  # noqa: B023
        (want, wanted), _ = compiled(objective)(*one)
        close(loss[i], want)
        jax.tree.map(close, jax.tree.map(lambda x: x[i], metrics), wanted)  # noqa: B023


def test_batch_is_duck_typed():
    logps, batch, _ = example()
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    close(L.policy_loss(logps, objective=L.Objective(), **arrays(types.SimpleNamespace(**fields)))[0],
          L.policy_loss(logps, objective=L.Objective(), **arrays(batch))[0])  # fmt: skip


def test_clip_metrics_tell_the_side_that_was_passed():
    """A dual-clipped token has a ratio far over 1: it is no lower clip, and it is no upper one either."""
    mask = np.ones((1, 1, 3), bool)
    batch = types.SimpleNamespace(
        weights=L.loss_weights(mask, "token_mean"), advantages=np.array([[[-1.0, -1.0, 1.0]]], np.float32),
        old_logps=np.zeros(mask.shape, np.float32),
    )  # fmt: skip
    logps = np.log(np.array([[[5.0, 0.5, 1.5]]], np.float32))
    _, metrics = L.policy_loss(logps, objective=L.Objective(surrogate=L.clipped(dual=3.0)), **arrays(batch))
    assert {k: float(metrics[k].total) for k in ("clip_low", "clip_high", "dual_clip")} == {
        "clip_low": 1,
        "clip_high": 1,
        "dual_clip": 1,
    }
    assert "dual_clip" not in L.policy_loss(logps, objective=L.Objective(), **arrays(batch))[1]


def test_clip_cov_by_advantages_leaves_kl_and_ratios_alone():
    mask = np.ones((1, 1, 4), bool)
    rng = np.random.default_rng(1)
    logps, ref = (-np.abs(rng.normal(size=mask.shape)).astype(np.float32) for _ in range(2))
    keep = np.array([[[True, True, False, True]]])

    def metrics(advantages):
        batch = types.SimpleNamespace(
            weights=L.loss_weights(mask, "token_mean"),
            advantages=advantages,
            old_logps=logps - 0.1,
            ref_logps=ref,
        )
        return L.policy_loss(logps, objective=L.Objective(kl_coef=0.1, aggregate="token_mean"), **arrays(batch))[1]

    ones = np.ones(mask.shape, np.float32)
    plain, cut = metrics(ones), metrics(np.where(keep, ones, 0))
    assert plain["kl_loss"] == cut["kl_loss"] and plain["ratio"].count == cut["ratio"].count
    close(cut["policy_loss"], 0.75 * plain["policy_loss"], atol=1e-6)


@pytest.mark.parametrize("weight", [-0.5, np.nan])
def test_a_weight_under_0_or_nan_is_refused(weight):
    """Compiled, where no value can be seen, such a token is left out."""
    arrays = {"advantages": jnp.ones(3), "old_logps": jnp.zeros(3), "objective": L.Objective()}
    weights = jnp.array([0.5, weight, 0.5])
    with pytest.raises(ValueError, match="weights has numbers under 0 or NaN"):
        L.policy_loss(jnp.zeros(3), weights=weights, **arrays)
    loss = jax.jit(lambda logps, w: L.policy_loss(logps, weights=w, **arrays)[0])
    value, gradient = jax.value_and_grad(loss)(jnp.zeros(3), weights)
    close(value, -1.0)
    close(gradient, [-0.5, 0.0, -0.5])
