"""FLOPs of a small decoder and of a few samples, counted by hand."""

import numpy as np

from grpojax import data
from grpojax.models import DecoderConfig
from grpojax.run.batch import Batch
from grpojax.types import Rollout

CONFIG = DecoderConfig(
    family="llama", vocab_size=11, hidden_size=4, intermediate_size=8, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=2, rope_theta=1e4,
)  # fmt: skip
WEIGHT = 2 * 2 * (4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 8)  # 576 of a token through both layers
KEY, ENTRY = 2 * 2 * 4 * 2, 2 * 11 * 4  # 32 of a token and a key that it sees, 88 of a token and the vocabulary
# A prompt of 3 with completions of 1 and 2 tokens: 6 tokens, 19 keys. Its greedy completion of 2 alone: 5 and 15.
FORWARD, GREEDY = 6 * WEIGHT + 19 * KEY + 3 * ENTRY, 5 * WEIGHT + 15 * KEY + 2 * ENTRY


def completions(lengths):
    lengths = np.array(lengths, np.int32)
    tokens = np.zeros((*lengths.shape, 4), np.int32)
    return Rollout(tokens=tokens, logps=tokens.astype(np.float32), lengths=lengths, stopped=lengths > 0)


def judged(lengths, greedy=None):
    rollout, lengths = completions(lengths), np.array(lengths)
    return Batch(
        problems=[data.Problem(i, (1, 2, 3), "", None, {}) for i in range(len(lengths))], rollout=rollout,
        total=lengths * 1.0, reward=lengths * 1.0, by_name={}, invalid={},
        besides=() if greedy is None else [completions(np.reshape(greedy, (-1, 1)))],
    )  # fmt: skip
