"""Losses on given answers for `grpojax.programs.update`: completions to imitate, or pairs of a better and worse one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpojax import losses as L
from grpojax.models import decoder as dec
from grpojax.models.compute import Compute
from grpojax.programs.update import Loss, Metrics
from grpojax.types import Array, Mean, Rows, Samples, Scalar, pytree

SIGN = "sign"  # of `Rows.arrays`: 1 on tokens of the chosen completion, -1 on those of the rejected


@pytree
class Pairs:
    """Pairs of an update: each prompt has two completions, the chosen and the rejected.

    Attributes:
      rows: the completions, with the array `SIGN`.
      reference: ``[M, B, K, 2]`` float32, sums of the frozen reference's log-probs for the chosen and the rejected.
      weights: ``[M, B, K]`` float32, weight of each pair in the loss.
    """

    rows: Rows
    reference: Array
    weights: Array


def by_prompts(x: Array, shards: int, microbatches: int) -> np.ndarray:
    """Cuts an array ``[P, ...]`` of prompts into ``[M, B, K, ...]``, like `grpojax.programs.packing.pack_groups`.

    Example:
      >>> by_prompts(np.arange(8), shards=2, microbatches=2).tolist()
      [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    """
    x = np.asarray(x)
    return x.reshape(shards, microbatches, len(x) // (shards * microbatches), *x.shape[1:]).swapaxes(0, 1)


def sft_objective(graph: Any, compute: Compute) -> Loss:
    """The loss ``(params, frozen, part: Rows) -> (value, metrics)`` of `grpojax.losses.sft_loss`.

    Metrics: ``loss``, and ``nll`` and ``entropy``, means over tokens in nats.

    Args:
      graph: the decoder's graph definition.
      compute: how to run the decoder.
    """

    def loss(params: Any, frozen: Any, part: Rows) -> tuple[Scalar, Metrics]:
        scores = dec.score(graph, params, part.bare, compute, entropy="value")
        weights = part.arrays["weights"]
        live, entropy = weights > 0, jnp.asarray(scores.entropy)
        count = live.sum().astype(jnp.float32)
        with jax.named_scope("loss"):
            value = L.sft_loss(scores.logps, weights)
        return value, {
            "loss": value,
            "nll": Mean(total=-jnp.where(live, scores.logps, 0.0).sum(), count=count),
            "entropy": Mean(total=jnp.where(live, entropy, 0.0).sum(), count=count),
        }

    return loss


def dpo_objective(graph: Any, compute: Compute, beta: float) -> Loss:
    """The loss ``(params, frozen, part: Pairs) -> (value, metrics)`` of `grpojax.losses.dpo_loss`.

    Metrics: ``loss``, and the means over pairs of each of the `pair_metrics`.

    Args:
      graph: the decoder's graph definition.
      compute: how to run the decoder.
      beta: beta of the loss.
    """

    def loss(params: Any, frozen: Any, part: Pairs) -> tuple[Scalar, Metrics]:
        rows, sign = part.rows.bare, part.rows.arrays[SIGN]
        logps = dec.score(graph, params, rows, compute).logps
        with jax.named_scope("loss"):
            sums = [_of_prompts(jnp.where(sign == s, logps, 0.0), rows.token_prompt, part.weights) for s in (1.0, -1.0)]
            ref = [part.reference[..., i] for i in (0, 1)]
            value = (part.weights * L.dpo_loss(*sums, *ref, beta=beta)).sum()
        live = part.weights > 0
        count = live.sum().astype(jnp.float32)
        each = pair_metrics(jnp.stack(sums, -1), part.reference, beta)
        means = {name: Mean(total=jnp.where(live, x, 0.0).sum(), count=count) for name, x in each.items()}
        return value, {"loss": value, **means}

    return loss


def pair_metrics(logps: Samples, reference: Samples, beta: float) -> dict[str, Array]:
    """Metrics ``[...]`` of pairs, from sums of log-probs ``[..., 2]`` for the chosen and the rejected completion.

    ``rewards/*`` are DPO's implicit rewards ``beta (log π - log π_ref)``.
    """
    rewards = beta * (logps - reference)
    margin = rewards[..., 0] - rewards[..., 1]
    return {
        "logps/chosen": logps[..., 0],
        "logps/rejected": logps[..., 1],
        "rewards/chosen": rewards[..., 0],
        "rewards/rejected": rewards[..., 1],
        "rewards/margins": margin,
        "rewards/accuracies": (margin > 0).astype(jnp.float32),
    }


def _of_prompts(x: Array, token_prompt: Array, like: Array) -> Array:
    """Sums of ``x [B, R, S]`` over the tokens of each prompt, ``[B, K]``."""
    mine = token_prompt[..., None] == jnp.arange(like.shape[1], dtype=token_prompt.dtype)
    return jnp.where(mine, x[..., None], 0.0).sum((1, 2))
