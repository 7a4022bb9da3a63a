"""Groups of samples from one jitted program, or from one that hands them over in parts.

A draw's random key is ``fold_in(key, uid, sample, position)``: it depends neither on slots nor on the order of
prompts nor on the mesh.
"""

import dataclasses
import functools
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from grpojax.host.errors import UserError
from grpojax.models.compute import Compute
from grpojax.models.sharding import constrain
from grpojax.programs import decoding
from grpojax.programs.sampler_config import SamplerConfig
from grpojax.types import Array, Prompts, Rollout, Scalar

_STATIC = ("graph", "config", "eos_ids", "compute")


@functools.partial(jax.jit, static_argnames=(*_STATIC, "left"))
def _sample(
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
    if begun is not None and (config.rows or config.decode_slots not in (0, config.group)):
        raise UserError(
            f"decode_slots={config.decode_slots}, rows={config.rows}: samples that were begun need slots of their own; "
            "set 0"
        )
    return _sample(graph, params, prompts, key, config, eos_ids, compute, begun, left)


# ------------------------------------------------------------------------------------------------- in parts


@functools.partial(jax.jit, static_argnames=_STATIC)
def start_parts(
    graph: nnx.GraphDef,
    params: nnx.State,
    prompts: Prompts,
    key: Array,
    config: SamplerConfig,
    *,
    eos_ids: tuple[int, ...],
    compute: Compute,
) -> tuple[Any, decoding.Loop, Rollout]:
    """Reads the prompts and draws the first token of every sample, for `next_part`; arguments as of `sample_groups`.

    Returns:
      ``(read, state, out)``: what stays as it is, what parts take over from each other, and the samples so far.
    """
    fixed, out = decoding.prefill(nnx.merge(graph, params), prompts, key, config, eos_ids, compute)
    read, start = (fixed.known, fixed.prompt_kv), decoding.before_decoding(fixed, out)
    return decoding.between_parts(read, start, out, compute, functools.partial(_constrain, compute.mesh))


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames="state")
def next_part(
    graph: nnx.GraphDef,
    params: nnx.State,
    read: Any,
    state: decoding.Loop,
    out: Rollout,
    undone: Scalar,
    config: SamplerConfig,
    *,
    eos_ids: tuple[int, ...],
    compute: Compute,
) -> tuple[decoding.Loop, Rollout]:
    """Goes on with a rollout until at most so many groups of each lane are undone.

    Args:
      graph, params, config, eos_ids, compute: as of `start_parts`.
      read: of `start_parts`.
      state: slots and caches of `start_parts` or of the part before; their memory is taken over.
      out: the samples so far.
      undone: [] int32, groups of a lane.

    Returns:
      ``(state, out)``.
    """
    known, prompt_kv = read
    fixed = decoding.fixed_of(nnx.merge(graph, params), known, prompt_kv, config, eos_ids, compute)
    s = decoding.go_on(fixed, state, out, undone)
    return decoding.between_parts(None, s, s.out, compute, functools.partial(_constrain, compute.mesh))[1:]


def _constrain(mesh: Mesh | None, x: Array, *axes: str | None) -> Array:
    return constrain(x, mesh, *axes)


def undone_after(parts: int, prompts: int, lanes: int) -> list[int]:
    """How many groups of each lane every part of a rollout may leave undone: an equal share less each time, the last
    one none.

    Args:
      parts: of the rollout; no more than the prompts of a lane are made.
      prompts: of all lanes.
      lanes: batch shards.

    Example:
      >>> undone_after(3, prompts=16, lanes=2), undone_after(4, prompts=3, lanes=1)
      ([5, 2, 0], [2, 1, 0])
    """
    each = prompts // lanes
    parts = min(parts, each)
    return [each - -(-part * each // parts) for part in range(1, parts + 1)]
