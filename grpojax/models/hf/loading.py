"""Hugging Face folders in: safetensors straight into sharded arrays.

It reads one tensor of the files after the other, and only the parts for this host's devices. The host never holds the
whole model: only its own shards and, for a folder in a bucket, one tensor.
"""

import contextlib
import functools
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from grpojax.models import decoder
from grpojax.models.decoder import Decoder
from grpojax.models.hf.config_json import read_config
from grpojax.models.hf.folder import model_folder
from grpojax.models.hf.tensor_part import OnDisk, TensorPart
from grpojax.models.hf.tokenizer import fit_tokenizer
from grpojax.models.hf.weights import (
    check_weights,
    file_dtype,
    names_of,
    of_text,
    open_file,
    parts_on_disk,
    resolve_head,
    tensors_of,
    unpacked,
    weights_on_disk,
)
from grpojax.models.weight import Weight
from grpojax.models.weight_table import DECODER, axes_of, check_mesh, leaf_name
from grpojax.sharding import named

Bounds = tuple[tuple[int, int], ...]  # start and stop of each axis


def load(
    path: str | os.PathLike, *, tokenizer: Any = None, mesh: Mesh | None = None, dtype: DTypeLike | None = None
) -> Decoder:
    """Reads a Hugging Face folder (`grpojax.models.hf.families`; bf16, f16 or f32 safetensors).

    Weights may have the names that ``torch.compile``, DDP, FSDP or peft give them, or lack the ``model.`` in front.
    With tied embeddings, ``lm_head.weight`` may be there if it equals them. ``rotary_emb.inv_freq`` is ignored, and so
    are the weights for images of a model whose text part is read.

    Args:
      path: a folder, local or in a bucket, with ``config.json`` and ``model.safetensors``, or shards and their index.
      tokenizer: the model's tokenizer (`load_tokenizer`). Embedding rows that are none of its ids are never drawn. None
        treats every row as a token.
      mesh: shard the weights over it by `grpojax.sharding.TRAIN`; None puts them on the default device.
      dtype: type of the weights, by default float32 (master weights). Weights that are `exact` are always float32.

    Raises:
      UserError: the folder, its config or a file is missing or damaged, a weight is NaN or infinite, weights and config
        disagree, the model's sizes do not divide over the mesh, or the tokenizer has ids beyond the embedding.
    """
    path = model_folder(path)
    config = read_config(path)
    if tokenizer is not None:
        config = fit_tokenizer(config, tokenizer, path)
    check_mesh(config, mesh)
    graph, abstract = decoder.abstract(config)
    found = unpacked(config.family, of_text(config.family, weights_on_disk(path), config.num_layers))
    resolve_head(path, config, found)
    wanted = tensors_of(abstract, config)
    check_weights(path, config, wanted, found)
    found = parts_on_disk(config.family, wanted, found)
    dtype = file_dtype(dtype or jnp.float32)

    def read(tree_path, leaf):
        ours, sharding = leaf_name(tree_path), named(mesh, axes_of(tree_path, leaf))
        kept = np.dtype(np.float32) if DECODER[ours].exact else dtype
        return _read(found, ours, names_of(ours, leaf.shape, config), leaf.shape, kept, sharding)

    params = jax.tree_util.tree_map_with_path(read, abstract)
    return nnx.merge(graph, params)


def _read(
    found: dict[str, OnDisk],
    ours: str,
    names: Mapping[tuple[int, ...], str],
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: NamedSharding | None,
) -> jax.Array:
    """One weight of ours, all its layers. ``names`` are those of `names_of`."""
    weight = DECODER[ours]
    indices = [None] if sharding is None else sharding.addressable_devices_indices_map(shape).values()
    rows = -1 if weight.transposed else weight.lead  # the axis of ours that a file's rows are
    # Devices that hold the same part share its buffer. In the order of a file's rows, each of them is fetched once.
    bounds = sorted({_bounds(index, shape) for index in indices}, key=lambda b: (b[rows], b))
    parts = {b: np.empty([stop - start for start, stop in b], dtype) for b in bounds}
    # Files are open for one weight only: what stays mapped counts as resident memory.
    with contextlib.ExitStack() as stack:
        opened = functools.cache(lambda file: stack.enter_context(open_file(file)))
        for at, name in names.items():
            _fill(parts, at, TensorPart(found[name], opened), weight)
        if sharding is None:
            array = jax.device_put(parts[bounds[0]])
        else:
            array = jax.make_array_from_callback(shape, sharding, lambda index: parts[_bounds(index, shape)])
        # A transfer that still runs would keep its host buffers while the next weight is read.
        return array.block_until_ready()


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Bounds:
    """What a device holds; None is all."""
    index = index or (slice(None),) * len(shape)
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def _fill(parts: Mapping[Bounds, np.ndarray], at: tuple[int, ...], tensor: TensorPart, weight: Weight) -> None:
    """The parts of one layer, each from start to stop of each of our axes, out of its tensor on disk."""
    for bounds, part in parts.items():
        lead, within = bounds[: weight.lead], bounds[weight.lead :]
        if not all(first <= i < last for i, (first, last) in zip(at, lead, strict=True)):
            continue
        values = tensor[tuple(slice(*b) for b in (reversed(within) if weight.transposed else within))]
        place = tuple(i - first for i, (first, _) in zip(at, lead, strict=True))
        part[place][...] = values.T if weight.transposed else values
