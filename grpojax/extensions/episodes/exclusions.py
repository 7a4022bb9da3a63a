"""Settings that episodes of several turns do not go with."""

from collections.abc import Callable, Mapping
from typing import Any

from grpojax.run.exclusions import Exclusion

# Needs of variants that samples of one turn have, and episodes do not.
_OF_ONE_TURN = {
    "critic": "whose critic's returns run over tokens that the policy did not draw",
    "greedy": "which draws a greedy completion of one turn with each group",
    "ground_truth": "which puts the true answer behind a completion of one turn",
    "rollout_plan": "which draws the samples of a prompt in several phases",
    "step_rewards": "whose rewards of steps are at places in a completion of one turn",
}


def _of_one_turn(c: Any) -> list[str]:
    return [why for need, why in _OF_ONE_TURN.items() if need in c.method.variant.needs]


def _plays(settings: str, why: str, when: Callable[[Any], bool], what: Callable[[Any], str]) -> Exclusion:
    return Exclusion(
        settings=f"`environment` and {settings}",
        why=why,
        when=lambda c: c.environment is not None and when(c),
        message=lambda c: f"environment: episodes of several turns do not go with {what(c)}",
    )


TABLE: Mapping[str, tuple[Exclusion, ...]] = {
    "recipe": (
        _plays(
            "`rollout.ahead`, or `rollout.overlap` over 0",
            "between its turns an episode waits for the host, and it is over when its step is",
            lambda c: c.rollout.ahead or c.rollout.overlap,
            lambda c: f"rollout.ahead={c.rollout.ahead} and rollout.overlap={c.rollout.overlap:g}: set both to 0",
        ),
        _plays(
            "`rollout.decode_slots`",
            "each episode keeps a slot of its own while its environment works",
            lambda c: c.rollout.decode_slots not in (0, c.rollout.group),
            lambda c: f"rollout.decode_slots={c.rollout.decode_slots}: set it to 0",
        ),
        _plays(
            "`rollout.cache_dtype: int8`",
            "what an environment answers is read on top of the cache",
            lambda c: c.rollout.cache_dtype == "int8",
            lambda c: "rollout.cache_dtype=int8: set it to compute",
        ),
        _plays(
            "`rollout.router_replay: true`",
            "the experts for what an environment answers are not kept",
            lambda c: c.rollout.router_replay,
            lambda c: "rollout.router_replay=true: set it to false",
        ),
        _plays(
            "a variant that needs a critic, a greedy completion, the true answer, rewards of steps, or phases of "
            "samples",
            "these are of samples of one turn",
            lambda c: bool(_of_one_turn(c)),
            lambda c: f"variant {c.method.variant.name!r}, {_of_one_turn(c)[0]}: take another variant",
        ),
        _plays(
            "`variant.ratio: trace` or `trace_both`",
            "a trace would reach over tokens that the policy did not draw",
            lambda c: c.method.variant.objective.ratio.startswith("trace"),
            lambda c: f"variant.ratio={c.method.variant.objective.ratio}: set variant.ratio=token",
        ),
        _plays(
            "the variant `gtpo`",
            "beginnings and ends that samples share are compared token by token, without holes between turns",
            lambda c: c.method.variant.name == "gtpo",
            lambda c: "variant 'gtpo', which compares whole completions: take another variant",
        ),
        _plays(
            "`variant.answer_weight`",
            "the answer is looked for in the whole text, which has what environments answered too",
            lambda c: c.method.variant.options.get("answer_weight", 1.0) != 1.0,
            lambda c: f"variant.answer_weight={c.method.variant.options['answer_weight']}: leave it out",
        ),
    ),
}
