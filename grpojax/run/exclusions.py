"""Which settings exclude each other, and why: tables, from which errors and ``docs/exclusions.md`` are made.

Here are the rows of the core. A row is an extension's (`grpojax.extension.Names.exclusions`) if without the extension
its settings are refused anyway. A combination that would be ignored without the extension has its row here.

Errors about a single setting, such as a number out of its range, are where the setting is.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from grpojax import extension, variants
from grpojax.host.errors import UserError
from grpojax.losses.surrogates import acts_without_advantage, name_of
from grpojax.rewards import RewardsConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exclusion:
    """Settings that do not go together.

    Attributes:
      settings: the settings, as Markdown for the page.
      why: the reason, as Markdown for the page.
      when: whether a context has these settings.
      message: the error, with the values and the remedy.
    """

    settings: str
    why: str
    when: Callable[[Any], bool]
    message: Callable[[Any], str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Older:
    """A variant, and the setting that makes its samples come from an older policy.

    Attributes:
      variant: the variant without that setting.
      options: the options that the recipe gives.
      setting, value: ``rollout.ahead`` or ``rollout.overlap``.
    """

    variant: variants.Variant
    options: Mapping[str, Any]
    setting: str
    value: float

    @property
    def named(self) -> str:
        """How errors begin."""
        return f"{self.setting}={self.value:g}: variant {self.variant.name!r}"

    @property
    def corrected(self) -> bool:
        """Whether the objective corrects for such samples as it is."""
        objective = self.variant.objective
        return objective.ratio_denominator == "sampler" or objective.importance != "none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resolved:
    """A variant with what else the recipe says of a step.

    Attributes:
      variant: with all of its options.
      options: those that the recipe gives.
      rewards: what judges the samples.
      filter: dynamic sampling, None without.
      rollout, train: sections of the recipe.
      older: whether samples are of an older policy.
      needs_old_logps: whether all samples are scored by the policy before the first update.
    """

    variant: variants.Variant
    options: Mapping[str, Any]
    rewards: RewardsConfig
    filter: Any
    rollout: Any
    train: Any
    older: bool
    needs_old_logps: bool

    @property
    def kl_in_reward(self) -> bool:
        """Whether a KL is taken off the samples' rewards."""
        objective = self.variant.objective
        return bool(objective.kl_coef) and objective.kl_in == "reward"

    @property
    def spliced(self) -> bool:
        """Whether other text is learned from than was drawn."""
        return self.variant.options.get("train_on") == "spliced"


# What errors about a KL in the reward say to do.
NO_KL = "set variant.kl_in=loss and variant.kl_kind=k3, or variant.kl_coef=0"
_SKIP = "train.skip_zero_advantage"


def _skips(settings: str, why: str, when: Callable[[Resolved], bool], what: Callable[[Resolved], str]) -> Exclusion:
    return Exclusion(
        settings=f"`{_SKIP}: true` and {settings}",
        why=why,
        when=lambda c: c.train.skip_zero_advantage and when(c),
        message=lambda c: f"{_SKIP}=true does not go with {what(c)}; or set {_SKIP}=false",
    )


def _acting(c: Resolved) -> str:
    """The option by which a surrogate acts without an advantage, or the surrogate."""
    coef = getattr(c.variant.objective.surrogate, "kl_coef", 0)
    name = name_of(c.variant.objective.surrogate)
    return f"variant.ratio_kl_coef={coef}" if coef else f"the surrogate {name}"


def _all_scored(c: Resolved) -> list[str]:
    return sorted({"critic", "entropy", "teacher"} & {*c.variant.needs})


def _reads_others(c: Resolved) -> list[str]:
    """What of the variant reads samples with another network, or another text than was sampled."""
    return sorted({"critic", "ground_truth", "hidden_states", "rollout_plan", "teacher"} & {*c.variant.needs})


_SKIPS = (
    _skips(
        "a KL (`variant.kl_coef` over 0)",
        "the reference scores all samples, and the KL has a gradient where the advantage is 0",
        lambda c: c.variant.objective.needs_reference,
        lambda c: f"variant.kl_coef={c.variant.objective.kl_coef}: set it to 0",
    ),
    _skips(
        "an entropy bonus (`variant.entropy_coef`)",
        "it has a gradient where the advantage is 0",
        lambda c: c.variant.objective.needs_entropy,
        lambda c: f"variant.entropy_coef={c.variant.objective.entropy_coef}: set it to 0, without a target",
    ),
    _skips(
        "LLDS's term (`variant.llds_coef`)",
        "it has a gradient where the advantage is 0",
        lambda c: c.variant.objective.needs_displacement_weights,
        lambda c: f"variant.llds_coef={c.variant.objective.llds_coef}: set it to 0",
    ),
    _skips(
        "a surrogate that acts without an advantage (`variant.ratio_kl_coef` of DPPO, or one of your own)",
        "it has a gradient where the advantage is 0",
        lambda c: acts_without_advantage(c.variant.objective.surrogate),
        lambda c: f"{_acting(c)}, which has a gradient where the advantage is 0",
    ),
    _skips(
        "a load-balance loss (`train.balance_coef`)",
        "it has a gradient where the advantage is 0",
        lambda c: c.train.balance_coef > 0,
        lambda c: f"train.balance_coef={c.train.balance_coef:g}: set it to 0",
    ),
    _skips(
        "`variant.covariance`",
        "tokens are picked by their covariance over all samples",
        lambda c: c.variant.objective.needs_covariance_mask,
        lambda c: f"variant.covariance={c.variant.objective.covariance}: set it to none",
    ),
    _skips(
        "a variant that needs the critic, the entropy or a teacher",
        "these are of all samples",
        lambda c: bool(_all_scored(c)),
        lambda c: f"variant {c.variant.name!r}, which needs the {' and '.join(_all_scored(c))} of all samples",
    ),
    _skips(
        "several updates a rollout",
        "all samples are scored before the first update; not so with `variant.ratio_denominator: sampler`",
        lambda c: c.needs_old_logps,
        lambda c: (
            "several updates a rollout, before which all samples are scored: set train.ppo_epochs and "
            "train.minibatches to 1, or variant.ratio_denominator=sampler and no variant.importance"
        ),
    ),
)

# The core's rows by what is looked at (the scope), in the order in which the errors are raised.
TABLE: Mapping[str, tuple[Exclusion, ...]] = {
    "rollout": (
        Exclusion(
            settings="`rollout.overlap` over 0 and `rollout.decode_slots`",
            why="a sample that goes on in the next rollout has a slot of its own",
            when=lambda c: c.overlap and c.decode_slots not in (0, c.group),
            message=lambda c: (
                f"overlap={c.overlap:g} with decode_slots={c.decode_slots}: a sample that goes on in the next "
                "rollout has a slot of its own; set decode_slots=0, or overlap=0"
            ),
        ),
        Exclusion(
            settings="`rollout.overlap` over 0 and `rollout.router_replay: true`",
            why="a sample that goes on is read again by newer weights, which choose other experts for its tokens",
            when=lambda c: c.overlap and c.router_replay,
            message=lambda c: (
                f"overlap={c.overlap:g} with router_replay=true: a sample that goes on is read again by newer weights, "
                "which choose other experts; set overlap=0, or router_replay=false"
            ),
        ),
        Exclusion(
            settings="`rollout.uncorrected: true` and neither `rollout.weights` nor `rollout.cache_dtype` of int8",
            why="there is nothing to correct",
            when=lambda c: c.uncorrected and not c.eight_bits,
            message=lambda c: (
                f"uncorrected=true: there is nothing to correct with weights={c.weights} and cache_dtype="
                f"{c.cache_dtype}; it goes with int8"
            ),
        ),
    ),
    "train": (
        Exclusion(
            settings="`train.steps` and `train.tokens`",
            why="both set the length of the run",
            when=lambda c: (c.steps is None) == (c.tokens is None),
            message=lambda c: f"steps={c.steps}, tokens={c.tokens}: give one of them, and null for the other",
        ),
        Exclusion(
            settings="`train.reference_mix` and `train.reference_every: 0`",
            why="it is the weight in a refresh, and there is none",
            when=lambda c: c.reference_mix != type(c).reference_mix and not c.reference_every,
            message=lambda c: f"reference_mix={c.reference_mix}: goes with reference_every over 0",
        ),
        Exclusion(
            settings="`train.eval_samples` over 1 and `train.eval_temperature: 0`",
            why="greedy samples of a problem are all the same",
            when=lambda c: c.eval_samples > 1 and c.eval_temperature == 0,
            message=lambda c: (
                f"eval_samples={c.eval_samples} would all be the same at eval_temperature=0; give it one over 0"
            ),
        ),
    ),
    "older": (
        Exclusion(
            settings="`rollout.ahead` or `rollout.overlap`, and an objective without a ratio or `variant.importance`",
            why="nothing corrects for samples of an older policy",
            when=lambda c: not c.corrected and not c.variant.objective.has_ratio,
            message=lambda c: (
                f"{c.named} has no ratio to correct for samples of an older policy: set variant.importance=truncate, "
                f"or {c.setting}=0"
            ),
        ),
        Exclusion(
            settings="`rollout.ahead` or `rollout.overlap`, and `variant.ratio_denominator: trainer` by itself",
            why="such a ratio ignores which policy drew the samples",
            when=lambda c: not c.corrected and c.options.get("ratio_denominator") is not None,
            message=lambda c: (
                f"{c.named} with ratio_denominator={c.variant.objective.ratio_denominator} ignores which policy "
                "drew the samples: set variant.ratio_denominator=sampler, or variant.importance=truncate as well, or "
                f"{c.setting}=0"
            ),
        ),
        Exclusion(
            settings="`rollout.ahead` or `rollout.overlap`, and a variant of one's own without `ratio_denominator`",
            why="it ignores which policy drew the samples",
            when=lambda c: not c.corrected and "ratio_denominator" not in variants.parameters(c.variant.name),
            message=lambda c: (
                f"{c.named} ignores which policy drew the samples, and has no option ratio_denominator: give its "
                f"objective ratio_denominator='sampler' or an importance, or set {c.setting}=0"
            ),
        ),
    ),
    "method": (
        Exclusion(
            settings="`rewards.combine` and a variant that is defined for the other value",
            why="its advantages depend on how rewards are combined",
            when=lambda c: c.variant.combine is not None and c.rewards.combine != c.variant.combine,
            message=lambda c: (
                f"variant {c.variant.name!r} is defined on rewards with combine: {c.variant.combine}; rewards.combine "
                f"is {c.rewards.combine!r}"
            ),
        ),
        Exclusion(
            settings="`filter` and a variant that is for groups whose rewards are all the same",
            why="the filter drops these groups",
            when=lambda c: c.filter is not None and c.variant.keep is None and c.variant.equal_groups,
            message=lambda c: (
                f"filter: variant {c.variant.name!r} learns from groups whose rewards are all the same, and the filter "
                "drops them; leave it out"
            ),
        ),
        Exclusion(
            settings="`filter.success` and a variant without a filter of its own",
            why="it keeps groups whose rewards differ, and asks for no pass",
            when=lambda c: c.filter is not None and c.filter.success is not None and c.variant.keep is None,
            message=lambda c: (
                f"filter.success={c.filter.success:g}: this variant has no filter of its own; groups that differ stay"
            ),
        ),
        Exclusion(
            settings="`rollout.sample_allocation` and a variant that does not allocate its samples",
            why="every prompt gets `rollout.group` samples",
            when=lambda c: c.rollout.sample_allocation is not None and "rollout_plan" not in c.variant.needs,
            message=lambda c: (
                f"rollout.sample_allocation: variant {c.variant.name!r} gives every prompt rollout.group samples; "
                "leave it out"
            ),
        ),
        Exclusion(
            settings="`rollout.router_replay: true` and a variant that needs a critic, a teacher, hidden states or "
            "true answers, or allocates its samples",
            why="another network or another text is read, for which the sampler chose no experts (a reference takes "
            "the policy's choices)",
            when=lambda c: c.rollout.router_replay and bool(_reads_others(c)),
            message=lambda c: (
                f"rollout.router_replay=true: variant {c.variant.name!r} needs {', '.join(_reads_others(c))}, which "
                "the sampler chose no experts for; set it to false"
            ),
        ),
        Exclusion(
            settings="`variant.overlong_limit` and the reward soft_overlong",
            why="overlong samples would be punished twice",
            when=lambda c: (
                bool(c.options.get("overlong_limit")) and "soft_overlong" in [term.name for term in c.rewards.terms]
            ),
            message=lambda c: (
                f"variant {c.variant.name!r} punishes overlong samples, and so does the reward soft_overlong: leave "
                "the reward out, or set variant.overlong_limit and variant.overlong_buffer to null"
            ),
        ),
        Exclusion(
            settings="several updates a rollout and an objective without a ratio",
            why="it assumes samples of the current policy",
            when=lambda c: not c.variant.objective.has_ratio and c.train.updates_a_rollout > 1,
            message=lambda c: (
                f"variant {c.variant.name!r} has no importance ratio, so it is for one update a rollout, not "
                f"{c.train.updates_a_rollout}: set train.ppo_epochs and train.minibatches to 1, or ask for a ratio "
                "with variant.ratio"
            ),
        ),
        Exclusion(
            settings="`variant.kl_in: reward` and a variant that takes rewards in a range",
            why="a KL in the reward leaves the range",
            when=lambda c: c.variant.bounded_rewards and c.kl_in_reward,
            message=lambda c: (
                f"variant {c.variant.name!r} takes rewards in a range, which a KL in the reward leaves: {NO_KL}"
            ),
        ),
        Exclusion(
            settings="`train.reference_every` over 0 and `variant.kl_coef: 0`",
            why="there is no reference",
            when=lambda c: c.train.reference_every and not c.variant.objective.needs_reference,
            message=lambda c: (
                f"train.reference_every={c.train.reference_every}: there is no reference at variant.kl_coef=0; set it "
                "to 0"
            ),
        ),
        Exclusion(
            settings="`rewards.combine: normalize` and `rollout.group: 1`",
            why="a reward that is normalised in a group of one is 0",
            when=lambda c: c.rollout.group == 1 and c.rewards.combine == "normalize",
            message=lambda c: (
                "rewards.combine=normalize with rollout.group=1: a reward normalised in a group of one is 0; raise "
                "rollout.group"
            ),
        ),
        Exclusion(
            settings="`rewards.combine: normalize` and `train.truncated: drop`",
            why="each reward is normalised before cut samples are dropped, so that they would be in its statistics",
            when=lambda c: c.train.truncated == "drop" and c.rewards.combine == "normalize",
            message=lambda c: (
                "train.truncated=drop with rewards.combine=normalize: samples that were cut would be in the statistics "
                "of each reward; set train.truncated=mask, which keeps them there"
            ),
        ),
        *_SKIPS,
    ),
    "recipe": (
        Exclusion(
            settings="`rollout.max_turn_tokens` and no `environment`",
            why="samples have one turn",
            when=lambda c: c.environment is None and c.rollout.max_turn_tokens,
            message=lambda c: (
                f"rollout.max_turn_tokens={c.rollout.max_turn_tokens}: goes with an environment; set rollout.max_tokens"
            ),
        ),
        Exclusion(
            settings="the reward `environment` and no `environment`",
            why="it is what `get_reward` of an environment returns",
            when=lambda c: c.environment is None and "environment" in [term.name for term in c.method.rewards.terms],
            message=lambda c: "the reward 'environment' is what get_reward of an environment returns: give environment",
        ),
        Exclusion(
            settings="`rollout.curriculum` and `rollout.retire`, or a variant that retires solved prompts",
            why="a curriculum draws solved problems by their level, and retiring leaves them out",
            when=lambda c: c.rollout.curriculum is not None and c.method.retire is not None,
            message=lambda c: (
                f"rollout.curriculum: solved prompts are retired (by rollout.retire or variant "
                f"{c.method.variant.name!r}), which it does not go with; leave one out"
            ),
        ),
        Exclusion(
            settings="`data.level` and no `rollout.curriculum`",
            why="nothing else reads levels",
            when=lambda c: c.rollout.curriculum is None and c.names_levels,
            message=lambda c: "data.level, or a source's level: is for rollout.curriculum; leave it out, or give that",
        ),
        Exclusion(
            settings="`critic` and a variant without a critic",
            why="there is no critic",
            when=lambda c: c.critic is not None and c.method.variant.critic is None,
            message=lambda c: f"critic: variant {c.method.variant.name!r} has no critic; leave the section out",
        ),
    ),
}
# Other scopes are sections of the recipe.
TITLES = {
    "older": "Samples of an older policy",
    "method": "A variant and the rest of the recipe",
    "recipe": "Sections of the recipe",
}


def rows(scope: str) -> tuple[Exclusion, ...]:
    """The rows of a scope: the core's, then those of the extensions in the order of their names.

    Args:
      scope: a key of `TABLE`, or a section of an extension.

    Raises:
      UserError: an extension has rows of a scope that there is not; they would never be looked at.
    """
    found = TABLE.get(scope, ())
    for name, names in sorted(extension.installed().items()):
        brought = extension.imported(names.exclusions) if names.exclusions else {}
        if unknown := sorted(brought.keys() - TABLE.keys() - names.sections.keys()):
            raise UserError(f"extension {name!r} has exclusions of {unknown[0]!r}, which is none of {', '.join(TABLE)}")
        found += brought.get(scope, ())
    return found


def check(scope: str, context: Any) -> None:
    """Raises `UserError` for the first row of `rows` that ``context`` has.

    Args:
      scope: as of `rows`.
      context: a section, the whole recipe, or an `Older` or `Resolved`.
    """
    for row in rows(scope):
        if row.when(context):
            raise UserError(row.message(context))


def page() -> str:
    """The tables as Markdown: ``python -m grpojax.run.exclusions > docs/exclusions.md`` writes it."""
    lines = [
        "# Settings that exclude each other",
        "",
        "A recipe with both is refused, with an error that says what to set. This page is made from "
        "`grpojax/run/exclusions.py`. Extensions bring rows of their own, in the `exclusions.py` of their folders.",
    ]
    for scope in (*TABLE, *extension.words("sections")):
        if of_scope := rows(scope):
            title = TITLES.get(scope, f"Within `{scope}`")
            lines += ["", f"## {title}", "", "| what does not go together | why |", "|---|---|"]
            lines += [f"| {row.settings} | {row.why} |" for row in of_scope]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
