"""From rewards to advantages: stateless transforms ``(values, signals) -> values``, joined by `chain`.

Values are ``[P, G]`` (a number a sample) until `to_tokens`, and ``[P, G, T]`` after it. All of it is float32 and
constant for the gradient. This package imports jax only.

Example:
  >>> import jax.numpy as jnp
  >>> grpo = chain(center("group"), scale("group", ddof=1, eps=1e-4))
  >>> [round(float(a), 4) for a in grpo(jnp.array([[1.0, 0.0, 0.0, 0.0]]))[0]]
  [1.4997, -0.4999, -0.4999, -0.4999]
  >>> text_of(grpo)
  'center(by=group, leave_one_out=False, singleton=zero) | scale(by=group, of=rewards, ddof=1, eps=0.0001, \
live_only=False, singleton=zero)'
"""

from grpojax.advantages.baselines import (
    center,
    center_by_length,
    floor,
    rescale_live,
    scale,
    subtract_greedy,
    whiten,
)
from grpojax.advantages.group_rules import (
    best_margin,
    likelihood_of_all_fail,
    max_rl,
    pass_at_k,
    penalize_all_fail,
    virtual_best,
    weigh_signs,
)
from grpojax.advantages.signals import Signals, Transform, chain, described, need, per_sample, per_token, text_of
from grpojax.advantages.tokens import (
    answer_term,
    distill,
    gae,
    process_rewards,
    subtract_kl,
    to_tokens,
    token_returns,
    token_rewards,
)

__all__ = [
    "Signals",
    "Transform",
    "answer_term",
    "best_margin",
    "center",
    "center_by_length",
    "chain",
    "described",
    "distill",
    "floor",
    "gae",
    "likelihood_of_all_fail",
    "max_rl",
    "need",
    "pass_at_k",
    "penalize_all_fail",
    "per_sample",
    "per_token",
    "process_rewards",
    "rescale_live",
    "scale",
    "subtract_greedy",
    "subtract_kl",
    "text_of",
    "to_tokens",
    "token_returns",
    "token_rewards",
    "virtual_best",
    "weigh_signs",
    "whiten",
]
