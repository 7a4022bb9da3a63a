"""Supervised losses: transformers' cross-entropy, DPO written out, and the same gradient under every split."""

import dataclasses

import flat_batches
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick_xla
import tiny_hf
from flax import nnx
from plain_decoder import BASE, plain_batch, ragged_batch, random_decoder, with_tokens

from grpojax import losses, masked, models, sharding
from grpojax.device import ROWS, Real, quick_options
from grpojax.extensions.supervised import supervised_programs, supervised_update
from grpojax.models import Compute
from grpojax.models.weight_table import shardings
from grpojax.programs import optimizer as opt
from grpojax.programs import state
from grpojax.programs.policy import PolicyShape, Sampling
from grpojax.programs.update import make_update, update_program

CONFIG = dataclasses.replace(BASE, vocab_size=56, hidden_size=16, intermediate_size=24, num_layers=2)
SGD = opt.OptimizerConfig(name="sgd", b1=0.0, learning_rate=1.0, grad_clip=0.0)


def answers(p=8, g=2, how="token_mean", seed=0):
    """Completions with weights; one of them is not there."""
    batch = ragged_batch(np.random.default_rng(seed), p=p, g=g, vocab=56)
    lengths = np.where(np.arange(p * g).reshape(p, g) == 3, 0, batch.lengths)
    mask = np.asarray(masked.from_lengths(lengths, batch.tokens.shape[2]))
    batch = dataclasses.replace(batch, lengths=lengths.astype(np.int32), tokens=np.where(mask, batch.tokens, 0))
    weights = np.asarray(losses.loss_weights(mask, how, count_empty=False))
    return with_tokens(batch, advantages=None, weights=weights)


def pairs(p=8, seed=0):
    """``(batch, reference [P, 2], weights [P])``; no two pairs weigh the same, and one weighs nothing."""
    rng = np.random.default_rng(seed)
    batch = ragged_batch(rng, p=p, g=2, vocab=56)
    sign = np.broadcast_to(np.array([[1.0], [-1.0]], np.float32), batch.tokens.shape)
    reference = -4.0 * batch.lengths + rng.normal(size=(p, 2))
    return (
        with_tokens(batch, sign=sign, advantages=None, weights=None),
        reference.astype(np.float32),
        np.arange(p) / 17.0,
    )


def part_of(kind, *, shards=1, microbatches=1, gather=False):
    """What the loss of a kind reads."""
    how = {"shards": shards, "microbatches": microbatches}
    if kind == "sft":
        return flat_batches.pack(answers(), gather=gather, **how)[0]
    batch, *rest = pairs()
    reference, weights = (supervised_update.by_prompts(np.float32(x), **how) for x in rest)
    packed, _ = flat_batches.pack(batch, gather=gather, **how)
    return supervised_update.Pairs(rows=packed, reference=reference, weights=weights)


def objective(kind, graph, compute):
    if kind == "sft":
        return supervised_update.sft_objective(graph, compute)
    return supervised_update.dpo_objective(graph, compute, 0.3)


def updated(kind, *, sizes=None, microbatches=1, attention="xla"):
    """Weights after one update, and its metrics."""
    mesh = None
    if sizes is not None:
        mesh = sharding.make_mesh(sharding.MeshConfig(data=sizes[0], fsdp=sizes[1], tensor=sizes[2]))
    compute = Compute(mesh=mesh, attention=attention)
    graph, params = random_decoder(CONFIG)
    if mesh is not None:
        params = jax.device_put(params, shardings(params, mesh))
    rule = opt.make_optimizer(SGD, 10)
    part = part_of(kind, shards=sharding.shards(mesh), microbatches=microbatches, gather=compute.needs_gather)
    step = update_program("update", make_update(objective(kind, graph, compute), rule), compute)
    after, metrics = step(state.init_state(params, rule, Real(mesh)), None, Real(mesh).put(part, ROWS))
    return jax.tree.map(np.asarray, after.params), {k: float(getattr(v, "value", v)) for k, v in metrics.items()}


def same(got, want, atol=3e-6):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=atol, err_msg=jax.tree_util.keystr(path))


@pytest.fixture(scope="module")
def whole():
    return {kind: updated(kind) for kind in ("sft", "dpo")}


@pytest.mark.in_ci("sizes3-1-splash-sft", "None-4-xla-dpo")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "dpo"])
@pytest.mark.parametrize(("sizes", "microbatches", "attention"), [
    (None, 4, "xla"), ((2, 2, 2), 2, "xla"), ((8, 1, 1), 1, "xla"), ((2, 2, 2), 1, "splash"), (None, 8, "splash"),
])  # fmt: skip
def test_the_gradient_does_not_depend_on_the_split(whole, kind, sizes, microbatches, attention):
    want, metrics = whole[kind]
    got, other = updated(kind, sizes=sizes, microbatches=microbatches, attention=attention)
    same(got, want)
    for name, value in metrics.items():
        assert other[name] == pytest.approx(value, rel=2e-5, abs=2e-6), name


@pytest.mark.slow
def test_the_update_is_the_gradient_of_the_plain_cross_entropy(whole):
    batch = answers()
    graph, params = random_decoder(CONFIG)

    def plain(params):
        return -(batch.arrays["weights"] * plain_batch(graph, params, batch)[0]).sum()

    loss, gradient = jax.jit(jax.value_and_grad(plain))(params)
    after, metrics = whole["sft"]
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert metrics["nll"] == pytest.approx(float(loss), rel=1e-5)  # a mean over tokens
    same(jax.tree.map(np.subtract, params, gradient), after, atol=1e-5)


@pytest.mark.slow
def test_the_update_is_the_gradient_of_dpo_written_out(whole):
    batch, reference, weights = pairs()
    graph, params = random_decoder(CONFIG)

    def loss(params):
        sums = plain_batch(graph, params, batch)[0].sum(-1)
        margin = (sums[:, 0] - reference[:, 0]) - (sums[:, 1] - reference[:, 1])
        return (np.float32(weights) * jnp.log1p(jnp.exp(-0.3 * margin))).sum(), (sums, margin)

    (value, (sums, margin)), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    after, metrics = whole["dpo"]
    same(jax.tree.map(np.subtract, params, gradient), after, atol=2e-5)
    live = slice(1, None)  # the first pair weighs nothing
    want = {
        "loss": value,
        "logps/chosen": sums[live, 0].mean(),
        "logps/rejected": sums[live, 1].mean(),
        "rewards/chosen": 0.3 * (sums[live, 0] - reference[live, 0]).mean(),
        "rewards/rejected": 0.3 * (sums[live, 1] - reference[live, 1]).mean(),
        "rewards/margins": 0.3 * margin[live].mean(),
        "rewards/accuracies": (margin[live] > 0).mean(),
    }
    for name, number in want.items():
        assert metrics[name] == pytest.approx(float(number), rel=1e-4, abs=1e-5), name
    assert 0 < metrics["rewards/accuracies"] < 1


@pytest.mark.slow
def test_the_loss_and_its_gradient_are_transformers(tmp_path):
    """The prompt's labels are masked, and one update has completions of several prompts in shared rows."""
    from with_torch import torch

    made = tiny_hf.save(tmp_path, "qwen2")
    graph, params = nnx.split(models.load(tmp_path))
    batch = ragged_batch(np.random.default_rng(5), p=3, g=2, vocab=94)
    mask = np.asarray(masked.from_lengths(batch.lengths, batch.tokens.shape[2]))
    batch = with_tokens(batch, advantages=None, weights=np.asarray(losses.loss_weights(mask, "token_mean")))
    packed, _ = flat_batches.pack(batch)
    run = jax.jit(
        jax.value_and_grad(supervised_update.sft_objective(graph, Compute()), has_aux=True),
        compiler_options=quick_xla.OPTIONS,
    )
    (loss, _), gradient = run(params, None, jax.tree.map(lambda x: x[0], packed))

    total, count = torch.zeros(()), 0
    for p, g in np.ndindex(3, 2):
        prompt = batch.prompts.tokens[p, : batch.prompts.lengths[p]].tolist()
        answer = batch.tokens[p, g, : batch.lengths[p, g]].tolist()
        labels = [-100] * len(prompt) + answer
        out = made(torch.tensor([prompt + answer]), labels=torch.tensor([labels]))
        total, count = total + out.loss * len(answer), count + len(answer)
    (total / count).backward()
    assert float(loss) == pytest.approx((total / count).item(), rel=1e-5)
    np.testing.assert_allclose(gradient["embed"][...], made.model.embed_tokens.weight.grad.numpy(), atol=2e-6)
    np.testing.assert_allclose(gradient["head"][...], made.lm_head.weight.grad.numpy(), atol=2e-6)
    assert float(jnp.abs(gradient["embed"][...]).max()) > 1e-3


def test_update_and_scores_have_the_options_for_xla(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    compute, nothing = Compute(), lambda *given: None
    shape = PolicyShape(config=CONFIG, graph=None, compute=compute, sampling=Sampling(None, compute))
    options, made = quick_options(), supervised_programs.make_supervised_programs(shape, nothing, SGD, 10)
    assert options is not None and (made.score.options, made.update.options) == (options, options)
