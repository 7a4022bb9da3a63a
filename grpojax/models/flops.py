"""Useful FLOPs of a group-native forward, counted from the shapes, and what devices can do at best."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from grpojax.models.decoder_config import DecoderConfig
from grpojax.types import PerPrompt, Samples


class Chip(NamedTuple):
    """What a maker's data sheet says of one device.

    Attributes:
      flops: dense bfloat16 FLOP/s.
      bandwidth: bytes/s of its memory.
      memory: bytes of it.
      link: bytes/s that one of its links to neighbours carries one way. A GPU's is all of its NVLink together, or
        PCIe where it has none; 0 where the sheet does not say.
      network: bytes/s to devices of another slice or machine, a chip's share of its host's; 0 where it does not say.
    """

    flops: float
    bandwidth: float
    memory: float
    link: float = 0.0
    network: float = 0.0


_GIB = 2**30

# By the name that jax has for its kind. TPUs: the pages "TPU v4", "TPU v5e", "TPU v5p" and "TPU v6e" at
# docs.cloud.google.com/tpu/docs: peak compute, HBM, interconnect (2400, 1600, 4800, 3200 Gbps a chip over 6, 4, 6, 4
# links), data center network (6.4 and 25.6 Tbps a pod of 256 v5e and v6e, 50 Gbps a chip of v5p; none given for v4).
# GPUs: NVIDIA's data sheets "H100 Tensor Core GPU", "H200", "A100" (all SXM) and "L4", and the white paper "Ada GPU
# Architecture" (RTX 4090): no sparsity, and of NVLink, whose figure counts both ways, half.
CHIPS = {
    "TPU v4": Chip(275e12, 1.228e12, 32 * _GIB, 50e9),
    "TPU v5 lite": Chip(197e12, 0.819e12, 16 * _GIB, 50e9, 3.125e9),
    "TPU v5": Chip(459e12, 2.765e12, 95 * _GIB, 100e9, 6.25e9),
    "TPU v5p": Chip(459e12, 2.765e12, 95 * _GIB, 100e9, 6.25e9),
    "TPU v6 lite": Chip(918e12, 1.64e12, 32 * _GIB, 100e9, 12.5e9),
    "NVIDIA A100-SXM4-40GB": Chip(312e12, 1.555e12, 40 * _GIB, 300e9),
    "NVIDIA A100-SXM4-80GB": Chip(312e12, 2.039e12, 80 * _GIB, 300e9),
    "NVIDIA H100 80GB HBM3": Chip(989e12, 3.35e12, 80e9, 450e9),
    "NVIDIA H200": Chip(989e12, 4.8e12, 141e9, 450e9),
    "NVIDIA L4": Chip(121e12, 0.3e12, 24e9, 32e9),
    "NVIDIA GeForce RTX 4090": Chip(165e12, 1.008e12, 24e9, 32e9),
}
PEAK_FLOPS = {kind: chip.flops for kind, chip in CHIPS.items()}


def matmul_weights(c: DecoderConfig) -> int:
    """Weights that a token multiplies with in the layers (not the vocabulary): of a mixture, those of its experts."""
    return c.num_layers * _layer_weights(c, c.experts.chosen if c.experts else 0)


def layer_weights(c: DecoderConfig) -> int:
    """Weights of the matrices of one layer, all experts of a mixture among them."""
    return _layer_weights(c, c.experts.count if c.experts else 0)


def _layer_weights(c: DecoderConfig, experts: int) -> int:
    """Of a layer with so many of its experts."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    width, router = c.intermediate_size, 0
    if c.experts is not None:
        width, router = experts * c.experts.size + c.experts.shared, c.experts.count + c.shared_expert
    return c.hidden_size * (2 * q + 2 * kv + 3 * width + router)


def forward_flops(c: DecoderConfig, prompt_lengths: PerPrompt, lengths: Samples) -> float:
    """Multiply-adds times two of one group-native forward, counted on tokens in use only.

    Args:
      c: the decoder.
      prompt_lengths: ``[P]`` tokens of each prompt, run once.
      lengths: ``[P, G]`` tokens of each completion.
    """
    prompt_lengths, lengths = np.asarray(prompt_lengths, np.float64), np.asarray(lengths, np.float64)
    tokens = prompt_lengths.sum() + lengths.sum()
    # Causal attention: a token sees the prompt and, of its own kind, itself and those before it.
    seen = (prompt_lengths * (prompt_lengths + 1) / 2).sum()
    seen += (lengths * (lengths + 1) / 2 + lengths * prompt_lengths[:, None]).sum()
    attention = 2 * seen * c.num_heads * c.head_dim * c.num_layers
    return 2 * (tokens * matmul_weights(c) + attention + lengths.sum() * c.vocab_size * c.hidden_size)


def update_flops(
    c: DecoderConfig, prompt_lengths: PerPrompt, lengths: Samples, *, remat: str, frozen: bool = False
) -> float:
    """FLOPs of a forward and a backward pass as they are computed, recomputation included.

    The backward pass costs two forward passes. Logits are made again in it; with ``remat`` "layer" so is all else.

    Args:
      c: the decoder.
      prompt_lengths: ``[P]`` tokens of each prompt.
      lengths: ``[P, G]`` tokens of each completion.
      remat: as in `grpojax.models.Compute`.
      frozen: the weights get no gradient, which is half of the backward pass; small factors are not counted.
    """
    forward = forward_flops(c, prompt_lengths, lengths)
    logits = 2 * float(np.asarray(lengths, np.float64).sum()) * c.vocab_size * c.hidden_size
    return (2 if frozen else 3) * forward + (forward if remat == "layer" else logits)


def influence_flops(c: DecoderConfig, lengths: Samples, entries: PerPrompt) -> float:
    """FLOPs of `grpojax.credit.influence` beyond the forward: logits of a group's tokens against its own vocabulary,
    the matrix ``M``, and its product with every token.

    Args:
      c: the decoder.
      lengths: ``[P, G]`` tokens of each completion.
      entries: ``[P]`` distinct tokens of each group.
    """
    tokens = np.asarray(lengths, np.float64).sum(1)
    return 3 * 2 * float((tokens * np.asarray(entries)).sum()) * c.hidden_size


def decode_bytes(
    c: DecoderConfig,
    prompt_tokens: int,
    tokens: float,
    *,
    prompts: int,
    slots: int,
    block: int = 1,
    cache_dtype: DTypeLike = "bfloat16",
) -> float:
    """Bytes of memory that the sampler reads for one token step: weights once (of a mixture all experts, as many tokens
    choose them), a prompt's keys and values once for all slots of its row, and of every slot the blocks of the cache in
    which any has a token. In bfloat16, on one device.

    Args:
      c: the decoder.
      prompt_tokens: of each prompt.
      tokens: drawn so far of the longest sample; on the average over a rollout a fraction.
      prompts: sampled at the same time: rows of slots.
      slots: completions of each that are sampled at the same time.
      block: positions that are read together (`grpojax.programs.kv_cache.ring`).
      cache_dtype: of keys and values.
    """
    per_token = kv_bytes(c, cache_dtype)
    weights = c.num_layers * layer_weights(c) + c.vocab_size * c.hidden_size
    return 2 * weights + prompts * (prompt_tokens + slots * -(-tokens // block) * block) * per_token


def kv_numbers(c: DecoderConfig) -> int:
    """Keys and values of one token in all layers."""
    return 2 * c.num_layers * c.num_kv_heads * c.head_dim


def kv_bytes(c: DecoderConfig, cache_dtype: DTypeLike) -> int:
    """Their bytes; in eight bits with a scale of two a token and head (`grpojax.models.quantised`)."""
    size = kv_numbers(c) * jnp.dtype(cache_dtype).itemsize
    return size + 2 * kv_numbers(c) // c.head_dim if jnp.dtype(cache_dtype) == jnp.int8 else size


def parameters(c: DecoderConfig) -> int:
    """Weights of matrices: layers, embedding and, where it is one of its own, output projection."""
    return c.num_layers * layer_weights(c) + (2 if c.own_head else 1) * c.vocab_size * c.hidden_size
