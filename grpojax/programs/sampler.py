"""Groups of samples from one jitted program.

A draw's random key is ``fold_in(key, uid, sample, position)``: it depends neither on slots nor on the order of
prompts nor on the mesh.
"""

import dataclasses

from flax import nnx

from grpojax.host.errors import UserError
from grpojax.models.compute import Compute
from grpojax.programs import decoding
from grpojax.programs.compiling import program
from grpojax.programs.sampler_config import SamplerConfig
from grpojax.types import Array, Prompts, Rollout


def _rollout(
    graph: nnx.GraphDef,
    params: nnx.State,
    prompts: Prompts,
    key: Array,
    config: SamplerConfig,
    eos_ids: tuple[int, ...],
    compute: Compute,
    begun: Rollout | None = None,
    left: int = 0,
) -> Rollout:
    fixed, out = decoding.prefill(nnx.merge(graph, params), prompts, key, config, eos_ids, compute)
    if begun is None:
        return decoding.decode(fixed, decoding.before_decoding(fixed, out)).out
    fixed = dataclasses.replace(fixed, left=left)
    return decoding.decode(fixed, decoding.going_on(fixed, prompts, begun, out)).out


_sample = program("rollout", _rollout, static=("graph", "config", "eos_ids", "compute", "left"))


def sample_groups(
    graph: nnx.GraphDef,
    params: nnx.State,
    prompts: Prompts,
    key: Array,
    config: SamplerConfig,
    *,
    eos_ids: tuple[int, ...],
    compute: Compute,
    begun: Rollout | None = None,
    left: int = 0,
) -> Rollout:
    """Draws ``config.group`` samples of each prompt.

    Args:
      graph, params: the two halves of a `Decoder` (``nnx.split``).
      prompts: the prompts; on a mesh their number must divide over its lanes (`spread`).
      key: a key that differs from rollout to rollout, such as ``fold_in(key(seed), step)``.
      config: group size, lengths, temperature, truncation, decode_slots.
      eos_ids: tokens that end a sample; none means that every sample has ``max_tokens``.
      compute: how to run the decoder.
      begun: ``[P, G, ...]`` samples of an earlier rollout (`grpojax.programs.begun`): of length 0 they are new,
        unfinished ones, at most ``left`` in a lane, go on, the others stay as they are. Every sample then has a slot of
        its own.
      left: goes with ``begun``: the rollout ends as soon as at most so many samples of each lane want another token and
        one group is whole.

    Returns:
      `Rollout`, ``[P, G, T]``.

    Example:
      >>> import jax, numpy as np
      >>> from flax import nnx
      >>> from grpojax.models import Compute, Decoder, DecoderConfig
      >>> from grpojax.types import Prompts
      >>> model = Decoder(DecoderConfig(family="qwen2", vocab_size=50, hidden_size=16, intermediate_size=32,
      ...     num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, rope_theta=1e4, qkv_bias=True), rngs=nnx.Rngs(0))
      >>> prompts = Prompts(tokens=np.array([[5, 6, 7], [8, 9, 0]], np.int32), lengths=np.array([3, 2], np.int32),
      ...     uids=np.array([0, 1], np.uint32), first_sample=np.zeros(2, np.int32))
      >>> rollout = sample_groups(*nnx.split(model), prompts, jax.random.key(0), SamplerConfig(group=4, max_tokens=5),
      ...     eos_ids=(1,), compute=Compute())
      >>> rollout.tokens.shape
      (2, 4, 5)
    """
    if not isinstance(eos_ids, tuple):
        raise TypeError(f"eos_ids must be a tuple of ints, got {eos_ids!r}")
    if begun is not None and config.decode_slots not in (0, config.group):
        raise UserError(f"decode_slots={config.decode_slots}: samples that were begun need slots of their own; set 0")
    return _sample(graph, params, prompts, key, config, eos_ids, compute, begun, left)
