"""The update, the rollout and its weights as one GPU runs them, without a mesh, exported for NVIDIA: what multiplies in
which dtype, what a token copies, and that it runs the kernel that attends to slots."""

import dataclasses

import flat_batches
import jax
import numpy as np
import optax
import pytest
from exported import MOVES, TRITON, decode_loop, factors, finer, made, stablehlo
from plain_decoder import BASE, FORMATS, ragged_batch, random_decoder, with_tokens

from grpojax import losses
from grpojax.models import Compute, decoder
from grpojax.programs import policy_update, state
from grpojax.programs.sampler import sample_groups
from grpojax.programs.sampler_config import SamplerConfig
from grpojax.programs.update import make_update
from grpojax.types import Prompts

CONFIG = dataclasses.replace(BASE, vocab_size=56, hidden_size=16, intermediate_size=24, num_layers=2)


def update():
    """A bfloat16 update exported for CUDA."""
    batch = ragged_batch(np.random.default_rng(0), p=3, g=5, vocab=56)
    ones = np.ones(batch.tokens.shape, np.float32)
    packed, _ = flat_batches.pack(with_tokens(batch, advantages=ones, weights=ones, ref_logps=-ones))
    graph, params = random_decoder(CONFIG)
    rule = optax.sgd(0.1)
    compute = Compute(dtype="bfloat16", attention="xla", platform="gpu")
    objective = losses.Objective(kl_coef=0.1)
    step = jax.jit(
        make_update(policy_update.policy_objective(graph, objective, compute, entropy=True), rule), donate_argnums=0
    )
    leaves, tree = jax.tree.flatten((state.init_state(params, rule), {}, packed))
    flat = jax.jit(lambda *leaves: jax.tree.leaves(step(*jax.tree.unflatten(tree, leaves))))
    return stablehlo(flat, *leaves)


@pytest.mark.slow
def test_a_bfloat16_update_multiplies_nothing_in_float32():
    """The gradients of the scores, float32 themselves, are cast before they meet queries and keys."""
    text = update()
    assert len(factors(text)) > 40 and finer(text) == []


WIDE = dataclasses.replace(CONFIG, vocab_size=256, hidden_size=256, intermediate_size=384, head_dim=64)


def rollout(length=67, prompts=3, **cells):
    """A bfloat16 rollout of 3 prompts, 5 samples of 71 tokens each, exported for CUDA."""
    graph, params = decoder.abstract(WIDE)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, "bfloat16"), params)
    zero = jax.ShapeDtypeStruct((prompts,), np.int32)
    given = Prompts(
        tokens=jax.ShapeDtypeStruct((prompts, length), np.int32),
        lengths=zero,
        uids=jax.ShapeDtypeStruct((prompts,), np.uint32),
        first_sample=zero,
    )
    compute = Compute(dtype="bfloat16", attention="xla", platform="gpu")
    config = SamplerConfig(group=5, max_tokens=71, top_p=0.9, **cells)
    leaves, tree = jax.tree.flatten((params, given))

    def flat(key, *leaves):
        given = (*jax.tree.unflatten(tree, leaves), jax.random.wrap_key_data(key))
        return jax.tree.leaves(sample_groups(graph, *given, config, eos_ids=(0,), compute=compute))

    key = jax.ShapeDtypeStruct((2,), np.uint32)
    return stablehlo(jax.jit(flat), key, *leaves)


@pytest.mark.parametrize("cells", [{}, {"decode_slots": 4}], ids=["all slots", "fewer"])
@pytest.mark.slow
def test_a_bfloat16_rollout_multiplies_nothing_in_float32_and_copies_nothing_each_token(cells):
    """Numbers drawn are float32, but no product is of them. Of what is as large as a prompt's keys or a layer's
    smallest weight, a token makes nothing but caches with one column more, in place."""
    text = rollout(**cells)
    assert len(factors(text)) > 20 and finer(text) == []
    least = min(WIDE.hidden_size, 3 * 67) * WIDE.num_kv_heads * WIDE.head_dim
    loop = "\n".join(decode_loop(text))
    large = made(text, least, decode_loop(text))
    assert made(text, 1, decode_loop(text)).total() > 250
    assert {op for op, *_ in large} == {"dynamic_update_slice"} and large.total() == 2 * WIDE.num_layers
    assert text.count(TRITON) == 2 and loop.count("call @attend") == loop.count("call @of_prompt") == WIDE.num_layers
    # q, k and v are one product, and so are gate and up.
    assert loop.count("dot_general") == 4 * WIDE.num_layers + 1 and "optimization_barrier" not in loop


@pytest.mark.parametrize("weights", FORMATS)
def test_a_rollouts_weights_are_each_made_once(weights):
    """On one GPU: of all layers at a time, by a cast, or by rounding to eight bits; nothing is moved beside that."""
    compute = Compute(dtype="bfloat16", attention="xla", platform="gpu")
    params = decoder.abstract(WIDE)[1]
    found = made(stablehlo(state.make_reshard(WIDE, compute, weights), params), WIDE.hidden_size * WIDE.head_dim)
    moved = [(operation, dtype) for (operation, _, dtype), n in found.items() if operation in MOVES for _ in range(n)]
    assert moved == [("convert", "bf16" if weights == "compute" else "i8")] * 8
