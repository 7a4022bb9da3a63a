"""The ways to draw samples, behind `source.Source`, and the choice for a recipe. All but the usual one are of
extensions."""

from collections.abc import Callable
from typing import Any

from grpojax import data, extension
from grpojax.programs.policy import DryPolicy, Policy
from grpojax.rewards import Rewards
from grpojax.run.recipe import Config
from grpojax.run.sources.source import Context, Plain, Source

# Needs of a variant that a source supplies, and the argument of `source.Plain` that takes what supplies them.
BY_NEED = {"greedy": "companion", "step_rewards": "read_steps"}


def make(
    config: Config,
    policy: Policy,
    rewards: Rewards,
    problems: data.Problems,
    *,
    weights: Callable[[], tuple[Any, int]],
    longest_prompt: int,
    context: Context,
    players: Any = None,
) -> Source:
    """The source of a recipe's run, with arguments as of `source.Plain`. ``players`` play its episodes, if it has
    any."""
    given = {"weights": weights, "longest_prompt": longest_prompt, "context": context}
    if players is not None:
        given["players"] = players
    source = _kind(config)(config, policy, rewards, problems, **given, **_supplied(config))
    if not config.rollout.ahead or isinstance(policy, DryPolicy):  # ahead the same is drawn, in another order
        return source
    return way("rollout.ahead")(source, config.train)


def way(setting: str) -> Any:
    """What an extension has for a setting, or a need, of how samples are drawn (`grpojax.extension.Names.sources`).

    Raises:
      UserError: no extension has it.
    """
    return extension.load("sources", setting, setting)


def _kind(config: Config) -> Any:
    if config.environment is not None:
        return way("environment")
    if config.method.plan is not None:
        return way("rollout_plan")
    return way("rollout.overlap") if config.rollout.overlap else Plain


def _supplied(config: Config) -> dict[str, Any]:
    """The objects that the variant needs from a source, by the argument of `source.Plain`."""
    return {BY_NEED[need]: way(need) for need in config.method.variant.needs if need in BY_NEED}
