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
      rows: rows of ``decode_slots`` slots that a batch shard has; one that has nothing left to draw takes over another
        prompt. 0 gives each prompt a row of its own, which it keeps. ``decode_slots: 1`` fills every row to the last,
        but reads a prompt once for each.
      block: positions of the cache that are read or left out together; 0 takes about an eighth of ``max_tokens``, or
        all of it where leaving some out does not pay, and 64 on a GPU (`grpojax.programs.slot_cache.ring`).
      cache_dtype: of the keys and values that decode steps read; "int8" with a bfloat16 scale a token and head
        (`grpojax.models.quantised`). A prompt itself runs over its own as they are.
    """

    group: int = 8
    max_tokens: int = 256
    decode_slots: int = 0
    rows: int = 0
    block: int = 0
    cache_dtype: Literal["compute", "float32", "bfloat16", "int8"] = "compute"

    def __post_init__(self):
        super().__post_init__()
        require(self, group="[1, inf)", max_tokens="[1, inf)", rows="[0, inf)")
        if not 0 <= self.decode_slots <= self.group:
            raise UserError(f"decode_slots={self.decode_slots!r}: must be between 0 (all) and group={self.group}")
        if not 0 <= self.block <= self.max_tokens:
            raise UserError(f"block={self.block!r}: must be between 0 (by platform) and max_tokens={self.max_tokens}")


def rows_of(config: SamplerConfig, prompts: int, lanes: int) -> int:
    """Rows of slots of all lanes: no more than the samples of a lane can fill.

    Args:
      config: decode_slots and rows.
      prompts: of all lanes.
      lanes: batch shards.

    Example:
      >>> rows_of(SamplerConfig(group=8, decode_slots=3, rows=4), prompts=16, lanes=2)
      8
      >>> rows_of(SamplerConfig(group=8, decode_slots=3, rows=99), prompts=16, lanes=2)
      48
    """
    if not config.rows:
        return prompts
    return min(config.rows, prompts // lanes * -(-config.group // (config.decode_slots or config.group))) * lanes
