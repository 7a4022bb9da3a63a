"""The policy's loss for `grpojax.programs.update`, and the programs that score its samples before an update."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from grpojax import diagnostics
from grpojax import losses as L
from grpojax.models import decoder as dec
from grpojax.models import experts
from grpojax.models.compute import Compute
from grpojax.programs import blocks
from grpojax.programs.packing import Packed
from grpojax.programs.update import TOTAL_WEIGHT, Loss, Metrics, ReadPrompts
from grpojax.types import Array, Mean, Rows, Scalar


def policy_objective(
    graph: Any,
    objective: L.Objective,
    compute: Compute,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    balance_coef: float | None = None,
) -> Loss:
    """The loss ``(params, frozen, micro: Packed) -> (value, metrics)`` of an objective.

    Args:
      graph: the decoder's graph definition.
      objective: what to optimise. A reference or an entropy that it does not need is not computed. An adaptive entropy
        bonus reads its coefficient from ``frozen["entropy_coef"]``.
      compute: how to run the decoder.
      temperature: the temperature that the samples were drawn at.
      entropy: compute the entropy as a metric even if the objective does not need it.
      balance_coef: weight of the load-balance loss of a mixture of experts (`grpojax.models.experts.load`), a mean over
        the tokens of the update by their loss weights, whatever these add up to. 0 computes no such loss. None for a
        dense policy.

    Returns:
      The loss. Its metrics are those of `grpojax.losses.policy_loss`. If the batch has ``sampler_logps``, those of
      `grpojax.diagnostics.mismatch` are added; a mixture of experts adds ``router_entropy``, ``router_counts`` and
      ``balance_loss``.
    """
    wanted = True if objective.needs_entropy else "value" if entropy else False

    def loss(params: Any, frozen: Any, micro: Packed) -> tuple[Scalar, Metrics]:
        tokens, observe = micro.per_token, None
        if balance_coef is not None:
            weights = _shares(tokens.weights, frozen) if balance_coef else None
            observe = functools.partial(experts.load, rows=micro.rows, weights=weights)
        scores = dec.score(graph, params, micro.rows, compute, temperature=temperature, entropy=wanted, observe=observe)
        starts = tokens.action_starts
        with jax.named_scope("loss"):
            value, metrics = L.policy_loss(
                scores.logps,
                objective=objective,
                advantages=tokens.advantages,
                weights=tokens.weights,
                old_logps=tokens.old_logps,
                ref_logps=tokens.ref_logps,
                sampler_logps=tokens.sampler_logps,
                displacement_weights=tokens.displacement_weights,
                actions=None if starts is None else jnp.cumsum(starts, -1, dtype=jnp.int32),
                covariance_mask=tokens.covariance_mask,
                entropy=scores.entropy,
                entropy_coef=(frozen or {}).get("entropy_coef"),
                segments=micro.rows.segments,
            )
        if tokens.sampler_logps is not None:
            metrics |= diagnostics.mismatch(scores.logps, tokens.sampler_logps, tokens.weights > 0)
        if scores.observed is not None:
            more, measured = of_routers(scores.observed, micro.rows, balance_coef or 0.0)
            value, metrics = value + more, metrics | measured | {"loss": metrics["loss"] + more}
        return value, metrics

    return loss


def _shares(weights: Array, frozen: Any) -> Array:
    """Loss weights that add up to 1 over all micro-batches. Those of a sum over tokens add up to hundreds, and the
    load-balance loss would be as much stronger than under a mean."""
    total = (frozen or {}).get(TOTAL_WEIGHT, weights.sum())
    return weights * jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1.0), 0.0)


def of_routers(load: experts.Load, rows: Rows, coef: float) -> tuple[Scalar, Metrics]:
    """The weighted load-balance loss over all layers, and the metrics of the layers' routers."""
    seen = (rows.segments > 0).sum().astype(jnp.float32) * load.entropy.shape[0]
    metrics: Metrics = {"router_entropy": Mean(total=load.entropy.sum(), count=seen), "router_counts": load.counts}
    if load.balance is None:
        return jnp.float32(0.0), metrics
    balance = load.balance.mean()
    return coef * balance, metrics | {"balance_loss": balance}


def reader(graph: Any, compute: Compute) -> ReadPrompts:
    """The forward of prompts whose result the policy's loss and scores use (`grpojax.programs.update.Learns`)."""

    def read(params: Any, frozen: Any, rows: Rows) -> dec.PromptStates:
        return dec.read_prompts(nnx.merge(graph, params), rows, compute)

    return read


def make_score(
    graph: Any, compute: Compute, *, temperature: float = 1.0, entropy: bool = False
) -> Callable[[Any, Any], dec.Scores]:
    """Scores under given weights: ``(params, rows [M, ...]) -> Scores`` of ``[M, B, R, S]``, without gradient.

    Args:
      graph, compute, temperature: as in `policy_objective`.
      entropy: also compute the entropy of each token's distribution.
    """

    def score(params: Any, rows: Any) -> dec.Scores:
        def of_block(part: Any) -> dec.Scores:
            wanted = "value" if entropy else False
            return dec.score(graph, params, part, compute, temperature=temperature, entropy=wanted)

        return blocks.each(of_block, rows, functools.partial(reader(graph, compute), params, None))

    return score


def make_covariance_mask(objective: L.Objective) -> Callable[[Any, Any, Packed, Any], Any]:
    """The tokens that Clip-Cov or KL-Cov picks: ``(key, logps, packed, places) -> bool``.

    All arrays are ``[M, B, R, S]``. ``logps`` are the log-probs of the whole minibatch before its update. ``places``
    numbers the tokens of the minibatch (`grpojax.programs.packing.Layout.index`), so that the pick does not depend on
    micro-batches or devices.
    """

    def pick(key: Any, logps: Any, packed: Packed, places: Any) -> Any:
        tokens, segments = packed.per_token, packed.rows.segments
        return L.covariance_mask(
            key,
            logps,
            objective=objective,
            advantages=tokens.advantages,
            weights=tokens.weights,
            old_logps=tokens.old_logps,
            sampler_logps=tokens.sampler_logps,
            segments=segments,
            places=places,
        )

    return pick
