"""The useful FLOPs of a critic, counted by hand."""

from types import SimpleNamespace

import pytest
from counted_work import CONFIG, ENTRY, FORWARD, judged

from grpojax.extensions.methods.critic import LearnedCritic
from grpojax.extensions.methods.critic_update import CriticModel
from grpojax.models import Compute
from grpojax.run.sections import TrainConfig
from grpojax.run.work import step_flops

CRITIC = FORWARD - 3 * ENTRY


BATCH = judged([[1, 2]])


@pytest.mark.parametrize(("frozen", "passes"), [(False, 3), (True, 1)])
def test_a_critic_says_and_learns(frozen, passes):
    """Without the vocabulary; a frozen trunk is not gone back through."""
    critic = SimpleNamespace(
        model=CriticModel(config=CONFIG, compute=Compute(), frozen=frozen),
        config=SimpleNamespace(train=TrainConfig(steps=1, ppo_epochs=2)),
    )
    assert CRITIC == 4064
    whole = BATCH
    one = {"scores": 1, "ppo_epochs": 2, "parts": [LearnedCritic.flops(critic, whole)]}
    got = step_flops(CONFIG, whole, **one)
    assert (got["score"], got["update"]) == (FORWARD + CRITIC, 2 * (3 * FORWARD + passes * CRITIC))
    alone = step_flops(CONFIG, whole, **one, policy_learns=False)
    assert alone == got | {"update": 2 * passes * CRITIC}
