"""The useful FLOPs of a step, counted by hand."""

import dataclasses

import numpy as np

from grpojax import data
from grpojax.models import DecoderConfig, flops
from grpojax.run.batch import RolloutBatch
from grpojax.run.work import step_flops
from grpojax.types import Rollout

CONFIG = DecoderConfig(
    family="llama", vocab_size=11, hidden_size=4, intermediate_size=8, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=2, rope_theta=1e4,
)  # fmt: skip
WEIGHT = 2 * 2 * (4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 8)  # 576 of a token through both layers
KEY, ENTRY = 2 * 2 * 4 * 2, 2 * 11 * 4  # 32 of a token and a key that it sees, 88 of a token and the vocabulary
# A prompt of 3 with completions of 1 and 2 tokens: 6 tokens, 19 keys. Its greedy completion of 2 alone: 5 and 15.
FORWARD, GREEDY = 6 * WEIGHT + 19 * KEY + 3 * ENTRY, 5 * WEIGHT + 15 * KEY + 2 * ENTRY


def judged(lengths, greedy=None):
    lengths = np.array(lengths, np.int32)
    tokens = np.zeros((*lengths.shape, 4), np.int32)
    rollout = Rollout(tokens=tokens, logps=tokens.astype(np.float32), lengths=lengths, stopped=lengths > 0)
    return RolloutBatch(
        problems=[data.Problem(i, (1, 2, 3), "", None, {}) for i in range(len(lengths))], rollout=rollout,
        total=lengths * 1.0, reward=lengths * 1.0, by_name={}, invalid={}, greedy_lengths=greedy,
    )  # fmt: skip


BATCH = judged([[1, 2]])


def test_the_policy_alone():
    assert (FORWARD, GREEDY) == (4328, 3536)
    drawn = [BATCH, judged([[1, 2], [2, 1]])]  # a filter has dropped two groups of three
    got = step_flops(
        CONFIG,
        dataclasses.replace(BATCH, everything=drawn),
        scores=2,
        iterations=3,
        parts=[{"late": 3.0}, {"late": 4.0, "score": 1.0}],
    )
    assert got == {"rollout": 3 * FORWARD, "score": 2 * FORWARD + 1, "late": 7.0, "update": 9 * FORWARD}


def test_a_greedy_completion_runs_its_prompt_again():
    drawn = [judged([[1, 2]], np.array([2]))]
    got = step_flops(CONFIG, dataclasses.replace(BATCH, everything=drawn), scores=0, iterations=1)
    assert got == {"rollout": 4328 + 3536, "score": 0, "late": 0, "update": 3 * FORWARD}


def test_influence_is_three_products_with_a_groups_own_vocabulary():
    assert flops.influence_flops(CONFIG, np.array([[1, 2], [3, 0]]), np.array([3, 2])) == 6 * 4 * (3 * 3 + 3 * 2)
