"""What layers that do not attend keep for the slots of a rollout (`grpojax.models.layer_kinds.Mixer`)."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from grpojax.models.compute import Compute
from grpojax.models.layer_kinds import Mixer
from grpojax.sharding import TRAIN, constrain, spec
from grpojax.types import Array


def in_slots(mixer: Mixer | None, prompts: Sequence[Any], slots: int, compute: Compute) -> list[Any]:
    """States ``[P, S, ...]`` of ``slots`` slots for each prompt, all 0, for each layer with the mixer; those of
    ``prompts`` are ``[P, ...]``."""

    def empty(x: Array) -> Array:
        return jnp.zeros((x.shape[0], slots, *x.shape[1:]), x.dtype)

    return [_placed(mixer, jax.tree.map(empty, states), compute) for states in prompts]


def started(states: Any, prompts: Any, fresh: Array) -> Any:
    """The states ``[P, S, ...]``, with those of the prompt ``[P, ...]`` in slots where ``fresh [P, S]``."""

    def choose(x: Array, prompt: Array) -> Array:
        return jnp.where(fresh.reshape(*fresh.shape, *(1,) * (x.ndim - 2)), prompt[:, None], x)

    return jax.tree.map(choose, states, prompts)


def inserted(
    mixer: Mixer | None, states: Sequence[Any], read: Sequence[Any], slots: Array, used: Array, compute: Compute
) -> list[Any]:
    """The states of slots, with those of samples that were read put in.

    Args:
      mixer: the layers'.
      states: ``[P, S, ...]`` for each of the layers.
      read: ``[K, ...]`` for each, K samples for each data-parallel shard.
      slots: ``[K]`` int32, the slot of each in its shard, ``row * S + slot``.
      used: ``[1]`` int32 for each shard, how many of the K are samples.
      compute: has the mesh.
    """

    def of_shard(x: Array, new: Array, slots: Array, used: Array) -> Array:
        flat = x.reshape(-1, *x.shape[2:])
        at = jnp.where(jnp.arange(len(slots)) < used, slots, len(flat))  # out of range: not written
        return flat.at[at].set(new, mode="drop").reshape(x.shape)

    def put(x: Array, new: Array, axes: tuple[str | None, ...]) -> Array:
        if compute.mesh is None:
            return of_shard(x, new, slots, used)
        shard, there, given = (spec(a, TRAIN) for a in (axes[:1], axes, (axes[0], *axes[2:])))
        of_mesh = jax.shard_map(of_shard, mesh=compute.mesh, in_specs=(there, given, shard, shard), out_specs=there)
        return of_mesh(x, new, slots, used)

    return [jax.tree.map(put, x, new, _axes(mixer)) for x, new in zip(states, read, strict=True)]


def _axes(mixer: Mixer | None) -> Any:
    assert mixer is not None, "layers have states"
    return mixer.state_axes


def _placed(mixer: Mixer | None, states: Any, compute: Compute) -> Any:
    def place(x: Array, axes: tuple[str | None, ...]) -> Array:
        return constrain(x, compute.mesh, *axes, *(None,) * (x.ndim - len(axes)))

    return jax.tree.map(place, states, _axes(mixer))
