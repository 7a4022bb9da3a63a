"""Problems that are made, not read, what judges their answers, and environments to act in.

Each module of problems has ``rows(name, options)``, the rows of the source ``SCHEME:name``. A score of its own is a
reward function.
"""

from grpojax.extension import Names

NAMES = Names(
    problems={
        "facts": "grpojax.extensions.problems.facts",
        "grid": "grpojax.extensions.problems.frozen_lake",
        "reasoning": "grpojax.extensions.problems.reasoning",
        "reasoning_gym": "grpojax.extensions.problems.reasoning_gym",
    },
    rewards={"reasoning_gym": "grpojax.extensions.problems.reasoning_gym:score"},
    environments={
        "calculator": "grpojax.extensions.problems.calculator:Calculator",
        "frozen_lake": "grpojax.extensions.problems.frozen_lake:FrozenLake",
        "python": "grpojax.extensions.problems.python_tool:Python",
        "reasoning_gym": "grpojax.extensions.problems.reasoning_gym:Attempts",
        "search": "grpojax.extensions.problems.retrieval:Search",
        "textarena": "grpojax.extensions.problems.games:TextArena",
    },
)
