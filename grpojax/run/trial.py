"""The trial of a variant on made-up samples, before a run reads weights or data.

Whether a variant's advantages exist for a group of the run's size, and are not all 0, is seen only where they are
computed. A recipe is read without that.
"""

from typing import Any

import jax
import numpy as np

from grpojax import losses as L
from grpojax import variants
from grpojax.advantages import Signals
from grpojax.device import Program
from grpojax.host.errors import UserError
from grpojax.host.on_host import on_host
from grpojax.run import parts
from grpojax.run.sections import RolloutConfig


def try_out(variant: variants.Variant, rollout: RolloutConfig) -> None:
    """Raises `UserError` if the advantages of such a group do not exist, as for pass@k with k over the group size, or
    are all 0, as in a group of one that is compared with itself."""
    rewards = np.zeros((2, rollout.group), np.float32)
    try:
        made = jax.eval_shape(variant.advantage, rewards, _made_up(variant, rewards.shape))
        if variants.is_path(variant.name):
            _try_own(variant.objective, made, np.zeros((*rewards.shape, 3), np.float32))
    except Exception as e:
        if not isinstance(e, ValueError) and not variants.is_path(variant.name):
            raise
        message = str(e) if isinstance(e, ValueError) else f"{type(e).__name__}: {' '.join(str(e).split())}"
        raise UserError(f"variant {variant.name!r} with rollout.group={rollout.group}: {message}") from None
    if rollout.group == 1 and not learns_from_equals(variant, rollout):
        raise UserError(
            f"rollout.group=1: variant {variant.name!r} compares the samples of a prompt with each other: with a "
            "single one every advantage is 0, and nothing would be learned; set rollout.group to 2 or more, or take a "
            "variant with another baseline, such as reinforce_pp (the mean of the batch) or remax (a greedy sample)"
        )


def _try_own(objective: L.Objective, advantages: Any, tokens: np.ndarray) -> None:
    """Raises the error that a variant from outside of this package would raise in the first update of a run."""
    if getattr(advantages, "shape", None) != tokens.shape:
        raise ValueError(
            f"its advantages have shape {getattr(advantages, 'shape', None)}, wanted [P, G, T] = {tokens.shape}: end "
            "the chain with to_tokens()"
        )
    given = {name: tokens for name in (*objective.reads, "old_logps", "advantages", "weights")}
    coef = None if objective.entropy_target is None else np.float32(0)
    jax.eval_shape(lambda x: L.policy_loss(x, objective=objective, entropy_coef=coef, **given), tokens)


@on_host()
def learns_from_equals(variant: variants.Variant, rollout: RolloutConfig) -> bool:
    """Whether a variant gives an advantage to samples of groups whose rewards are all the same. A group of one is such
    a group.

    That is so with a baseline other than the group's mean, a teacher, a critic, or rewards that still differ.

    Args:
      variant: its advantages are computed for made-up samples.
      rollout: how many prompts and samples there are.

    Example:
      >>> from grpojax import extension, variants
      >>> rollout = RolloutConfig(prompts=8, group=1, max_tokens=4)
      >>> [learns_from_equals(variants.get(name), rollout) for name in ("grpo", "reinforce_pp")]
      [False, True]
    """
    prompts = min(rollout.prompts, 3)
    # From failed to passed: a variant may treat either specially. Means of these values are exact.
    rewards = np.repeat(np.array([0.0, 1.0, 0.25], np.float32)[:prompts, None], rollout.group, 1)
    signals = _made_up(variant, rewards.shape)
    advantage = Program("", variant.advantage)  # one program instead of one for each of its operations
    return any(bool(np.any(np.asarray(advantage(x, signals)) != 0)) for x in (rewards, 1 - rewards))


def _made_up(variant: variants.Variant, shape: tuple[int, int]) -> Signals:
    """Signals of made-up samples, ``shape [P, G]``, of three tokens each: those that every variant may read, and those
    of the parts."""
    rng = np.random.default_rng(0)

    def some(*shape: int) -> np.ndarray:
        return rng.uniform(0.1, 0.9, shape).astype(np.float32)

    tokens = *shape, 3
    logps = -some(*tokens)
    axes = {"P": shape[:1], "P G": shape, "P G T": tokens}
    made = {
        "lengths": np.full(shape, 3, np.int32),
        "mask": np.ones(tokens, bool),
        "behavior_logps": logps,
        "ref_logps": logps,  # as the policy's own, so that no KL gives an advantage
        "max_logps": 0 * logps,
        "entropy": some(*tokens),
        "tokens": rng.integers(0, 9, tokens).astype(np.int32),
        "step_rewards": some(*tokens),
    }
    for kind in parts.kinds(variant).values():
        made |= kind.made_up(lambda at: some(*axes[at]))
    return parts.signals_of(made)
