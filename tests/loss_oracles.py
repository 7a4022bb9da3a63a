"""`grpojax.losses` as plain float64 loops over samples and tokens. Nothing here imports grpojax."""

import math

import numpy as np
from oracles import sample_means, tokens_of


def log_ratio(logps, old_logps, mask, level, decay=None):
    out = np.zeros(np.shape(mask))
    for p, g in np.ndindex(out.shape[:2]):
        places = tokens_of(mask, p, g)
        delta = [float(logps[p][g][t]) - float(old_logps[p][g][t]) for t in places]
        for n, t in enumerate(places):
            if level == "token":
                out[p, g, t] = delta[n]
            elif level.startswith("sequence"):
                out[p, g, t] = sum(delta) / len(delta)
            elif level == "joint":
                out[p, g, t] = sum(delta)
            elif level != "own":
                for lag in range(n + 1):
                    weight = decay**lag
                    if level == "trace_both":
                        weight = max(weight, decay ** (n - lag))
                    out[p, g, t] += weight * delta[n - lag]
    return out


def aggregate(losses, mask, how, *, constant=None, count_empty=True):
    """Token losses ``[P, G, T]`` to one number, as the papers print it."""
    prompts = [[[x for x, m in zip(xs, ms, strict=True) if m] for xs, ms in zip(*group, strict=True)]
               for group in zip(np.asarray(losses, np.float64), np.asarray(mask), strict=True)]  # fmt: skip
    samples = [sample for prompt in prompts for sample in prompt]
    groups = [[x for sample in prompt for x in sample] for prompt in prompts]
    if not count_empty:
        samples, groups = [s for s in samples if s], [g for g in groups if g]

    def mean(numbers):
        return sum(numbers) / max(len(numbers), 1)

    match how:
        case "token_mean":
            return mean([x for sample in samples for x in sample])
        case "sequence_mean":
            return mean([mean(sample) for sample in samples])
        case "prompt_mean":
            return mean([mean(group) for group in groups])
        case "sequence_sum":
            return mean([sum(sample) for sample in samples])
        case "constant":
            return mean([sum(sample) / constant for sample in samples])


def loss_weights(mask, how, **options):
    """What each token adds to the aggregate."""
    out = np.zeros(np.shape(mask))
    for i in np.ndindex(out.shape):
        one = np.zeros(out.shape)
        one[i] = 1.0
        out[i] = aggregate(one, mask, how, **options)
    return out


def surrogate(log_ratio, advantage, low=0.2, high=0.2):
    """PPO's clipped loss of one token."""
    ratio = math.exp(log_ratio)
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def token_loss(name, log_ratio, advantage, logp, **options):
    """One token's surrogate; for those that are of one token."""
    ratio = math.exp(log_ratio)
    match name:
        case "clipped":
            loss = surrogate(log_ratio, advantage, options["low"], options["high"])
            dual = options.get("dual")
            return min(loss, -dual * advantage) if dual is not None and advantage < 0 else loss
        case "unclipped":
            return -ratio * advantage
        case "reinforce":
            return -advantage * logp
        case "cispo":
            return -min(max(ratio, options["weight_min"]), options["weight_max"]) * advantage * logp
        case "soft_adaptive":
            tau = options["tau_positive"] if advantage > 0 else options["tau_negative"]
            return -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage


def geometric(log_ratios, advantage, low, high):
    """GMPO's loss of one sample."""
    kept = [min(d, high) if advantage >= 0 else max(d, -low) for d in log_ratios]
    return -advantage * math.exp(sum(kept) / len(kept))


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


def policy_loss(
    logps, weights, advantages, *, old_logps=None, ref_logps=None, entropy=None,
    low=0.2, high=0.2, kl_coef=0.0, kl_kind="k3", entropy_coef=0.0,
):  # fmt: skip
    """The loss with the KL in it."""
    loss = 0.0
    for i in zip(*np.nonzero(weights), strict=True):
        delta = 0.0 if old_logps is None else float(logps[i]) - float(old_logps[i])
        token = surrogate(delta, float(advantages[i]), low, high)
        if kl_coef:
            token += kl_coef * kl(float(logps[i]), float(ref_logps[i]), kl_kind, delta)
        if entropy_coef:
            token -= entropy_coef * float(entropy[i])
        loss += float(weights[i]) * token
    return loss


def kl(logp, ref_logp, kind, log_ratio=0.0):
    """One token's estimate of the KL to the reference."""
    d = logp - ref_logp
    k3 = math.exp(-d) - 1 + d
    return {"k1": d, "k2": d * d / 2, "k3": k3, "unbiased": math.exp(log_ratio) * k3}[kind]


def kl_slope(d, kind, ratio=1.0, bound=20.0):
    """The derivative of a KL estimator by the log-prob, ``d`` nats over the reference."""
    if kind == "k3":
        return 1.0 - math.exp(min(-d, bound))
    return {"k1": 1.0, "k2": d, "unbiased": ratio * d}[kind]


def full_kl(logits, ref_logits):
    """``(KL, gradient)`` of one position."""

    def softmax(x):
        top = max(x)
        parts = [math.exp(float(v) - float(top)) for v in x]
        return [part / sum(parts) for part in parts]

    p, q = softmax(logits), softmax(ref_logits)
    total = sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True))
    return total, [a * (math.log(a) - math.log(b) - total) for a, b in zip(p, q, strict=True)]


def falls(logps, sampler_logps, mask):
    """``[P, G]``: mean log π_sampler - log π of a sample."""
    return sample_means(np.asarray(sampler_logps, float) - np.asarray(logps, float), mask)


def importance(train, sampler, mask, mode, level, low=0.5, high=2.0):
    out = np.zeros(np.shape(mask))
    for p, g, t in np.argwhere(mask):
        places = tokens_of(mask, p, g)
        apart = [float(train[p][g][s]) - float(sampler[p][g][s]) for s in places]
        weight = math.exp({"token": apart[places.index(t)], "sequence": sum(apart),
                           "geometric": sum(apart) / len(apart)}[level])  # fmt: skip
        out[p, g, t] = min(weight, high) if mode == "truncate" else weight * (low <= weight <= high)
    return out


def covariance(logps, advantages, mask):
    places = [tuple(i) for i in np.argwhere(mask)]

    def mean(x):
        return sum(float(x[i]) for i in places) / len(places)

    out = np.zeros(np.shape(mask))
    for i in places:
        out[i] = (float(advantages[i]) - mean(advantages)) * (float(logps[i]) - mean(logps))
    return out


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


def displacement(log_ratios, mask, gate, actions):
    """LLDS's token terms."""
    out = np.zeros(np.shape(mask))
    for p, g, t in np.argwhere(mask):
        mates = {"token": [t], "response": tokens_of(mask, p, g)}
        mates["action"] = [s for s in mates["response"] if actions[p][g][s] == actions[p][g][t]]
        if sum(-log_ratios[p][g][s] for s in mates[gate]) > 0:
            out[p, g, t] = max(0.0, -log_ratios[p][g][t])
    return out


def displacement_weights(advantages, mask, normalise, answer=None, answer_weight=1.0):
    places = [tuple(i) for i in np.argwhere(mask)]
    preferred = [i for i in places if advantages[i] >= 0]
    out = np.zeros(np.shape(mask))
    for i in preferred:
        out[i] = 1 / len(preferred if normalise == "preferred" else places)
        if answer is not None and answer[i]:
            out[i] *= answer_weight
    return out


def value_loss(values, returns, weights, old_values=None, clip=None):
    """``(loss, gradient)``."""
    loss, gradient = 0.0, np.zeros(np.shape(weights))
    for i in zip(*np.nonzero(weights), strict=True):
        v, r, w = float(values[i]), float(returns[i]), float(weights[i])
        worst, gradient[i] = (v - r) ** 2, w * (v - r)
        if clip is not None:
            old = float(old_values[i])
            near = (min(max(v, old - clip), old + clip) - r) ** 2
            if abs(v - old) > clip and near > worst:
                worst, gradient[i] = near, 0.0
        loss += 0.5 * w * worst
    return loss, gradient


def dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta):
    margin = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
    return math.log1p(math.exp(-margin))
