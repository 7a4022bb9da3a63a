"""One update: the same gradient under every split, the right gradient, and no work that nobody asked for."""

import dataclasses

import flat_batches
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from one_update import CONFIG, SGD, learning_batch, update
from plain_decoder import plain_batch, random_decoder, with_tokens

from grpojax import losses, sharding, variants
from grpojax.device import Real
from grpojax.host.errors import UserError
from grpojax.models import Compute
from grpojax.models.weight_table import shardings
from grpojax.programs import optimizer as opt
from grpojax.programs import policy_update, state
from grpojax.programs.update import Learner, make_joint_update, make_update
from grpojax.types import TrainState


@pytest.fixture(scope="module")
def reference():
    batch, variant = learning_batch(variant=variants.get("grpo", kl_coef=0.1, entropy_coef=0.01), off_policy=True)
    return batch, variant.objective, update(batch, variant.objective)


@pytest.mark.in_ci("sizes10-1-splash-14")
@pytest.mark.parametrize(
    ("sizes", "microbatches", "attention", "least"),
    [
        (None, 16, "xla", None),
        (None, 1, "xla", 14),
        *(
            pytest.param(*split, marks=pytest.mark.slow)
            for split in [
                (None, 2, "xla", None),
                ((8, 1, 1), 1, "xla", None),
                (None, 8, "splash", None),
                ((1, 8, 1), 4, "xla", None),
                ((2, 2, 2), 1, "splash", None),
                ((2, 2, 2), 2, "xla", None),
                (None, 1, "splash", 14),
                ((1, 2, 4), 1, "xla", 14),
                ((2, 1, 4), 1, "splash", 14),
            ]
        ),
    ],
)
def test_the_gradient_does_not_depend_on_the_split(reference, sizes, microbatches, attention, least):
    batch, objective, (want, metrics) = reference
    compute = Compute(attention=attention)
    how = dict(sizes=sizes, microbatches=microbatches, least=least)
    got, other = update(batch, objective, compute=compute, **how)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6, err_msg=jax.tree_util.keystr(path))
    for name, value in metrics.items():
        assert other[name] == pytest.approx(value, rel=2e-5, abs=2e-6), name


@pytest.mark.slow
def test_the_loss_is_about_zero_and_the_gradient_is_the_policy_gradient():
    """At ratio 1 the value is -sum(w A) = 0 with group-centred advantages; the gradient is -sum w A grad log pi."""
    batch, variant = learning_batch(p=3, g=5)
    graph, params = random_decoder(CONFIG)
    after, metrics = update(batch, variant.objective)
    weight = batch.arrays["weights"] * batch.arrays["advantages"]
    want = jax.jit(jax.grad(lambda p: -(weight * plain_batch(graph, p, batch)[0]).sum()))(params)
    assert abs(metrics["policy_loss"]) < 1e-6
    assert metrics["grad_norm"] == pytest.approx(float(optax.tree.norm(want)), rel=1e-4)
    assert metrics["grad_norm"] > 0.1
    for (path, new), old, grad in zip(
        jax.tree_util.tree_leaves_with_path(after),
        jax.tree.leaves(params),
        jax.tree.leaves(want),
        strict=True,
    ):
        np.testing.assert_allclose(old - new, grad, atol=1e-5, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("what", ["row", "all"])
@pytest.mark.slow
def test_masked_samples_give_nothing(what):
    batch, variant = learning_batch(p=3, g=5)
    dead = np.ones((3, 5), bool) if what == "all" else np.arange(15).reshape(3, 5) == 7
    poison = np.where(dead[..., None], np.nan, 0.0).astype(np.float32)
    dropped = with_tokens(
        batch,
        weights=np.where(dead[..., None], 0.0, batch.arrays["weights"]),
        advantages=batch.arrays["advantages"] + poison,
    )
    got, metrics = update(dropped, variant.objective)
    start = random_decoder(CONFIG)[1]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(got)) and np.isfinite(list(metrics.values())).all()
    if what == "all":
        jax.tree.map(np.testing.assert_array_equal, got, jax.tree.map(np.asarray, start))
    else:
        zeroed = with_tokens(batch, advantages=np.where(dead[..., None], 0.0, batch.arrays["advantages"]))
        want, _ = update(zeroed, variant.objective)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, want)


def flops(objective, *, entropy):
    """Multiplications in the compiled update's matmuls, loops counted as often as they run (there are none)."""
    graph, params = random_decoder(dataclasses.replace(CONFIG, num_layers=1))
    tx = opt.make_optimizer(SGD, 10)
    batch, _ = learning_batch(p=2, g=2)
    packed, _ = flat_batches.pack(with_tokens(batch, ref_logps=np.zeros_like(batch.arrays["weights"])))
    loss = policy_update.policy_objective(graph, objective, Compute(remat="none"), entropy=entropy)
    compiled = (
        jax.jit(make_update(loss, tx), donate_argnums=0).lower(state.init_state(params, tx), {}, packed).compile()
    )
    return compiled.cost_analysis()["flops"]


@pytest.mark.slow
def test_no_reference_forward_hides_in_the_update():
    """The update reads reference log-probs as numbers: a KL term costs no second forward."""
    without, with_kl = (flops(losses.Objective(kl_coef=c), entropy=False) for c in (0.0, 0.1))
    assert with_kl < 1.02 * without


@pytest.mark.slow
def test_perturbed_policy_has_a_kl_and_an_equal_one_has_none():
    batch, variant = learning_batch(p=3, g=5, variant=variants.get("grpo", kl_coef=0.1))
    graph, params = random_decoder(CONFIG)
    logps, _ = jax.jit(lambda p: plain_batch(graph, p, batch))(params)
    _, metrics = update(with_tokens(batch, ref_logps=np.asarray(logps)), variant.objective)
    assert abs(metrics["kl"]) < 1e-5
    _, metrics = update(batch, variant.objective)
    assert metrics["kl"] > 1e-2


@pytest.mark.slow
def test_gradient_clipping_limits_the_step():
    batch, variant = learning_batch(p=3, g=5)
    got, metrics = update(batch, variant.objective, optimizer=dataclasses.replace(SGD, grad_clip=0.01))
    start = random_decoder(CONFIG)[1]
    moved = float(optax.tree.norm(jax.tree.map(lambda a, b: a - b, got, start)))
    assert metrics["grad_norm"] > 0.01 and moved == pytest.approx(0.01, rel=1e-3)


# ------------------------------------------------------------------------------------------------- mesh


def test_meshes_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="needs 6 devices, but there are 8"):
        sharding.make_mesh(sharding.MeshConfig(data=3, fsdp=2, tensor=1))
    with pytest.raises(UserError, match="one of them may be -1"):
        sharding.MeshConfig(data=-1, fsdp=-1)
    mesh = sharding.make_mesh(sharding.MeshConfig(tensor=8, fsdp=1))
    with pytest.raises(UserError, match="num_attention_heads 4"):
        state.decoder_network(CONFIG, opt.make_optimizer(SGD, 1), mesh)
    with pytest.raises(ValueError, match="two dimensions on one mesh axis"):
        sharding.spec(("heads", "mlp"), sharding.TRAIN)


def test_abstract_state_is_the_state():
    mesh = sharding.make_mesh(sharding.MeshConfig(data=2, fsdp=2, tensor=2))
    tx = opt.make_optimizer(opt.OptimizerConfig(), 10)
    abstract = state.abstract_state({"policy": state.decoder_network(CONFIG, tx, mesh)[1]}, mesh)["policy"]
    params = jax.device_put(random_decoder(CONFIG)[1], shardings(abstract.params, mesh))
    learner = state.init_state(params, tx, Real(mesh))

    def same(a, x):
        assert (a.shape, a.dtype) == (x.shape, x.dtype) and x.sharding.is_equivalent_to(a.sharding, x.ndim)

    jax.tree.map(same, abstract, learner)
    cut = [x for x in jax.tree.leaves(abstract) if not x.sharding.is_fully_replicated]
    assert len(cut) > 20
    assert all(x.dtype == jnp.float32 for x in cut)


def test_an_update_without_a_gradient_changes_nothing():
    """Adam's moments would move the weights, and its weight decay too. Each role is its own case."""

    def loss(w, frozen, x):
        return (w * x).sum(), {}

    tx = optax.adamw(0.1, weight_decay=0.5)
    made = jax.jit(make_update(loss, tx), donate_argnums=0)
    start = made(
        TrainState(step=jnp.int32(0), params=jnp.ones(3), opt_state=tx.init(jnp.ones(3))), None, jnp.ones((1, 3))
    )
    want = jax.tree.map(np.asarray, start[0])
    got, metrics = made(start[0], None, jnp.zeros((2, 3)))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert metrics["grad_norm"] == 0 == metrics["skipped"] and int(got.step) == 1
    moved, _ = made(got, None, jnp.full((1, 3), 1e-12))  # one that is small is one
    assert int(moved.step) == 2 and (np.asarray(moved.params) != want.params).all()

    learners = Learner(loss=loss, optimizer=tx), Learner(loss=lambda w, frozen, x: (w.sum(), {}), optimizer=tx)
    both = jax.jit(make_joint_update(dict(zip(("policy", "critic"), learners, strict=True))), donate_argnums=0)
    after, _ = both({role: jax.tree.map(jnp.array, want) for role in ("policy", "critic")}, {}, jnp.zeros((1, 3)))
    jax.tree.map(np.testing.assert_array_equal, after["policy"], want)
    assert int(after["critic"].step) == 2 and (np.asarray(after["critic"].params) != want.params).all()


@pytest.mark.parametrize(
    ("objective", "moves"),
    [
        (losses.Objective(), False),
        (losses.Objective(kl_coef=0.1), True),
        (losses.Objective(entropy_coef=0.1), True),
        (losses.Objective(llds_coef=0.2), True),
        (losses.Objective(surrogate=losses.dppo_tv(kl_coef=0.1)), True),
    ],
)
def test_groups_without_variance_move_only_what_has_a_gradient(objective, moves):
    """Of advantages that are all 0 the policy's term says nothing; others may."""
    old = jnp.array([[-1.0, -2.0, -0.5]])

    def loss(logits, frozen, x):
        given = {"ref_logps": old - 0.3, "displacement_weights": x, "entropy": -jnp.exp(logits) * logits}
        return losses.policy_loss(logits, objective=objective, advantages=0 * x, weights=x, old_logps=old, **given)[
            0
        ], {}

    tx = optax.adamw(0.1)
    start = TrainState(step=jnp.int32(0), params=old - 0.1, opt_state=tx.init(old))
    want = np.asarray(start.params)
    got, metrics = jax.jit(make_update(loss, tx), donate_argnums=0)(start, None, jnp.full((1, 1, 3), 1 / 3))
    assert (np.asarray(got.params) != want).any() == moves == (int(got.step) == 1) == (metrics["grad_norm"] > 0)
