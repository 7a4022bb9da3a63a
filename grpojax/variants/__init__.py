"""Published variants, each a composition of `advantages`, `credit`, `allocation` and `losses`. Imports jax only.

A variant is a class (`Method`) whose fields are its options, with the published values as defaults: its chain of
advantages, its surrogate, and its objective, whose options every variant has. ``clip_low``, ``clip_high`` and
``clip_dual`` are ``low``, ``high`` and ``dual`` of its clip. ``ddof`` and ``eps`` are always those of the standard
deviation that the variant divides by; no paper of the GRPO family states them, and the defaults are TRL's unless a
variant says otherwise. If a paper states no KL, kl_coef is 0; if it states no clip, the clip is 0.2.

A method without a ratio (`losses.Objective.has_ratio`) is for one update per rollout. `twin_at_one_update` says which
methods are then the same.

``kl_in`` says where the KL is: "loss", "reward" (of the whole sample, in any variant) or "token_reward" (only where
the chain has token rewards).

`control` gives the same method with its one mechanism off, for a comparison. A printed variant shows its advantage
chain and its objective.

Example:
  >>> get("dapo", clip_high=0.3).objective.surrogate
  clipped(low=0.2, high=0.3, dual=None)
  >>> dapo().keep({"accuracy": [[1.0, 0.0], [1.0, 1.0]]}, "accuracy").tolist()
  [True, False]
"""

from grpojax.variants.advantage_methods import (
    deepseek_v3_2,
    distill,
    dr_grpo,
    gdpo,
    gpg,
    grpo,
    grpo_process,
    lite_ppo,
    magistral,
    max_rl,
    ngrpo,
    opo,
    pass_at_k,
    pass_at_k_margin,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    rloo,
    scale_rl,
    w_reinforce,
)
from grpojax.variants.credit_methods import (
    entropy_shaping,
    grpo_lambda_length,
    grpo_lambda_traces,
    gtpo,
    high_entropy_tokens,
    lp_reg,
    nthr,
    rl_zvp,
    xrpo,
)
from grpojax.variants.critics import BiasLoss, Critic, ValueLoss
from grpojax.variants.experiments import (
    culling,
    gt_likelihood,
    negative_advantage,
    rare_token,
    token_critic,
)
from grpojax.variants.loss_methods import (
    cispo,
    clip_cov,
    dapo,
    dppo,
    dual_clip,
    gmpo,
    gspo,
    gspo_token,
    kl_cov,
    llds,
    luspo,
    ppo,
    sapo,
    vespo,
)
from grpojax.variants.method import Clipped, GroupNormalised, Method, OnPolicy, group_normalised
from grpojax.variants.registry import control, get, names, parameters, published, section, source, table
from grpojax.variants.twins import twin_at_one_update
from grpojax.variants.variant import NEEDS, Grade, Variant, check_needs, is_path

__all__ = [
    "BiasLoss",
    "Clipped",
    "Critic",
    "Grade",
    "GroupNormalised",
    "Method",
    "NEEDS",
    "OnPolicy",
    "ValueLoss",
    "Variant",
    "check_needs",
    "cispo",
    "clip_cov",
    "control",
    "culling",
    "dapo",
    "deepseek_v3_2",
    "distill",
    "dppo",
    "dr_grpo",
    "dual_clip",
    "entropy_shaping",
    "gdpo",
    "get",
    "gmpo",
    "gpg",
    "grpo",
    "grpo_lambda_length",
    "grpo_lambda_traces",
    "grpo_process",
    "group_normalised",
    "gspo",
    "gspo_token",
    "gt_likelihood",
    "gtpo",
    "high_entropy_tokens",
    "is_path",
    "kl_cov",
    "lite_ppo",
    "llds",
    "lp_reg",
    "luspo",
    "magistral",
    "max_rl",
    "names",
    "negative_advantage",
    "ngrpo",
    "nthr",
    "opo",
    "parameters",
    "pass_at_k",
    "pass_at_k_margin",
    "ppo",
    "published",
    "rare_token",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "rl_zvp",
    "rloo",
    "sapo",
    "scale_rl",
    "section",
    "source",
    "table",
    "token_critic",
    "twin_at_one_update",
    "vespo",
    "w_reinforce",
    "xrpo",
]
