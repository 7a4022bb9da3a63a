"""The logged numbers of a step, from arrays on the host. All functions are pure. Metrics of samples and of
updates are named only here; those of time and of the run so far in `grpojax.train` and `grpojax.run.journal`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grpojax import diagnostics, masked
from grpojax.host.on_host import on_host
from grpojax.losses.surrogates import STOPPING
from grpojax.programs.sampler import own_tokens
from grpojax.run.batch import Batch
from grpojax.run.run_method import RunMethod
from grpojax.types import Max, Mean, PerPrompt, Rollout, Samples

# The update's names of means over tokens, and the names that they are logged under.
MEANS = {
    "kl": "kl",
    "entropy": "entropy",
    "ratio": "ratio_mean",
    "clip_low": "clip_ratio/low_mean",
    "clip_high": "clip_ratio/high_mean",
    "dual_clip": "clip_ratio/dual_mean",
    "cap_hit": "clip_ratio/cap_mean",
    "importance": "importance_mean",
    "importance_clipped": "importance_clipped_mean",
    "off_policy": "off_policy",
    "clip_cov": "covariance/clipped_mean",
    "kl_cov": "covariance/penalised_mean",
    "router_entropy": "router/entropy",
}
# Between the sampler and the policy before the first update of a step: later updates change the policy.
FIRST = {
    "logp_difference": "sampling/logp_difference_mean",
    "logp_difference_max": "sampling/logp_difference_max",
    "sampler_kl": "sampling/kl",
    "sampler_ratio": "sampling/ratio_mean",
    "sampler_ratio_square": "sampling/effective_sample_size",
}
BOUNDS = tuple(MEANS[name] for name in STOPPING)


@on_host()
def of_rollouts(batch: Batch, method: RunMethod) -> dict[str, float]:
    """Metrics of a step's samples that need only the host: over all drawn samples, and over those that a filter kept.

    Args:
      batch: the batch of the step, with its rewards.
      method: has the deciding reward and the filter.
    """
    drawn = batch.everything
    values = {**of_drawn(drawn, method.deciding), **batch.metrics}
    if method.filter is None:
        return values
    return values | of_kept(batch) | {"groups/kept": batch.kept_share}


def of_version(version: int, updates: int) -> dict[str, float]:
    """Metrics of samples that are older than the policy: the version that drew them, and how many updates it is behind.

    Args:
      version: number of updates in the weights that drew them; the oldest one if tokens have several versions.
      updates: number of updates in the weights that learn from them.

    Example:
      >>> of_version(6, 8)
      {'rollout/version': 6.0, 'rollout/staleness': 2.0}
    """
    return {"rollout/version": float(version), "rollout/staleness": float(updates - version)}


def of_drawn(drawn: Sequence[Batch], deciding: str) -> dict[str, float]:
    """Metrics of every group that was drawn for a step, including those that the filter dropped.

    Args:
      drawn: the rollouts of the step.
      deciding: the reward that says whether a sample succeeded.
    """
    total = np.concatenate([d.total for d in drawn])
    taught = np.concatenate([_advantage_rewards(d) for d in drawn])
    reward = np.concatenate([d.reward for d in drawn])
    lengths = np.concatenate([d.own_lengths for d in drawn])
    there = lengths > 0
    lengths, stopped = lengths[there], np.concatenate([d.rollout.stopped for d in drawn])[there]
    decides = np.concatenate([d.by_name[deciding] for d in drawn])
    values = {
        **_of_rewards(reward, taught, there.any(1)),
        "rewards/invalid": float(1 - np.isfinite(total[there]).mean()),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(1 - stopped.mean()),
        "completions/mean_terminated_length": _mean(lengths[stopped]),
        **of_samples(drawn, decides),
    }
    for name in drawn[0].by_name:
        each = np.concatenate([d.by_name[name] for d in drawn])
        known = each[np.isfinite(each)]
        values[f"rewards/{name}/mean"] = _mean(known)
        values[f"rewards/{name}/std"] = float(known.std()) if known.size else math.nan
    for d in drawn:
        for kind, n in d.invalid.items():
            values[f"rewards/invalid/{kind}"] = values.get(f"rewards/invalid/{kind}", 0.0) + n
    groups = diagnostics.group_statistics(decides, drawn=there)
    return values | {f"groups/{name}": float(x) for name, x in groups.items()}


def of_samples(drawn: Sequence[Batch], decides: Samples, *, success: float = 1.0) -> dict[str, float]:
    """The repetitiveness of the samples, and the likelihood of the right ones when they were drawn.

    Args:
      drawn: the rollouts of a step, with P prompts in all.
      decides: ``[P, G]`` the deciding reward.
      success: the reward from which on a sample is right.

    Returns:
      ``completions/repetition``, the mean of `grpojax.diagnostics.repetition`; ``completions/right_logp``, the mean of
      the right samples' log-probs a token, nats. NaN of nothing.
    """
    own = [own_tokens(d.rollout) for d in drawn]
    lengths = np.concatenate([x.lengths for x in own])
    logps = np.concatenate([_totals(x) for x in own])
    repeated = np.concatenate([diagnostics.repetition(x.tokens, x.lengths) for x in own])
    right = (lengths > 0) & (decides >= success)  # NaN is no success
    return {
        "completions/repetition": _mean(repeated[np.isfinite(repeated)]),
        "completions/right_logp": _mean(logps[right] / lengths[right]),
    }


def of_kept(batch: Batch) -> dict[str, float]:
    """Metrics of the groups that a filter kept; ``groups/missing`` is the share of the batch without any.

    Args:
      batch: what the step learns from.
    """
    dropped = batch.dropped
    lengths = batch.own_lengths[~dropped]
    known = _of_rewards(batch.reward[~dropped], batch.total[~dropped], lengths.any(1))
    rewards = {f"kept/{name}": value for name, value in known.items()}
    lengths = lengths[lengths > 0]
    return rewards | {
        "kept/mean_length": _mean(lengths),
        "groups/missing": float(dropped.mean()),
    }


def _advantage_rewards(drawn: Batch) -> Samples:
    """The rewards that advantages are made of: the total and, if there are any, the rewards of steps."""
    steps = drawn.signals.get("step_rewards")
    return drawn.total if steps is None else drawn.total + np.nansum(steps, -1)


def _of_rewards(reward: Samples, total: Samples, drawn: PerPrompt) -> dict[str, float]:
    """Metrics of the plain rewards. Whether a group teaches anything depends on the rewards that the advantages are
    made of. ``drawn [P]`` bool are the groups that have samples."""
    finite = np.isfinite(reward)
    count = np.maximum(finite.sum(1), 1)
    mean = np.where(finite, reward, 0.0).sum(1) / count
    std = np.sqrt((np.where(finite, reward - mean[:, None], 0.0) ** 2).sum(1) / np.maximum(count - 1, 1))
    return {
        "reward": _mean(reward[finite]),
        "reward_std": _mean(std[finite.any(1)]),
        "frac_reward_zero_std": _mean(np.asarray(masked.all_equal(total, np.isfinite(total), 1))[drawn]),
    }


def _totals(rollout: Rollout) -> Samples:
    """Log-probs of whole samples."""
    there = np.arange(rollout.logps.shape[-1]) < rollout.lengths[..., None]
    return np.where(there, rollout.logps, 0.0).sum(-1, dtype=np.float64)


def _mean(x: np.ndarray) -> float:
    """The mean of nothing is unknown, and not 0."""
    return float(x.mean()) if x.size else math.nan


def tokens(drawn: Sequence[Batch]) -> tuple[int, int]:
    """``(prompt, completion)`` tokens of all drawn samples; a prompt counts once for each of its samples. What
    environments answered counts with the prompts."""
    prompt = sum(int(np.dot([len(p.ids) for p in d.problems], (d.all_lengths > 0).sum(1))) for d in drawn)
    prompt += sum(int((d.rollout.lengths - d.own_lengths).sum()) for d in drawn)
    return prompt, sum(int(d.all_lengths.sum()) for d in drawn)


def of_updates(updates: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The logged metrics of a step's updates: terms of the loss as means over updates, all others as means over tokens.

    Args:
      updates: for each update the result of `grpojax.programs.update`, on the host; empty if there was no update.

    Example:
      >>> of_updates([{"loss": 1.0, "kl": Mean(total=1.0, count=4.0)}, {"loss": 3.0, "kl": Mean(total=2.0, count=2.0)}])
      {'loss': 2.0, 'kl': 0.5}
    """
    values: dict[str, float] = {}
    for name, first in updates[0].items() if updates else ():
        each = [u[name] for u in updates]
        if name == "sampler_ratio_square":
            means = _value([updates[0]["sampler_ratio"]]), _value([first])
            values[FIRST[name]] = diagnostics.effective_sample_size(*means)
        elif name == "log_ratio_square":
            values["log_ratio_rms"] = float(np.sqrt(_value(each)))
        elif name == "router_counts":
            values["router/busiest_share"] = busiest_share(np.sum(each, 0))
        elif name in FIRST:
            values[FIRST[name]] = _value([first])
        elif isinstance(first, Mean | Max):
            values[MEANS.get(name, name)] = _value(each)
        elif not _is_skipped(name):
            values[name] = float(np.mean(each))
    if BOUNDS[0] in values:
        values["clip_ratio/region_mean"] = sum(values.get(name, 0.0) for name in BOUNDS)
    return values


def busiest_share(counts: np.ndarray) -> float:
    """The share of a layer's assignments of tokens to experts that its busiest expert gets, as a mean over layers.

    Args:
      counts: ``[layers, E]``, how many tokens each expert got.

    Example:
      >>> busiest_share(np.array([[2, 1, 1], [0, 4, 0]]))
      0.75
    """
    return float((counts.max(-1) / counts.sum(-1)).mean())


def skipped(update: Mapping[str, Any]) -> float:
    """1 for an update that did not change a network because its gradient was not finite; 0 for others.

    Example:
      >>> skipped({"skipped": 0.0, "critic/skipped": 1.0})
      1.0
    """
    return float(max((x for name, x in update.items() if _is_skipped(name)), default=0.0))


def _is_skipped(name: str) -> bool:
    """Whether a metric is 1 if a network's gradient was not finite: the policy's, or ``ROLE/skipped`` of another."""
    return name.rpartition("/")[2] == "skipped"


def _value(each: Sequence[Any]) -> float:
    if isinstance(each[0], Max):
        return max(float(x.value) for x in each)
    return float(sum(float(x.total) for x in each) / max(sum(float(x.count) for x in each), 1.0))
