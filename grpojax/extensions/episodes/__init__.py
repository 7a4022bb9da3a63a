"""Episodes of several turns: the policy calls tools, and an environment answers."""

from grpojax.extension import Names

NAMES = Names(
    sections={"environment": "grpojax.extensions.episodes.config:EnvironmentConfig"},
    sources={"environment": "grpojax.extensions.episodes.source:Episodes"},
    exclusions="grpojax.extensions.episodes.exclusions:TABLE",
)
