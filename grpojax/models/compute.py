"""How a decoder runs: precision, the trade of memory for time, kernels, devices. Other modules say what it computes."""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import jax
from jax.sharding import Mesh

from grpojax import extension
from grpojax.host.errors import UserError
from grpojax.models import attention as att

if TYPE_CHECKING:
    AdapterConfig = Any
else:
    AdapterConfig = extension.section("model.adapter")

Attention = Literal["auto", "xla", "splash", "cudnn"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy, and how it is run.

    Attributes:
      path: a Hugging Face folder; ``builtin:tiny`` is the one in the package.
      dtype: type of activations, and of weights in products. Master weights are always float32.
      remat: what the backward pass recomputes. "layer" recomputes each layer. "matmuls" keeps the products with weights
        and, on CPUs and with cuDNN, the output of attention, and recomputes the rest. "none" keeps all activations.
      attention: the kernel: "xla", "splash" (TPU) or "cudnn" (NVIDIA, bfloat16). "auto" chooses by platform.
      adapter: low-rank factors learn, and the weights in ``path`` are frozen; None trains every weight. It is a section
        of an extension.
    """

    path: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["layer", "matmuls", "none"] = "layer"
    attention: Attention = "auto"
    adapter: AdapterConfig | None = None

    def __post_init__(self):
        if self.attention == "cudnn" and self.dtype == "float32":
            raise UserError("attention='cudnn' needs dtype: bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compute:
    """How to run a decoder; nothing here changes what it computes beyond rounding.

    Attributes:
      dtype: type of activations, and of weights in products; norms, softmax and log-probs are float32.
      remat: what a layer keeps for the backward pass. "layer" keeps its input. "matmuls" also keeps the products with
        its weights and, on CPUs and with cuDNN, the output of attention. "none" keeps everything. The rest is
        recomputed.
      attention: "auto" (by platform), "xla", "splash" (TPU) or "cudnn" (NVIDIA).
      experts: how a mixture of experts runs. "grouped" runs each expert on its own tokens, "every" on all tokens;
        "auto" chooses.
      vocab_chunk: entries of the vocabulary whose logits are computed at a time; 0 takes as many as make about
        `logits_bytes`.
      mesh: None on one device.
      platform: the platform to compile for; None is jax's default.
      lean: in a forward pass without gradient, run the MLP on at most 1024 tokens of a shard at a time, which bounds
        the memory of its activations.
    """

    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["layer", "matmuls", "none"] = "layer"
    attention: Attention = "auto"
    experts: Literal["auto", "grouped", "every"] = "auto"
    vocab_chunk: int = 0
    mesh: Mesh | None = None
    platform: Literal["cpu", "gpu", "tpu"] | None = None
    lean: bool = False

    @property
    def on_gpu(self) -> bool:
        """Whether the decoder is compiled for a GPU."""
        return (self.platform or jax.default_backend()) == "gpu"

    @property
    def unrolls(self) -> bool:
        """Whether the layers are compiled one by one instead of as a loop.

        On a GPU a loop copies what each layer keeps for the backward pass into one array of all layers. Without the
        loop an update took 13 % less time on an H100. On a mesh there is a loop, so that a layer's weights are gathered
        only when the layer runs.
        """
        return self.on_gpu and self.mesh is None

    @property
    def logits_bytes(self) -> int:
        """Bytes of a block of logits. It is larger on a GPU, which is slow with the narrow matmuls of small blocks."""
        return (256 if self.on_gpu else 32) * 2**20

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
