"""Credit for single tokens and samples: transforms ``(values, signals) -> values`` for `grpojax.advantages.chain`.

Each says whether it takes ``[P, G]`` (before `to_tokens`) or ``[P, G, T]`` (after it); the wrong one raises. All of it
is float32 and constant for the gradient, except `token_bias_loss`. Degenerate groups stay exactly 0 unless the method
says otherwise. This package imports jax only.

Example:
  >>> import jax.numpy as jnp
  >>> from grpojax import advantages as A
  >>> chain = A.chain(A.center("none"), A.to_tokens(), compensate_rare_tokens())
  >>> signals = A.Signals(mask=jnp.ones((1, 1, 3), bool), behavior_logps=jnp.log(jnp.array([[[0.9, 0.6, 0.3]]])))
  >>> [round(float(a), 4) for a in chain(jnp.array([[1.5]]), signals)[0, 0]]
  [1.5, 2.0, 2.5]
"""

from grpojax.credit.conflicts import conflict_weights
from grpojax.credit.entropy_credit import (
    entropy_filter,
    entropy_mask,
    entropy_of_equal_groups,
    entropy_penalty,
    entropy_shaping,
)
from grpojax.credit.hidden_states import group_vocabulary, influence, nthr, nthr_scores
from grpojax.credit.learned_bias import add_token_bias, bounded_bias, token_bias_loss
from grpojax.credit.rarity import compensate_rare_tokens, protect_rare_tokens, sharpen_novelty

__all__ = [
    "add_token_bias",
    "bounded_bias",
    "compensate_rare_tokens",
    "conflict_weights",
    "entropy_filter",
    "entropy_mask",
    "entropy_of_equal_groups",
    "entropy_penalty",
    "entropy_shaping",
    "group_vocabulary",
    "influence",
    "nthr",
    "nthr_scores",
    "protect_rare_tokens",
    "sharpen_novelty",
    "token_bias_loss",
]
