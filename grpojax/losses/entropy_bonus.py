"""An entropy bonus that holds a target."""

from grpojax import shapes
from grpojax.types import Scalar


def adapt_entropy_coef(coef: Scalar, entropy: Scalar, target: float, step: float = 0.005) -> tuple[Scalar, Scalar]:
    """``(coef of the next step, coef applied in this one)`` of the entropy bonus (Skywork-OR1, arXiv 2505.22312).

    The weight rises by ``step`` if the entropy is under ``target``, and falls by it if it is over, down to 0.
    It is applied only while the entropy is at most the target: ``coef if entropy <= target else 0``.

    Args:
      coef: ``[]`` the weight so far, 0 or more; part of a run's state.
      entropy: ``[]`` mean over this step's tokens, nats.
      target: the entropy to hold, nats per token; 0.2 in the paper.
      step: change of the weight; 0.005 in the paper.

    Returns:
      Two numbers, by plain arithmetic, so that it can run while the device is busy. The second is `policy_loss`'s
      ``entropy_coef``.

    Example:
      >>> [[round(float(x), 3) for x in adapt_entropy_coef(0.01, entropy, 0.2)] for entropy in (0.1, 0.3)]
      [[0.015, 0.01], [0.005, 0.0]]
    """
    shapes.check("adapt_entropy_coef", "", coef=coef, entropy=entropy, target=target, step=step)
    under, over = (entropy < target) * 1.0, (entropy > target) * 1.0
    moved = coef + step * (under - over)
    return moved * ((moved > 0) * 1.0), coef * (1.0 - over)
