"""The section ``model.adapter`` of a recipe. This module imports little, since every recipe imports it."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, get_args

from grpojax.host.errors import UserError, require

if TYPE_CHECKING:
    from grpojax.models.decoder_config import DecoderConfig

Target = Literal[
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_b",
    "in_proj_a",
    "out_proj",
]


# Our weights that are linear layers, with the name that Hugging Face and PEFT have for the layer. A seed's random
# numbers follow this order, so a new weight comes last.
LINEAR: Mapping[str, Target] = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
    "q_gated": "q_proj",
    "delta_q": "in_proj_qkv",
    "delta_k": "in_proj_qkv",
    "delta_v": "in_proj_qkv",
    "delta_gate": "in_proj_z",
    "delta_rate": "in_proj_b",
    "delta_decay": "in_proj_a",
    "delta_out": "out_proj",
    "expert_gate": "gate_proj",
    "expert_up": "up_proj",
    "expert_down": "down_proj",
    "shared_gate": "gate_proj",
    "shared_up": "up_proj",
    "shared_down": "down_proj",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Trains low-rank adapters instead of every weight. They need a learning rate about ten times as high as that of
    training every weight (arXiv:2106.09685 and "LoRA without regret", Schulman et al. 2025).

    Attributes:
      rank: number of columns of A and of rows of B.
      alpha: the factors' product is multiplied by ``alpha / rank``.
      target: the linear layers that have factors. None is all that the model has: if only attention has factors, a
        policy learns worse.
      rslora: multiply the product by ``alpha / sqrt(rank)`` (rsLoRA, arXiv:2312.03732), for ranks over 64.
      dora: learn a norm for each column of the sum of base and product (DoRA, arXiv:2402.09353).
      base: format of the frozen weights. "compute" keeps them in ``model.dtype``. "int8" keeps the linear layers in
        eight bits, with a scale for each column.
      merged: merge the factors into the weights that a rollout samples with. False samples with base and factors in two
        products, as an update computes them, and needs no second copy of the weights. It needs ``mesh.fsdp`` 1.
      path: a PEFT folder whose factors the run starts from; it must have been made with these settings. The reference
        of a KL or of DPO is this start, the base with these factors. With None, A is random and B is 0, so that start
        and reference are the base.
    """

    rank: int
    alpha: float = 32.0
    target: tuple[Target, ...] | None = None
    rslora: bool = False
    dora: bool = False
    base: Literal["compute", "int8"] = "compute"
    merged: bool = True
    path: str | None = None

    def __post_init__(self) -> None:
        require(self, rank="[1, inf)", alpha="(0, inf)")
        if self.target is not None and (not self.target or len(set(self.target)) < len(self.target)):
            raise UserError(f"target={list(self.target)}: name at least one linear layer, and none twice")
        if self.dora and not self.merged:
            raise UserError("merged=false, dora=true: norms would need all weights for each token; set merged to true")

    @property
    def scale(self) -> float:
        """The number that the product of the factors is multiplied by.

        Example:
          >>> AdapterConfig(rank=8).scale, AdapterConfig(rank=64, rslora=True).scale
          (4.0, 4.0)
        """
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def weights(self, decoder: "DecoderConfig") -> tuple[str, ...]:
        """The weights of a decoder that have factors, by our names."""
        from grpojax.models.weight_table import DECODER, present

        there = present(DECODER, decoder)
        return tuple(n for n, layer in LINEAR.items() if n in there and (self.target is None or layer in self.target))

    def layers(self, decoder: "DecoderConfig") -> tuple[Target, ...]:
        """The linear layers of a decoder that have factors, by their names in ``target``."""
        found = {LINEAR[name] for name in self.weights(decoder)}
        return tuple(layer for layer in get_args(Target) if layer in found)
