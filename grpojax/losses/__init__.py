"""The policy objective in pieces: ratios, surrogates, KL estimators, corrections, aggregation weights.

Aggregation is an array: `loss_weights` is computed once on the global batch, and every term of the loss is
``sum(weights * x)``. Any split of the batch over micro-batches or devices then sums to the same gradient.
Everything is float32; masks come before ``exp``. This package imports jax only.
"""

from grpojax.losses.corrections import Importance, ImportanceLevel, importance_correction, off_policy_mask
from grpojax.losses.covariance_masks import clip_cov, covariance, covariance_mask, kl_cov, kl_cov_penalty
from grpojax.losses.divergence import KLKind, KLPlace, kl
from grpojax.losses.entropy_bonus import adapt_entropy_coef
from grpojax.losses.llds import Gate, displacement, displacement_weights
from grpojax.losses.objective import Covariance, Objective, RatioDenominator
from grpojax.losses.policy_terms import policy_loss
from grpojax.losses.ratios import Ratio, log_difference, log_ratio
from grpojax.losses.supervised import dpo_loss, sft_loss
from grpojax.losses.surrogates import cispo, clipped, geometric, reinforce, soft_adaptive, unclipped, vespo
from grpojax.losses.token_weights import Aggregation, loss_weights
from grpojax.losses.trust_regions import dppo_kl, dppo_tv
from grpojax.losses.value import value_loss

__all__ = [
    "Aggregation",
    "RatioDenominator",
    "Covariance",
    "Gate",
    "Importance",
    "ImportanceLevel",
    "KLKind",
    "KLPlace",
    "Objective",
    "Ratio",
    "adapt_entropy_coef",
    "cispo",
    "clip_cov",
    "clipped",
    "covariance",
    "covariance_mask",
    "displacement",
    "displacement_weights",
    "dpo_loss",
    "dppo_kl",
    "dppo_tv",
    "geometric",
    "importance_correction",
    "kl",
    "kl_cov",
    "kl_cov_penalty",
    "log_difference",
    "log_ratio",
    "loss_weights",
    "off_policy_mask",
    "policy_loss",
    "reinforce",
    "sft_loss",
    "soft_adaptive",
    "unclipped",
    "value_loss",
    "vespo",
]
