"""Useful FLOPs of a group-native forward, counted from the shapes, and the peak performance of devices."""

from typing import NamedTuple

import numpy as np

from grpojax.models.compute import Compute
from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.layer_kinds import Kind
from grpojax.models.number_formats import CacheFormat, Floats
from grpojax.types import PerPrompt, Samples


class Chip(NamedTuple):
    """The figures of one device in its maker's data sheet.

    Attributes:
      flops: dense bfloat16 FLOP/s.
      bandwidth: bytes/s of its memory.
      memory: bytes of its memory.
      link: bytes/s that one of its links to neighbours carries in one direction. For a GPU it is all of its NVLink
        together, or PCIe if it has no NVLink. 0 if the sheet has no figure.
      network: bytes/s to devices of another slice or machine, as a chip's share of its host's network. 0 if the sheet
        has no figure.
    """

    flops: float
    bandwidth: float
    memory: float
    link: float = 0.0
    network: float = 0.0


_GIB = 2**30
_HALF = Floats("bfloat16")

# By jax's name of the kind of device. TPUs: the pages "TPU v4", "TPU v5e", "TPU v5p" and "TPU v6e" at
# docs.cloud.google.com/tpu/docs: peak compute, HBM, interconnect (2400, 1600, 4800, 3200 Gbps a chip over 6, 4, 6, 4
# links), data center network (6.4 and 25.6 Tbps a pod of 256 v5e and v6e, 50 Gbps a chip of v5p; none given for v4).
# GPUs: NVIDIA's data sheets "H100 Tensor Core GPU", "H200", "A100" (all SXM), "L4" and "T4", and the white papers "Ada
# GPU Architecture" (RTX 4070, 4080 and 4090) and "RTX Blackwell GPU Architecture" (RTX 5090). They are figures without
# sparsity, with sums in float32. A T4 multiplies no bfloat16: its figure is that of float32. NVIDIA's figure of NVLink
# counts both directions, so half of it stands here.
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
    "NVIDIA GeForce RTX 4070": Chip(58e12, 0.504e12, 12e9, 32e9),
    "NVIDIA GeForce RTX 4080": Chip(97e12, 0.717e12, 16e9, 32e9),
    "NVIDIA GeForce RTX 4090": Chip(165e12, 1.008e12, 24e9, 32e9),
    "NVIDIA GeForce RTX 5090": Chip(209e12, 1.792e12, 32e9, 64e9),
    "Tesla T4": Chip(8.1e12, 0.32e12, 16e9, 16e9),
}
PEAK_FLOPS = {kind: chip.flops for kind, chip in CHIPS.items()}


def matmul_weights(c: DecoderConfig) -> int:
    """Weights that a token is multiplied by in the layers, without the vocabulary. A mixture counts the token's experts
    only."""
    return sum(_layer_weights(c, kind, of_token=True) for kind in c.kinds)


def layer_weights(c: DecoderConfig) -> int:
    """Weights of the matrices of one layer, including all experts of a mixture; of the largest, if layers differ."""
    return max(_layer_weights(c, kind) for kind in c.kinds)


def all_layers_weights(c: DecoderConfig) -> int:
    """Weights of the matrices of all layers, including all experts of a mixture."""
    return sum(_layer_weights(c, kind) for kind in c.kinds)


def _layer_weights(c: DecoderConfig, kind: Kind, *, of_token: bool = False) -> int:
    """Weights of the matrices of one layer, or those that a token is multiplied by."""
    q, kv, d = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size
    mixer, mlp = d * ((2 + c.output_gate) * q + 2 * kv), 3 * d * c.intermediate_size
    if c.mixer is not None and kind.mixer == c.mixer.name:
        mixer = c.mixer.matrices(d)
    if c.mlp is not None and kind.mlp == c.mlp.name:
        mlp = c.mlp.of_token(d) if of_token else c.mlp.matrices(d)
    return mixer + mlp


def _other_products(c: DecoderConfig) -> int:
    """Multiply-adds of a token that multiply no weight of a matrix, in all layers with another mixer than attention."""
    return 0 if c.mixer is None else len(c.mixer_layers) * c.mixer.products()


def state_bytes(c: DecoderConfig) -> int:
    """Bytes of the states of all layers with another mixer than attention, for one sample."""
    return 0 if c.mixer is None else len(c.mixer_layers) * c.mixer.state_bytes()


def forward_flops(c: DecoderConfig, prompt_lengths: PerPrompt, lengths: Samples) -> float:
    """FLOPs of one group-native forward: twice its multiply-adds, without padding.

    Args:
      c: the decoder.
      prompt_lengths: ``[P]`` tokens of each prompt, run once.
      lengths: ``[P, G]`` tokens of each completion.
    """
    prompt_lengths, lengths = np.asarray(prompt_lengths, np.float64), np.asarray(lengths, np.float64)
    tokens = prompt_lengths.sum() + lengths.sum()
    windowed = len(c.windowed_layers)
    seen = (len(c.attending) - windowed) * _seen(prompt_lengths, lengths, np.inf)
    if windowed:
        seen += windowed * _seen(prompt_lengths, lengths, c.window)
    attention = 2 * seen * c.num_heads * c.head_dim
    of_layers = tokens * (matmul_weights(c) + _other_products(c)) + attention
    return 2 * (of_layers + lengths.sum() * c.vocab_size * c.hidden_size)


def _seen(prompt_lengths: np.ndarray, lengths: np.ndarray, window: float) -> float:
    """Keys that all tokens see in one layer. Attention is causal: a prompt's token sees the prompt up to itself, and a
    completion's token also the whole prompt; each sees at most ``window`` tokens, itself included."""

    def of_text(n: np.ndarray) -> np.ndarray:
        short = np.minimum(n, window)
        return short * (short + 1) / 2 + (n - short) * short

    before = of_text(prompt_lengths)
    return float(before.sum() + (of_text(prompt_lengths[:, None] + lengths) - before[:, None]).sum())


def update_flops(
    c: DecoderConfig, prompt_lengths: PerPrompt, lengths: Samples, *, remat: str, frozen: bool = False
) -> float:
    """FLOPs of a forward and a backward pass, including recomputation.

    The backward pass costs two forward passes. It recomputes the logits, and with ``remat`` "layer" also all else.

    Args:
      c: the decoder.
      prompt_lengths: ``[P]`` tokens of each prompt.
      lengths: ``[P, G]`` tokens of each completion.
      remat: as in `grpojax.models.Compute`.
      frozen: whether the weights get no gradient, which saves half of the backward pass. Small factors do not count.
    """
    forward = forward_flops(c, prompt_lengths, lengths)
    logits = 2 * float(np.asarray(lengths, np.float64).sum()) * c.vocab_size * c.hidden_size
    return (2 if frozen else 3) * forward + (forward if remat == "layer" else logits)


def flops_in_vain(c: DecoderConfig, compute: Compute, at_once: int, tokens: float) -> float:
    """FLOPs of weights that these tokens are multiplied by and do not need, if ``at_once`` of them run together on a
    device: those of experts that a token does not go to."""
    if c.mlp is None:
        return 0.0
    return 2 * float(tokens) * c.mlp.in_vain(c.hidden_size, compute, at_once) * len(c.mlp_layers)


def influence_flops(c: DecoderConfig, lengths: Samples, entries: PerPrompt) -> float:
    """FLOPs of `grpojax.credit.influence` in addition to the forward. They are the logits of a group's tokens for the
    group's own vocabulary, the matrix ``M``, and the product of ``M`` with every token.

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
    cache: CacheFormat = _HALF,
) -> float:
    """Bytes of memory that the sampler moves for one decode step, with weights in bfloat16, on one device.

    A step reads the weights once (all experts of a mixture, since many tokens choose among them). It reads a prompt's
    keys and values once for all slots of its row. For every slot it reads the blocks of the cache in which any slot has
    a token that the layer sees. It reads and writes the states of layers that do not attend.

    Args:
      c: the decoder.
      prompt_tokens: tokens of each prompt.
      tokens: tokens of the longest sample so far. May be a fraction, as an average over a rollout.
      prompts: number of prompts that are sampled at the same time, which are the rows of slots.
      slots: number of completions of each prompt that are sampled at the same time.
      block: positions that are read together (`grpojax.programs.kv_cache.ring`).
      cache: how keys and values are stored.
    """
    attending, windowed = len(c.attending), len(c.windowed_layers)
    per_token = kv_bytes(c, cache) / attending
    weights = all_layers_weights(c) + c.vocab_size * c.hidden_size
    states = 2 * prompts * slots * state_bytes(c)

    def blocks(tokens: float) -> float:
        return -(-tokens // block) * block

    own = (attending - windowed) * blocks(tokens) + windowed * blocks(min(tokens, c.window))
    return 2 * weights + prompts * (attending * prompt_tokens + slots * own) * per_token + states


def kv_numbers(c: DecoderConfig) -> int:
    """How many numbers the keys and values of one token have in all layers that attend."""
    return 2 * len(c.attending) * c.num_kv_heads * c.head_dim


def kv_bytes(c: DecoderConfig, cache: CacheFormat) -> int:
    """Bytes of the keys and values of one token in all layers."""
    return kv_numbers(c) // c.head_dim * cache.bytes(c.head_dim)


def parameters(c: DecoderConfig) -> int:
    """Weights of all matrices: layers, embedding and, if it is not tied to the embedding, the output projection."""
    return all_layers_weights(c) + (2 if c.own_head else 1) * c.vocab_size * c.hidden_size
