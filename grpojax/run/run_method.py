"""The method of a recipe: its variant, rewards and filter, resolved once and checked against each other."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, Literal

from grpojax import extension, variants
from grpojax.advantages import text_of
from grpojax.host import settings
from grpojax.host.errors import UserError
from grpojax.rewards import RewardConfig, RewardsConfig
from grpojax.run import exclusions, parts
from grpojax.run.exclusions import Older, Resolved
from grpojax.run.sections import FilterConfig, RetireConfig, RolloutConfig, TrainConfig

# Needs that every run supplies; the rest of `variants.NEEDS` are of extensions.
WITH_SAMPLES = ("culling", "entropy", "step_rewards")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunMethod:
    """How a run learns.

    Attributes:
      variant: the variant with its overrides.
      rewards: the rewards of the samples.
      filter: dynamic sampling, max_rollouts filled in; None without. A variant may have one of its own.
      retire: when a prompt is solved and no longer drawn, its share filled in; None for never.
      plan: how samples are allocated to prompts, every field filled in; None for one group per prompt.
      deciding: the reward that says whether a sample succeeded: the filter's metric, or the first with a weight.
      older: whether samples come from an older policy than the one that learns from them (``rollout.ahead``,
        ``rollout.overlap``).
    """

    variant: variants.Variant
    rewards: RewardsConfig
    filter: FilterConfig | None
    retire: RetireConfig | None
    plan: Any
    deciding: str
    older: bool = False

    def needs_old_logps(self, updates: int) -> bool:
        """Whether the ratio's denominator is the policy's log-probs from before the first of a step's ``updates``.

        The only update of a step has these log-probs itself, and its ratio is 1. This holds for samples of an older
        policy too: the objective then corrects from the sampler to the policy, or the sampler is the denominator.
        """
        return updates > 1 and self.variant.objective.ratio_denominator == "trainer"

    def scores_policy(self, updates: int) -> bool:
        """Whether the policy scores the samples before the first of a step's ``updates``."""
        compared = any(kind.needs_policy_logps(self.variant) for kind in parts.kinds(self.variant).values())
        return self.needs_old_logps(updates) or "entropy" in self.variant.needs or compared

    @property
    def replaces_samples(self) -> bool:
        """Whether updates learn from other text than was drawn."""
        return self.variant.options.get("train_on") == "spliced"

    def widest(self, group: int) -> int:
        """Most samples of a prompt, the G of a step's batch, if ``rollout.group`` is ``group``."""
        return group if self.plan is None else self.plan.most


def resolve(
    variant: str | Mapping[str, Any],
    rewards: tuple[RewardConfig, ...] | RewardsConfig,
    given_filter: FilterConfig | Literal["auto", "none"],
    rollout: RolloutConfig,
    train: TrainConfig,
    *,
    recipe: type | None = None,
) -> RunMethod:
    """Resolves names and options; raises `UserError` for an unknown one, or a combination that is not possible. An
    option of the variant that is a key of another section of the class ``recipe`` is an error that names it."""
    options = _options(variant, rollout.max_tokens)
    made = _variant(options, recipe)
    older = {f"rollout.{n}": x for n in ("ahead", "overlap") if (x := getattr(rollout, n))}
    for name, value in older.items():
        made = _corrected(made, options, name, value)
    terms = _rewards(rewards, made)
    names = [term.metric for term in terms.terms]
    chosen = _filter(given_filter, made, names)
    weighted = [term.metric for term in terms.terms if term.weight]
    deciding = (chosen.metric if chosen is not None else None) or weighted[0]
    method = RunMethod(
        variant=made,
        rewards=terms,
        filter=chosen,
        retire=None,
        plan=None,
        deciding=deciding,
        older=bool(older),
    )
    _check(method, options, rollout, train)
    plan, retire = _plan(rollout, made), _retire(rollout.retire, made, chosen)
    return dataclasses.replace(method, plan=plan, retire=retire)


def describe(method: RunMethod) -> dict[str, Any]:
    """A method as plain data: every option and every term with its value, defaults included.

    Returns:
      ``variant``, its name; ``options``, all it has; ``advantage``, the chain as text (`grpojax.advantages.text_of`);
      ``objective``, every field of `grpojax.losses.Objective`, the surrogate as text; and ``filter``, ``retire``,
      ``critic`` and ``sample_allocation``, None without, and ``needs``. `grpojax.records.method_diff.differences`
      compares two.

    Example:
      >>> from grpojax.records.method_diff import differences
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
    """An option's value as JSON, or as text if JSON cannot express it."""
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    return value if value is None or isinstance(value, bool | int | float | str) else text_of(value)


def _options(variant: str | Mapping[str, Any], longest: int) -> dict[str, Any]:
    """The variant's name and overrides. If they are not given, ``rollout.max_tokens`` sets the divisor of ``aggregate:
    constant``, and DAPO's overlong_limit, with a fifth of it as overlong_buffer."""
    given: dict[str, Any] = {"name": variant} if isinstance(variant, str) else dict(variant)
    name = given.get("name")
    if isinstance(name, str) and variants.is_path(name):
        given.pop("source", None)  # of a stored recipe: not an option; it is compared when a run starts
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


def _variant(options: Mapping[str, Any], recipe: type | None = None) -> variants.Variant:
    given = dict(options)
    name = given.pop("name")
    try:
        section = variants.section(name)
    except ValueError as e:
        raise UserError(f"variant: {e}") from None
    root = dataclasses.make_dataclass("Root", [("variant", section)])
    built = settings.build(root, {"variant": given}, recipe=recipe).variant
    try:
        variant = variants.get(name, **{field.name: getattr(built, field.name) for field in dataclasses.fields(built)})
    except ValueError as e:
        raise UserError(f"variant: {e}") from None
    try:
        kinds = parts.kinds(variant)
        variants.check_needs(variant, {*WITH_SAMPLES, *kinds})
    except UserError:
        raise
    except ValueError as e:
        raise UserError(f"{e}\nno extension that is installed has it: install the one that does") from None
    for need, kind in kinds.items():
        if missing := [option for option in kind.options if option not in variant.options]:
            raise UserError(f"variant {name!r} needs {need!r}, for which it must have the option {missing[0]!r}")
    return variant


def _corrected(variant: variants.Variant, options: Mapping[str, Any], setting: str, value: float) -> variants.Variant:
    """The variant, if the setting makes samples of an older policy. If its options do not mention that, its ratio is
    taken against the sampler's log-probs. Raises `UserError` if nothing would correct for the older policy."""
    older = Older(variant=variant, options=options, setting=setting, value=value)
    exclusions.check("older", older)
    if older.corrected:
        return variant
    return _variant({**options, "ratio_denominator": "sampler"})


def _rewards(rewards: tuple[RewardConfig, ...] | RewardsConfig, variant: variants.Variant) -> RewardsConfig:
    """The rewards. A bare list has the defaults of `RewardsConfig`."""
    try:
        whole = rewards if isinstance(rewards, RewardsConfig) else RewardsConfig(terms=rewards)
    except ValueError as e:
        raise UserError(f"rewards: {e}") from None
    return whole if whole.combine else dataclasses.replace(whole, combine=variant.combine or "sum")


def _filter(
    given: FilterConfig | Literal["auto", "none"], variant: variants.Variant, names: list[str]
) -> FilterConfig | None:
    own = variant.keep is not None
    if given == "none" or (given == "auto" and not own):
        return None
    chosen = given if isinstance(given, FilterConfig) else FilterConfig()
    if chosen.max_rollouts is None:
        chosen = dataclasses.replace(chosen, max_rollouts=3 if variant.resample else 1)
    if chosen.metric is not None and chosen.metric not in names:
        raise UserError(f"filter.metric={chosen.metric!r} is not a reward of the run, which has {', '.join(names)}")
    return chosen


def _retire(given: RetireConfig | None, variant: variants.Variant, chosen: FilterConfig | None) -> RetireConfig | None:
    if given is None and variant.retire is None:
        return None
    given = given or RetireConfig()
    share = variant.retire if given.share is None else given.share
    if share is None:
        raise UserError(
            f"rollout.retire: variant {variant.name!r} retires no prompts by itself, so success and readmit_after "
            "have no effect; set rollout.retire.share, in (0, 1]"
        )
    success = given.success if given.success is not None or chosen is None else chosen.success
    return dataclasses.replace(given, share=share, success=success)


def _plan(rollout: RolloutConfig, variant: variants.Variant) -> Any:
    if "rollout_plan" not in variant.needs:
        return None
    asked = f"variant {variant.name!r} needs 'rollout_plan'"
    given = rollout.sample_allocation or extension.load("sections", "rollout.sample_allocation", asked)()
    return given.resolved(rollout.prompts, rollout.group)


def _check(method: RunMethod, options: Mapping[str, Any], rollout: RolloutConfig, train: TrainConfig) -> None:
    """Raises `UserError` if the variant does not fit the rest of the recipe."""
    resolved = Resolved(
        variant=method.variant,
        options=options,
        rewards=method.rewards,
        filter=method.filter,
        rollout=rollout,
        train=train,
        older=method.older,
        needs_old_logps=method.needs_old_logps(train.updates_a_rollout),
    )
    exclusions.check("method", resolved)
