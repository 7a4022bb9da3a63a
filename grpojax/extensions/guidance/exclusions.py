"""Settings that guided groups do not go with."""

from collections.abc import Mapping

from grpojax.run.exclusions import Exclusion

TABLE: Mapping[str, tuple[Exclusion, ...]] = {
    "rollout": (
        Exclusion(
            settings="`rollout.guidance` and `rollout.ahead`",
            why="which prompts are guided follows from the rewards of the rollout before",
            when=lambda c: c.guidance is not None and c.ahead,
            message=lambda c: (
                f"guidance with ahead={c.ahead}: which prompts are guided follows from the rewards of the rollout "
                "before; set ahead=0"
            ),
        ),
        Exclusion(
            settings="`rollout.guidance` with a `share` of less than one group",
            why="no group would be guided",
            when=lambda c: c.guidance is not None and c.guidance.share * c.prompts < 1,
            message=lambda c: (
                f"guidance.share={c.guidance.share:g} of prompts={c.prompts} is less than one group: set share to at "
                f"least {1 / c.prompts:.3g}"
            ),
        ),
    ),
    "recipe": (
        Exclusion(
            settings="`rollout.guidance` and a variant with rewards of steps",
            why="its rewards read a prefix and a sample as one text, in which steps have other places",
            when=lambda c: c.rollout.guidance is not None and "step_rewards" in c.method.variant.needs,
            message=lambda c: (
                f"rollout.guidance with variant {c.method.variant.name!r}, which has rewards of steps: they read a "
                "prefix and a sample as one text, in which steps have other places; leave guidance out"
            ),
        ),
    ),
}
