"""A way into prompts whose samples all fail: some groups begin with a part of a solution (``rollout.guidance``)."""

from grpojax.extension import Names

NAMES = Names(
    sections={"rollout.guidance": "grpojax.extensions.guidance.guidance_config:GuidanceConfig"},
    settings={"rollout.guidance": "grpojax.extensions.guidance.guided:Guidance"},
    exclusions="grpojax.extensions.guidance.exclusions:TABLE",
)
