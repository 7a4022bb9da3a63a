"""Rewards: functions ``fn(prompts, completions, tokens, **columns) -> list[float | None | list]``, plain or ``async``.

``prompts`` and ``completions`` are texts, ``tokens`` the sampled ids, ``columns`` the data's columns plus ``gold``,
all lists of one entry a sample. A function gets some samples of a batch at a time, in no order to count on, in a worker
process: it must judge each for itself. None (or a number that is not finite) marks a sample as invalid, as does a
failure of the function: such a sample is left out of its group's statistics and of the loss.

In place of a number there may be the rewards of a sample's steps, a list of ``(token end, reward)``: the tokens up to a
step's end, 1 for a step of only the first token, rising. Variants that learn from them need ``step_rewards``.
`steps.split_steps` says where steps end.
"""

from grpojax.rewards.answers import MARKERS, check_answer, extract_answer, normal_form
from grpojax.rewards.builtin import REWARDS
from grpojax.rewards.config import RewardConfig, RewardsConfig
from grpojax.rewards.scoring import PendingScores, Rewards, Scores
from grpojax.rewards.steps import split_steps

__all__ = [
    "MARKERS",
    "REWARDS",
    "PendingScores",
    "RewardConfig",
    "Rewards",
    "RewardsConfig",
    "Scores",
    "check_answer",
    "extract_answer",
    "normal_form",
    "split_steps",
]
