"""The memory and the least time of a recipe on a machine that is not there."""

from grpojax.extension import Names

NAMES = Names(commands={"plan": "grpojax.extensions.plan.cli.plan"})
