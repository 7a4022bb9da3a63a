"""Rewards: functions ``fn(prompts, completions, tokens, **columns) -> list[float | None | list]``, plain or ``async``.

``prompts`` and ``completions`` are texts, ``tokens`` the sampled ids, ``columns`` the data's columns plus ``gold``,
all of them lists with one entry per sample. A function runs in a worker process and gets some samples of a batch at a
time, in any order, so it must score each by itself. None, a number that is not finite, or a failure of the function
makes a sample invalid: it is left out of its group's statistics and of the loss. A `grpojax.host.errors.UserError`
ends the run with its message.

Instead of a number, a function may return the rewards of a sample's steps: a list of ``(token end, reward)``, where the
token end is the number of tokens up to the step's end, in rising order. Variants that learn from them need
``step_rewards``. `steps.split_steps` says where steps end.
"""

from grpojax.rewards.answers import MARKERS, check_answer, extract_answer, normal_form
from grpojax.rewards.builtin import REWARDS
from grpojax.rewards.reward_config import RewardConfig, RewardsConfig
from grpojax.rewards.scoring import PendingScores, Rewards, RewardScores
from grpojax.rewards.steps import split_steps

__all__ = [
    "MARKERS",
    "REWARDS",
    "PendingScores",
    "RewardConfig",
    "Rewards",
    "RewardsConfig",
    "RewardScores",
    "check_answer",
    "extract_answer",
    "normal_form",
    "split_steps",
]
