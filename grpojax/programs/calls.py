"""Programs with shapes in place of arrays, from which a plan is made.

The code that calls a program also makes the shapes that the program takes. This module has the types for both.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from grpojax import sharding
from grpojax.device import Program
from grpojax.models import adapters, experts, flops, kv_heads
from grpojax.models.weight_table import shardings
from grpojax.programs import kv_cache
from grpojax.programs.policy import PolicyShape, on_shards
from grpojax.programs.sampler import SamplerConfig, no_samples, rollout_program
from grpojax.programs.state import make_cast_of_factors, make_reshard
from grpojax.types import Prompts


class Call(NamedTuple):
    """A program and its arguments, with every prompt and completion at its longest.

    Attributes:
      program: the program.
      args: shapes in place of arrays.
      own: the arguments that are part of the run's state. They take memory also while the program does not run.
      flops: FLOPs of the program on all chips together; 0 if it multiplies nothing, or if the number is unknown.
      iterations: number of iterations of a rollout's loop if every sample is at its longest.
      cache: bytes of a rollout's keys and values on one chip.
      blocks: number of blocks of a rollout's cache.
      live: average share of these blocks that a decode step reads.
      samples: whether the program runs on the chips that sample.

      ragged: whether its rows are those of a minibatch. Such rows have a second, smaller size for shorter samples.
    """

    program: Program
    args: tuple[Any, ...]
    own: Any
    flops: float = 0.0
    iterations: int = 0
    cache: int = 0
    blocks: int = 1
    live: float = 1.0
    samples: bool = False

    ragged: bool = False


def abstract(x: Any, placed: NamedSharding | None) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of an array."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed)


def on_mesh(tree: Any, mesh: Mesh | None, *before: None) -> Any:
    """Shapes of host arrays as the devices hold them: the ``before`` axes first, then an axis of batch shards."""

    def placed(x: np.ndarray) -> jax.ShapeDtypeStruct:
        axes = (*before, "shard", *(None,) * (x.ndim - len(before) - 1))
        return abstract(x, sharding.named(mesh, axes))

    return jax.tree.map(placed, tree)


def random_key(mesh: Mesh | None) -> jax.ShapeDtypeStruct:
    """A key, the same on all devices."""
    return abstract(jax.eval_shape(lambda: jax.random.key(0)), sharding.named(mesh, ()))


def longest_prompts(count: int, tokens: int) -> Prompts:
    """``count`` prompts of ``tokens`` tokens."""
    zero = np.zeros(count, np.int32)
    return Prompts(
        tokens=np.zeros((count, tokens), np.int32),
        lengths=zero + tokens,
        uids=zero.astype(np.uint32),
        first_sample=zero,
    )


def forward_flops(policy: PolicyShape, prompts: int, longest: int, group: int, tokens: int) -> float:
    """FLOPs of a forward over ``prompts`` prompts of ``longest`` tokens, each with ``group`` samples of ``tokens``."""
    return flops.forward_flops(policy.config, np.full(prompts, longest), np.full((prompts, group), tokens))


def reshard(policy: PolicyShape, params: Any, weights: Literal["compute", "int8"]) -> tuple[dict[str, Call], Any]:
    """The call that makes a rollout's weights (`grpojax.programs.policy.Policy.reshard`), and these weights' shapes.

    Args:
      policy: the model.
      params: its weights.
      weights: the format of the rollout's weights.

    Returns:
      ``({"reshard": call}, weights)``. The dict is empty if there is nothing to do.
    """
    if adapters.unmerged(policy.adapter):
        cast, factors = make_cast_of_factors(policy.compute), adapters.factors_of(params)
        made = {name: abstract(x, factors[name].sharding) for name, x in jax.eval_shape(cast.fn, params).items()}
        return {"reshard": Call(cast, (params,), factors)}, adapters.joined(params, made)
    made = make_reshard(policy.config, policy.compute, weights, adapted=policy.adapter is not None)
    whole = params if made is None else jax.eval_shape(made.fn, params)
    whole = jax.tree.map(abstract, whole, shardings(whole, policy.sampling.mesh, sharding.ROLLOUT))
    return ({} if made is None else {"reshard": Call(made, (params,), params)}), whole


def rollout(policy: PolicyShape, weights: Any, prompts: Prompts, sampling: SamplerConfig, *, left: int = 0) -> Call:
    """A rollout, as `grpojax.programs.policy.Policy.sample` dispatches it.

    Args:
      policy: the model.
      weights: weights from `reshard`.
      prompts: prompts from `longest_prompts`.
      sampling: how to sample.
      left: samples of a batch shard that may continue in the next rollout; 0 if none ever does.
    """
    mesh, compute, shards = policy.sampling.mesh, policy.sampling.compute, policy.sampling.shards
    longest = prompts.tokens.shape[1]
    spread, config = on_shards(prompts, sampling, shards)
    rows, tokens = len(spread.lengths), config.max_tokens
    args = weights, on_mesh(spread, mesh), random_key(mesh)
    if left:
        args = *args, on_mesh(no_samples(rows, config.group, tokens), mesh)
    slots = config.decode_slots or config.group
    ring, rounds = kv_cache.ring(tokens, compute), -(-config.group // slots)
    cells = (rows * longest + rows * slots * ring.size) // shards // (1 if mesh is None else mesh.shape["tensor"])
    total = forward_flops(policy, rows, longest, config.group, tokens)
    if experts.pick(compute, rows // shards * slots) is experts.every:
        total += flops.other_experts_flops(policy.config, rows * config.group * (tokens - 1))
    cached = dataclasses.replace(policy.config, num_kv_heads=kv_heads.on_mesh(policy.config, mesh))
    return Call(
        rollout_program(policy.graph, config, eos_ids=(0,), compute=compute, left=left or None),
        args,
        adapters.without_factors(weights) if adapters.unmerged(policy.adapter) else (),
        flops=total,
        iterations=rounds * (tokens - 1),
        cache=cells * flops.kv_bytes(cached, kv_cache.dtype_of(config.cache_dtype, compute)),
        blocks=ring.blocks,
        live=ring.mean_live(tokens, rounds),
        samples=True,
    )
