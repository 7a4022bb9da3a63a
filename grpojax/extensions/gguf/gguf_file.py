"""GGUF files in: llama.cpp's names, layouts and quantisations undone, one stacked weight at a time.

What is written is a Hugging Face folder, so that nothing but `convert` has to know about GGUF. The ``gguf`` package
reads the file and dequantises; tokenizers are in `gguf_tokenizer`.
"""

import os
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from grpojax.extensions.gguf.gguf_tokenizer import special_ids, tokenizer_of
from grpojax.host.errors import UserError
from grpojax.models import decoder
from grpojax.models.decoder_config import DecoderConfig, Llama3Scaling
from grpojax.models.hf.config_json import to_hf
from grpojax.models.hf.folder import write_json
from grpojax.models.hf.weights import file_dtype
from grpojax.models.hf.writing import save
from grpojax.models.layers import rope_frequencies
from grpojax.models.weight_table import DECODER, leaf_name

FAMILIES = ("llama", "qwen2", "qwen3")  # an architecture is called alike in GGUF and here

# Our weight -> its tensor, without ``blk.N.`` and ``.weight`` or ``.bias``.
NAMES = {
    "embed": "token_embd",
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "q_norm": "attn_q_norm",
    "k": "attn_k",
    "k_norm": "attn_k_norm",
    "v": "attn_v",
    "o": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "norm": "output_norm",
    "head": "output",
}
ROPE_FACTORS = "rope_freqs.weight"
# Llama 3's stretching, of which a GGUF file has the outcome only: lowest and highest frequency factor, positions.
LLAMA3 = (1.0, 4.0, 8192)


class GGUFFile:
    """A GGUF file, open for reading.

    Args:
      path: of the file; its tensors are mapped, not read.

    Raises:
      UserError: there is no such file, or it is no GGUF file, or one part of several; the gguf package is missing.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        if not self.path.is_file():
            raise UserError(f"{path}: no such file" + " on a disk; copy it there first" * ("://" in str(path)))
        try:
            import gguf
        except ImportError:
            raise UserError("reading GGUF files needs the gguf package: pip install 'grpojax[gguf]'") from None
        self._dequantize = gguf.quants.dequantize
        try:
            reader = gguf.GGUFReader(self.path)
        except Exception as e:  # ValueError, IndexError, UnicodeDecodeError: whatever bytes elsewhere make it do
            raise UserError(f"{path} is no GGUF file, or is damaged: {' '.join(str(e).split())[:200]}") from None
        self._fields = reader.fields
        self.tensors = {t.name: t for t in reader.tensors}
        if (parts := self.get("split.count", 1)) > 1:
            raise UserError(f"{path} is one of {parts} parts; join them first: llama-gguf-split --merge")

    def get(self, key: str, default: Any = None) -> Any:
        """A field of the metadata; ``default`` where there is none."""
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        """A field of the metadata; raises `UserError` where there is none."""
        if key not in self._fields:
            raise UserError(f"{self.path}: the metadata lack {key!r}")
        return self.get(key)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, rows first (GGUF counts them last); raises `UserError` where there is none."""
        if name not in self.tensors:
            raise UserError(f"{self.path}: missing tensors: {name}")
        return tuple(int(n) for n in reversed(self.tensors[name].shape))

    def read(self, name: str) -> np.ndarray:
        """A tensor as float32; raises `UserError` for a quantisation that the gguf package cannot undo."""
        tensor = self.tensors[name]
        try:
            values = self._dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, KeyError):
            kind = tensor.tensor_type.name
            raise UserError(f"{self.path}: {name} is {kind}, which the gguf package cannot dequantise") from None
        return np.asarray(values, np.float32).reshape(self.shape(name))


def convert(path: str | os.PathLike, folder: str | os.PathLike, *, dtype: DTypeLike = "float32") -> None:
    """Writes a GGUF file's model as a Hugging Face folder; it appears whole or not at all.

    Args:
      path: the file; Llama, Qwen 2 or Qwen 3, with a byte-level BPE tokenizer inside.
      folder: to make; it may exist if it is empty.
      dtype: of the weights written. Quantised weights are 16-bit numbers times small integers: float32 holds them
        exactly, bfloat16 to three digits.

    Raises:
      UserError: the file cannot be read; its architecture, an option, a tensor or its tokenizer is one that this
        package does not have; tensors are missing; or ``folder`` is not empty.
    """
    if Path(folder).exists() and not (Path(folder).is_dir() and not any(Path(folder).iterdir())):
        raise UserError(f"{folder} already exists and is not an empty folder; convert to another one")  # before reading
    file = GGUFFile(path)
    config = config_of(file)
    tokenizer = tokenizer_of(file)
    model = _model(file, config, file_dtype(dtype))
    ids = special_ids(file)
    with tempfile.TemporaryDirectory() as source:
        write_json(Path(source) / "config.json", to_hf(config, jnp.dtype(dtype).name, ids))
        write_json(Path(source) / "generation_config.json", ids)
        save(folder, model, tokenizer=tokenizer, source=source)


def config_of(file: GGUFFile) -> DecoderConfig:
    """The decoder that a file's metadata and tensors describe.

    Raises:
      UserError: an architecture or an option that this decoder does not have, or something missing.
    """
    family = file.need("general.architecture")
    if family not in FAMILIES:
        raise UserError(f"{file.path}: unknown architecture {family!r}; known: {', '.join(FAMILIES)}")

    def need(key: str) -> Any:
        return file.need(f"{family}.{key}")

    def get(key: str, default: Any) -> Any:
        return file.get(f"{family}.{key}", default)

    hidden, heads = int(need("embedding_length")), need("attention.head_count")
    kv_heads = get("attention.head_count_kv", heads)
    if not isinstance(heads, int) or not isinstance(kv_heads, int):
        raise UserError(f"{file.path}: layers with different numbers of heads are not supported")
    if kv_heads < 1 or heads % kv_heads:
        raise UserError(
            f"{file.path}: {family}.attention.head_count={heads} does not divide by {family}.attention.head_count_kv="
            f"{kv_heads}\nthe file is damaged; download or convert it again"
        )
    head_dim = int(get("attention.key_length", hidden // heads))
    for key, only in (
        ("attention.value_length", head_dim),
        ("rope.dimension_count", head_dim),
        ("rope.scaling.type", "none"),
        ("rope.scale_linear", 1.0),
        ("expert_count", 0),
        ("attention.sliding_window", 0),
    ):
        if (value := get(key, only)) != only:
            raise UserError(f"{file.path}: {family}.{key}={value!r} is not supported; supported: {only!r}")
    theta = float(get("rope.freq_base", 1e4))
    return DecoderConfig(
        family=family,
        vocab_size=file.shape("token_embd.weight")[0],
        hidden_size=hidden,
        intermediate_size=int(need("feed_forward_length")),
        num_layers=int(need("block_count")),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=theta,
        rope_scaling=_rope_scaling(file, head_dim, theta),
        norm_eps=float(f"{need('attention.layer_norm_rms_epsilon'):.6g}"),  # 1e-05, not its float32's 9.99999975e-06
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm=family == "qwen3",
        max_positions=int(need("context_length")),
    )


def _rope_scaling(file: GGUFFile, head_dim: int, theta: float) -> Llama3Scaling | None:
    """Llama 3's stretching, from the factor of each frequency that the file has."""
    if ROPE_FACTORS not in file.tensors:
        return None
    factors = file.read(ROPE_FACTORS)
    low, high, positions = LLAMA3
    scaling = Llama3Scaling(
        factor=float(factors.max()), low_freq_factor=low, high_freq_factor=high, original_positions=positions
    )
    slowed = rope_frequencies(head_dim, theta, None) / rope_frequencies(head_dim, theta, scaling)
    if factors.shape != slowed.shape or not np.allclose(factors, slowed, rtol=1e-4):
        raise UserError(
            f"{file.path}: {ROPE_FACTORS} are not Llama 3's for {positions} positions; other scalings are not supported"
        )
    return scaling


def _tensor_name(ours: str, layer: int | None) -> str:
    stem = ours.removesuffix("_bias")
    name = NAMES[stem] + (".bias" if ours.endswith("_bias") else ".weight")
    return name if layer is None else f"blk.{layer}.{name}"


def _model(file: GGUFFile, config: DecoderConfig, dtype: np.dtype) -> decoder.Decoder:
    """The decoder with the file's weights."""
    graph, abstract = decoder.abstract(config)
    wanted: dict[str, tuple[int, ...]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract):
        wanted |= dict.fromkeys(_names(leaf_name(path), leaf.shape), _shape(leaf_name(path), leaf.shape))
    _check(file, wanted)

    def read(path: tuple[Any, ...], leaf: Any) -> jax.Array:
        ours = leaf_name(path)
        weight, out = DECODER[ours], np.empty(leaf.shape, dtype)
        for row, name in zip(out if weight.stacked else [out], _names(ours, leaf.shape), strict=True):
            values = _natural(file.read(name), ours, config)
            row[...] = values.T if weight.transposed else values
        return jnp.asarray(out)

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(read, abstract))


def _names(ours: str, shape: tuple[int, ...]) -> list[str]:
    layers: Collection[int | None] = range(shape[0]) if DECODER[ours].stacked else [None]
    return [_tensor_name(ours, layer) for layer in layers]


def _shape(ours: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """What each tensor of a weight must have."""
    within = shape[DECODER[ours].stacked :]
    return within[::-1] if DECODER[ours].transposed else within


def _check(file: GGUFFile, wanted: dict[str, tuple[int, ...]]) -> None:
    """Raises `UserError` unless the file has the tensors wanted and no others."""
    problems = {
        "missing tensors": [n for n in wanted if n not in file.tensors],
        "unknown tensors": [n for n in file.tensors if n not in wanted and n != ROPE_FACTORS],
        "tensors of another shape": [
            f"{n} {list(file.shape(n))} (expected {list(shape)})"
            for n, shape in wanted.items()
            if n in file.tensors and file.shape(n) != shape
        ],
    }
    for what, which in problems.items():
        if which:
            more = f" and {len(which) - 3} more" if len(which) > 3 else ""
            raise UserError(f"{file.path}: {what}: {', '.join(which[:3])}{more}")


def _natural(values: np.ndarray, ours: str, config: DecoderConfig) -> np.ndarray:
    """Rows of q and k as transformers has them.

    A rotary pair is the dimensions i and i + d/2 there; llama.cpp's Llama has the two side by side, as 2i and 2i + 1.
    """
    heads = {"q": config.num_heads, "k": config.num_kv_heads}.get(ours.removesuffix("_bias"))
    if config.family != "llama" or heads is None:
        return values
    pairs = values.reshape(heads, config.head_dim // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
