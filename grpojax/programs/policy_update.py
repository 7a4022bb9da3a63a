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
from grpojax.models.compute import Compute
from grpojax.models.layer_kinds import Mlp
from grpojax.programs import blocks
from grpojax.programs.update import TOTAL_WEIGHT, Loss, Metrics, ReadPrompts
from grpojax.types import Array, Declared, Rows, Scalar

_TOKENS = "P G T"
# The arrays of `grpojax.types.Rows` that the policy's loss reads. A run has advantages and weights, what its objective
# names (`grpojax.losses.Objective.reads`) and, where the text was drawn, the sampler's log-probs.
ARRAYS = {
    "advantages": Declared(_TOKENS, "the variant's, of the rewards"),
    "weights": Declared(_TOKENS, "the aggregation (`grpojax.losses.loss_weights`), 0 on padding"),
    "old_logps": Declared(
        _TOKENS,
        "log-probs in nats by the policy before the step's first update; absent with one update a rollout (ratio 1)",
    ),
    "sampler_logps": Declared(_TOKENS, "log-probs in nats that the sampler reported"),
    "ref_logps": Declared(_TOKENS, "log-probs in nats by the frozen reference, which fills it"),
    "displacement_weights": Declared(_TOKENS, "`grpojax.losses.displacement_weights`, from the part of that name"),
    "covariance_mask": Declared(_TOKENS, "tokens that Clip-Cov or KL-Cov picked before this update", "bool"),
    "action_starts": Declared(
        _TOKENS,
        "the first token of each turn of an episode; absent if a sample is one turn; only LLDS reads it",
        "bool",
    ),
}


def policy_objective(
    graph: Any,
    objective: L.Objective,
    compute: Compute,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    mlp: Mlp | None = None,
    balance_coef: float = 0.0,
) -> Loss:
    """The loss ``(params, frozen, micro: Rows) -> (value, metrics)`` of an objective.

    Args:
      graph: the decoder's graph definition.
      objective: what to optimise. A reference or an entropy that it does not need is not computed. An adaptive entropy
        bonus reads its coefficient from ``frozen["entropy_coef"]``.
      compute: how to run the decoder.
      temperature: the temperature that the samples were drawn at.
      entropy: compute the entropy as a metric even if the objective does not need it.
      mlp: the decoder's, if it is not the dense one. It adds metrics (`grpojax.models.layer_kinds.Mlp.measured`).
      balance_coef: weight of a loss of that MLP, such as the load-balance loss of a mixture of experts: a mean over the
        tokens of the update by their loss weights, whatever these add up to. 0 computes no such loss.

    Returns:
      The loss. Its metrics are those of `grpojax.losses.policy_loss`. If the batch has ``sampler_logps``, those of
      `grpojax.diagnostics.mismatch` are added.
    """
    wanted = True if objective.needs_entropy else "value" if entropy else False

    def loss(params: Any, frozen: Any, micro: Rows) -> tuple[Scalar, Metrics]:
        rows, observe = micro.bare, None
        given: dict[str, Any] = {name: micro.arrays.get(name) for name in ARRAYS}
        starts, weights = given.pop("action_starts"), micro.arrays["weights"]
        if mlp is not None:
            observe = mlp.observe(rows, _shares(weights, frozen) if balance_coef else None)
        scores = dec.score(graph, params, rows, compute, temperature=temperature, entropy=wanted, observe=observe)
        with jax.named_scope("loss"):
            value, metrics = L.policy_loss(
                scores.logps,
                objective=objective,
                actions=None if starts is None else jnp.cumsum(starts, -1, dtype=jnp.int32),
                entropy=scores.entropy,
                entropy_coef=(frozen or {}).get("entropy_coef"),
                segments=rows.segments,
                **given,
            )
        if (sampler := given["sampler_logps"]) is not None:
            metrics |= diagnostics.mismatch(scores.logps, sampler, weights > 0)
        if mlp is not None:
            more, measured = mlp.measured(scores.observed, rows, balance_coef)
            value, metrics = value + more, metrics | measured | {"loss": metrics["loss"] + more}
        return value, metrics

    return loss


def _shares(weights: Array, frozen: Any) -> Array:
    """Loss weights that add up to 1 over all micro-batches. Those of a sum over tokens add up to hundreds, and the
    load-balance loss would be as much stronger than under a mean."""
    total = (frozen or {}).get(TOTAL_WEIGHT, weights.sum())
    return weights * jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1.0), 0.0)


def reader(graph: Any, compute: Compute) -> ReadPrompts:
    """The forward of prompts whose result the policy's loss and scores use (`grpojax.programs.update.Learner`)."""

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


def make_covariance_mask(objective: L.Objective) -> Callable[[Any, Any, Rows, Any], Any]:
    """The tokens that Clip-Cov or KL-Cov picks: ``(key, logps, rows, token_index) -> bool``.

    All arrays are ``[M, B, R, S]``. ``logps`` are the log-probs of the whole minibatch before its update. In
    ``token_index`` each token of the minibatch has its number (`grpojax.programs.packing.Layout.index`), so that the
    pick does not depend on micro-batches or devices.
    """

    def pick(key: Any, logps: Any, rows: Rows, token_index: Any) -> Any:
        read = ("advantages", "weights", "old_logps", "sampler_logps")
        given = {name: rows.arrays.get(name) for name in read}
        given |= {"segments": rows.segments, "token_index": token_index}
        return L.covariance_mask(key, logps, objective=objective, **given)

    return pick
