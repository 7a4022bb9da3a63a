"""Which methods are the same if the policy that learns is the one that drew the samples."""

from grpojax import losses as L
from grpojax.variants.variant import Variant

# Their gradient at ratio 1 is -A times that of log π (at level "sequence": its mean over the sample).
_ALIKE = (L.clipped, L.unclipped, L.cispo, L.soft_adaptive, L.geometric, L.vespo, L.dppo_tv, L.dppo_kl)


def twin_at_one_update(variant: Variant) -> str | None:
    """One line on which method ``variant`` equals with one update per rollout; None if it equals no other.

    The ratio is then 1: no clip acts, and a sample's ratio has the gradient of its tokens' ratios. GSPO, GMPO, SAPO and
    the dual clip equal GRPO; CISPO and NGRPO's clip equal DAPO's. This does not hold for the traces of GRPO-λ, for
    Clip-Cov, and for a ratio to the sampler, which is not 1.

    Example:
      >>> from grpojax import variants
      >>> twin_at_one_update(variants.gspo()).partition(": ")[2]
      "gspo has the gradient of GRPO's loss, on its own advantages"
      >>> twin_at_one_update(variants.grpo())
    """
    objective = variant.objective
    surrogate, ratio = objective.surrogate, objective.ratio
    levels = ("token", "sequence", "sequence_token", *(("joint",) if isinstance(surrogate, L.vespo) else ()))
    if type(surrogate) not in _ALIKE or ratio not in levels:
        return None
    if objective.ratio_denominator == "sampler" or objective.covariance == "clip":
        return None
    if surrogate == L.clipped() and ratio == "token":
        return None
    known = {"sequence_mean": "GRPO's loss", "token_mean": "DAPO's loss"}
    if variant.name == "dapo":
        known = {}
    twin = known.get(objective.aggregate, f"a loss without a clip, aggregated by {objective.aggregate!r}")
    begins = "with one update a rollout the ratio is 1 and no clip acts"
    return f"{begins}: {variant.name} has the gradient of {twin}, on its own advantages"
