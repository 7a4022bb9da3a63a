"""What a recipe's names stand for: its variant, rewards and filter, resolved once and checked against each other."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np

from grpojax import losses as L
from grpojax import variants
from grpojax.advantages import Signals, text_of
from grpojax.host import settings
from grpojax.host.errors import UserError
from grpojax.host.on_host import on_host
from grpojax.records.methods import differences as differences  # beside `describe`, whose results it compares
from grpojax.rewards import RewardConfig, RewardsConfig
from grpojax.run.sections import AllocationConfig, FilterConfig, RetireConfig, RolloutConfig, TrainConfig

# What the trainer gives to variants beyond rewards, lengths, tokens and log-probs (`variants.NEEDS`).
SUPPLIED = (
    "critic",
    "culling",
    "displacement_weights",
    "entropy",
    "greedy",
    "ground_truth",
    "hidden_states",
    "rollout_plan",
    "step_rewards",
    "teacher",
)


# The options of a variant (`variants.Variant.options`) that the trainer reads for what it needs.
READ_OPTIONS = {
    "teacher": ("teacher",),
    "hidden_states": ("self_term", "select"),
    "ground_truth": ("groups", "likelihood", "marker", "include_marker", "missing", "fail_reward"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """How a run learns.

    Attributes:
      variant: with its overrides.
      rewards: what judges the samples.
      filter: dynamic sampling, max_rollouts filled in; None without. A variant may bring it along.
      retire: when a prompt is solved and no longer drawn, its share filled in; None for never.
      plan: how a rollout's samples are given to prompts, every field filled in; None for a group of each.
      deciding: the reward that says whether a sample succeeded: the filter's metric, or the first of the list.
      older: whether samples are of an older policy than the one that learns from them (``rollout.ahead``,
        ``rollout.overlap``).
    """

    variant: variants.Variant
    rewards: RewardsConfig
    filter: FilterConfig | None
    retire: RetireConfig | None
    plan: AllocationConfig | None
    deciding: str
    older: bool = False

    def scores_old(self, updates: int) -> bool:
        """Whether the ratio is taken against log-probs from before the first of a step's ``updates``.

        Of one update they are the policy's own, and the ratio is 1. Of older samples that is never assumed: the
        objective corrects from the sampler to these log-probs, or its ratio is anchored at the sampler.
        """
        return (self.older or updates > 1) and self.variant.objective.ratio_denominator == "trainer"

    @property
    def replaces_samples(self) -> bool:
        """Whether samples are learned from as other text than was drawn (`grpojax.run.parts.true_answers`)."""
        return self.variant.options.get("train_on") == "spliced"

    def widest(self, group: int) -> int:
        """Samples of a prompt at most, G of what a step learns from, where ``rollout.group`` is ``group``."""
        return group if self.plan is None else self.plan.most


def resolve(
    variant: str | Mapping[str, Any],
    rewards: tuple[RewardConfig, ...] | RewardsConfig,
    given_filter: FilterConfig | Literal["auto", "none"],
    rollout: RolloutConfig,
    train: TrainConfig,
) -> Method:
    """Looks everything up; raises `UserError` for a name, an option or a combination that there is not."""
    options = _options(variant, rollout.max_tokens)
    made = _variant(options)
    older = {f"rollout.{n}": x for n in ("ahead", "overlap") if (x := getattr(rollout, n))}
    for name, value in older.items():
        made = _corrected(made, options, name, value)
    terms = _rewards(rewards, made)
    names = [term.metric for term in terms.terms]
    chosen = _filter(given_filter, made, names)
    deciding = (chosen.metric if chosen is not None else None) or names[0]
    method = Method(
        variant=made,
        rewards=terms,
        filter=chosen,
        retire=_retire(rollout.retire, made, chosen),
        plan=_plan(rollout, made),
        deciding=deciding,
        older=bool(older),
    )
    _check(method, options, rollout, train)
    return method


def describe(method: Method) -> dict[str, Any]:
    """What a method is, as plain data: every option and every term with its value, whoever has set it.

    Returns:
      ``variant``, its name; ``options``, all it has; ``advantage``, the chain as text (`grpojax.advantages.text_of`);
      ``objective``, every field of `grpojax.losses.Objective`, the surrogate as text; and ``filter``, ``retire``,
      ``critic`` and ``sample_allocation``, None without, and ``needs``. `differences` compares two.

    Example:
      >>> from grpojax.rewards import RewardConfig
      >>> rollout, train = RolloutConfig(prompts=2, group=4, max_tokens=8), TrainConfig(steps=1)
      >>> grpo, control = (
      ...     describe(resolve(variant, (RewardConfig(name="answer"),), "auto", rollout, train))
      ...     for variant in ("grpo", {"name": "grpo", "aggregate": "sequence_sum", "kl_coef": 0.0})
      ... )
      >>> grpo["advantage"].split(" | ")[0]
      'center(by=group, leave_one_out=False, singleton=zero)'
      >>> differences(grpo, control)
      {'objective.aggregate': ('sequence_mean', 'sequence_sum'), 'objective.kl_coef': (0.04, 0.0)}
    """
    variant = method.variant
    objective = {f.name: getattr(variant.objective, f.name) for f in dataclasses.fields(variant.objective)}
    chosen = method.filter
    filtered = chosen and {
        "keep": text_of(variant.keep) if variant.keep else "groups that differ",
        **settings.to_dict(chosen),
        "metric": method.deciding,
    }
    critic = variant.critic
    return settings.to_dict(
        {
            "variant": variant.name,
            "options": {name: _plain(value) for name, value in variant.options.items()},
            "advantage": text_of(variant.advantage),
            "objective": {**objective, "surrogate": text_of(variant.objective.surrogate)},
            "filter": filtered,
            "retire": method.retire,
            "critic": critic
            and {"signal": critic.signal, "targets": text_of(critic.targets), "loss": text_of(critic.loss)},
            "sample_allocation": method.plan,
            "needs": list(variant.needs),
        }
    )


def _plain(value: Any) -> Any:
    """An option's value as it stands in JSON; as text where it could not."""
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    return value if value is None or isinstance(value, bool | int | float | str) else text_of(value)


def _options(variant: str | Mapping[str, Any], longest: int) -> dict[str, Any]:
    """The variant's name and overrides. From ``rollout.max_tokens`` come, where they are not given, the divisor of
    ``aggregate: constant``, and DAPO's overlong_limit with a fifth of it as overlong_buffer."""
    given: dict[str, Any] = {"name": variant} if isinstance(variant, str) else dict(variant)
    name = given.get("name")
    if isinstance(name, str) and variants.is_path(name):
        given.pop("source", None)  # of a stored recipe: not an option, and compared where a run starts
    if not isinstance(name, str):
        raise UserError("variant: give a name, as in `variant: grpo` or `variant: {name: grpo, clip_high: 0.28}`")
    try:
        parameters = variants.parameters(name)
    except ValueError as e:
        raise UserError(f"variant: {e}") from None
    if "constant" in parameters and given.get("aggregate", parameters.get("aggregate")) == "constant":
        given.setdefault("constant", float(longest))
    elif parameters.get("constant") is inspect.Parameter.empty:
        given.setdefault("constant", None)
    if "overlong_limit" in parameters and not {"overlong_limit", "overlong_buffer"} & given.keys():
        given |= {"overlong_limit": longest, "overlong_buffer": max(longest // 5, 1)}
    limit = given.get("overlong_limit")
    if isinstance(limit, int) and limit > longest:
        raise UserError(f"variant.overlong_limit={limit} is never reached: samples end at rollout.max_tokens={longest}")
    return given


def _variant(options: Mapping[str, Any]) -> variants.Variant:
    given = dict(options)
    name = given.pop("name")
    try:
        fields = variants.annotations(name)
    except ValueError as e:
        raise UserError(f"variant: {e}") from None
    section = dataclasses.make_dataclass("VariantConfig", fields, frozen=True)
    root = dataclasses.make_dataclass("Root", [("variant", section)])
    built = settings.build(root, {"variant": given}).variant
    try:
        variant = variants.get(name, **{field[0]: getattr(built, field[0]) for field in fields})
    except ValueError as e:
        raise UserError(f"variant: {e}") from None
    try:
        variants.check_needs(variant, SUPPLIED)
    except ValueError as e:
        raise UserError(f"{e}: the trainer does not have that yet") from None
    for need in variant.needs:
        if missing := [option for option in READ_OPTIONS.get(need, ()) if option not in variant.options]:
            raise UserError(f"variant {name!r} needs {need!r}, for which it must have the option {missing[0]!r}")
    if ("critic" in variant.needs) != (variant.critic is not None):
        raise UserError(f"variant {name!r}: needs 'critic' goes with a critic, and a critic with that")
    return variant


def _corrected(variant: variants.Variant, options: Mapping[str, Any], setting: str, value: float) -> variants.Variant:
    """The variant for samples of an older policy, which the setting makes. One whose options say nothing of it takes
    its ratio against the sampler's log-probs; raises `UserError` where nothing would correct for them."""
    objective, said = variant.objective, f"{setting}={value:g}: variant {variant.name!r}"
    if "rollout_plan" in variant.needs:
        raise UserError(f"{said} gives samples to prompts by the rewards of those before; set {setting}=0")
    if "greedy" in variant.needs and setting == "rollout.overlap":
        raise UserError(
            f"{said} draws a greedy completion with each group, which nothing goes on with; set {setting}=0"
        )
    if variant.options.get("train_on") == "spliced":
        raise UserError(
            f"{said} with train_on=spliced learns from text that was not sampled, whose age cannot be corrected; set "
            f"{setting}=0, or variant.train_on=sampled"
        )
    if objective.ratio_denominator == "sampler" or objective.importance != "none":
        return variant
    if not objective.has_ratio:
        raise UserError(
            f"{said} has no ratio to correct for samples of an older policy: set variant.importance=truncate, or "
            f"{setting}=0"
        )
    if options.get("ratio_denominator") is not None:
        raise UserError(
            f"{said} with ratio_denominator={objective.ratio_denominator} takes no account of who drew the samples: "
            f"set variant.ratio_denominator=sampler, or variant.importance=truncate beside it, or {setting}=0"
        )
    if "ratio_denominator" not in variants.parameters(variant.name):
        raise UserError(
            f"{said} takes no account of who drew the samples, and has no option ratio_denominator: give its objective "
            f"ratio_denominator='sampler' or an importance, or set {setting}=0"
        )
    return _variant({**options, "ratio_denominator": "sampler"})


def _rewards(rewards: tuple[RewardConfig, ...] | RewardsConfig, variant: variants.Variant) -> RewardsConfig:
    """The rewards; a bare list has the defaults of `RewardsConfig`, and the variant's way to combine them."""
    wanted = variant.combine
    if isinstance(rewards, RewardsConfig):
        if wanted is not None and rewards.combine != wanted:
            raise UserError(
                f"variant {variant.name!r} is defined on rewards with combine: {wanted}; rewards.combine is "
                f"{rewards.combine!r}"
            )
        return rewards
    try:
        return RewardsConfig(terms=rewards, combine=wanted or "sum")
    except ValueError as e:
        raise UserError(f"rewards: {e}") from None


def _filter(
    given: FilterConfig | Literal["auto", "none"], variant: variants.Variant, names: list[str]
) -> FilterConfig | None:
    own = variant.keep is not None
    if given == "none" or (given == "auto" and not own):
        return None
    chosen = given if isinstance(given, FilterConfig) else FilterConfig()
    if chosen.max_rollouts is None:
        chosen = dataclasses.replace(chosen, max_rollouts=3 if variant.resample else 1)
    if not own and variant.name in ("distill", "gt_likelihood", "negative_advantage"):
        raise UserError(
            f"filter: variant {variant.name!r} learns from groups whose rewards are all the same, and the filter drops "
            "them; leave it out"
        )
    if chosen.metric is not None and chosen.metric not in names:
        raise UserError(f"filter.metric={chosen.metric!r} is no reward of the run; they are {', '.join(names)}")
    if chosen.success is not None and not own:
        raise UserError(
            f"filter.success={chosen.success:g}: this variant has no filter of its own; groups that differ stay"
        )
    return chosen


def _retire(given: RetireConfig | None, variant: variants.Variant, chosen: FilterConfig | None) -> RetireConfig | None:
    if given is None and variant.retire is None:
        return None
    given = given or RetireConfig()
    share = variant.retire if given.share is None else given.share
    if share is None:
        raise UserError(
            f"rollout.retire: variant {variant.name!r} retires no prompts by itself, so that success and readmit_after "
            "say nothing; give rollout.retire.share, in (0, 1]"
        )
    success = given.success if given.success is not None or chosen is None else chosen.success
    return dataclasses.replace(given, share=share, success=success)


def _plan(rollout: RolloutConfig, variant: variants.Variant) -> AllocationConfig | None:
    if "rollout_plan" not in variant.needs:
        if rollout.sample_allocation is not None:
            raise UserError(
                f"rollout.sample_allocation: variant {variant.name!r} gives every prompt rollout.group samples; leave "
                "it out"
            )
        return None
    if variant.objective.count_empty and variant.objective.aggregate in ("sequence_mean", "sequence_sum", "constant"):
        raise UserError(
            f"variant.count_empty=true: variant {variant.name!r} would divide by samples that were never drawn; "
            "leave it out"
        )
    given = rollout.sample_allocation or AllocationConfig()
    group = rollout.group
    plan = dataclasses.replace(given, probe=given.probe or group // 2, most=given.most or 2 * group)
    if not 1 <= plan.probe < group:
        raise UserError(
            f"rollout.sample_allocation.probe={plan.probe}: must be at least 1 and under rollout.group={group}"
        )
    if plan.most < group:
        raise UserError(
            f"rollout.sample_allocation.most={plan.most}: must be at least rollout.group={group}, or some are "
            "given to none"
        )
    rest = rollout.prompts * (group - plan.probe)
    if rest % plan.phases:
        raise UserError(
            f"rollout.sample_allocation.phases={plan.phases} does not divide the {rest} samples that are left "
            "after the probe"
        )
    return plan


def _check(method: Method, options: Mapping[str, Any], rollout: RolloutConfig, train: TrainConfig) -> None:
    """Raises `UserError` where the variant does not go with the rest of the recipe."""
    variant, rewards = method.variant, method.rewards
    objective, updates = variant.objective, train.updates_a_rollout
    if options.get("overlong_limit") and "soft_overlong" in [term.name for term in rewards.terms]:
        raise UserError(
            f"variant {variant.name!r} punishes overlong samples, and so does the reward soft_overlong: leave the "
            "reward out, or set variant.overlong_limit and variant.overlong_buffer to null"
        )
    if objective.needs_displacement_weights and updates == 1 and not method.older:
        raise UserError(
            "variant.llds_coef acts from the second update of a rollout on: raise train.ppo_epochs or "
            "train.minibatches over 1, or set it to 0"
        )
    if variant.options.get("answer_weight", 1.0) != 1.0 and not objective.needs_displacement_weights:
        raise UserError("variant.answer_weight is of LLDS's term, which variant.llds_coef=0 turns off: leave it out")
    if not objective.has_ratio and updates > 1:
        raise UserError(
            f"variant {variant.name!r} has no importance ratio, so it is for one update a rollout, not {updates}: set "
            "train.ppo_epochs and train.minibatches to 1, or ask for a ratio with variant.ratio"
        )
    if variant.name in ("max_rl", "ngrpo") and objective.needs_reference and objective.kl_in == "reward":
        raise UserError(
            f"variant {variant.name!r} takes rewards in a range, which a KL in the reward leaves: set "
            "variant.kl_in=loss and variant.kl_kind=k3, or variant.kl_coef=0"
        )
    if train.reference_every and not objective.needs_reference:
        raise UserError(
            f"train.reference_every={train.reference_every}: there is no reference at variant.kl_coef=0; set it to 0"
        )
    if {"ground_truth", "hidden_states"} & {*variant.needs} and objective.kl_coef and objective.kl_in == "reward":
        raise UserError(
            f"variant {variant.name!r} reads rewards as they were given, which a KL in the reward is no part of: "
            "set variant.kl_in=loss and variant.kl_kind=k3, or variant.kl_coef=0"
        )
    if "teacher" in variant.needs and objective.kl_coef and objective.kl_in == "reward":
        raise UserError(
            f"variant {variant.name!r} learns from no rewards, so that a KL in them would do nothing: set "
            "variant.kl_in=loss and variant.kl_kind=k3, or variant.kl_coef=0"
        )
    if variant.options.get("train_on") == "spliced" and objective.needs_sampler_logps:
        names = ("importance", "off_policy_limit", "ratio_denominator")
        told = {name: getattr(objective, name) for name in names}
        raise UserError(
            f"variant {variant.name!r} with train_on=spliced and "
            f"{', '.join(f'{k}={v}' for k, v in told.items() if v not in ('none', None, 'trainer'))}: spliced text was "
            "not sampled, so that there are no log-probs of the sampler to compare with; leave that out, or set "
            "variant.train_on=sampled"
        )
    if rollout.group == 1 and rewards.combine == "normalize":
        raise UserError(
            "rewards.combine=normalize with rollout.group=1: a reward normalised in a group of one is 0; raise "
            "rollout.group, or set rewards.combine=sum"
        )
    _check_skips(method, train)
    _check_eight_bits(variant, rollout)
    _try(variant, rollout)


def _check_skips(method: Method, train: TrainConfig) -> None:
    """Raises `UserError` where samples without an advantage are scored first, or have a gradient all the same."""
    variant, objective = method.variant, method.variant.objective
    own, later = {"critic", "entropy", "teacher"} & {*variant.needs}, method.scores_old(train.updates_a_rollout)
    why = [
        (objective.needs_reference, f"variant.kl_coef={objective.kl_coef}: set it to 0"),
        (objective.needs_entropy, f"variant.entropy_coef={objective.entropy_coef}: set it to 0, without a target"),
        (objective.needs_displacement_weights, f"variant.llds_coef={objective.llds_coef}: set it to 0"),
        (objective.needs_covariance_mask, f"variant.covariance={objective.covariance}: set it to none"),
        (bool(own), f"variant {variant.name!r}, which needs the {' and '.join(sorted(own))} of all samples"),
        (
            later,
            "several updates a rollout, or older samples: all are scored first; set variant.ratio_denominator=sampler",
        ),
    ]
    for found, what in why:
        if train.skip_zero_advantage and found:
            option = "train.skip_zero_advantage"
            raise UserError(f"{option}=true does not go with {what}; or set {option}=false")


def _check_eight_bits(variant: variants.Variant, rollout: RolloutConfig) -> None:
    """Raises `UserError` where samples of quantised weights, keys or values would be taken for the policy's own."""
    objective = variant.objective
    if not rollout.eight_bits or rollout.uncorrected:
        return
    if objective.importance == "none" and objective.ratio_denominator == "trainer":
        denominator = " or variant.ratio_denominator=sampler" if objective.has_ratio else ""
        remedy = f"variant.importance=truncate{denominator}"
        if variant.options.get("train_on") == "spliced":
            remedy = f"variant.train_on=sampled and {remedy}"
        raise UserError(
            f"{' and '.join(rollout.eight_bits)} with variant {variant.name!r}: samples are not of the policy that "
            f"learns, and nothing corrects for it: set {remedy}, or rollout.uncorrected=true"
        )


def _try(variant: variants.Variant, rollout: RolloutConfig) -> None:
    """Raises `UserError` where the advantages of such a group cannot be, such as pass@k with k over the group, or are
    all 0, as in a group of one that is compared with itself."""
    rewards = np.zeros((2, rollout.group), np.float32)
    try:
        made = jax.eval_shape(variant.advantage, rewards, _made_up(variant, rewards.shape))
        if variants.is_path(variant.name):
            _try_own(variant.objective, made, np.zeros((*rewards.shape, 3), np.float32))
    except Exception as e:
        if not isinstance(e, ValueError) and not variants.is_path(variant.name):
            raise
        said = str(e) if isinstance(e, ValueError) else f"{type(e).__name__}: {' '.join(str(e).split())}"
        raise UserError(f"variant {variant.name!r} with rollout.group={rollout.group}: {said}") from None
    if rollout.group == 1 and not learns_from_equals(variant, rollout):
        raise UserError(
            f"rollout.group=1: variant {variant.name!r} compares the samples of a prompt with each other: of a single "
            "one every advantage is 0, and nothing would be learned; set rollout.group to 2 or more, or take a variant "
            "with another baseline, such as reinforce_pp (the mean of the batch) or remax (a greedy sample)"
        )


def _try_own(objective: L.Objective, advantages: Any, tokens: np.ndarray) -> None:
    """Raises what a variant that is not of this package would raise in the first update of a run."""
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
    """Whether a variant learns from groups whose rewards are all the same, of which a group of one is a case: whether
    it gives any of them an advantage.

    That is so with a baseline other than the group's mean, a teacher, a critic, or rewards that still differ.

    Args:
      variant: its advantages are computed for made-up samples.
      rollout: how many prompts and samples there are.

    Example:
      >>> from grpojax import variants
      >>> rollout = RolloutConfig(prompts=8, group=1, max_tokens=4)
      >>> [learns_from_equals(variants.get(name), rollout) for name in ("grpo", "reinforce_pp")]
      [False, True]
    """
    prompts = min(rollout.prompts, 3)
    # From failed to passed: a variant may treat either in a way of its own. Means of these are exact.
    rewards = np.repeat(np.array([0.0, 1.0, 0.25], np.float32)[:prompts, None], rollout.group, 1)
    signals = _made_up(variant, rewards.shape)
    return any(bool(np.any(np.asarray(variant.advantage(x, signals)) != 0)) for x in (rewards, 1 - rewards))


def _made_up(variant: variants.Variant, shape: tuple[int, int]) -> Signals:
    """Signals of made-up samples, ``shape [P, G]``, of three tokens each: all that a variant may read."""
    rng = np.random.default_rng(0)

    def some(*shape: int) -> np.ndarray:
        return rng.uniform(0.1, 0.9, shape).astype(np.float32)

    tokens = *shape, 3
    logps = -some(*tokens)
    return Signals(
        lengths=np.full(shape, 3, np.int32),
        mask=np.ones(tokens, bool),
        behavior_logps=logps,
        # The reference is the policy itself, so that no KL teaches anything; a teacher is another model.
        ref_logps=-some(*tokens) if "teacher" in variant.needs else logps,
        max_logps=0 * logps,
        entropy=some(*tokens),
        tokens=rng.integers(0, 9, tokens).astype(np.int32),
        greedy_rewards=some(shape[0]),
        step_rewards=some(*tokens),
        likelihood=some(*shape),
        influence=some(*tokens),
        influence_means=some(*shape),
        draws=some(*tokens),
        token_bias=some(*tokens),
        values=some(*tokens),
    )
