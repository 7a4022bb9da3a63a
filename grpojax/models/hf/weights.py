"""The tensors of a checkpoint: which ours stand for, and which a folder has."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from grpojax.host import files
from grpojax.host.errors import UserError
from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.hf.config_json import read_json
from grpojax.models.hf.in_bucket import TensorFile
from grpojax.models.weight_table import DECODER, axes_of, leaf_name

# What a safetensors header calls the dtypes that weights may have.
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class OnDisk(NamedTuple):
    """Where a tensor is, from the header of its file."""

    file: epath.Path
    shape: tuple[int, ...]
    dtype: str


class Tensor(NamedTuple):
    """What one tensor of a checkpoint holds: our weight ``ours``, of one layer where that is stacked."""

    ours: str
    layer: int | None
    shape: tuple[int, ...]


def by_name(params: Any) -> dict[str, Any]:
    """The leaves of a tree of decoder weights, by the table's names; raises `ValueError` for one that it lacks."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        axes_of(path, leaf)
        leaves[leaf_name(path)] = leaf
    return leaves


def file_dtype(dtype: DTypeLike) -> np.dtype:
    """A dtype that files can have; raises `UserError` for others."""
    dtype = jnp.dtype(dtype)
    if dtype.name not in DTYPES:
        raise UserError(f"weights cannot be {dtype.name}; they can be {', '.join(DTYPES)}")
    return dtype


def tensors_of(params: Any) -> dict[str, Tensor]:
    """Every tensor of the checkpoint that belongs to a tree of decoder weights, by name."""
    leaves = by_name(params)
    tensors = {}
    for ours, weight in DECODER.items():
        if ours not in leaves:
            continue
        shape = leaves[ours].shape[weight.stacked :]
        for layer, name in enumerate(names_of(ours, leaves[ours].shape)):
            tensors[name] = Tensor(ours, layer if weight.stacked else None, shape[::-1] if weight.transposed else shape)
    return tensors


def names_of(ours: str, shape: tuple[int, ...]) -> list[str]:
    """The tensors that hold a weight of ours with this shape: one, or one a layer."""
    weight = DECODER[ours]
    assert weight.name is not None  # every weight of a decoder has one
    return [weight.name.format(i) for i in range(shape[0])] if weight.stacked else [weight.name]


@contextlib.contextmanager
def open_file(file: epath.Path) -> Iterator[Any]:
    """A safetensors file, open for reading; raises `UserError` where it is damaged."""
    if files.in_bucket(file):
        yield TensorFile(file)
        return
    try:
        handle = safe_open(str(file), framework="np")
    except SafetensorError as e:
        raise UserError(f"{file} is truncated or damaged: {e}") from None
    with handle:
        yield handle


def weights_on_disk(path: epath.Path) -> dict[str, OnDisk]:
    """Every tensor in the folder, by name, from the files' headers."""
    if (path / SINGLE).exists():
        shards = [path / SINGLE]
    elif (path / INDEX).exists():
        listed = read_json(path / INDEX).get("weight_map")
        if not isinstance(listed, dict):
            raise UserError(f"{path / INDEX} is damaged: it has no 'weight_map'")
        shards = [path / name for name in sorted(set(listed.values()))]
        if absent := [f.name for f in shards if not f.exists()]:
            raise UserError(f"{path}: {_some(absent)} named in {INDEX} but not there; download the folder again")
    elif pickles := [f.name for f in files.listing(path) if f.suffix in (".bin", ".pt", ".pth")]:
        raise UserError(
            f"{path} holds pickled weights ({_some(pickles)}), which can run code and are not read; convert:"
            "\ntransformers.AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
        )
    else:
        raise UserError(f"{path} has neither {SINGLE} nor {INDEX}")
    found = {}
    for file in shards:
        with open_file(file) as f:
            for name in f.keys():
                tensor = f.get_slice(name)
                found[name] = OnDisk(file, tuple(tensor.get_shape()), tensor.get_dtype())
    return found


def check_weights(path: epath.Path, config: DecoderConfig, wanted: dict[str, Tensor], found: dict[str, OnDisk]) -> None:
    """Raises `UserError` unless the tensors on disk are those, of those shapes, that the config calls for."""
    ignored = {"lm_head.weight"} if config.tie_embeddings else set()
    both = [(name, found[name], wanted[name]) for name in wanted if name in found]
    problems = {
        "missing weights": [n for n in wanted if n not in found],
        "unknown weights": [
            n for n in found if n not in wanted and n not in ignored and not n.endswith("rotary_emb.inv_freq")
        ],
        "weights of another shape": [
            f"{n} {list(have.shape)} (config: {list(want.shape)})" for n, have, want in both if have.shape != want.shape
        ],
        f"weights other than {', '.join(DTYPES.values())}": [
            f"{n} {have.dtype}" for n, have, _ in both if have.dtype not in DTYPES.values()
        ],
    }
    if text := "; ".join(f"{what}: {_some(which)}" for what, which in problems.items() if which):
        raise UserError(f"{path} does not fit its config.json ({config.family}): {text}")


def _some(names: Sequence[str], shown: int = 3) -> str:
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")
