"""Episodes of several turns: the policy calls tools, and an environment answers."""

from grpojax.extension import Names

NAMES = Names(
    sections={"environment": "grpojax.extensions.episodes.environment_config:EnvironmentConfig"},
    settings={"environment": "grpojax.extensions.episodes.episode_source:OfSeveralTurns"},
    exclusions="grpojax.extensions.episodes.exclusions:TABLE",
)
