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
        runs = [
            (segment, list(run)) for segment, run in itertools.groupby(places, key=lambda place: place[0])
        ]
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
