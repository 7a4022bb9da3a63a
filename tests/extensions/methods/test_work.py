"""The useful FLOPs of a critic, counted by hand."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from grpojax import data
from grpojax.extensions.methods.critic import Critic
from grpojax.extensions.methods.critic_update import CriticModel
from grpojax.models import Compute, DecoderConfig
from grpojax.run.batch import RolloutBatch
from grpojax.run.sections import TrainConfig
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


CRITIC = FORWARD - 3 * ENTRY


def judged(lengths, greedy=None):
    lengths = np.array(lengths, np.int32)
    tokens = np.zeros((*lengths.shape, 4), np.int32)
    rollout = Rollout(tokens=tokens, logps=tokens.astype(np.float32), lengths=lengths, stopped=lengths > 0)
    return RolloutBatch(
        problems=[data.Problem(i, (1, 2, 3), "", None, {}) for i in range(len(lengths))], rollout=rollout,
        total=lengths * 1.0, reward=lengths * 1.0, by_name={}, invalid={}, greedy_lengths=greedy,
    )  # fmt: skip


BATCH = judged([[1, 2]])


@pytest.mark.parametrize(("frozen", "passes"), [(False, 3), (True, 1)])
def test_a_critic_says_and_learns(frozen, passes):
    """Without the vocabulary; a frozen trunk is not gone back through."""
    critic = SimpleNamespace(
        model=CriticModel(config=CONFIG, compute=Compute(), frozen=frozen),
        config=SimpleNamespace(train=TrainConfig(steps=1, ppo_epochs=2)),
    )
    assert CRITIC == 4064
    whole = dataclasses.replace(BATCH, everything=[BATCH])
    one = {"scores": 1, "iterations": 2, "parts": [Critic.flops(critic, whole)]}
    got = step_flops(CONFIG, whole, **one)
    assert (got["score"], got["update"]) == (FORWARD + CRITIC, 2 * (3 * FORWARD + passes * CRITIC))
    alone = step_flops(CONFIG, whole, **one, policy_learns=False)
    assert alone == got | {"update": 2 * passes * CRITIC}
