"""`grpojax.credit` as plain float64 loops over samples and tokens. Nothing here imports grpojax."""

import math

import numpy as np
from oracles import live, sample_means, tokens_of, valid_of


def compensate_rare_tokens(values, logps, mask, limit=None, positive_only=True, max_logps=None, relative_to="sample"):
    out = np.zeros(np.shape(mask))
    prompts, group, _ = np.shape(mask)
    for p, g, t in np.argwhere(mask):
        beside = {
            "sample": [(p, g)],
            "group": [(p, j) for j in range(group)],
            "batch": [(q, j) for q in range(prompts) for j in range(group)],
        }[relative_to]
        most = max(math.exp(logps[q][j][s]) for q, j in beside for s in tokens_of(mask, q, j))
        if max_logps is not None:
            most = math.exp(max_logps[p][g][t])
        factor = 2 - math.exp(logps[p][g][t]) / most
        if limit is not None:
            factor = min(factor, limit)
        out[p, g, t] = values[p, g] * (factor if values[p, g] > 0 or not positive_only else 1)
    return out


def sharpen_novelty(values, rewards, logps, mask, coef=2.5, cap=0.5):
    scores, out = sample_means(logps, mask), np.array(values, float)
    for p in range(len(out)):
        mine = valid_of(rewards, p)
        for g in mine:
            eta = math.exp(scores[p, g] - sum(scores[p, j] for j in mine) / len(mine))
            if out[p, g] > 0:
                out[p, g] += min(max(coef * (1 - eta), 0), cap * out[p, g])
    return out


def entropy_mask(values, entropy, mask, fraction, rule):
    numbers = sorted(float(entropy[i]) for i in zip(*np.nonzero(mask), strict=True))
    if not numbers:
        return np.zeros(np.shape(mask))
    if rule == "quantile":
        threshold = np.quantile(np.array(numbers), 1 - fraction) - 1e-6
    else:
        threshold = numbers[-math.ceil(fraction * len(numbers) - 1e-6)]
    return np.where(mask & (entropy >= threshold), values[..., None], 0.0)


def protect_rare_tokens(values, logps, ratios, mask, share, coef):
    out = np.array(values, float)
    penalised = [at for at in np.ndindex(out.shape) if mask[at] and out[at] < 0]
    penalised.sort(key=lambda at: logps[at])
    last = penalised[max(int(share * len(penalised)), 1) - 1] if penalised else None
    for at in penalised:
        if logps[at] <= logps[last] and ratios[at] > 1:
            out[at] += coef * (float(ratios[at]) - 1)
    return out


def entropy_of_equal_groups(values, rewards, outcome, entropy, mask, alpha, success):
    out = np.array(values, float)
    for p in range(len(out)):
        known = [g for g in range(out.shape[1]) if np.isfinite(rewards[p][g]) and np.isfinite(outcome[p][g])]
        if len({float(outcome[p][g]) for g in known}) != 1:
            continue
        for g in known:
            numbers = [float(entropy[p][g][t]) for t in tokens_of(mask, p, g)]
            for t in tokens_of(mask, p, g):
                h = float(entropy[p][g][t])
                out[p, g, t] = alpha * h if outcome[p][g] >= success else -alpha * (max(numbers) - h)
    return out


def entropy_penalty(values, rewards, entropy, mask, coef, everywhere=False):
    means, out = sample_means(entropy, mask), np.zeros(np.shape(rewards))
    for p, g in np.argwhere(np.isfinite(rewards)):
        if everywhere or live(rewards, p):
            out[p, g] = values[p, g] - coef * means[p, g]
    return out


def bounded(bias, bound):
    return bias if bound is None else bound * math.tanh(bias / bound)


def add_token_bias(values, bias, mask, bound, center):
    """``values`` ``[P, G]``."""
    out = np.zeros(np.shape(mask))
    for p, g in np.ndindex(out.shape[:2]):
        places = tokens_of(mask, p, g)
        added = {t: bounded(float(bias[p][g][t]), bound) for t in places}
        mean = sum(added.values()) / len(added) if center and added else 0.0
        for t in places:
            out[p, g, t] = values[p][g] + added[t] - mean
    return out


def token_bias_loss(bias, advantages, mask, bound, l2, normalise):
    """``(loss, gradient)``, the gradient by differences; ``advantages`` ``[P, G, T]``."""
    places = [tuple(i) for i in np.argwhere(mask)]
    share = 1.0 if normalise == "sum" else 1.0 / max(len(places), 1)

    def token(b, i):
        b = bounded(b, bound)
        return share * (l2 * b * b - float(advantages[i]) * b)

    gradient, loss, h = np.zeros(np.shape(mask)), 0.0, 1e-5
    for i in places:
        b = float(bias[i])
        loss += token(b, i)
        gradient[i] = (token(b + h, i) - token(b - h, i)) / (2 * h)
    return loss, gradient


def conflict_weights(tokens, mask, sign, gain=2.0):
    """λ of GTPO, run by run."""
    out = np.ones(np.shape(mask))
    for p in range(len(mask)):
        said = [[int(tokens[p][g][t]) for t in tokens_of(mask, p, g)] for g in range(len(mask[p]))]
        for backward in (False, True):
            rows = [row[::-1] if backward else row for row in said]

            def conflicting(t, token):
                signs = {sign[p][g] for g, row in enumerate(rows) if len(row) > t and row[t] == token}  # noqa: B023
                return {1, -1} <= signs

            for g, row in enumerate(rows):
                for t, token in enumerate(row):
                    if not sign[p][g] or not conflicting(t, token):
                        break
                    place = len(row) - 1 - t if backward else t
                    out[p, g, place] *= gain if sign[p][g] > 0 else 0.0
    return out


def conflict_counts(tokens, mask, sign):
    """``[P, G]``: how long the longer of a sample's two runs is, at least 1."""
    out = np.ones(np.shape(mask)[:2])
    for p, g in np.ndindex(out.shape):
        out[p, g] = max(1, *(run_of_conflicts(tokens, mask, sign, p, g, way) for way in (1, -1)))
    return out


def run_of_conflicts(tokens, mask, sign, p, g, way):
    said = [[int(tokens[p][j][t]) for t in tokens_of(mask, p, j)][::way] for j in range(len(mask[p]))]
    run = 0
    for t, token in enumerate(said[g]):
        signs = {float(sign[p][j]) for j, row in enumerate(said) if len(row) > t and row[t] == token}
        if not sign[p][g] or not {1.0, -1.0} <= signs:
            break
        run += 1
    return run


def influence(probs, hidden, columns, mask, weights):
    """Every pair of tokens of a group, by its own inner products."""
    out = np.zeros(np.shape(mask))
    for p in range(len(mask)):
        places = [(g, t) for g in range(len(mask[p])) for t in tokens_of(mask, p, g)]
        error = {}
        for g, t in places:
            error[g, t] = -np.asarray(probs[p][g][t], float)
            if columns[p][g][t] >= 0:
                error[g, t][columns[p][g][t]] += 1
        h = {(g, t): np.asarray(hidden[p][g][t], float) for g, t in places}
        for n in places:
            for m in places:
                out[(p, *n)] += weights[p][m[0]][m[1]] * (error[n] @ error[m]) * (h[n] @ h[m])
    return out


def nthr(values, rewards, probs, hidden, columns, mask, sign, beta, eta, self_term):
    """``(advantages, distance of each score from its threshold, scores, means)``; ``values`` ``[P, G, T]``."""
    right = np.where(mask, (sign > 0)[..., None], 0.0)
    scores = influence(probs, hidden, columns, mask, right)
    means = sample_means(scores, mask)
    if not self_term:
        for g in range(mask.shape[1]):
            others = right.copy()
            others[:, g] = 0
            means[:, g] = sample_means(influence(probs, hidden, columns, mask, others), mask)[:, g]
    out, apart = np.where(mask, values, 0.0).astype(float), np.full(mask.shape, np.inf)
    for p in range(len(mask)):
        mine = valid_of(rewards, p)
        positive = [g for g in mine if sign[p][g] > 0]
        written = [g for g in positive if tokens_of(mask, p, g)]
        if not written:
            continue
        threshold = beta * min(means[p, g] for g in written)
        factor = abs(1 - 2 * len(positive) / len(mine)) if eta is None else eta
        for g in mine:
            for t in tokens_of(mask, p, g) if sign[p][g] < 0 else []:
                apart[p, g, t] = abs(scores[p, g, t] - threshold)
                if scores[p, g, t] > threshold:
                    out[p, g, t] *= factor
    return out, apart, scores, means
