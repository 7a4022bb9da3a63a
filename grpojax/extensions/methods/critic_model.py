"""A token critic: a decoder's trunk that gives one number for each completion token instead of logits.

It reads the same `Rows` as the policy, so that a prompt runs once per group. Its output is a linear head on the normed
hidden states. The head starts at 0, and so does the output.
"""

import dataclasses
import os
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx
from jax.sharding import Mesh

from grpojax.device import Program
from grpojax.host import files
from grpojax.host.errors import UserError
from grpojax.models import decoder as dec
from grpojax.models import flops, hf
from grpojax.models.compute import Compute
from grpojax.models.decoder import Decoder
from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.hf.folder import damaged
from grpojax.models.weight import Weight, WeightTable, zeros
from grpojax.models.weight_table import DECODER, initial, shardings
from grpojax.types import Array, PerPrompt, Rows, Samples

# A decoder's weights without its output projection, and the head ``[D]``. The head is not a matrix: it does not decay,
# and like the norms it stays whole on every device.
CRITIC: WeightTable = {
    **{name: weight for name, weight in DECODER.items() if name != "head"},
    "token_head": Weight(("hidden",), zeros, "token_head.weight"),
}
HEAD_FILE = "token_head.safetensors"  # next to the trunk's own files

Place = Literal["before", "after"]


class CriticNetwork(nnx.Module):
    """A decoder without an output projection, and a head ``[D]`` on its hidden states.

    Example:
      >>> from grpojax.models import DecoderConfig
      >>> config = DecoderConfig(family="qwen3", vocab_size=64, hidden_size=16, intermediate_size=32, num_layers=2,
      ...                        num_heads=4, num_kv_heads=2, head_dim=4, rope_theta=1e4, qk_norm=True)
      >>> graph, params = nnx.split(CriticNetwork(trunk_config(config), rngs=nnx.Rngs(0)))
      >>> params["token_head"].shape, float(params["token_head"][...].sum())
      ((16,), 0.0)
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.trunk = Decoder(config, rngs=rngs)
        self.token_head = nnx.Param(initial(CRITIC["token_head"], config, rngs))


def trunk_config(config: DecoderConfig, layers: int | None = None) -> DecoderConfig:
    """The config of a trunk for this decoder: without an output projection, and with ``layers`` layers if given."""
    return dataclasses.replace(config, tie_embeddings=True, num_layers=layers or config.num_layers)


def abstract(config: DecoderConfig) -> tuple[nnx.GraphDef[CriticNetwork], nnx.State]:
    """``(graphdef, params)`` of a critic with shapes in place of weights."""
    return nnx.split(nnx.eval_shape(lambda: CriticNetwork(config, rngs=nnx.Rngs(0))))


def token_outputs(trunk: Decoder, head: Array, rows: Rows, compute: Compute, *, at: Place) -> Array:
    """The critic's output for each completion token, ``[B, R, S]`` float32. On padding it is finite and means nothing.

    Args:
      trunk: the critic's decoder.
      head: ``[D]`` float32.
      rows: prompts and completions.
      compute: how to run the critic.
      at: "before" reads the state that predicts the token, as for the value of a state (PPO, arXiv 1707.06347). "after"
        reads the state that has read the token.
    """
    states = dec.token_states(trunk, rows, compute, at=at)
    with jax.named_scope("token_head"):
        return (states.astype(jnp.float32) * head.astype(jnp.float32)).sum(-1)


def from_decoder(config: DecoderConfig, params: Any) -> Any:
    """The weights of a trunk, copied from a decoder with the same layers, without its output projection."""
    wanted = jax.tree_util.tree_leaves_with_path(dec.abstract(config)[1])
    there = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    copy = Program("", lambda leaves: jax.tree.map(jnp.copy, leaves))
    leaves = copy([there[jax.tree_util.keystr(path)] for path, _ in wanted])
    return jax.tree.unflatten(jax.tree.structure(dec.abstract(config)[1]), leaves)


def fresh(config: DecoderConfig, seed: int, mesh: Mesh | None = None) -> Any:
    """Random weights of a trunk, the same on any mesh."""
    placed = None if mesh is None else lambda: shardings(dec.abstract(config)[1], mesh)
    return Program("", lambda: nnx.split(Decoder(config, rngs=nnx.Rngs(seed)))[1], out=placed)()


def joined(config: DecoderConfig, trunk: Any, head: Array) -> Any:
    """The weights of a `CriticNetwork` from the weights of its trunk, which it takes over, and from its head."""
    structure = jax.tree.structure(abstract(config)[1])
    return jax.tree.unflatten(structure, [head, *jax.tree.leaves(trunk)])


def forward_flops(config: DecoderConfig, prompt_lengths: PerPrompt, lengths: Samples) -> float:
    """`grpojax.models.flops.forward_flops` for a critic: without the vocabulary. The FLOPs of the head are ignored."""
    return flops.forward_flops(dataclasses.replace(config, vocab_size=0), prompt_lengths, lengths)


def read_head(folder: str | os.PathLike, config: DecoderConfig) -> np.ndarray:
    """The head ``[D]`` next to a trunk's files; zeros if there is none. Raises `UserError` if the file is damaged or
    the head has another size."""
    file = hf.model_folder(folder) / HEAD_FILE
    if not file.exists():
        return np.zeros(config.hidden_size, np.float32)
    try:
        head = safetensors.numpy.load(files.read(file)).get(CRITIC["token_head"].name or "")
    except safetensors.SafetensorError as e:
        raise damaged(file, e) from None
    size = config.hidden_size
    if head is None or head.shape != (size,) or not np.isfinite(head).all():
        raise UserError(f"{file}: no head of {size} finite numbers; export the critic again, or remove the file")
    return head.astype(np.float32)


def save(folder: str | os.PathLike, trunk: Decoder, head: Array, *, source: str, dtype: str) -> None:
    """Writes the trunk with `grpojax.models.hf.save`, with tied embeddings, and the head next to it in float32."""
    hf.save(folder, trunk, source=source, dtype=dtype)
    if jax.process_index() == 0:
        content = safetensors.numpy.save({CRITIC["token_head"].name or "": np.asarray(head, np.float32)})
        files.write(files.path(folder) / HEAD_FILE, content)
