"""Settings of a critic that exclude each other, and those that other needs and ways to draw do not go with."""

from collections.abc import Mapping

from grpojax.run.exclusions import NO_KL, Exclusion, Resolved


def _of_sampler(c: Resolved) -> str:
    """What of the objective reads the sampler's log-probs."""
    names = ("importance", "off_policy_limit", "ratio_denominator")
    values = {name: getattr(c.variant.objective, name) for name in names}
    return ", ".join(f"{k}={v}" for k, v in values.items() if v not in ("none", None, "trainer"))


TABLE: Mapping[str, tuple[Exclusion, ...]] = {
    "critic": (
        Exclusion(
            settings="`critic.path` and `critic.layers`",
            why="a trunk is read or random",
            when=lambda c: c.path is not None and c.layers is not None,
            message=lambda c: f"path={c.path!r} with layers={c.layers}: a trunk is read or random; leave one out",
        ),
        Exclusion(
            settings="`critic.seed` and no `critic.layers`",
            why="it seeds random weights",
            when=lambda c: c.layers is None and c.seed,
            message=lambda c: f"seed={c.seed}: seeds random weights; set layers too, or leave it out",
        ),
        Exclusion(
            settings="`critic.trunk: frozen` and `critic.layers`",
            why="random weights must learn",
            when=lambda c: c.layers is not None and c.trunk == "frozen",
            message=lambda c: f"trunk='frozen' with layers={c.layers}: random weights must learn; leave one out",
        ),
    ),
    "older": (
        Exclusion(
            settings="`rollout.ahead` or `rollout.overlap`, and a variant that allocates its samples",
            why="earlier rewards decide how many samples a prompt gets",
            when=lambda c: "rollout_plan" in c.variant.needs,
            message=lambda c: f"{c.named} gives samples to prompts by earlier rewards; set {c.setting}=0",
        ),
        Exclusion(
            settings="`rollout.overlap` and a variant with a greedy completion",
            why="a greedy completion is drawn with each group, and cannot go on in the next rollout",
            when=lambda c: "greedy" in c.variant.needs and c.setting == "rollout.overlap",
            message=lambda c: (
                f"{c.named} draws a greedy completion with each group, which cannot go on in the next rollout; "
                f"set {c.setting}=0"
            ),
        ),
        Exclusion(
            settings="`rollout.ahead` or `rollout.overlap`, and `variant.train_on: spliced`",
            why="spliced text was not sampled, so its age cannot be corrected",
            when=lambda c: c.variant.options.get("train_on") == "spliced",
            message=lambda c: (
                f"{c.named} with train_on=spliced learns from text that was not sampled, whose age cannot be "
                f"corrected; set {c.setting}=0, or variant.train_on=sampled"
            ),
        ),
    ),
    "method": (
        Exclusion(
            settings="`variant.count_empty: true` and a variant that allocates its samples",
            why="it would divide by samples that were never drawn",
            when=lambda c: (
                "rollout_plan" in c.variant.needs
                and c.variant.objective.count_empty
                and c.variant.objective.aggregate in ("sequence_mean", "sequence_sum", "constant")
            ),
            message=lambda c: (
                f"variant.count_empty=true: variant {c.variant.name!r} would divide by samples that were never drawn; "
                "leave it out"
            ),
        ),
        Exclusion(
            settings="`variant.llds_coef` over 0 and one update a rollout",
            why="its term acts from the second update of a rollout on",
            when=lambda c: (
                c.variant.objective.needs_displacement_weights
                and c.train.updates_a_rollout == 1
                and not (c.older and c.variant.objective.ratio_denominator == "sampler")
            ),
            message=lambda c: (
                "variant.llds_coef acts from the second update of a rollout on: raise train.ppo_epochs or "
                "train.minibatches over 1, or set it to 0"
            ),
        ),
        Exclusion(
            settings="`variant.answer_weight` and `variant.llds_coef: 0`",
            why="it only acts in LLDS's term",
            when=lambda c: (
                c.variant.options.get("answer_weight", 1.0) != 1.0
                and not c.variant.objective.needs_displacement_weights
            ),
            message=lambda c: (
                "variant.answer_weight only acts in LLDS's term, which variant.llds_coef=0 turns off: leave it out"
            ),
        ),
        Exclusion(
            settings="`variant.kl_in: reward` and a variant that reads the true answer or NTHR's scores",
            why="it needs the original rewards, without a KL",
            when=lambda c: bool({"ground_truth", "hidden_states"} & {*c.variant.needs}) and c.kl_in_reward,
            message=lambda c: f"variant {c.variant.name!r} needs the original rewards, without a KL in them: {NO_KL}",
        ),
        Exclusion(
            settings="`variant.kl_in: reward` and a teacher",
            why="it does not learn from rewards, so a KL in them has no effect",
            when=lambda c: "teacher" in c.variant.needs and c.kl_in_reward,
            message=lambda c: (
                f"variant {c.variant.name!r} does not learn from rewards, so a KL in them has no effect: {NO_KL}"
            ),
        ),
        Exclusion(
            settings="`variant.train_on: spliced` and an objective that reads the sampler's log-probs",
            why="spliced text was not sampled, and has none",
            when=lambda c: c.spliced and c.variant.objective.needs_sampler_logps,
            message=lambda c: (
                f"variant {c.variant.name!r} with train_on=spliced and {_of_sampler(c)}: spliced text was not sampled, "
                "so that there are no log-probs of the sampler to compare with; leave that out, or set "
                "variant.train_on=sampled"
            ),
        ),
    ),
}
