"""`grpojax.advantages` as plain float64 loops over rewards ``[P, G]``, where NaN is a missing sample.

Nothing here imports grpojax.
"""

import math
from fractions import Fraction

import numpy as np
from oracles import live, std, tokens_of, valid_of


def advantages(
    rewards, *, valid=None, center="group", leave_one_out=False, scale="none", of="rewards", ddof=1, eps=1e-4
):
    """``[P, G]`` advantages of ``[P, G]`` rewards; a reward that is not valid has none and counts nowhere."""
    rewards = np.asarray(rewards, np.float64)
    valid = np.isfinite(rewards) if valid is None else np.asarray(valid)
    samples = [(int(p), int(g)) for p, g in np.argwhere(valid)]

    def together(sample, by):
        return [s for s in samples if by == "batch" or s[0] == sample[0]]

    centred = np.zeros(rewards.shape)
    for s in samples:
        mine = together(s, center)
        if center == "none":
            centred[s] = rewards[s]
        elif len({rewards[o] for o in mine}) > 1:
            base = [rewards[o] for o in mine if not (leave_one_out and o == s)]
            centred[s] = rewards[s] - sum(base) / len(base)
    if scale == "none":
        return centred

    out = np.zeros(rewards.shape)
    for s in samples:
        base = [(rewards if of == "rewards" else centred)[o] for o in together(s, scale)]
        if len(set(base)) > 1:
            out[s] = centred[s] / (std(base, ddof) + eps)
    return out


def center_by_length(rewards, lengths):
    out = np.zeros(np.shape(rewards))
    for p in range(len(rewards)):
        mine = valid_of(rewards, p)
        tokens = sum(float(lengths[p][g]) for g in mine)
        if live(rewards, p) and tokens:
            baseline = sum(float(lengths[p][g]) * float(rewards[p][g]) for g in mine) / tokens
            for g in mine:
                out[p, g] = rewards[p][g] - baseline
    return out


def gpg(rewards):
    centred = advantages(rewards)
    samples = sum(len(valid_of(rewards, p)) for p in range(len(rewards)))
    alive = sum(len(valid_of(rewards, p)) for p in range(len(rewards)) if live(rewards, p))
    return centred * samples / max(alive, 1)


def virtual_best(rewards, reward_max=1.0, count=1, ddof=1, eps=1e-6):
    out = np.zeros(np.shape(rewards))
    for p in range(len(rewards)):
        mine = [float(rewards[p][g]) for g in valid_of(rewards, p)] + [reward_max] * count
        if len(set(mine)) > 1:
            for g in valid_of(rewards, p):
                out[p, g] = (rewards[p][g] - sum(mine) / len(mine)) / (std(mine, ddof) + eps)
    return out


def pass_at_k(rewards, k, success=1.0):
    out = np.zeros(np.shape(rewards))
    for p in range(len(rewards)):
        mine = valid_of(rewards, p)
        n, wrong = len(mine), sum(rewards[p][g] < success for g in mine)
        if n < k or wrong < k or wrong == n:
            continue
        mean = 1 - Fraction(math.comb(wrong, k), math.comb(n, k))
        sigma = math.sqrt(mean * (1 - mean))
        for g in mine:
            gap = 1 - mean
            if rewards[p][g] < success:
                gap -= Fraction(math.comb(wrong - 1, k - 1), math.comb(n - 1, k - 1))
            out[p, g] = float(gap) / sigma
    return out


def max_rl(rewards):
    out = np.zeros(np.shape(rewards))
    for p in range(len(rewards)):
        mine = [float(rewards[p][g]) for g in valid_of(rewards, p)]
        if sum(mine) > 0:
            for g in valid_of(rewards, p):
                out[p, g] = rewards[p][g] * len(mine) / sum(mine) - 1
    return out


def best_margin(rewards, scaled=False, eps=1e-6):
    out = np.zeros(np.shape(rewards))
    for p in range(len(rewards)):
        mine = sorted(valid_of(rewards, p), key=lambda g: -rewards[p][g])
        if len(mine) > 1:
            margin = float(rewards[p][mine[0]]) - float(rewards[p][mine[1]])
            out[p, mine[0]] = margin / (std([float(rewards[p][g]) for g in mine], 1) + eps) if scaled else margin
    return out


def subtract_greedy(rewards, greedy):
    out = np.zeros(np.shape(rewards))
    for p, g in np.argwhere(np.isfinite(rewards)):
        if np.isfinite(greedy[p]):
            out[p, g] = float(rewards[p][g]) - float(greedy[p])
    return out


def all_fail(rewards, outcome, fail_reward, p):
    judged = [outcome[p][g] for g in valid_of(rewards, p) if np.isfinite(outcome[p][g])]
    return bool(judged) and max(judged) <= fail_reward


def penalize_all_fail(values, rewards, outcome, c, fail_reward):
    out = np.array(values, float)
    for p, g in np.argwhere(np.isfinite(rewards)):
        if all_fail(rewards, outcome, fail_reward, p):
            out[p, g] = -c
    return out


def weigh_signs(rewards, outcome, positive, negative, success):
    out = np.zeros(np.shape(rewards))
    for p, g in np.argwhere(np.isfinite(rewards) & np.isfinite(outcome)):
        out[p, g] = positive if outcome[p][g] >= success else -negative
    return out


def likelihood_of_all_fail(rewards, outcome, likelihood, fail_reward):
    """The rewards that a chain goes on with; NaN for a sample that is left out."""
    out = np.array(rewards, float)
    for p, g in np.argwhere(np.isfinite(rewards)):
        if all_fail(rewards, outcome, fail_reward, p) and np.isfinite(likelihood[p]).any():
            out[p, g] = likelihood[p][g]
    return out


def keep_singletons(values, rewards, by):
    """A sample that is alone in its group (batch) has its reward."""
    out, everyone = np.array(values, float), np.argwhere(np.isfinite(rewards))
    for p, g in everyone:
        if len(valid_of(rewards, p) if by == "group" else everyone) == 1:
            out[p, g] = rewards[p][g]
    return out


def scale_by_live(values, rewards, of, ddof, eps):
    base = rewards if of == "rewards" else values
    numbers = [float(base[p][g]) for p in range(len(rewards)) if live(rewards, p) for g in valid_of(rewards, p)]
    out = np.zeros(np.shape(rewards))
    if len(set(numbers)) > 1 and len(numbers) > ddof:
        for p, g in np.argwhere(np.isfinite(rewards)):
            out[p, g] = float(values[p][g]) / (std(numbers, ddof) + eps)
    return out


def whiten(values, counted, ddof=0, eps=1e-8):
    numbers = [float(values[i]) for i in zip(*np.nonzero(counted), strict=True)]
    out = np.zeros(np.shape(values))
    if len(set(numbers)) > 1:
        for i in zip(*np.nonzero(counted), strict=True):
            out[i] = (values[i] - sum(numbers) / len(numbers)) / (std(numbers, ddof) + eps)
    return out


def subtract_kl(rewards, k1, mask, coef):
    out = np.array(rewards, float)
    for p, g in np.argwhere(np.isfinite(rewards)):
        for t in tokens_of(mask, p, g):
            out[p, g] -= coef * float(k1[p][g][t])
    return out


def token_rewards(rewards, mask, k1, coef):
    out = np.zeros(np.shape(mask))
    for p, g in np.argwhere(np.isfinite(rewards)):
        for t in tokens_of(mask, p, g):
            out[p, g, t] = -coef * float(k1[p][g][t])
            if t == tokens_of(mask, p, g)[-1]:
                out[p, g, t] += rewards[p][g]
    return out


def process_rewards(rewards, step_rewards, mask, ddof=1, eps=1e-4):
    out = np.zeros(np.shape(mask))
    for p in range(len(mask)):
        steps = [
            (g, t, float(step_rewards[p][g][t]))
            for g in valid_of(rewards, p)
            for t in tokens_of(mask, p, g)
            if np.isfinite(step_rewards[p][g][t])
        ]
        numbers = [r for _, _, r in steps]
        if len(set(numbers)) < 2:
            continue
        for g, end, r in steps:
            for t in range(end + 1):
                out[p, g, t] += (r - sum(numbers) / len(numbers)) / (std(numbers, ddof) + eps)
    return out


def token_returns(rewards, mask, k1=None, kl_coef=0.0, gamma=1.0, values=None, lam=None):
    """Returns of token rewards; with a critic's ``values`` the generalised advantages."""
    out = np.zeros(np.shape(mask))
    for p, g in np.argwhere(np.isfinite(rewards)):
        places = tokens_of(mask, p, g)
        after = after_value = 0.0
        for t in reversed(places):
            reward = (rewards[p][g] if t == places[-1] else 0.0) - (kl_coef * k1[p][g][t] if kl_coef else 0.0)
            if values is None:
                after = reward + gamma * after
            else:
                after = reward + gamma * after_value - values[p][g][t] + gamma * lam * after
                after_value = values[p][g][t]
            out[p, g, t] = after
    return out
