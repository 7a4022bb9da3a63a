"""`grpojax.allocation` as plain loops over prompts and samples. Nothing here imports grpojax."""

import math

import numpy as np
from oracles import std, valid_of


def length_selected(rewards, lengths, alpha, share, outcome=None, success=1.0):
    outcome = rewards if outcome is None else outcome
    out = np.array(rewards, float)
    judged = [[g for g in valid_of(rewards, p) if np.isfinite(outcome[p][g])] for p in range(len(rewards))]
    passed = [[g for g in mine if outcome[p][g] >= success] for p, mine in enumerate(judged)]
    rates = [-len(passed[p]) / len(mine) if mine else math.inf for p, mine in enumerate(judged)]
    n = max(1, math.ceil(share * len(rewards) - 1e-9))
    for p in sorted((p for p in range(len(rewards)) if passed[p]), key=lambda p: rates[p])[:n]:
        right = [float(lengths[p][g]) for g in passed[p]]
        for g in valid_of(rewards, p):
            z = 0.0
            if len(set(right)) > 1:
                z = (lengths[p][g] - sum(right) / len(right)) / std(right, 0)
            out[p, g] = 1 - alpha / (1 + math.exp(-z)) if g in passed[p] else 0.0
    return out


def soft_overlong(rewards, lengths, limit, buffer, factor=0.5):
    out = np.array(rewards, float)
    for i in np.ndindex(out.shape):
        over = min(max(int(lengths[i]) - (limit - buffer), 0), buffer)
        out[i] -= factor * over / buffer
    return out


def keep_prompts(outcome, above, below, success):
    out = []
    for group in outcome:
        known = [float(x) for x in group if np.isfinite(x)]
        if above is None and below is None:
            out.append(len(set(known if success is None else [x >= success for x in known])) > 1)
            continue
        rate = sum(x >= success for x in known) / len(known) if known else None
        out.append(rate is not None and (above is None or rate > above) and (below is None or rate < below))
    return out


def active(n, history, epoch, readmit_after):
    """``history``: (epoch, prompt, rewards), up to ``epoch``."""
    out = [True] * n
    for prompt in range(n):
        solved = [e for e, k, rewards in history if k == prompt and all(r >= 1 for r in rewards)]
        if solved and solved[-1] < epoch:
            out[prompt] = readmit_after is not None and epoch > solved[-1] + readmit_after
    return out
