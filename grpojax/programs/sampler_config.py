"""How many samples a rollout draws of each prompt, how long, and how many of them at a time."""

import dataclasses
from typing import Literal

from grpojax.host.errors import UserError, require
from grpojax.programs.drawing import DrawConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerConfig(DrawConfig):
    """What to draw, and how many samples at a time (`DrawConfig` for temperature and truncation).

    Attributes:
      group: samples per prompt, G.
      max_tokens: longest completion, T.
      decode_slots: samples of one prompt that are decoded at a time; 0 takes all of them. Fewer slots than samples
        pay when lengths differ much: a slot that ends early is used again.
      cache_dtype: of the keys and values that decode steps read; "int8" with a bfloat16 scale a token and head
        (`grpojax.models.quantised`). A prompt itself runs over its own as they are.
    """

    group: int = 8
    max_tokens: int = 256
    decode_slots: int = 0
    cache_dtype: Literal["compute", "float32", "bfloat16", "int8"] = "compute"

    def __post_init__(self):
        super().__post_init__()
        require(self, group="[1, inf)", max_tokens="[1, inf)")
        if not 0 <= self.decode_slots <= self.group:
            raise UserError(f"decode_slots={self.decode_slots!r}: must be between 0 (all) and group={self.group}")
