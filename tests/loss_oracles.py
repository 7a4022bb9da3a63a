"""Surrogates, masks and entropy control of `grpojax.losses` as plain float64 loops. Nothing here imports grpojax."""

import math

import numpy as np


def dppo(kind, logp, old_logp, advantage, low, high, kl_coef=0.0):
    """``(loss, gradient by the log-prob)`` of one token."""
    new, old = math.exp(logp), math.exp(old_logp)
    ratio, moved = new / old, abs(new - old)
    if kind == "kl":
        moved = old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))
    dropped = (advantage > 0 and new > old and moved > high) or (advantage < 0 and new < old and moved > low)
    drift = logp - old_logp
    policy = 0.0 if dropped else -ratio * advantage
    return policy + kl_coef * drift**2, policy + 2 * kl_coef * drift


def vespo(drifts, advantage, logps, positive=(2.0, 3.0), negative=(3.0, 2.0)):
    """``(losses, gradients by the log-probs)`` of one sample's tokens; ``drifts`` are their log-ratios."""
    k, rate = positive if advantage >= 0 else negative
    weight = min(max(math.exp(min(sum(drifts), 20.0)), 1e-8), math.exp(20.0))
    phi = math.exp(rate + k * math.log(weight) - rate * weight)
    return [-phi * advantage * lp for lp in logps], [-phi * advantage] * len(logps)


def kl_slope(d, kind, ratio=1.0, bound=20.0):
    """The derivative of a KL estimator by the log-prob, ``d`` nats over the reference."""
    if kind == "k3":
        return 1.0 - math.exp(min(-d, bound))
    return {"k1": 1.0, "k2": d, "unbiased": ratio * d}[kind]


def picked(covariance, mask, fraction, *, low=None, high=None, skip=None):
    """``(tokens that may be picked, how many are)``: the top ones, or any in a range."""
    places = [tuple(i) for i in np.argwhere(mask)]
    count = max(int(fraction * len(places) + 1e-3), 1)
    if low is None:
        return set(sorted(places, key=lambda i: -covariance[i])[:count]), count
    free = {i for i in places if low < covariance[i] < high and not skip[i]}
    return free, min(count, len(free))


def adapt_entropy(coef, entropies, target, step):
    """The coefficients applied at each of the steps, one after the other."""
    applied = []
    for entropy in entropies:
        applied.append(coef if entropy <= target else 0.0)
        if entropy < target:
            coef = coef + step
        elif entropy > target:
            coef = max(coef - step, 0.0)
    return applied
