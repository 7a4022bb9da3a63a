"""Numbers in eight bits: weights, and keys and values, in a rollout; the frozen base of adapters."""

from grpojax.extension import Names

NAMES = Names(
    formats={"int8": "grpojax.extensions.int8.eight_bits:INT8"},
    exclusions="grpojax.extensions.int8.exclusions:TABLE",
)
