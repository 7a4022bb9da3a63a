"""Hugging Face folders in: safetensors straight into sharded arrays.

Only the slices that this host's devices hold are read, one stacked weight at a time, so that the whole model never
stands on the host.
"""

import contextlib
import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from grpojax.models import decoder
from grpojax.models.decoder import Decoder
from grpojax.models.hf.config_json import model_folder, read_config
from grpojax.models.hf.weights import (
    OnDisk,
    check_weights,
    file_dtype,
    names_of,
    open_file,
    tensors_of,
    weights_on_disk,
)
from grpojax.models.sharding import named
from grpojax.models.weight_table import DECODER, Weight, axes_of, check_mesh, leaf_name


def load(path: str | os.PathLike, *, mesh: Mesh | None = None, dtype: DTypeLike | None = None) -> Decoder:
    """Reads a Hugging Face folder (Qwen 2, Qwen 3 or Llama; bf16, f16 or f32 safetensors).

    The ``lm_head.weight`` of a checkpoint with tied embeddings is ignored, and so are ``rotary_emb.inv_freq``
    buffers.

    Args:
      path: a local folder with ``config.json`` and ``model.safetensors``, or shards and their index.
      mesh: cut the weights over it as `grpojax.models.sharding.TRAIN` says; None puts them on the default device.
      dtype: of the weights; float32 (master weights) unless given.

    Raises:
      UserError: the folder, its config or a file is missing or damaged, weights and config disagree, or the
        model's sizes do not divide over the mesh.
    """
    path = model_folder(path)
    config = read_config(path)
    check_mesh(config, mesh)
    graph, abstract = decoder.abstract(config)
    found = weights_on_disk(path)
    check_weights(path, config, tensors_of(abstract), found)
    dtype = file_dtype(dtype or jnp.float32)

    def read(tree_path, leaf):
        sharding = named(mesh, axes_of(tree_path, leaf))
        return _read(found, leaf_name(tree_path), leaf.shape, dtype, sharding)

    params = jax.tree_util.tree_map_with_path(read, abstract)
    return nnx.merge(graph, params)


def _read(
    found: dict[str, OnDisk], ours: str, shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding | None
) -> jax.Array:
    """One weight of ours, all its layers."""
    weight, names = DECODER[ours], names_of(ours, shape)
    # Files are open for one weight only: what stays mapped counts as resident memory.
    with contextlib.ExitStack() as stack:
        opened = functools.cache(lambda file: stack.enter_context(open_file(file)))
        tensors = [opened(found[name].file).get_slice(name) for name in names]

        @functools.cache  # devices that hold the same part share the buffer
        def part(bounds):
            return _fill(tensors, weight, dtype, bounds)

        def callback(index):
            return part(tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True)))

        if sharding is None:
            array = jax.device_put(callback((slice(None),) * len(shape)))
        else:
            array = jax.make_array_from_callback(shape, sharding, callback)
        # A transfer that still runs would keep its host buffers while the next weight is read.
        return array.block_until_ready()


def _fill(tensors: Sequence[Any], weight: Weight, dtype: np.dtype, bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
    """A part of a weight: ``bounds`` are start and stop of each of our axes; ``tensors`` are on disk."""
    out = np.empty([stop - start for start, stop in bounds], dtype)
    (first, last), *within = bounds if weight.stacked else ((0, 1), *bounds)
    index = tuple(slice(*b) for b in (reversed(within) if weight.transposed else within))
    for row, tensor in zip(out if weight.stacked else [out], tensors[first:last], strict=True):
        row[...] = tensor[index].T if weight.transposed else tensor[index]
    return out
