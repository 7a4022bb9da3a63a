"""Useful FLOPs of a group-native forward, counted from the shapes, and what devices can do at best."""

import numpy as np

from grpojax.models.decoder_config import DecoderConfig
from grpojax.types import PerPrompt, Samples

# Of one device as jax names its kind, from the makers' data sheets: dense bfloat16 FLOP/s, bytes/s of its memory.
PEAKS = {
    "TPU v4": (275e12, 1.2e12), "TPU v5 lite": (197e12, 0.82e12), "TPU v5": (459e12, 2.77e12),
    "TPU v5p": (459e12, 2.77e12), "TPU v6 lite": (918e12, 1.64e12), "NVIDIA A100-SXM4-40GB": (312e12, 1.56e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 2.04e12), "NVIDIA H100 80GB HBM3": (989e12, 3.35e12),
    "NVIDIA H200": (989e12, 4.8e12),
}  # fmt: skip
PEAK_FLOPS = {kind: flops for kind, (flops, _) in PEAKS.items()}


def matmul_weights(c: DecoderConfig) -> int:
    """Weights that a token multiplies with in the layers (not the vocabulary)."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    return c.num_layers * (c.hidden_size * (2 * q + 2 * kv) + 3 * c.hidden_size * c.intermediate_size)


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


def decode_bytes(c: DecoderConfig, prompt_tokens: int, tokens: int, *, prompts: int, group: int, slots: int) -> float:
    """Bytes of memory that sampling must read: weights once a token step, each prompt's keys and values once for all
    of its slots, each slot's own. In bfloat16, every prompt and completion of full length, on a single device.

    Args:
      c: the decoder.
      prompt_tokens: of each prompt.
      tokens: of each completion.
      prompts: sampled at the same time.
      group: completions of a prompt.
      slots: of them sampled at the same time; 0 for all.
    """
    slots = slots or group
    per_token = 2 * 2 * c.num_layers * c.num_kv_heads * c.head_dim
    seen = prompts * (prompt_tokens + slots * (tokens + 1) / 2) * per_token
    return -(-group // slots) * tokens * (2 * (matmul_weights(c) + c.vocab_size * c.hidden_size) + seen)
