"""The ways to draw samples, each in a file of its own behind `source.Source`, and the choice for a recipe.

Sources that few recipes use are imported only when needed.
"""

import importlib
from collections.abc import Callable
from typing import Any

from grpojax import data
from grpojax.programs.calls import Call
from grpojax.programs.policy import Policy, PolicyShape
from grpojax.rewards import Rewards
from grpojax.run.loop import Loop
from grpojax.run.recipe import Config
from grpojax.run.sources.source import Plain, Source

# Keys of `grpojax.variants.NEEDS` that a source supplies: the argument of `source.Plain`, and its import path.
BY_NEED = {
    "greedy": ("companion", "greedy:Greedy"),
    "step_rewards": ("read_steps", "step_rewards:read"),
}


def make(
    config: Config,
    policy: Policy,
    rewards: Rewards,
    problems: data.Problems,
    *,
    weights: Callable[[], tuple[Any, int]],
    longest_prompt: int,
    loop: Loop,
    players: Any = None,
) -> Source:
    """The source of a recipe's run, with arguments as of `source.Plain`. ``players`` play its episodes, if it has any
    (`grpojax.run.episodes.Players`)."""
    given = {"weights": weights, "longest_prompt": longest_prompt, "loop": loop}
    if players is not None:
        given["players"] = players
    source = _kind(config)(config, policy, rewards, problems, **given, **_supplied(config))
    if not config.rollout.ahead:
        return source
    return _load("ahead:Ahead")(source, config.train, loop.state)


def calls_of(config: Config, policy: PolicyShape, weights: Any) -> dict[str, Call]:
    """The programs that a recipe's source runs, with arguments as of `source.Plain.calls`."""
    found, companion = _kind(config).calls(config, policy, weights), _supplied(config).get("companion")
    return found if companion is None else found | companion.calls(config, policy, weights)


def _kind(config: Config) -> Any:
    if config.environment is not None:
        return _load("episodes:Episodes")
    if config.method.plan is not None:
        return _load("allocated:Allocated")
    return _load("partial:Partial") if config.rollout.overlap else Plain


def _supplied(config: Config) -> dict[str, Any]:
    """The objects that the variant needs from a source, by the argument of `source.Plain`."""
    named = [BY_NEED[need] for need in config.method.variant.needs if need in BY_NEED]
    return {argument: _load(path) for argument, path in named}


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
