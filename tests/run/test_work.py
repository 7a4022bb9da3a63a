"""The useful FLOPs of a step, counted by hand."""

import dataclasses

import numpy as np
from counted_work import CONFIG, ENTRY, FORWARD, GREEDY, KEY, WEIGHT, judged

from grpojax.models import flops
from grpojax.run.work import step_flops

BATCH = judged([[1, 2]])


def test_the_policy_alone():
    assert (FORWARD, GREEDY) == (4328, 3536)
    drawn = [BATCH, judged([[1, 2], [2, 1]])]  # a filter has dropped two groups of three
    got = step_flops(
        CONFIG,
        dataclasses.replace(BATCH, rollouts=drawn),
        scores=2,
        ppo_epochs=3,
        parts=[{"late": 3.0}, {"late": 4.0, "score": 1.0}],
    )
    assert got == {"rollout": 3 * FORWARD, "score": 2 * FORWARD + 1, "late": 7.0, "update": 9 * FORWARD}


def test_a_greedy_completion_runs_its_prompt_again():
    drawn = [judged([[1, 2]], np.array([2]))]
    got = step_flops(CONFIG, dataclasses.replace(BATCH, rollouts=drawn), scores=0, ppo_epochs=1)
    assert got == {"rollout": 4328 + 3536, "score": 0, "late": 0, "update": 3 * FORWARD}


def test_a_token_sees_a_window_of_keys():
    """In the second layer those of the prompt see 1, 2 and 2 keys, and those of the completions 2."""
    windowed = dataclasses.replace(CONFIG, window=2, windowed_layers=(1,))
    got = flops.forward_flops(windowed, [3], [[1, 2]])
    assert got == 6 * WEIGHT + (19 + 11) * KEY / 2 + 3 * ENTRY


def test_influence_is_three_products_with_a_groups_own_vocabulary():
    assert flops.influence_flops(CONFIG, np.array([[1, 2], [3, 0]]), np.array([3, 2])) == 6 * 4 * (3 * 3 + 3 * 2)
