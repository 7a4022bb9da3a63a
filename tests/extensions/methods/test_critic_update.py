"""The critic: its outputs and gradients by a plain forward, the same on any mesh, and what it leaves alone."""

import dataclasses

import flat_batches
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from plain_decoder import BASE, plain_states, ragged_batch, random_decoder, whole_sequences, with_tokens

from grpojax import losses, masked, sharding, variants
from grpojax.device import ROWS, Real
from grpojax.extensions.methods import critic_model
from grpojax.extensions.methods.critic_update import CriticModel, make_critic_score
from grpojax.models import Compute, flops
from grpojax.models.weight_table import shardings
from grpojax.programs import policy_update
from grpojax.programs.state import init_state
from grpojax.programs.update import Learner, make_joint_update, make_update, update_program
from grpojax.run.make_programs import learner_of

CONFIG = dataclasses.replace(BASE, vocab_size=56, hidden_size=16, intermediate_size=24, num_layers=2)
SHALLOW = dataclasses.replace(CONFIG, num_layers=1)
LOSSES = {
    "bias": ("after", variants.BiasLoss(bound=0.7, l2=0.3)),
    "unbounded": ("after", variants.BiasLoss()),
    "mean": ("after", variants.BiasLoss(normalise="mean")),
    "values": ("before", variants.ValueLoss(clip=0.2)),
    "plain values": ("before", variants.ValueLoss(clip=None)),
}


def example(seed=0, p=8, g=4):
    """A ragged batch with something in everything that a critic reads."""
    rng = np.random.default_rng(seed)
    batch = ragged_batch(rng, p=p, g=g, vocab=CONFIG.vocab_size)
    mask = np.asarray(masked.from_lengths(batch.lengths, batch.tokens.shape[2]))

    def normal(*shape):
        return np.where(mask, rng.normal(size=shape), 0).astype(np.float32)

    return with_tokens(
        batch,
        advantages=normal(p, g, 1),
        weights=np.asarray(losses.loss_weights(mask, "sequence_sum")),
        critic_targets=normal(p, g, mask.shape[2]),
        critic_outputs=normal(p, g, mask.shape[2]),
        critic_weights=np.asarray(losses.loss_weights(mask, "token_mean")),
    )


def start(config=CONFIG, seed=0):
    """Trunk and head, all of it random."""
    head = jnp.asarray(np.random.default_rng(seed).normal(size=config.hidden_size) / 4, jnp.float32)
    return random_decoder(config, seed)[1], head


def plain_outputs(trunk, head, batch, at):
    """By a forward of one sequence at a time, ``[P, G, T]``."""
    (p, g, most), sequences = batch.tokens.shape, whole_sequences(batch)
    states = plain_states(trunk, sequences.reshape(p * g, -1)).reshape(p, g, sequences.shape[-1], -1)
    places = (batch.prompts.lengths - (at == "before"))[:, None, None] + np.arange(most)
    # Of a completion of full length nothing is cut: the last place is the prompt's length and T - 1.
    chosen = jnp.take_along_axis(states, np.broadcast_to(places, (p, g, most))[..., None], 2)
    return jnp.where(np.arange(most) < batch.lengths[..., None], chosen @ head, 0.0)


def plain_loss(outputs, tokens, loss):
    """By the formulas, on ``[P, G, T]``."""
    w, target = tokens["weights"], tokens["critic_targets"]
    if isinstance(loss, variants.BiasLoss):
        bias = outputs if loss.bound is None else loss.bound * jnp.tanh(outputs / loss.bound)
        return ((tokens["critic_weights"] if loss.own_weights else w) * (loss.l2 * bias**2 - target * bias)).sum()
    squares = (outputs - target) ** 2
    if loss.clip is not None:
        old = tokens["critic_outputs"]
        near = (old + jnp.clip(outputs - old, -loss.clip, loss.clip) - target) ** 2
        squares = jnp.maximum(squares, near)
    return 0.5 * (w * squares).sum()


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        ("bias", False),
        *(
            pytest.param(n, f, marks=pytest.mark.exhaustive)
            for n in LOSSES
            for f in (False, True)
            if (n, f) != ("bias", False)
        ),
    ],
)
def test_value_and_gradient_equal_those_of_a_plain_forward(name, frozen):
    at, loss = LOSSES[name]
    batch, model = example(p=3, g=5), CriticModel(config=SHALLOW, compute=Compute(), frozen=frozen, at=at, loss=loss)
    packed, layout = flat_batches.pack(batch)
    part = jax.tree.map(lambda x: x[0], packed)
    params, plain_weights = model.weights(*start(SHALLOW))

    def plain(params):
        outputs = plain_outputs(*model.parts(params, plain_weights), batch, at)
        return plain_loss(outputs, batch.arrays, loss), outputs

    (want, outputs), want_grad = jax.jit(jax.value_and_grad(plain, has_aux=True))(params)
    (got, metrics), grad = jax.jit(jax.value_and_grad(model.objective, has_aux=True))(params, plain_weights, part)
    said = layout.unpack(np.asarray(jax.jit(make_critic_score(model))(params, plain_weights, packed)))
    np.testing.assert_allclose(said, outputs, atol=1e-5)
    np.testing.assert_allclose([got, metrics["loss"]], want, rtol=1e-5, atol=1e-5)
    assert len(jax.tree.leaves(grad)) == (1 if frozen else len(jax.tree.leaves(params)))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(grad), jax.tree.leaves(want_grad), strict=True):
        scale = float(np.abs(b).max())
        np.testing.assert_allclose(a, b, atol=2e-5 * scale + 1e-9, rtol=1e-4, err_msg=jax.tree_util.keystr(path))


@pytest.mark.slow
def test_the_bias_follows_the_advantage():
    """Signs of a fixed batch: with the other sign of the loss all of them would be wrong."""
    batch = example(p=3, g=5)
    model = CriticModel(config=SHALLOW, compute=Compute(), at="after", loss=variants.BiasLoss())
    sign = np.where(np.asarray(batch.tokens) % 2 == 0, 1.0, -1.0).astype(np.float32)
    batch = with_tokens(batch, critic_targets=sign)
    packed, layout = flat_batches.pack(batch)
    trunk, _ = start(SHALLOW)
    params, _ = model.weights(trunk, jnp.zeros(CONFIG.hidden_size))
    rule, score = optax.adam(0.01), jax.jit(make_critic_score(model))
    state, update = (
        init_state(params, rule, table=critic_model.CRITIC),
        jax.jit(make_update(model.objective, rule), donate_argnums=0),
    )
    assert not np.asarray(score(state.params, {}, packed)).any()  # the head starts at 0
    for _ in range(30):
        state, _ = update(state, {}, packed)
    said = layout.unpack(np.asarray(score(state.params, {}, packed)))
    live = batch.arrays["weights"] > 0
    assert (np.sign(said) == sign)[live].mean() > 0.9


def train(sizes, *, frozen=False, updates=2, microbatches=1):
    """Policy and critic after so many updates in one program; ``(states, metrics, trunk)``."""
    mesh = None
    if sizes is not None:
        mesh = sharding.make_mesh(sharding.MeshConfig(data=sizes[0], fsdp=sizes[1], tensor=sizes[2]))
    compute = Compute(mesh=mesh)
    model = CriticModel(config=CONFIG, compute=compute, frozen=frozen, at="before", loss=variants.ValueLoss())
    graph, policy = random_decoder(CONFIG)
    rules = {"policy": optax.sgd(0.5, momentum=0.5), "critic": optax.sgd(0.1, momentum=0.5)}
    params, plain = model.weights(*start(seed=1))
    if mesh is not None:
        policy = jax.device_put(policy, shardings(policy, mesh))
        params = jax.device_put(params, shardings(params, mesh, table=critic_model.CRITIC))
        plain = jax.device_put(plain, shardings(plain, mesh))
    states = {
        "policy": init_state(policy, rules["policy"], Real(mesh)),
        "critic": init_state(params, rules["critic"], Real(mesh), critic_model.CRITIC),
    }
    loss = policy_update.policy_objective(graph, losses.Objective(), compute)
    learners = {
        "policy": Learner(loss=loss, optimizer=rules["policy"]),
        "critic": learner_of(model.networks(rules["critic"])["critic"]),
    }
    step = update_program("update", make_joint_update(learners), compute)
    metrics = {}
    for i in range(updates):
        packed, _ = flat_batches.pack(example(i), shards=sharding.shards(mesh), microbatches=microbatches)
        states, metrics = step(states, plain, Real(mesh).put(packed, ROWS))
    return states, metrics, plain


@pytest.fixture(scope="module")
def alone():
    states, metrics, _ = train(None)
    return jax.tree.map(np.asarray, states), jax.tree.map(float, metrics)


@pytest.mark.in_ci("sizes0-1")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "microbatches"), [((1, 8, 1), 1), ((2, 4, 1), 1), ((8, 1, 1), 1), ((2, 2, 2), 1), (None, 4)]
)
def test_the_same_on_any_mesh(alone, sizes, microbatches):
    states, metrics, _ = train(sizes, microbatches=microbatches)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), states, alone[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), metrics, alone[1])
    assert alone[1]["critic/loss"] > 0 and alone[1]["critic/grad_norm"] > 0


@pytest.mark.slow
def test_a_frozen_trunk_is_left_alone_and_the_head_learns():
    states, metrics, plain = train(None, frozen=True, updates=1)
    jax.tree.map(np.testing.assert_array_equal, plain["critic_trunk"], start(seed=1)[0])
    assert set(states["critic"].params) == {"token_head"} and float(metrics["critic/grad_norm"]) > 0
    assert np.abs(np.asarray(states["critic"].params["token_head"]) - np.asarray(start(seed=1)[1])).max() > 1e-3


def test_flops_are_those_of_the_layers():
    with_vocabulary = flops.forward_flops(CONFIG, [7, 3], [[4, 5], [2, 1]])
    assert with_vocabulary - critic_model.forward_flops(CONFIG, [7, 3], [[4, 5], [2, 1]]) == 2 * 12 * 56 * 16


def test_a_trunk_comes_without_the_policys_projection():
    config = dataclasses.replace(CONFIG, tie_embeddings=False)
    _, params = random_decoder(config)
    trunk = critic_model.from_decoder(critic_model.trunk_config(config), params)
    assert "head" in params and "head" not in trunk
    np.testing.assert_array_equal(trunk["layers"]["up"][...], params["layers"]["up"][...])
    whole = critic_model.joined(critic_model.trunk_config(config), trunk, jnp.zeros(16))
    graph, abstract = critic_model.abstract(critic_model.trunk_config(config))
    assert jax.tree.structure(whole) == jax.tree.structure(abstract)
    assert nnx.merge(graph, whole).token_head.shape == (16,)
    with pytest.raises(ValueError, match="no weight that the table knows"):
        shardings(params, sharding.make_mesh(sharding.MeshConfig()), table=critic_model.CRITIC)
