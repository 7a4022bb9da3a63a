"""How a decoder is run: precision, memory against time, kernels, devices. What it computes is elsewhere."""

import dataclasses
from typing import Literal

from jax.sharding import Mesh

from grpojax.host.errors import UserError
from grpojax.models import attention as att

Attention = Literal["auto", "xla", "splash", "cudnn", "cudnn_lengths"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy, and how it is run.

    Attributes:
      path: a Hugging Face folder; ``builtin:tiny`` is the one in the package.
      dtype: of activations and of the weights while they multiply. Master weights are always float32.
      remat: "layer" recomputes each layer in the backward pass, "matmuls" all of it but the products with weights and,
        on CPU, what attention gave; "none" keeps its activations.
      attention: "auto" picks by platform; "xla", "splash" (TPU), "cudnn" (NVIDIA, bfloat16), "cudnn_lengths" (the same,
        given lengths in place of a mask; "auto" takes it nowhere, since it has not run on a GPU yet).
    """

    path: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["layer", "matmuls", "none"] = "layer"
    attention: Attention = "auto"

    def __post_init__(self):
        if self.attention.startswith("cudnn") and self.dtype == "float32":
            raise UserError(f"attention={self.attention!r} needs dtype: bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compute:
    """How to run a decoder; nothing here changes what it computes beyond rounding.

    Attributes:
      dtype: of activations and of the weights while they multiply; norms, softmax and log-probs are float32.
      remat: what a layer keeps for the backward pass: "layer" its input only, "matmuls" also what its weights gave
        and, on CPU, attention, so that the rest is done again, "none" everything.
      attention: "auto" (by platform), "xla", "splash" (TPU), "cudnn" or "cudnn_lengths" (NVIDIA).
      vocab_chunk: entries of the vocabulary that tokens are scored against at once; 0 takes about 32 MiB of logits.
      mesh: None on one device.
      platform: the one compiled for; None is jax's default.
      lean: of a forward without gradient, hold an MLP's activations of no more than 1024 tokens of a shard.
    """

    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["layer", "matmuls", "none"] = "layer"
    attention: Attention = "auto"
    vocab_chunk: int = 0
    mesh: Mesh | None = None
    platform: Literal["cpu", "gpu", "tpu"] | None = None
    lean: bool = False

    @property
    def needs_gather(self) -> bool:
        """Whether rows that hold several completions must come with `Rows.gather`."""
        return att.needs_gather(self.attention, self.platform)


def compute_of(
    config: ModelConfig, mesh: Mesh | None = None, platform: Literal["cpu", "gpu", "tpu"] | None = None
) -> Compute:
    """The `Compute` that a recipe's ``model`` section asks for, on a mesh or one device.

    Example:
      >>> compute_of(ModelConfig(path="builtin:tiny", dtype="bfloat16")).dtype
      'bfloat16'
    """
    return Compute(dtype=config.dtype, remat=config.remat, attention=config.attention, mesh=mesh, platform=platform)
