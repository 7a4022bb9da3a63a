"""The update and the rollout as they are exported for NVIDIA, without one: what multiplies in which dtype, what a
token copies, and that it runs the kernel that attends to slots."""

import dataclasses
import math
import re

import jax
import numpy as np
import optax
import pytest
from jax import export
from plain_decoder import BASE, ragged_batch, random_decoder, with_tokens

from grpojax import losses
from grpojax.models import Compute, decoder
from grpojax.programs import packing, policy_update, state
from grpojax.programs.sampler import SamplerConfig, sample_groups
from grpojax.programs.update import make_update
from grpojax.types import Prompts

CONFIG = dataclasses.replace(BASE, vocab_size=56, hidden_size=16, intermediate_size=24, num_layers=2)


def products():
    """Operands of each product of matrices in a bfloat16 update exported for CUDA, as in ``3x5xbf16``."""
    batch = ragged_batch(np.random.default_rng(0), p=3, g=5, vocab=56)
    ones = np.ones(batch.tokens.shape, np.float32)
    packed, _ = packing.pack(with_tokens(batch, advantages=ones, weights=ones, ref_logps=-ones))
    graph, params = random_decoder(CONFIG)
    rule = optax.sgd(0.1)
    compute = Compute(dtype="bfloat16", attention="xla", platform="gpu")
    objective = losses.Objective(kl_coef=0.1)
    step = make_update(policy_update.policy_objective(graph, objective, compute, entropy=True), rule)
    leaves, tree = jax.tree.flatten((state.init_state(params, rule), {}, packed))
    flat = jax.jit(lambda *leaves: jax.tree.leaves(step(*jax.tree.unflatten(tree, leaves))))
    return factors(export.export(flat, platforms=["cuda"])(*leaves).mlir_module())


def factors(text):
    return re.findall(r"dot_general.* : \(tensor<([^>]*)>, tensor<([^>]*)>\)", text)


def test_a_bfloat16_update_multiplies_nothing_in_float32():
    """The gradients of the scores, float32 themselves, are cast before they meet queries and keys."""
    found = products()
    assert len(found) > 40
    assert [pair for pair in found if not all(x.endswith("bf16") for x in pair)] == []


def nvidia():
    """Has a kernel know for which GPU it is made; before jax 0.11 it is an H100 where there is none."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


TRITON = "__gpu$xla.gpu.triton"


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
    kernel = export.DisabledSafetyCheck.custom_call(TRITON)
    with nvidia():
        exported = export.export(jax.jit(flat), platforms=["cuda"], disabled_checks=[kernel])(key, *leaves)
    return exported.mlir_module()


def decode_loop(text):
    """Lines of the innermost loop that calls the kernel."""
    lines = text.splitlines()
    starts = [k for k, line in enumerate(lines) if "stablehlo.while" in line]
    of_slots = max(k for k, line in enumerate(lines) if "call @attend" in line)
    start = max(k for k in starts if k < of_slots)
    margin = len(lines[start]) - len(lines[start].lstrip())
    end = next(k for k in range(of_slots, len(lines)) if lines[k].startswith(" " * margin + "}"))
    return lines[start + 1 : end]


@pytest.mark.parametrize("cells", [{}, {"slots": 4, "rows": 2}], ids=["own rows", "shared rows"])
def test_a_bfloat16_rollout_multiplies_nothing_in_float32_and_copies_nothing_each_token(cells):
    """Numbers drawn are float32, but no product is of them. Of what is as large as a prompt's keys or a layer's
    smallest weight, a token makes nothing but caches with one column more, in place."""
    text = rollout(**cells)
    found = factors(text)
    assert len(found) > 20 and [pair for pair in found if not all(x.endswith("bf16") for x in pair)] == []
    least = min(WIDE.hidden_size, 3 * 67) * WIDE.num_kv_heads * WIDE.head_dim * cells.get("rows", 3) // 3
    loop = "\n".join(decode_loop(text))
    made = re.findall(r"= (?:stablehlo\.)?(\w+) .*(?:->|:) tensor<([\dx]*)x\w+>", loop)
    large = [op for op, shape in made if math.prod(map(int, shape.split("x"))) >= least]
    assert len(made) > 250 and large == ["dynamic_update_slice"] * 2 * WIDE.num_layers
    assert text.count(TRITON) == 2 and loop.count("call @attend") == loop.count("call @of_prompt") == WIDE.num_layers
    assert loop.count("optimization_barrier") == 3 * WIDE.num_layers  # before k, v and up: multiplied one by one
