"""What a sampler draws: settings only. A recipe is read without the sampler itself."""

import dataclasses
from typing import Any, Literal, cast

from grpojax.host.errors import UserError, require


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawConfig:
    """The distribution that tokens are drawn from. The cuts apply in this order; each renormalises the distribution.

    Attributes:
      temperature: 0 is greedy. Otherwise at least 0.001: logits that are divided by less lose the digits that a
        probability is made of.
      top_k: keep the k likeliest tokens (ties with the k-th stay; Fan et al., arXiv:1805.04833); 0 keeps all.
      top_p: keep the smallest set of likeliest tokens with at least this mass (ties stay; Holtzman et al.,
        arXiv:1904.09751); 1 keeps all.
      min_p: keep tokens with at least this share of the likeliest one's probability (Nguyen et al.,
        arXiv:2407.01082); 0 keeps all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self):
        require(self, temperature="[0, inf)", top_k="[0, inf)", top_p="(0, 1]", min_p="[0, 1]")
        if 0 < self.temperature < 0.001:
            raise UserError(f"temperature={self.temperature:g}: set 0, which is greedy, or at least 0.001")

    @property
    def truncates(self) -> bool:
        """Whether tokens of the vocabulary are cut off before drawing."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerConfig(DrawConfig):
    """What to draw, and how many samples to decode at a time. `DrawConfig` has temperature and truncation.

    Attributes:
      group: samples per prompt, G.
      max_tokens: longest completion, T.
      decode_slots: samples of one prompt that are decoded at a time; 0 decodes all of them at once. Fewer slots than
        samples are faster when lengths differ much, because a slot is reused as soon as its sample ends.
      cache_dtype: dtype of the keys and values that decode steps read. "int8" stores a bfloat16 scale for each token
        and head. Prefill attends to a prompt's keys and values before they are rounded.
      router_replay: keep the experts that the routers of a mixture choose for each token, so that scores and updates
        choose the same. This takes layers x experts a token bytes for each token.
    """

    group: int = 8
    max_tokens: int = 256
    decode_slots: int = 0
    cache_dtype: Literal["compute", "float32", "bfloat16", "int8"] = "compute"
    router_replay: bool = False

    def __post_init__(self):
        super().__post_init__()
        require(self, group="[1, inf)", max_tokens="[1, inf)")
        if not 0 <= self.decode_slots <= self.group:
            raise UserError(f"decode_slots={self.decode_slots!r}: must be between 0 (all) and group={self.group}")


def plain(config: SamplerConfig, **changes: Any) -> SamplerConfig:
    """The fields of a `SamplerConfig`, or of a subclass with more, with some changes.

    Example:
      >>> made = plain(SamplerConfig(group=4, temperature=0.5), group=2)
      >>> made.group, made.temperature
      (2, 0.5)
    """
    return SamplerConfig(**{f.name: getattr(config, f.name) for f in dataclasses.fields(SamplerConfig)} | changes)


def unrounded(cache_dtype: str) -> Literal["compute", "float32", "bfloat16"]:
    """``cache_dtype``, or "compute" if it is no float. For completions that must come from the policy itself, such as
    those of held-out problems.

    Example:
      >>> unrounded("int8"), unrounded("bfloat16")
      ('compute', 'bfloat16')
    """
    return cast(Literal["float32", "bfloat16"], cache_dtype) if cache_dtype in ("float32", "bfloat16") else "compute"
