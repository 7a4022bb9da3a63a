"""What the pure modules compute, as plain float64 loops. Nothing here imports grpojax."""

import itertools
import math

import numpy as np


def close(got, want, atol=1e-6, rtol=1e-5):
    """Asserts that two arrays are equal to float32 rounding, NaN nowhere."""
    got = np.asarray(got, np.float64)
    assert np.isfinite(got).all(), got
    np.testing.assert_allclose(got, np.broadcast_to(want, got.shape), rtol=rtol, atol=atol)


def std(numbers, ddof):
    if len(numbers) <= ddof:
        return 0.0
    mean = sum(numbers) / len(numbers)
    return math.sqrt(sum((x - mean) ** 2 for x in numbers) / (len(numbers) - ddof))


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


def kl(logp, ref_logp, kind, log_ratio=0.0):
    """One token's estimate of the KL to the reference."""
    d = logp - ref_logp
    k3 = math.exp(-d) - 1 + d
    return {"k1": d, "k2": d * d / 2, "k3": k3, "unbiased": math.exp(log_ratio) * k3}[kind]


def policy_loss(
    logps, weights, advantages, *, behavior_logps=None, ref_logps=None, entropy=None,
    low=0.2, high=0.2, kl_coef=0.0, kl_kind="k3", entropy_coef=0.0,
):  # fmt: skip
    """The loss with the KL in it."""
    loss = 0.0
    for i in zip(*np.nonzero(weights), strict=True):
        delta = 0.0 if behavior_logps is None else float(logps[i]) - float(behavior_logps[i])
        token = surrogate(delta, float(advantages[i]), low, high)
        if kl_coef:
            token += kl_coef * kl(float(logps[i]), float(ref_logps[i]), kl_kind, delta)
        if entropy_coef:
            token -= entropy_coef * float(entropy[i])
        loss += float(weights[i]) * token
    return loss


def check_first_fit(bins, lengths, size):
    """Asserts that ``bins`` is a first-fit packing of ``lengths``, longest first."""
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in b) for b in bins]
    assert all(load <= size for load in loads)
    assert all(lengths[i] >= lengths[j] for b in bins for i, j in itertools.pairwise(b))
    for load, later in ((loads[a], bins[b]) for a, b in itertools.combinations(range(len(bins)), 2)):
        assert all(load + lengths[i] > size for i in later), "an item would have fitted into an earlier bin"


def read_rows(rows):
    """All that `Rows` ``[M, B, ...]`` says: a list of (micro-batch, lane, prompt, completions)."""
    out = []
    for m, b, r in np.ndindex(rows.row_prompt.shape):
        k = rows.row_prompt[m, b, r]
        prompt = rows.prompts[m, b, k][: rows.prompt_lengths[m, b, k]].tolist()
        places = zip(rows.segments[m, b, r], rows.offsets[m, b, r], rows.tokens[m, b, r], strict=True)
        runs = [(segment, list(run)) for segment, run in itertools.groupby(places, key=lambda place: place[0])]
        padding = [run for segment, run in runs if segment == 0]
        assert all((o, t) == (0, 0) for run in padding for _, o, t in run), "something stands on padding"
        assert not padding or runs[-1][0] == 0 and len(padding) == 1, "padding is not on the right"
        used = [(segment, run) for segment, run in runs if segment]
        assert len({segment for segment, _ in used}) == len(used), "one segment stands in two places"
        for _, run in used:
            assert [int(o) for _, o, _ in run] == list(range(len(run))), "offsets do not count from 0"
        if used:
            out.append((m, b, prompt, [[int(t) for _, _, t in run] for _, run in used]))
    return out


# --- transforms, each on the [P, G] rewards (NaN is a missing sample) and what else it reads


def valid_of(rewards, p):
    """The valid samples of a group."""
    return [g for g in range(len(rewards[p])) if np.isfinite(rewards[p][g])]


def live(rewards, p):
    return len({float(rewards[p][g]) for g in valid_of(rewards, p)}) > 1


def tokens_of(mask, p, g):
    return [t for t in range(len(mask[p][g])) if mask[p][g][t]]


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
        mean = 1 - math.comb(wrong, k) / math.comb(n, k)
        sigma = math.sqrt(mean * (1 - mean))
        for g in mine:
            gap = 1 - mean
            if rewards[p][g] < success:
                gap -= math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)
            out[p, g] = gap / sigma
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


def whiten(values, counted, ddof=0, eps=1e-8):
    numbers = [float(values[i]) for i in zip(*np.nonzero(counted), strict=True)]
    out = np.zeros(np.shape(values))
    if len(set(numbers)) > 1:
        for i in zip(*np.nonzero(counted), strict=True):
            out[i] = (values[i] - sum(numbers) / len(numbers)) / (std(numbers, ddof) + eps)
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


def compensate_rare_tokens(values, logps, mask, limit=None, positive_only=True, max_logps=None):
    out = np.zeros(np.shape(mask))
    for p, g, t in np.argwhere(mask):
        most = max(math.exp(logps[p][g][s]) for s in tokens_of(mask, p, g))
        if max_logps is not None:
            most = math.exp(max_logps[p][g][t])
        factor = 2 - math.exp(logps[p][g][t]) / most
        if limit is not None:
            factor = min(factor, limit)
        out[p, g, t] = values[p, g] * (factor if values[p, g] > 0 or not positive_only else 1)
    return out


def sample_means(x, mask):
    out = np.zeros(np.shape(mask)[:2])
    for p, g in np.ndindex(out.shape):
        numbers = [float(x[p][g][t]) for t in tokens_of(mask, p, g)]
        out[p, g] = sum(numbers) / max(len(numbers), 1)
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


def entropy_penalty(values, rewards, entropy, mask, coef, everywhere=False):
    means, out = sample_means(entropy, mask), np.zeros(np.shape(rewards))
    for p, g in np.argwhere(np.isfinite(rewards)):
        if everywhere or live(rewards, p):
            out[p, g] = values[p, g] - coef * means[p, g]
    return out


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


# --- what the transforms take and give at the edges: other judges, groups of one, live groups, KL in the reward


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


def likelihood_of_all_fail(rewards, outcome, likelihood, fail_reward):
    """The rewards that a chain goes on with."""
    out = np.array(rewards, float)
    for p, g in np.argwhere(np.isfinite(rewards)):
        if all_fail(rewards, outcome, fail_reward, p) and np.isfinite(likelihood[p][g]):
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


# --- losses


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


def covariance(logps, advantages, mask):
    places = [tuple(i) for i in np.argwhere(mask)]
    mean = lambda x: sum(float(x[i]) for i in places) / len(places)  # noqa: E731
    out = np.zeros(np.shape(mask))
    for i in places:
        out[i] = (float(advantages[i]) - mean(advantages)) * (float(logps[i]) - mean(logps))
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


def log_ratio(logps, behavior_logps, mask, level, decay=None):
    out = np.zeros(np.shape(mask))
    for p, g in np.ndindex(out.shape[:2]):
        places = tokens_of(mask, p, g)
        delta = [float(logps[p][g][t]) - float(behavior_logps[p][g][t]) for t in places]
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


def importance(train, sampler, mask, mode, level, low=0.5, high=2.0):
    out = np.zeros(np.shape(mask))
    for p, g, t in np.argwhere(mask):
        places = tokens_of(mask, p, g)
        apart = [float(train[p][g][s]) - float(sampler[p][g][s]) for s in places]
        weight = math.exp({"token": apart[places.index(t)], "sequence": sum(apart),
                           "geometric": sum(apart) / len(apart)}[level])  # fmt: skip
        out[p, g, t] = min(weight, high) if mode == "truncate" else weight * (low <= weight <= high)
    return out


def displacement(log_ratios, mask, gate, actions):
    """LLDS's token terms."""
    out = np.zeros(np.shape(mask))
    for p, g, t in np.argwhere(mask):
        mates = {"token": [t], "response": tokens_of(mask, p, g)}
        mates["action"] = [s for s in mates["response"] if actions[p][g][s] == actions[p][g][t]]
        if sum(-log_ratios[p][g][s] for s in mates[gate]) > 0:
            out[p, g, t] = max(0.0, -log_ratios[p][g][t])
    return out


# --- allocation


def length_selected(rewards, lengths, alpha, share, outcome=None, success=1.0):
    outcome = rewards if outcome is None else outcome
    out = np.array(rewards, float)
    judged = [[g for g in valid_of(rewards, p) if np.isfinite(outcome[p][g])] for p in range(len(rewards))]
    passed = [[g for g in mine if outcome[p][g] >= success] for p, mine in enumerate(judged)]
    rates = [-len(passed[p]) / len(mine) if mine else math.inf for p, mine in enumerate(judged)]
    n = max(1, math.ceil(share * len(rewards) - 1e-9))
    for p in sorted(range(len(rewards)), key=lambda p: rates[p])[:n]:
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


def active(n, history, epoch, readmit_after, share=1.0):
    """``history``: (epoch, prompt, rewards), up to ``epoch``."""
    out = [True] * n
    for prompt in range(n):
        solved = [
            e
            for e, k, rewards in history
            if k == prompt
            and (known := [r for r in rewards if np.isfinite(r)])
            and sum(r >= 1 for r in known) >= share * len(known) - 1e-9
        ]
        if solved and solved[-1] < epoch:
            out[prompt] = readmit_after is not None and epoch > solved[-1] + readmit_after
    return out
