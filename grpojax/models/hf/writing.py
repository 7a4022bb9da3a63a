"""Hugging Face folders out: one tensor at a time comes to the host, and the folder appears whole or not at all."""

import contextlib
import functools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx
from huggingface_hub import split_state_dict_into_shards_factory
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from grpojax.device import Program
from grpojax.host import files
from grpojax.host.errors import UserError
from grpojax.models.decoder import Decoder
from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.hf.config_json import text_part, to_hf
from grpojax.models.hf.folder import model_folder, read_json, write_json
from grpojax.models.hf.weights import (
    DTYPES,
    INDEX,
    Tensor,
    by_name,
    experts_of,
    file_dtype,
    joined,
    joined_shape,
    tensors_of,
)
from grpojax.models.weight_table import DECODER

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


def save(
    path: str | os.PathLike,
    model: Decoder,
    *,
    tokenizer: Any = None,
    source: str | os.PathLike | None = None,
    dtype: DTypeLike | None = None,
    eos_ids: Sequence[int] = (),
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a folder that transformers (4 and 5), vLLM and `load` read; it appears whole or not at all.

    With several processes all of them call this, and process 0 writes.

    Args:
      path: the new folder, local or in a bucket; it may exist if it is empty.
      tokenizer: saved with ``save_pretrained``; without one the tokenizer files of ``source`` are copied.
      source: the folder that the model came from. Fields of its ``config.json`` that we do not know are kept,
        and its ``generation_config.json`` is copied.
      dtype: of the files; the weights' own unless given.
      eos_ids: tokens that end a completion; those that the files of ``source`` do not name are added to
        ``generation_config.json``.
      max_shard_bytes: a larger model is written as several files and an index.

    Raises:
      UserError: ``path`` is not empty, ``source`` is no model folder, or the family's ``config.json`` cannot
        express the model's config.
    """
    path = files.path(path)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    leaves, tensors = by_name(params), tensors_of(params, model.config)
    parts = joined(model.config.family, tensors)
    shapes = {name: joined_shape(model.config.family, name, of, tensors) for name, of in parts.items()}
    dtypes = {
        name: file_dtype(dtype or jnp.result_type(*(leaves[tensors[part].ours].dtype for part in of)))
        for name, of in parts.items()
    }
    shards = split_state_dict_into_shards_factory(
        {name: math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items()},
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    lead = jax.process_index() == 0
    with appearing(path) if lead else contextlib.nullcontext((Path(os.devnull), Path())) as (large, folder):
        if lead:
            config = _config_json(model.config, dtypes["model.embed_tokens.weight"].name, source, tokenizer)
            _write_small_files(folder, config, source, tokenizer, eos_ids)
        for file, names in shards.filename_to_tensors.items():
            with (large / file if lead else large).open("wb") as f:
                names = sorted(names, key=lambda n: -dtypes[n].itemsize)  # keeps every tensor aligned
                f.write(_header({n: (dtypes[n], shapes[n]) for n in names}))
                for whole in names:
                    for together in _in_order(whole, parts[whole]):
                        made = [_fetch(leaves[(t := tensors[part]).ours], t, dtypes[whole]) for part in together]
                        f.write(_bytes(made, across=experts_of(whole, together) > 0))
        if lead and shards.is_sharded:
            write_json(folder / INDEX, {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename})
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("grpojax: model folder written")


def appearing(path: epath.Path) -> contextlib.AbstractContextManager[tuple[Any, Path]]:
    """A folder for large files and one for small, which are ``path`` when the block ends well and are removed
    otherwise; raises `UserError` where there is something already."""
    return _appearing_in_bucket(path) if files.in_bucket(path) else _appearing(path)


@contextlib.contextmanager
def _appearing(path: epath.Path) -> Iterator[tuple[Path, Path]]:
    """A folder next to ``path``, for large files and for small, that takes its name when the block ends well and is
    removed otherwise."""
    place = Path(path)
    _check_free(place.exists() and not (place.is_dir() and not any(place.iterdir())), place)
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = place.with_name(f".{place.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)  # of an export that was killed
    draft.mkdir()
    try:
        yield draft, draft
        draft.rename(place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextlib.contextmanager
def _appearing_in_bucket(path: epath.Path) -> Iterator[tuple[epath.Path, Path]]:
    """``path`` itself for large files, and a local folder for small ones, whose files follow with ``config.json`` last:
    without it a folder is no model's. Until then ``.partial`` says that an export is under way, or was killed."""
    partial = path / ".partial"
    if partial.exists():
        path.rmtree()
    _check_free(path.exists(), path)
    files.make_folder(path)
    files.write(partial, b"")
    try:
        with tempfile.TemporaryDirectory() as small:
            yield path, Path(small)
            for file in sorted(Path(small).iterdir(), key=lambda file: file.name == "config.json"):
                files.write(path / file.name, file.read_bytes())
        partial.unlink(missing_ok=True)  # if the answer was lost, the request that follows finds none
    except BaseException:
        with contextlib.suppress(OSError):
            path.rmtree(missing_ok=True)
        raise


def _check_free(taken: bool, path: Path | epath.Path) -> None:
    if taken:
        raise UserError(f"{path} already exists and is not an empty folder; export to another one")


def _in_order(whole: str, parts: Sequence[str]) -> list[list[str]]:
    """The parts of a tensor in the order of the file, those together whose columns stand in turn."""
    if not (experts := experts_of(whole, parts)):
        return [[part] for part in parts]
    return [list(parts[i::experts]) for i in range(experts)]


def _bytes(parts: Sequence[np.ndarray], *, across: bool) -> Any:
    """The bytes of an array, or ``across`` those of arrays whose outputs are columns and stand in turn."""
    whole = np.stack([x.T for x in parts], -1) if across else parts[0]
    return np.ascontiguousarray(whole).reshape(-1).view(np.uint8).data


def _fetch(leaf: jax.Array, tensor: Tensor, dtype: np.dtype) -> np.ndarray:
    """One tensor, with outputs as rows. Collective where hosts share the weight."""
    everywhere = None
    if not leaf.is_fully_addressable:
        assert isinstance(leaf.sharding, NamedSharding)
        everywhere = NamedSharding(leaf.sharding.mesh, PartitionSpec())
    at = tuple(np.int32(i) for i in tensor.at)
    value = np.asarray(_one(dtype, everywhere)(leaf, at))
    return value.T if DECODER[tensor.ours].transposed else value


@functools.cache  # jax keeps it for every shape
def _one(dtype: np.dtype, everywhere: NamedSharding | None) -> Program:
    placed = None if everywhere is None else lambda leaf, at: everywhere
    return Program("", lambda leaf, at: leaf[at].astype(dtype), out=placed)


def _header(tensors: dict[str, tuple[np.dtype, tuple[int, ...]]]) -> bytes:
    """The head of a safetensors file: its own length in 8 bytes, then JSON padded to a multiple of 8."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype.name], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _config_json(config: DecoderConfig, dtype: str, source: str | os.PathLike | None, tokenizer: Any) -> dict[str, Any]:
    """The ``config.json`` to write, on top of the source's."""
    if source is not None:
        base = text_part(read_json(model_folder(source) / "config.json"))
    else:
        base = {name: getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return to_hf(config, dtype, base)


def _write_small_files(
    folder: Path,
    config: dict[str, Any],
    source: str | os.PathLike | None,
    tokenizer: Any,
    eos_ids: Sequence[int],
) -> None:
    write_json(folder / "config.json", config)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        described = read_json(folder / "tokenizer_config.json")
        if described.get("tokenizer_class") == "TokenizersBackend":  # transformers 4 knows it by its old name only
            write_json(folder / "tokenizer_config.json", described | {"tokenizer_class": "PreTrainedTokenizerFast"})
    if source is not None:
        there = model_folder(source)
        for name in ("generation_config.json", *(_TOKENIZER_FILES if tokenizer is None else ())):
            if (there / name).exists():
                (folder / name).write_bytes(files.read(there / name))
    _write_ends(folder, config, eos_ids)


def _write_ends(folder: Path, config: dict[str, Any], eos_ids: Sequence[int]) -> None:
    """Adds the tokens that end a completion to ``generation_config.json``, where engines would not stop at them."""
    file = folder / "generation_config.json"
    if file.exists():
        described = read_json(file)
    else:  # engines take what they need from config.json then
        described = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config}
    named = described.get("eos_token_id")
    known = named if isinstance(named, list) else [] if named is None else [named]
    if missing := [i for i in eos_ids if i not in known]:
        ends = [*known, *missing]
        write_json(file, described | {"eos_token_id": ends if len(ends) > 1 else ends[0]})
