"""A rollout's program of a small model with large layers, lowered and not run: its text says what a cache costs."""

import jax
import numpy as np

from grpojax.models import DecoderConfig, decoder
from grpojax.programs.sampler import sample_groups
from grpojax.types import Prompts

SMALL = DecoderConfig(
    family="qwen2", vocab_size=2048, hidden_size=1024, intermediate_size=2816, num_layers=2, num_heads=8,
    num_kv_heads=4, head_dim=128, rope_theta=1e6, qkv_bias=True,
)  # fmt: skip


def lowered(config, compute, prompts=4, length=96):
    graph, params = decoder.abstract(SMALL)
    zero = jax.ShapeDtypeStruct((prompts,), np.int32)
    given = Prompts(
        tokens=jax.ShapeDtypeStruct((prompts, length), np.int32),
        lengths=zero,
        uids=jax.ShapeDtypeStruct((prompts,), np.uint32),
        first_sample=zero,
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    program = jax.jit(lambda *args: sample_groups(graph, *args, config, eos_ids=(0,), compute=compute))
    return program.lower(params, given, key)
