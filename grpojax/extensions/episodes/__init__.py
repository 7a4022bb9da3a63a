"""Episodes of several turns: the policy calls tools, and an environment answers."""

from grpojax.extension import Names

NAMES = Names(
    sections={"environment": "grpojax.extensions.episodes.config:EnvironmentConfig"},
    settings={"environment": "grpojax.extensions.episodes.source:OfSeveralTurns"},
    exclusions="grpojax.extensions.episodes.exclusions:TABLE",
)
