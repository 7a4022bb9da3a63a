"""An entropy bonus that holds a target."""

from grpojax import shapes
from grpojax.types import Scalar


def adapt_entropy_coef(coef: Scalar, entropy: Scalar, target: float, step: float = 0.005) -> tuple[Scalar, Scalar]:
    """``(coef of the next step, coef applied in this one)`` of the entropy bonus (Skywork-OR1, arXiv 2505.22312).

    The weight rises by ``step`` where the entropy is under ``target`` and falls by it where it is over, to 0 at least.
    It is applied only while the entropy is at most the target: ``coef if entropy <= target else 0``.

    Args:
      coef: ``[]`` the weight so far, 0 or more; part of a run's state.
      entropy: ``[]`` mean over this step's tokens, nats.
      target: the entropy to hold, nats a token; 0.2 there.
      step: 0.005 there.

    Returns:
      Two numbers, by plain arithmetic, so that a run may do it while the device is busy; the second is `policy_loss`'s
      ``entropy_coef``.

    Example:
      >>> [[round(float(x), 3) for x in adapt_entropy_coef(0.01, entropy, 0.2)] for entropy in (0.1, 0.3)]
      [[0.015, 0.01], [0.005, 0.0]]
    """
    shapes.check("adapt_entropy_coef", "", coef=coef, entropy=entropy, target=target, step=step)
    under, over = (entropy < target) * 1.0, (entropy > target) * 1.0
    moved = coef + step * (under - over)
    return moved * ((moved > 0) * 1.0), coef * (1.0 - over)
