"""Hugging Face folders in and out: safetensors straight into sharded arrays, and back.

Reading touches only the slices that this host's devices hold, one stacked weight at a time; writing brings
one tensor at a time to the host. Neither ever holds the whole model there.
"""

import contextlib
import functools
import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from huggingface_hub import split_state_dict_into_shards_factory
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import SafetensorError, safe_open

from grpojax.host.errors import UserError
from grpojax.models import decoder
from grpojax.models.decoder import Decoder
from grpojax.models.decoder_config import ARCHITECTURES, DecoderConfig, from_hf
from grpojax.models.sharding import check_divides, named


class Key(NamedTuple):
    """Where a checkpoint keeps a weight: its name, ``{}`` for the layer, and whether it is ``[out, in]``."""

    name: str
    transposed: bool = False

    @property
    def stacked(self) -> bool:
        return "{}" in self.name


# Our name -> theirs, read by the loader and by the saver. Qwen 2, Qwen 3 and Llama name their weights alike;
# which of these a model has is the decoder's to say.
KEYS = {
    "embed": Key("model.embed_tokens.weight"),
    "attn_norm": Key("model.layers.{}.input_layernorm.weight"),
    "q": Key("model.layers.{}.self_attn.q_proj.weight", transposed=True),
    "q_bias": Key("model.layers.{}.self_attn.q_proj.bias"),
    "q_norm": Key("model.layers.{}.self_attn.q_norm.weight"),
    "k": Key("model.layers.{}.self_attn.k_proj.weight", transposed=True),
    "k_bias": Key("model.layers.{}.self_attn.k_proj.bias"),
    "k_norm": Key("model.layers.{}.self_attn.k_norm.weight"),
    "v": Key("model.layers.{}.self_attn.v_proj.weight", transposed=True),
    "v_bias": Key("model.layers.{}.self_attn.v_proj.bias"),
    "o": Key("model.layers.{}.self_attn.o_proj.weight", transposed=True),
    "o_bias": Key("model.layers.{}.self_attn.o_proj.bias"),
    "mlp_norm": Key("model.layers.{}.post_attention_layernorm.weight"),
    "gate": Key("model.layers.{}.mlp.gate_proj.weight", transposed=True),
    "gate_bias": Key("model.layers.{}.mlp.gate_proj.bias"),
    "up": Key("model.layers.{}.mlp.up_proj.weight", transposed=True),
    "up_bias": Key("model.layers.{}.mlp.up_proj.bias"),
    "down": Key("model.layers.{}.mlp.down_proj.weight", transposed=True),
    "down_bias": Key("model.layers.{}.mlp.down_proj.bias"),
    "norm": Key("model.norm.weight"),
    "head": Key("lm_head.weight"),
}

# What a safetensors header calls the dtypes that weights may have.
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"

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


class _OnDisk(NamedTuple):
    file: Path
    shape: tuple[int, ...]
    dtype: str


class _Tensor(NamedTuple):
    """What one tensor of a checkpoint holds: our weight ``ours``, of one layer where that is stacked."""

    ours: str
    layer: int | None
    shape: tuple[int, ...]


def _name(tree_path) -> str:
    return [p.key for p in tree_path if isinstance(p, jax.tree_util.DictKey)][-1]


def _by_name(params) -> dict[str, Any]:
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def _file_dtype(dtype) -> np.dtype:
    dtype = jnp.dtype(dtype)
    if dtype.name not in _DTYPES:
        raise UserError(f"weights cannot be {dtype.name}; they can be {', '.join(_DTYPES)}")
    return dtype


def _tensors(params) -> dict[str, _Tensor]:
    """Every tensor of the checkpoint that belongs to a tree of decoder weights, by name."""
    leaves = _by_name(params)
    tensors = {}
    for ours, key in KEYS.items():
        if ours not in leaves:
            continue
        layers = range(leaves[ours].shape[0]) if key.stacked else [None]
        shape = leaves[ours].shape[key.stacked :]
        for layer in layers:
            tensors[key.name.format(layer)] = _Tensor(ours, layer, shape[::-1] if key.transposed else shape)
    return tensors


# ---------------------------------------------------------------------------------------------------- in


def read_config(path: str | os.PathLike) -> DecoderConfig:
    """The decoder that a folder's ``config.json`` describes; the weights need not be there."""
    file = _folder(path) / "config.json"
    return from_hf(_read_json(file), str(file))


def load(path: str | os.PathLike, *, mesh: Mesh | None = None, dtype=None) -> Decoder:
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
    path = _folder(path)
    config = read_config(path)
    _check_mesh(config, mesh)
    graph, abstract = decoder.abstract(config)
    found = _weights_on_disk(path)
    _check_weights(path, config, _tensors(abstract), found)
    dtype = _file_dtype(dtype or jnp.float32)

    def read(tree_path, leaf):
        sharding = named(mesh, decoder.axes_of(tree_path, leaf))
        return _read(found, KEYS[_name(tree_path)], leaf.shape, dtype, sharding)

    params = jax.tree_util.tree_map_with_path(read, abstract)
    return nnx.merge(graph, params)


def _read(
    found: dict[str, _OnDisk], key: Key, shape: tuple[int, ...], dtype, sharding: NamedSharding | None
) -> jax.Array:
    """One weight of ours, all its layers."""
    names = [key.name.format(i) for i in range(shape[0])] if key.stacked else [key.name]
    # Files are open for one weight only: what stays mapped counts as resident memory.
    with contextlib.ExitStack() as stack:
        opened = functools.cache(lambda file: stack.enter_context(_open(file)))
        tensors = [opened(found[name].file).get_slice(name) for name in names]

        @functools.cache  # devices that hold the same part share the buffer
        def part(bounds):
            return _fill(tensors, key, dtype, bounds)

        def callback(index):
            return part(tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True)))

        if sharding is None:
            array = jax.device_put(callback((slice(None),) * len(shape)))
        else:
            array = jax.make_array_from_callback(shape, sharding, callback)
        # A transfer that still runs would keep its host buffers while the next weight is read.
        return array.block_until_ready()


def _fill(tensors: Sequence[Any], key: Key, dtype, bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
    """A part of a weight: ``bounds`` are start and stop of each of our axes; ``tensors`` are on disk."""
    out = np.empty([stop - start for start, stop in bounds], dtype)
    (first, last), *within = bounds if key.stacked else ((0, 1), *bounds)
    index = tuple(slice(*b) for b in (reversed(within) if key.transposed else within))
    for row, tensor in zip(out if key.stacked else [out], tensors[first:last], strict=True):
        row[...] = tensor[index].T if key.transposed else tensor[index]
    return out


def _folder(path) -> Path:
    path = Path(path)
    if not path.is_dir():
        raise UserError(
            f"{path}: no such folder; a model of the hub is downloaded first: hf download OWNER/NAME --local-dir FOLDER"
        )
    return path


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file.parent} has no {file.name}") from None
    except ValueError as e:
        raise UserError(f"{file} is damaged: {e}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} is damaged: it holds no JSON object")
    return content


@contextlib.contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        handle = safe_open(file, framework="np")
    except SafetensorError as e:
        raise UserError(f"{file} is truncated or damaged: {e}") from None
    with handle:
        yield handle


def _weights_on_disk(path: Path) -> dict[str, _OnDisk]:
    """Every tensor in the folder, by name, from the files' headers."""
    if (path / _SINGLE).exists():
        files = [path / _SINGLE]
    elif (path / _INDEX).exists():
        listed = _read_json(path / _INDEX).get("weight_map")
        if not isinstance(listed, dict):
            raise UserError(f"{path / _INDEX} is damaged: it has no 'weight_map'")
        files = [path / name for name in sorted(set(listed.values()))]
        if absent := [f.name for f in files if not f.exists()]:
            raise UserError(f"{path}: {_some(absent)} named in {_INDEX} but not there; download the folder again")
    elif pickles := sorted(f.name for pattern in ("*.bin", "*.pt", "*.pth") for f in path.glob(pattern)):
        raise UserError(
            f"{path} holds pickled weights ({_some(pickles)}), which can run code and are not read; convert:"
            "\ntransformers.AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
        )
    else:
        raise UserError(f"{path} has neither {_SINGLE} nor {_INDEX}")
    found = {}
    for file in files:
        with _open(file) as f:
            for name in f.keys():
                tensor = f.get_slice(name)
                found[name] = _OnDisk(file, tuple(tensor.get_shape()), tensor.get_dtype())
    return found


def _check_weights(path: Path, config: DecoderConfig, wanted: dict[str, _Tensor], found: dict[str, _OnDisk]) -> None:
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
        f"weights other than {', '.join(_DTYPES.values())}": [
            f"{n} {have.dtype}" for n, have, _ in both if have.dtype not in _DTYPES.values()
        ],
    }
    if text := "; ".join(f"{what}: {_some(which)}" for what, which in problems.items() if which):
        raise UserError(f"{path} does not fit its config.json ({config.family}): {text}")


def _some(names: Sequence[str], shown: int = 3) -> str:
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")


def _check_mesh(config: DecoderConfig, mesh: Mesh | None) -> None:
    check_divides(mesh, "num_attention_heads", config.num_heads, ("tensor",))
    check_divides(mesh, "num_key_value_heads", config.num_kv_heads, ("tensor",))
    check_divides(mesh, "intermediate_size", config.intermediate_size, ("tensor",))
    check_divides(mesh, "vocab_size", config.vocab_size, ("tensor",))
    check_divides(mesh, "hidden_size", config.hidden_size, ("fsdp",))


# --------------------------------------------------------------------------------------------------- out


def save(
    path: str | os.PathLike,
    model: Decoder,
    *,
    tokenizer=None,
    source: str | os.PathLike | None = None,
    dtype=None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a folder that transformers (4 and 5), vLLM and `load` read; it appears whole or not at all.

    With several processes all of them call this, and process 0 writes.

    Args:
      path: the new folder; it may exist if it is empty.
      tokenizer: saved with ``save_pretrained``; without one the tokenizer files of ``source`` are copied.
      source: the folder that the model came from. Fields of its ``config.json`` that we do not know are kept,
        and its ``generation_config.json`` is copied.
      dtype: of the files; the weights' own unless given.
      max_shard_bytes: a larger model is written as several files and an index.

    Raises:
      UserError: ``path`` is not empty, ``source`` is no model folder, or the family's ``config.json`` cannot
        express the model's config.
    """
    path = Path(path)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    leaves, tensors = _by_name(params), _tensors(params)
    dtypes = {name: _file_dtype(dtype or leaves[t.ours].dtype) for name, t in tensors.items()}
    shards = split_state_dict_into_shards_factory(
        {name: math.prod(t.shape) * dtypes[name].itemsize for name, t in tensors.items()},
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    lead = jax.process_index() == 0
    with _appearing(path) if lead else contextlib.nullcontext(Path(os.devnull)) as folder:
        if lead:
            config = _config_json(model.config, dtypes["model.embed_tokens.weight"].name, source, tokenizer)
            _write_small_files(folder, config, source, tokenizer)
        for file, names in shards.filename_to_tensors.items():
            with open(folder / file if lead else folder, "wb") as f:
                names = sorted(names, key=lambda n: -dtypes[n].itemsize)  # keeps every tensor aligned
                f.write(_header({n: (dtypes[n], tensors[n].shape) for n in names}))
                for name in names:
                    f.write(_fetch(leaves[tensors[name].ours], tensors[name], dtypes[name]).data)
        if lead and shards.is_sharded:
            _write_json(folder / _INDEX, {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename})
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("grpojax: model folder written")


@contextlib.contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    """A folder beside ``path`` that takes its name when the block ends well and is removed otherwise."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path} already exists and is not an empty folder; export to another one")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)  # of an export that was killed
    draft.mkdir()
    try:
        yield draft
        draft.rename(path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _fetch(leaf: jax.Array, tensor: _Tensor, dtype: np.dtype) -> np.ndarray:
    """One tensor's bytes, as the file has them. Collective where hosts share the weight."""
    everywhere = None
    if not leaf.is_fully_addressable:
        assert isinstance(leaf.sharding, NamedSharding)
        everywhere = NamedSharding(leaf.sharding.mesh, PartitionSpec())
    layer = None if tensor.layer is None else np.int32(tensor.layer)
    value = np.asarray(_one(leaf, layer, dtype=dtype, sharding=everywhere))
    return np.ascontiguousarray(value.T if KEYS[tensor.ours].transposed else value).reshape(-1).view(np.uint8)


@functools.partial(jax.jit, static_argnames=("dtype", "sharding"))
def _one(leaf, layer, *, dtype, sharding):
    value = leaf if layer is None else jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False)
    value = value.astype(dtype)
    return value if sharding is None else jax.lax.with_sharding_constraint(value, sharding)


def _header(tensors: dict[str, tuple[np.dtype, tuple[int, ...]]]) -> bytes:
    """The head of a safetensors file: its own length in 8 bytes, then JSON padded to a multiple of 8."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype.name], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _config_json(config: DecoderConfig, dtype: str, source, tokenizer) -> dict[str, Any]:
    """A ``config.json`` in the spelling of transformers 4 and 5 at once, on top of the source's."""
    if source is not None:
        raw = _read_json(_folder(source) / "config.json")
    else:
        raw = {name: getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    rope: dict[str, Any] = {"rope_type": "default"}
    if s := config.rope_scaling:
        rope = {
            "rope_type": "llama3",
            "factor": s.factor,
            "low_freq_factor": s.low_freq_factor,
            "high_freq_factor": s.high_freq_factor,
            "original_max_position_embeddings": s.original_positions,
        }
    raw |= {
        "architectures": [next(name for name, family in ARCHITECTURES.items() if family == config.family)],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope if config.rope_scaling else None,
        "rope_parameters": rope | {"rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    if config.family != "qwen2":
        raw["attention_bias"] = config.qkv_bias
    if config.family == "llama":
        raw["mlp_bias"] = config.mlp_bias
    if (read := from_hf(raw)) != config:
        lost = [f for f, value in vars(config).items() if getattr(read, f) != value]
        raise UserError(f"a {config.family} config.json cannot express this model's {', '.join(lost)}")
    return raw


def _write_small_files(folder: Path, config: dict[str, Any], source, tokenizer) -> None:
    _write_json(folder / "config.json", config)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        described = _read_json(folder / "tokenizer_config.json")
        if described.get("tokenizer_class") == "TokenizersBackend":  # transformers 4 knows it by its old name only
            _write_json(folder / "tokenizer_config.json", described | {"tokenizer_class": "PreTrainedTokenizerFast"})
    copied = ("generation_config.json", *(_TOKENIZER_FILES if tokenizer is None else ()))
    for name in copied if source is not None else ():
        if (file := Path(source) / name).exists():
            shutil.copyfile(file, folder / name)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# --------------------------------------------------------------------------------------------- tokenizer

# Words, digits, spaces, punctuation, code and several scripts: what tokenizers split differently.
_PROBE = (
    "Hello world! It's 12345.67 + 89 =\n\n\t def f(x):\r\n    return x**2  # \\boxed{42}"
    " naïve A\u030angstro\u0308m, 你好 мир 🙂"
)


def load_tokenizer(path: str | os.PathLike) -> Any:
    """The tokenizer saved in a folder, token for token.

    ``AutoTokenizer`` rebuilds a tokenizer by its model type, which splits a custom one's text differently; so
    ``tokenizer.json`` is loaded as it stands.

    Raises:
      UserError: the folder holds no tokenizer, or a damaged one, or ``tokenizer_config.json`` changes how
        ``tokenizer.json`` splits text.
    """
    import transformers  # slow to import

    path = _folder(path)
    file = path / "tokenizer.json"
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise UserError(f"{path} holds no tokenizer (no tokenizer.json)")
    if not file.exists():
        try:
            return transformers.AutoTokenizer.from_pretrained(path)
        except Exception as e:  # whatever the tokenizers of transformers raise
            raise UserError(f"{path}: the tokenizer cannot be read: {' '.join(str(e).split())[:200]}") from None
    import tokenizers

    try:
        saved = tokenizers.Tokenizer.from_file(str(file))
    except Exception as e:  # tokenizers raises nothing narrower
        raise UserError(f"{file} is damaged: {e}") from None
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    if tokenizer.encode(_PROBE, add_special_tokens=False) != saved.encode(_PROBE, add_special_tokens=False).ids:
        raise UserError(f"{path}: tokenizer_config.json makes transformers split text unlike tokenizer.json alone")
    return tokenizer


def eos_ids(path: str | os.PathLike, tokenizer) -> tuple[int, ...]:
    """Every token that ends a completion, as the generation config, the config and the tokenizer have it.

    Sorted; empty where none of them names one.
    """
    path = _folder(path)
    configs = [_read_json(f) for f in (path / "generation_config.json", path / "config.json") if f.exists()]
    named_ids = [c.get("eos_token_id") for c in configs] + [tokenizer.eos_token_id]
    flat = [i for ids in named_ids for i in (ids if isinstance(ids, list) else [ids])]
    return tuple(sorted({int(i) for i in flat if i is not None}))
