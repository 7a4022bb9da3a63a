"""Published variants, each a composition of `advantages`, `credit`, `allocation` and `losses`. Imports jax only.

A variant is a function that returns its advantage chain; `published` states the rest, its objective as published. All
of them also take the options of the objective (`OPTIONS`) and of its surrogate, with the published values as defaults:
``low``, ``high`` and ``dual`` of a clip as ``clip_low``, ``clip_high`` and ``clip_dual``. ``ddof`` and ``eps`` are
always those of the standard deviation that the variant divides by; no paper of the GRPO family states them, and the
defaults are TRL's unless a variant says otherwise. Where a paper states no KL, kl_coef is 0; where it leaves the clip
open, it is 0.2.

``kl_in`` says where the KL stands: "loss", "reward" (of the whole sample, in any variant) or "token_reward" (only where
the chain has token rewards).

Example:
  >>> get("dapo", clip_high=0.3).objective.surrogate
  clipped(low=0.2, high=0.3, dual=None)
  >>> dapo().keep({"accuracy": [[1.0, 0.0], [1.0, 1.0]]}, "accuracy").tolist()
  [True, False]
"""

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

from grpojax import advantages as A
from grpojax import allocation
from grpojax import credit as C
from grpojax import losses as L

Grade = Literal["deployed", "replicated", "ablated", "single team"]
# What a trainer may lack, and what it is.
NEEDS = {
    "critic": "a critic: signals.values, or signals.token_bias, and a loss of its own",
    "culling": "a data order that leaves out solved prompts (allocation.cull)",
    "displacement_weights": "batch.displacement_weights (losses.displacement_weights)",
    "entropy": "signals.entropy, of the full vocabulary at every token",
    "greedy": "signals.greedy_rewards, of one greedy completion a prompt",
    "ground_truth": "signals.likelihood of the true answer",
    "hidden_states": "signals.hidden, probs and columns",
    "rollout_plan": "samples given to prompts by allocation.xrpo_allocate",
    "step_rewards": "signals.step_rewards",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One published method.

    Attributes:
      name: as in the config.
      advantage: ``(rewards [P, G], Signals) -> [P, G, T]``.
      objective: what the update minimises.
      citation: paper and arXiv id.
      evidence: "deployed" in a named model, "replicated" by others, "ablated" by its team at length, "single team".
      needs: what it takes beyond rewards, lengths, tokens and log-probs; keys of `NEEDS`.
      keep: the filter ``(metrics, on) -> [P] bool`` that decides which prompts train (`allocation.keep_prompts`),
        None for all.
    """

    name: str
    advantage: A.Transform
    objective: L.Objective
    citation: str
    evidence: Grade
    needs: tuple[str, ...] = ()
    keep: Callable[..., Any] | None = None


# Fields of `losses.Objective` that every variant offers; those that only some have are offered where they are given.
OPTIONS = (
    "aggregate", "constant", "count_empty", "kl_coef", "kl_kind", "kl_in", "entropy_coef", "importance", "importance_level",
    "importance_low", "importance_high", "off_policy_limit",
)  # fmt: skip
_ALL: dict[str, Callable[..., Variant]] = {}
_CLIPPED = L.clipped()


def _surrogate_options(surrogate) -> dict[str, dataclasses.Field]:
    """Option name to field of the surrogate."""
    renamed = {"low": "clip_low", "high": "clip_high", "dual": "clip_dual"}
    return {renamed.get(f.name, f.name): f for f in dataclasses.fields(surrogate)}


def published(
    citation: str,
    evidence: Grade,
    *,
    needs: tuple[str, ...] = (),
    keep: Callable[..., Any] | None = None,
    surrogate: Any = _CLIPPED,
    **objective,
):
    """Registers a function ``(options) -> advantage chain`` as a variant.

    Args:
      citation, evidence, needs, keep: as in `Variant`.
      surrogate, objective: fields of `losses.Objective`. ``aggregate="constant"`` without a constant makes that an
        option that must be given.
    """
    fields = {f.name: f for f in dataclasses.fields(L.Objective)}
    of_surrogate = _surrogate_options(surrogate)
    offered = [name for name in fields if name in {*OPTIONS, *objective}]

    def register(chain: Callable[..., A.Transform]) -> Callable[..., Variant]:
        own = inspect.signature(chain).parameters
        options = dict(own)
        for name, f in of_surrogate.items():
            options[name] = inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=getattr(surrogate, f.name), annotation=f.type
            )
        for name in (n for n in offered if n not in own):
            default = objective.get(name, fields[name].default)
            if name == "constant" and objective.get("aggregate") == "constant" and default is None:
                default = inspect.Parameter.empty
            annotation = fields[name].type
            options[name] = inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
        signature = inspect.Signature(list(options.values()), return_annotation=Variant)

        @functools.wraps(chain)
        def variant(**given) -> Variant:
            try:
                bound = signature.bind(**given)
            except TypeError as e:
                raise ValueError(f"variant {chain.__name__!r}: {e}") from None
            bound.apply_defaults()
            chosen = bound.arguments
            terms = objective | {name: chosen[name] for name in offered}
            clip = {f.name: chosen[name] for name, f in of_surrogate.items()}
            loss = L.Objective(surrogate=dataclasses.replace(surrogate, **clip), **terms)
            arguments = {name: chosen[name] for name in own}
            if loss.kl_in == "token_reward" and "kl_coef" not in own:
                raise ValueError(f"variant {chain.__name__!r} has no token rewards: kl_in='reward' or 'loss'")
            if loss.kl_in != "token_reward" and "kl_coef" in own:
                arguments["kl_coef"] = 0.0  # it is the sample's reward, or the loss, that has the KL
            advantage = chain(**arguments)
            if loss.kl_in == "reward" and loss.kl_coef:
                advantage = A.chain(advantage, reward=A.subtract_kl(loss.kl_coef))
            return Variant(
                name=chain.__name__,
                advantage=advantage,
                objective=loss,
                citation=citation,
                evidence=evidence,
                needs=needs,
                keep=keep,
            )

        variant.__signature__ = signature  # pyrefly: ignore
        _ALL[chain.__name__] = variant
        return variant

    return register


def _grpo(ddof: int, eps: float) -> tuple[A.Transform, A.Transform]:
    """GRPO's own steps, before `to_tokens`."""
    return A.center("group"), A.scale("group", ddof=ddof, eps=eps)


# --- GRPO and its baselines

_MATH = "Shao et al., DeepSeekMath, arXiv 2402.03300"


@published(_MATH, "deployed", kl_coef=0.04)
def grpo(*, ddof: int = 1, eps: float = 1e-4):
    """GRPO with outcome supervision, DeepSeekMath, arXiv 2402.03300.

    ``A_i = (r_i - mean r) / (std r + eps)``; clipped surrogate, mean over a sample's tokens, then over samples;
    k3 in the loss. The paper states kl_coef 0.04; the clip it does not: 0.2 is TRL's.
    """
    return A.chain(*_grpo(ddof, eps), A.to_tokens())


@published(_MATH, "ablated", needs=("step_rewards",), kl_coef=0.04)
def grpo_process(*, ddof: int = 1, eps: float = 1e-4):
    """GRPO with process supervision, arXiv 2402.03300: suffix sums of the steps' normalised rewards."""
    return A.chain(A.process_rewards(ddof=ddof, eps=eps))


@published("Liu et al., Understanding R1-Zero-Like Training, arXiv 2503.20783", "replicated", aggregate="constant")
def dr_grpo(*, leave_one_out: bool = False):
    """Dr. GRPO, arXiv 2503.20783: ``A_i = r_i - mean r``, token sums divided by a constant, no KL.

    Args:
      leave_one_out: the mean of the other samples; as some texts print Dr. GRPO, though it is RLOO's baseline.
      constant: the divisor, the longest completion allowed in tokens (the trainer fills in rollout.max_tokens).
    """
    return A.chain(A.center("group", leave_one_out=leave_one_out), A.to_tokens())


@published(
    "Ahmadian et al., Back to Basics, arXiv 2402.14740", "replicated",
    surrogate=L.reinforce(), aggregate="sequence_sum", kl_coef=0.03, kl_kind="k1", kl_in="reward",
)  # fmt: skip
def rloo():
    """RLOO, arXiv 2402.14740: ``A_i = r_i - mean_{j != i} r_j``, ``-A Σ_t log π``, k1 in the reward.

    kl_coef 0.03 is the paper's on TL;DR; 0.10 on HH.
    """
    return A.chain(A.center("group", leave_one_out=True), A.to_tokens())


_PLUS = "Hu et al., REINFORCE++, arXiv 2501.03262"


@published(_PLUS, "replicated", aggregate="token_mean", kl_kind="k1", kl_in="token_reward")
def reinforce_pp(*, kl_coef: float = 0.0, ddof: int = 0, eps: float = 1e-8):
    """REINFORCE++, arXiv 2501.03262: returns of token rewards with k1 in them, whitened over the batch's tokens.

    Args:
      kl_coef: of k1 in each token's reward; over 0 it needs signals.ref_logps. The paper's own is not stated.
      ddof: of the batch's deviation; OpenRLHF 0, verl 1.
    """
    return A.chain(A.token_rewards(kl_coef=kl_coef), A.token_returns(), A.whiten(ddof=ddof, eps=eps))


@published(_PLUS, "replicated", aggregate="token_mean", kl_kind="k2")
def reinforce_pp_baseline(*, weighted_by: Literal["tokens", "sequences"] = "tokens", ddof: int = 0, eps: float = 1e-8):
    """REINFORCE++-baseline, arXiv 2501.03262: ``r - mean r`` of the group, whitened over the batch; KL as a k2 loss.

    The weight of that loss is the run's: kl_coef is 0 until it is given.

    Args:
      weighted_by: whether long samples count more in the batch's mean and deviation: tokens in OpenRLHF (the authors')
        and verl, sequences in TRL and ms-swift.
      ddof: of the batch's deviation; OpenRLHF 0, verl 1.
    """
    steps = A.to_tokens(), A.whiten(ddof=ddof, eps=eps)
    if weighted_by not in ("tokens", "sequences"):
        raise ValueError(f"weighted_by={weighted_by!r}: must be 'tokens' or 'sequences'")
    return A.chain(A.center("group"), *(steps if weighted_by == "tokens" else steps[::-1]))


@published(
    "Li et al., ReMax, arXiv 2310.10505", "replicated",
    needs=("greedy",), surrogate=L.reinforce(), aggregate="sequence_sum",
)  # fmt: skip
def remax():
    """ReMax, arXiv 2310.10505: ``A = r - r_greedy``, ``-A Σ_t log π``. No KL here; the paper's is in the reward."""
    return A.chain(A.subtract_greedy(), A.to_tokens())


@published("Chu et al., GPG, arXiv 2504.02546", "single team", surrogate=L.reinforce(), aggregate="token_mean")
def gpg(*, scaled: bool = False, ddof: int = 1, eps: float = 1e-4):
    """GPG, arXiv 2504.02546: ``A = α (r - mean r) / F``, ``-A log π``; α makes up for groups without variance.

    Args:
      scaled: F is the group's deviation; 1 otherwise.
    """
    scale = A.scale("group" if scaled else "none", ddof=ddof, eps=eps)
    return A.chain(A.center("group"), scale, A.rescale_live(), A.to_tokens())


@published("Chen et al., Pass@k Training, arXiv 2508.10751", "single team", aggregate="token_mean")
def pass_at_k(*, k: int = 4, success: float = 1.0):
    """Pass@k as the reward in closed form, arXiv 2508.10751; k = 1 is GRPO with ddof 0.

    The objective was not checked: the clipped surrogate over tokens.

    Args:
      k: samples that one attempt may draw, at most the group; 4 is a choice of ours.
      success: the outcome from which on a sample is right.
    """
    return A.chain(A.pass_at_k(k, success=success), A.to_tokens())


@published("Tang et al., arXiv 2503.19595", "single team", aggregate="token_mean")
def pass_at_k_margin(*, scaled: bool = False):
    """The other pass@k, arXiv 2503.19595: only the best sample learns, by its margin to the second best.

    The objective was not checked: the clipped surrogate over tokens.
    """
    return A.chain(A.best_margin(scaled=scaled), A.to_tokens())


@published(
    "Hao et al., On-Policy RL with Optimal Reward Baseline, arXiv 2505.23585", "single team",
    surrogate=L.reinforce(), aggregate="sequence_sum",
)  # fmt: skip
def opo():
    """OPO, arXiv 2505.23585: a baseline weighted by length; for exactly one update a rollout.

    How the paper aggregates was not checked; its baseline is derived for sums over tokens.
    """
    return A.chain(A.center_by_length(), A.to_tokens())


@published("Liu et al., Tricks or Traps?, arXiv 2508.08221", "ablated", aggregate="token_mean")
def lite_ppo(*, of: Literal["rewards", "advantages"] = "rewards", ddof: int = 1, eps: float = 1e-4):
    """Lite PPO, arXiv 2508.08221: the group's mean, the batch's deviation, mean over tokens.

    Args:
      of: whose deviation: of raw rewards, as the paper prints, or of centred ones, as ScaleRL and Magistral do.
    """
    return A.chain(A.center("group"), A.scale("batch", of=of, ddof=ddof, eps=eps), A.to_tokens())


@published(
    "Khatri et al., ScaleRL, arXiv 2510.13786", "ablated",
    keep=functools.partial(allocation.keep_prompts, below=0.9), surrogate=L.cispo(), aggregate="prompt_mean",
)  # fmt: skip
def scale_rl(*, ddof: int = 1, eps: float = 1e-4):
    """ScaleRL, arXiv 2510.13786: the deviation of the batch's centred rewards, CISPO, mean over prompts.

    Prompts that nobody, or 0.9 of the group and more, solves are left out. The bound of CISPO is TRL's.
    """
    return A.chain(A.center("group"), A.scale("batch", of="advantages", ddof=ddof, eps=eps), A.to_tokens())


@published(
    "Mistral AI, Magistral, arXiv 2506.10910", "deployed",
    keep=allocation.keep_prompts, surrogate=L.clipped(high=0.28), aggregate="prompt_mean",
)  # fmt: skip
def magistral(*, ddof: int = 1, eps: float = 1e-4):
    """Magistral, arXiv 2506.10910: rewards centred in the group, then whitened over the batch; a higher upper clip.

    The loss is divided by a group's tokens; groups without variance are left out; no KL. The paper's upper clip is
    0.26 to 0.28.
    """
    return A.chain(A.center("group"), A.whiten(ddof=ddof, eps=eps), A.to_tokens())


@published(
    "DeepSeek-AI, DeepSeek-V3.2, arXiv 2512.02556",
    "deployed",
    kl_coef=0.001,
    kl_kind="unbiased",
    off_policy_limit=0.5,
)
def deepseek_v3_2():
    """DeepSeek-V3.2's GRPO, arXiv 2512.02556: no deviation, an unbiased KL, wrong samples that the policy left masked.

    The paper gives neither the weight of the KL (0.001 is R1's) nor the limit of the mask (0.5 is TRL's). Its
    keep-routing and keep-sampling-mask are the sampler's and not here.
    """
    return A.chain(A.center("group"), A.to_tokens())


# --- other policy losses


@published(
    "Yu et al., DAPO, arXiv 2503.14476", "replicated",
    keep=allocation.keep_prompts, surrogate=L.clipped(high=0.28), aggregate="token_mean",
)  # fmt: skip
def dapo(*, ddof: int = 1, eps: float = 1e-4, overlong_limit: int | None = None, overlong_buffer: int | None = None):
    """DAPO, arXiv 2503.14476: a higher upper clip, mean over tokens, no KL, only mixed groups, soft overlong punishment.

    Overlong *filtering*, which the paper tried first, is a mask: ``loss_weights(mask & stopped[..., None], ...)``.

    Args:
      overlong_limit: longest completion in tokens (paper: 20480); None for no punishment. The trainer fills in
        rollout.max_tokens.
      overlong_buffer: tokens before it in which the punishment grows (paper: 4096; the trainer fills in the same
        fifth of the limit).
    """
    if (overlong_limit is None) != (overlong_buffer is None):
        raise ValueError(f"overlong_limit={overlong_limit} with overlong_buffer={overlong_buffer}: both or none")
    reward = None
    if overlong_limit is not None and overlong_buffer is not None:
        reward = allocation.soft_overlong(overlong_limit, overlong_buffer)
    return A.chain(
        *_grpo(ddof, eps), A.to_tokens(), reward=reward
    )  # fmt: skip


_GSPO = "Zheng et al., GSPO, arXiv 2507.18071"


@published(_GSPO, "deployed", surrogate=L.clipped(low=3e-4, high=4e-4), ratio="sequence")
def gspo(*, ddof: int = 1, eps: float = 1e-4):
    """GSPO, arXiv 2507.18071: one ratio a sample, the geometric mean of its tokens'. The paper gives no KL."""
    return A.chain(*_grpo(ddof, eps), A.to_tokens())


@published(_GSPO, "deployed", surrogate=L.clipped(low=3e-4, high=4e-4), ratio="sequence_token")
def gspo_token(*, ddof: int = 1, eps: float = 1e-4):
    """GSPO-token, arXiv 2507.18071: equals GSPO for one advantage a sample, and takes one for each token."""
    return A.chain(*_grpo(ddof, eps), A.to_tokens())


@published("MiniMax-M1, arXiv 2506.13585", "deployed", surrogate=L.cispo(), aggregate="token_mean")
def cispo(*, ddof: int = 1, eps: float = 1e-4):
    """CISPO, MiniMax-M1, arXiv 2506.13585: ``-sg[min(ρ, weight_max)] A log π``.

    The paper does not disclose its bound; weight_max 5 is TRL's.
    """
    return A.chain(*_grpo(ddof, eps), A.to_tokens())


@published("SAPO, arXiv 2511.20347", "deployed", surrogate=L.soft_adaptive())
def sapo(*, ddof: int = 1, eps: float = 1e-4):
    """SAPO, arXiv 2511.20347: a sigmoid of the ratio in place of the clip. No KL is stated."""
    return A.chain(*_grpo(ddof, eps), A.to_tokens())


@published("Zhao et al., GMPO, arXiv 2507.20673", "single team", surrogate=L.geometric())
def gmpo(*, ddof: int = 1, eps: float = 1e-4):
    """GMPO, arXiv 2507.20673: the geometric mean of ratios, clipped token by token at ``e^±0.4``."""
    return A.chain(*_grpo(ddof, eps), A.to_tokens())


@published("Ye et al., arXiv 1912.09729", "replicated", surrogate=L.clipped(dual=3.0), kl_coef=0.04)
def dual_clip(*, ddof: int = 1, eps: float = 1e-4):
    """GRPO with the dual clip of arXiv 1912.09729: with A < 0 ratios over 3 stop too."""
    return A.chain(*_grpo(ddof, eps), A.to_tokens())


@published(
    "Schulman et al., PPO, arXiv 1707.06347", "deployed",
    needs=("critic",), aggregate="token_mean", kl_kind="k1", kl_in="token_reward",
)  # fmt: skip
def ppo(*, gamma: float = 1.0, lam: float = 0.95, kl_coef: float = 0.0):
    """PPO with a critic and GAE, arXiv 1707.06347 and 1506.02438; advantages whitened over the batch's tokens.

    For language models the loss is a mean over tokens, and the weight of the KL is the run's: 0 until it is given.

    Args:
      gamma: discount a token.
      lam: GAE's λ; 1 is as usual for language models as 0.95.
      kl_coef: of k1 in each token's reward; over 0 it needs signals.ref_logps.
    """
    return A.chain(A.token_rewards(kl_coef=kl_coef), A.gae(gamma=gamma, lam=lam), A.whiten())


# --- credit


@published(
    "Simoni et al., GTPO: Trajectory-Based Policy Optimization, arXiv 2508.03772", "single team",
    needs=("entropy",), surrogate=L.unclipped(), ratio="own",
)  # fmt: skip
def gtpo(
    *,
    gamma: float = 0.1,
    threshold: float = 0.6931471805599453,
    initial_entropy: float | None = None,
    gain: float = 2.0,
    everywhere: bool = False,
    count_norm: bool = False,
):
    """GTPO, arXiv 2508.03772: conflicting beginnings and ends are spared, uncertain samples left out. No KL, no clip.

    Not GTPO of arXiv 2508.04349, which weights rewards by entropy.

    Args:
      gamma: γ of ``A_i - γ mean H``.
      threshold: mean entropy in nats over which a sample is left out; ln 2 (code: 0.7).
      initial_entropy: the policy's before training (`grpojax.credit.entropy_filter`).
      gain: factor of a right sample's conflicting tokens.
      everywhere: the entropy term also where A_i is 0, as in the authors' code.
      count_norm: the code's division by conflicting tokens, which the paper does not have.
    """
    return A.chain(
        A.center("group"), C.entropy_penalty(gamma, everywhere=everywhere),
        C.entropy_filter(threshold, initial=initial_entropy), A.to_tokens(), C.conflict_weights(gain, count_norm=count_norm),
    )  # fmt: skip


@published(
    "Wang et al., Beyond the 80/20 Rule, arXiv 2506.01939", "ablated", needs=("entropy",),
    keep=allocation.keep_prompts, surrogate=L.clipped(high=0.28), aggregate="token_mean",
)  # fmt: skip
def high_entropy_tokens(
    *, fraction: float = 0.2, rule: Literal["quantile", "top"] = "quantile", ddof: int = 1, eps: float = 1e-4
):
    """DAPO on the fifth of the tokens with the highest entropy, "80/20", arXiv 2506.01939; largest gains at 32B.

    Args:
      fraction: share of the batch's tokens that learn; what the loss divides by stays all tokens.
      rule: of the threshold (`grpojax.credit.entropy_mask`).
    """
    return A.chain(*_grpo(ddof, eps), A.to_tokens(), C.entropy_mask(fraction, rule=rule))


@published("Cheng et al., Reasoning with Exploration, arXiv 2506.14758", "single team", needs=("entropy",))
def entropy_shaping(*, alpha: float = 0.4, kappa: float = 2.0, ddof: int = 1, eps: float = 1e-4):
    """GRPO with a bonus of the entropy on every token's advantage, arXiv 2506.14758.

    Args:
      alpha: of the entropy in nats; unconfirmed, 0.4 is one re-implementation's.
      kappa: the bonus is at most 1/kappa of the advantage's size; unconfirmed like it.
    """
    return A.chain(*_grpo(ddof, eps), A.to_tokens(), C.entropy_shaping(alpha, kappa))


@published("Dai et al., GRPO-λ, arXiv 2505.18086", "single team", kl_coef=0.04)
def grpo_lambda_length(
    *, alpha: float = 0.6, share: float = 0.2, success: float = 1.0, ddof: int = 1, eps: float = 1e-4
):
    """GRPO-λ by length, arXiv 2505.18086: the best-solved fifth of the prompts also pays for length.

    The rest is GRPO: kl_coef 0.04 is DeepSeekMath's.

    Args:
      alpha: what length costs; unconfirmed (`grpojax.allocation.length_selected`).
      share: λ, the share of prompts.
      success: the outcome from which on a sample is right.
    """
    return A.chain(
        *_grpo(ddof, eps), A.to_tokens(),
        reward=allocation.length_selected(alpha, share=share, success=success),
    )  # fmt: skip


@published(
    "Parthasarathi, Reymond et al., GRPO-λ, arXiv 2510.00194", "single team",
    ratio="trace", trace_decay=0.99, kl_coef=0.04,
)  # fmt: skip
def grpo_lambda_traces(*, lowest: float = -0.1, ddof: int = 1, eps: float = 1e-4):
    """GRPO-λ with eligibility traces, arXiv 2510.00194 (ε-trace, "recent"; "both" is ``ratio: trace_both``).

    kl_coef 0.04 was seen in one re-implementation only.

    Args:
      lowest: negative advantages go no lower: their traces destabilise.
      trace_decay: γλ. Early tokens get up to ``1 / (1 - trace_decay)`` times the gradient: lower the learning rate.
    """
    return A.chain(
        *_grpo(ddof, eps), A.floor(lowest), A.to_tokens()
    )  # fmt: skip


@published("Bamba et al., XRPO, arXiv 2510.06672", "single team", needs=("rollout_plan",), kl_coef=0.04)
def xrpo(*, novelty: float = 2.5, novelty_cap: float = 0.5, ddof: int = 1, eps: float = 1e-4):
    """XRPO, arXiv 2510.06672: samples go where they tell most, unlikely right ones count more.

    Without its in-context seeding of prompts that nobody solves. The objective is GRPO's, kl_coef DeepSeekMath's.
    """
    return A.chain(
        *_grpo(ddof, eps), C.sharpen_novelty(novelty, novelty_cap), A.to_tokens()
    )  # fmt: skip


@published(
    "Nan et al., NGRPO, arXiv 2509.18851", "single team", keep=functools.partial(allocation.keep_prompts, above=None),
    surrogate=L.clipped(low=0.16, high=0.24), aggregate="token_mean",
)  # fmt: skip
def ngrpo(*, reward_max: float = 1.0, count: int = 1, ddof: int = 1, eps: float = 1e-6):
    """NGRPO, arXiv 2509.18851: statistics with a virtual best sample, so that groups in which all fail teach too.

    Args:
      reward_max: the best reward there is.
      count: virtual samples.
      ddof: 1 in the code and the paper's Figure 3; its Eq. 6 does not match.
    """
    return A.chain(A.virtual_best(reward_max, count, ddof=ddof, eps=eps), A.to_tokens())


@published(
    "Deng et al., On the Effect of Negative Gradient in GRPO, arXiv 2505.18830", "single team",
    needs=("hidden_states",), aggregate="token_mean", kl_coef=1e-4,
)  # fmt: skip
def nthr(*, beta: float = 1.0, eta: float | None = None, self_term: bool = True, ddof: int = 0, eps: float = 1e-4):
    """NTHR, arXiv 2505.18830: a softer penalty on tokens of wrong samples that would pull right ones down.

    Args:
      beta, eta, self_term: as in `grpojax.credit.nthr`.
      ddof: 0 in the paper's algebra, which has no eps; 1e-4 is TRL's.
    """
    return A.chain(
        *_grpo(ddof, eps), A.to_tokens(),
        C.nthr(beta=beta, eta=eta, self_term=self_term),
    )  # fmt: skip


@published(
    "Deng et al., LLDS, arXiv 2512.04220", "single team",
    needs=("displacement_weights",), kl_coef=1e-3, llds_coef=0.2, llds_gate="action",
)  # fmt: skip
def llds(*, ddof: int = 1, eps: float = 1e-4):
    """GRPO with LLDS, arXiv 2512.04220: a loss on what the likelihood of right (A >= 0) samples lost.

    It acts from the second update of a rollout on. Without batch.actions a response is one action. How the paper
    aggregates the policy loss was not checked: GRPO's mean over a sample's tokens.
    """
    return A.chain(*_grpo(ddof, eps), A.to_tokens())


# --- five experiments at UIUC: all on GRPO's advantage, with sums over tokens
#
# Their text has the loss -A Σ log π. The clipped surrogate has the same gradient at ratio 1 and stops where the policy
# has moved, without which the fourth is unbounded below.

_UIUC = "Zhao, UIUC, unpublished; GRPO as in arXiv 2402.03300"


@published(_UIUC, "single team", needs=("critic",), aggregate="sequence_sum")
def token_critic(*, bound: float | None = None, center_bias: bool = False, ddof: int = 1, eps: float = 1e-4):
    """A learned bias for each token on GRPO's advantage (arXiv 2402.03300); reported as unstable.

    Args:
      bound: largest bias by a tanh; None for none, as tried. Unbounded it has no fixed point.
      center_bias: no change to a sample's sum of advantages.
    """
    return A.chain(
        *_grpo(ddof, eps), A.to_tokens(),
        C.add_token_bias(bound=bound, center=center_bias),
    )  # fmt: skip


@published(_UIUC, "single team", aggregate="sequence_sum")
def rare_token(*, limit: float | None = None, positive_only: bool = True, ddof: int = 1, eps: float = 1e-4):
    """GRPO (arXiv 2402.03300) with up to twice the advantage on a right sample's unlikely tokens; reported as failing.

    Args:
      limit: largest factor; None for none.
      positive_only: only where A > 0; one of the two descriptions leaves that out.
    """
    return A.chain(
        *_grpo(ddof, eps), A.to_tokens(), C.compensate_rare_tokens(limit, positive_only=positive_only)
    )  # fmt: skip


@published(_UIUC, "single team", needs=("culling",), aggregate="sequence_sum")
def culling(*, ddof: int = 1, eps: float = 1e-4):
    """GRPO (arXiv 2402.03300) on prompts not yet solved (`grpojax.allocation.cull`); reported as no change."""
    return A.chain(*_grpo(ddof, eps), A.to_tokens())


@published(_UIUC, "single team", aggregate="sequence_sum")
def negative_advantage(*, c: float = 1.0, fail_reward: float = 0.0, ddof: int = 1, eps: float = 1e-4):
    """GRPO (arXiv 2402.03300) with ``A = -c`` where a whole group fails; reported as inconclusive.

    Args:
      c: 1 as tried; NGRPO's would be ``1 / sqrt(G + 1)``.
      fail_reward: the outcome up to which a sample fails.
    """
    return A.chain(
        *_grpo(ddof, eps), A.penalize_all_fail(c, fail_reward), A.to_tokens()
    )  # fmt: skip


@published(_UIUC, "single team", needs=("ground_truth",), aggregate="sequence_sum")
def gt_likelihood(*, fail_reward: float = 0.0, ddof: int = 1, eps: float = 1e-4):
    """GRPO (arXiv 2402.03300) on the true answer's likelihood where a whole group fails; reported as failing.

    Trains on the tokens that were sampled; training on spliced text was the likely cause of incoherence.

    Args:
      fail_reward: the outcome up to which a sample fails.
    """
    return A.chain(
        *_grpo(ddof, eps), A.to_tokens(),
        reward=A.likelihood_of_all_fail(fail_reward),
    )  # fmt: skip


# --- by name


def names() -> list[str]:
    """The names that `get` knows."""
    return sorted(_ALL)


def get(name: str, **overrides) -> Variant:
    """The variant called ``name``; raises `ValueError` for a name or an override that it does not have.

    Example:
      >>> get("grpo", kl_coef=0.0).objective.needs_reference
      False
    """
    known = parameters(name)
    for key in overrides:
        if key not in known:
            raise ValueError(f"variant {name!r} takes no {key!r}{_nearest(key, known)}")
    return _ALL[name](**overrides)


def check_needs(variant: Variant, provided=()) -> None:
    """Raises `ValueError` naming what ``variant`` needs beyond ``provided``, keys of `NEEDS`: for trainers to call first.

    Some needs would not be noticed otherwise: without its rollout plan, XRPO is another method that runs.

    Example:
      >>> check_needs(grpo())
      >>> check_needs(remax())
      Traceback (most recent call last):
      ValueError: variant 'remax' needs greedy: signals.greedy_rewards, of one greedy completion a prompt
    """
    missing = [f"{name}: {NEEDS[name]}" for name in variant.needs if name not in provided]
    if missing:
        raise ValueError(f"variant {variant.name!r} needs {'; '.join(missing)}")


def parameters(name: str) -> Mapping[str, Any]:
    """What a variant takes: name to default, `inspect.Parameter.empty` where it must be given."""
    if name not in _ALL:
        raise ValueError(f"{name!r} is unknown{_nearest(name, _ALL)}")
    return {k: p.default for k, p in inspect.signature(_ALL[name]).parameters.items()}


def annotations(name: str) -> list[tuple]:
    """A variant's parameters as the fields of `dataclasses.make_dataclass`, those that must be given first."""
    types = inspect.signature(_ALL[name]).parameters
    required = [(k, types[k].annotation) for k, v in parameters(name).items() if v is inspect.Parameter.empty]
    rest = [(k, types[k].annotation, v) for k, v in parameters(name).items() if v is not inspect.Parameter.empty]
    return required + rest


def table() -> str:
    """All variants as a Markdown table: name, evidence, loss, what it needs, source.

    Example:
      >>> print(table().splitlines()[0])
      | variant | evidence | surrogate | ratio | aggregate | kl | needs | source |
    """
    rows = [("variant", "evidence", "surrogate", "ratio", "aggregate", "kl", "needs", "source"), ("---",) * 8]
    for name in names():
        required = {k: 1.0 for k, v in parameters(name).items() if v is inspect.Parameter.empty}
        variant = get(name, **required)
        objective = variant.objective
        kl = f"{objective.kl_coef:g} {objective.kl_kind} in the {objective.kl_in}" if objective.kl_coef else "-"
        rows.append((
            name, variant.evidence, type(objective.surrogate).__name__, objective.ratio, objective.aggregate, kl,
            ", ".join(variant.needs) or "-", variant.citation,
        ))  # fmt: skip
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _nearest(word: str, known) -> str:
    near = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"
