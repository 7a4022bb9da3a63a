"""The tensors of a checkpoint: which ours stand for, and which a folder has."""

import contextlib
import re
from collections.abc import Container, Iterator, Mapping, Sequence
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
from grpojax.models.hf.families import FAMILIES
from grpojax.models.hf.folder import MERGE, damaged, read_json
from grpojax.models.hf.in_bucket import TensorFile
from grpojax.models.hf.tensor_part import OnDisk
from grpojax.models.weight import WeightTable
from grpojax.models.weight_table import DECODER, axes_of, layers_with, leaf_name

# What a safetensors header calls the dtypes that weights may have.
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"

# What torch.compile, FSDP and activation checkpointing put into the names of the weights that they wrap.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_CONVERT = "transformers.AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
# Files that stand next to weights: other people's and our own.
_NO_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state|token_head).*")


class Tensor(NamedTuple):
    """What one tensor of a checkpoint holds: our weight ``ours`` at ``at``, a layer or a layer and an expert."""

    ours: str
    at: tuple[int, ...]
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


def tensors_of(params: Any, config: DecoderConfig) -> dict[str, Tensor]:
    """Every tensor of the checkpoint that belongs to a tree of decoder weights, by name."""
    leaves = by_name(params)
    tensors = {}
    for ours, weight in DECODER.items():
        if ours not in leaves:
            continue
        shape = leaves[ours].shape[weight.lead :]
        for at, name in names_of(ours, leaves[ours].shape, config).items():
            tensors[name] = Tensor(ours, at, shape[::-1] if weight.transposed else shape)
    return tensors


def names_of(
    ours: str, shape: tuple[int, ...], config: DecoderConfig, table: WeightTable = DECODER
) -> dict[tuple[int, ...], str]:
    """The tensors that hold a weight of ours with this shape, by their place in it: one, one a layer, or one a layer
    and expert.

    Example:
      >>> config = DecoderConfig(family="qwen2", vocab_size=7, hidden_size=8, intermediate_size=3, num_layers=2,
      ...                        num_heads=1, num_kv_heads=1, head_dim=4, rope_theta=1e4)
      >>> names_of("norm", (7,), config), names_of("q_bias", (2, 7), config)[1,]
      ({(): 'model.norm.weight'}, 'model.layers.1.self_attn.q_proj.bias')
    """
    weight, layers = table[ours], layers_with(table[ours], config)
    name = weight.name or ""  # every weight of a decoder has one
    return {at: name.format(*(layers[i] for i in at[:1]), *at[1:]) for at in np.ndindex(shape[: weight.lead])}


def joined(family: str, tensors: Mapping[str, Tensor], found: Container[str] = ()) -> dict[str, list[str]]:
    """The tensors of a family's folder: of each the names of ours that it holds, as
    `grpojax.models.hf.family.Tensors` says. ``found`` are those that are there, if there is a folder yet.

    Example:
      >>> tensors = {f"model.layers.0.self_attn.{x}_proj.weight": Tensor(x, (0,), (2, 3)) for x in "qkvo"}
      >>> [(name, len(parts)) for name, parts in joined("phi3", tensors).items()]
      [('model.layers.0.self_attn.qkv_proj.weight', 3), ('model.layers.0.self_attn.o_proj.weight', 1)]
    """
    names, in_one = FAMILIES[family].tensors.names, FAMILIES[family].tensors.names_in_one
    usual, other = (_by_whole(tensors, patterns) for patterns in (names, {**names, **in_one}))
    return other if any(whole in found for whole in other.keys() - usual.keys()) else usual


def _by_whole(tensors: Mapping[str, Tensor], patterns: Mapping[str, str]) -> dict[str, list[str]]:
    wholes: dict[str, list[str]] = {}
    for name in tensors:
        whole = name
        for pattern, into in patterns.items():
            whole = re.sub(pattern, into, whole)
        wholes.setdefault(whole, []).append(name)
    return wholes


def experts_of(whole: str, parts: Sequence[str]) -> int:
    """How many experts a tensor has along its first axis; 0 if it has no such axis."""
    numbers = [_NUMBER.findall(name) for name in parts]
    return len({n[-1] for n in numbers}) if len(numbers[0]) > len(_NUMBER.findall(whole)) else 0


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def joined_shape(family: str, whole: str, parts: Sequence[str], tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
    """The shape of a tensor that has the rows of these, or all experts' in one."""
    shapes, experts = [tensors[name].shape for name in parts], experts_of(whole, parts)
    of_each = (sum(shape[0] for shape in shapes) // max(experts, 1), *shapes[0][1:])
    if not experts:
        return of_each
    return (experts, *(of_each[::-1] if FAMILIES[family].tensors.in_turn else of_each))


def parts_on_disk(family: str, wanted: Mapping[str, Tensor], found: Mapping[str, OnDisk]) -> dict[str, OnDisk]:
    """Where each tensor of ours is, out of those of a folder that `check_weights` has passed."""
    out, in_turn = {}, FAMILIES[family].tensors.in_turn
    for whole, parts in joined(family, wanted, found).items():
        experts = experts_of(whole, parts)
        firsts = dict.fromkeys(range(experts or 1), 0)
        for i, name in enumerate(parts):
            there, rows = found[whole]._replace(shape=wanted[name].shape), wanted[name].shape[0]
            expert = i % experts if experts else 0
            if not experts:
                out[name] = there._replace(first=firsts[0])
            elif in_turn:
                step, across = len(parts) // experts, len(wanted[name].shape) == 2
                out[name] = there._replace(first=i // experts, step=step, expert=expert, across=across)
            else:
                out[name] = there._replace(first=firsts[expert], expert=expert)
            firsts[expert] += rows
    return out


def unpacked(family: str, found: dict[str, OnDisk]) -> dict[str, OnDisk]:
    """The tensors of a folder, with those that quantised ones stand for in their place."""
    for unpack in FAMILIES[family].tensors.unpack.values():
        found = unpack(found)
    return found


@contextlib.contextmanager
def open_file(file: epath.Path) -> Iterator[Any]:
    """A safetensors file, open for reading; raises `UserError` where it is damaged."""
    if files.in_bucket(file):
        yield TensorFile(file)
        return
    try:
        handle = safe_open(str(file), framework="np")
    except SafetensorError as e:
        raise damaged(file, e) from None
    except OSError as e:
        raise UserError(f"{file} cannot be read: {e}") from None
    with handle:
        yield handle


def plain_name(name: str) -> str:
    """A tensor's name without what wrappers put in front of it, and with the ``model.`` that a bare trunk lacks.

    Example:
      >>> plain_name("module._orig_mod.model.layers.0.mlp.up_proj.weight")
      'model.layers.0.mlp.up_proj.weight'
      >>> plain_name("base_model.model.lm_head.weight"), plain_name("norm.weight")
      ('lm_head.weight', 'model.norm.weight')
    """
    plain = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    plain = re.sub(r"^(module\.)*(base_model\.model\.)?", "", plain)
    return f"model.{plain}" if re.match(r"(layers|embed_tokens|norm)\.", plain) else plain


def weights_on_disk(path: epath.Path) -> dict[str, OnDisk]:
    """Every tensor in the folder, by its plain name, from the files' headers."""
    found: dict[str, OnDisk] = {}
    for file in _weight_files(path):
        with open_file(file) as f:
            for name in f.keys():
                tensor, plain = f.get_slice(name), plain_name(name)
                if plain in found:
                    other = found[plain]
                    raise UserError(
                        f"{path}: {other.name} in {other.file.name} and {name} in {file.name} are the same weight; "
                        "remove the one that is left over, or download the folder again"
                    )
                found[plain] = OnDisk(file, name, tuple(tensor.get_shape()), tensor.get_dtype())
    return found


def _weight_files(path: epath.Path) -> list[epath.Path]:
    """The safetensors files of a folder, as transformers finds them; raises `UserError` where it has none."""
    if (path / SINGLE).exists():
        return [path / SINGLE]
    if (path / INDEX).exists():
        listed = read_json(path / INDEX).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
            raise damaged(path / INDEX, "it has no 'weight_map' of files")
        shards = [path / name for name in sorted(set(listed.values()))]
        if absent := [f.name for f in shards if not f.exists()]:
            raise UserError(f"{path}: {_some(absent)} named in {INDEX} but not there; download the folder again")
        return shards
    names = [f.name for f in files.listing(path) if not _NO_WEIGHTS.fullmatch(f.name)]
    tensors = [name for name in names if name.endswith(".safetensors")]
    none = f"{path} has neither {SINGLE} nor {INDEX}"
    if any(name.startswith("adapter_model.") for name in names):
        raise UserError(f"{none} but an adapter, without the base that it belongs to; merge it with peft:\n{MERGE}")
    if any(re.fullmatch(r"model-\d+-of-\d+\.safetensors", name) for name in tensors):
        raise UserError(f"{none}; its {_some(tensors)} need the index: download {INDEX} too")
    if any(name.startswith("consolidated") for name in names):
        raise UserError(f"{none}; consolidated.* is in a layout of its makers' own: download the files named model*")
    if tensors:
        raise UserError(f"{none}; it has {_some(tensors)}: rename what holds the weights to {SINGLE}")
    if pickles := [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]:
        raise UserError(
            f"{path} holds pickled weights ({_some(pickles)}), which can run code and are not read; convert:"
            f"\n{_CONVERT}"
        )
    if gguf := [name for name in names if name.endswith(".gguf")]:
        raise UserError(f"{none}; convert the GGUF file: grpojax convert {path / gguf[0]} --to NEW_FOLDER")
    raise UserError(f"{none}; download the weights too (it has {_some(names) or 'no files'})")


def of_text(family: str, found: Mapping[str, OnDisk], layers: int) -> dict[str, OnDisk]:
    """The tensors of the text part with this number of layers, under the names that they have in a model of text only.

    Example:
      >>> list(of_text("gemma3_text", dict.fromkeys(["language_model.model.norm.weight", "vision_tower.scale"]), 3))
      ['model.norm.weight']
    """
    if FAMILIES[family].tensors.further_layers:
        numbers = {name: re.match(r"model\.layers\.(\d+)\.", name) for name in found}
        found = {name: there for name, there in found.items() if not (n := numbers[name]) or int(n[1]) < layers}
    if (images := FAMILIES[family].with_images) is None:
        return dict(found)
    kept = {name: there for name, there in found.items() if not re.match(images.unread, name)}
    return {_of_text(name): there for name, there in kept.items()}


def _of_text(name: str) -> str:
    name = re.sub(r"^(model\.)?language_model\.(model\.)?", "model.", name)
    return name.removeprefix("model.") if name.startswith("model.lm_head.") else name


def resolve_head(path: epath.Path, config: DecoderConfig, found: dict[str, OnDisk]) -> None:
    """Leaves one tensor in ``found`` for both sides of tied embeddings, under the embedding's name.

    Raises:
      UserError: both are there and differ: transformers 5 would take them for a model that is not tied, 4 would not.
    """
    if not config.tie_embeddings or HEAD not in found:
        return
    head = found.pop(HEAD)
    embed = found.setdefault(EMBED, head)
    if embed.dtype in DTYPES.values() and not _same(embed, head):
        raise UserError(
            f"{path}: {HEAD} differs from {EMBED}, but config.json has tie_word_embeddings: true;"
            f"\nset it to false if the model has an output head of its own, or remove {HEAD}"
        )


def _same(one: OnDisk, other: OnDisk) -> bool:
    """Whether two tensors hold the same numbers; some rows at a time."""
    if one == other:
        return True
    if one.shape != other.shape or len(one.shape) != 2 or not {one.dtype, other.dtype} <= set(DTYPES.values()):
        return False
    with open_file(one.file) as first, open_file(other.file) as second:
        a, b = first.get_slice(one.name), second.get_slice(other.name)
        rows, columns = one.shape
        parts = [(slice(at, min(at + _ROWS, rows)), slice(0, columns)) for at in range(0, rows, _ROWS)]
        return all(np.array_equal(a[part].astype(np.float32), b[part].astype(np.float32)) for part in parts)


_ROWS = 4096  # of an embedding, compared at once


def check_weights(path: epath.Path, config: DecoderConfig, wanted: dict[str, Tensor], found: dict[str, OnDisk]) -> None:
    """Raises `UserError` unless the tensors on disk are those, of those shapes, that the config calls for."""
    names = joined(config.family, wanted, found)
    shapes = {name: joined_shape(config.family, name, parts, wanted) for name, parts in names.items()}
    both = [(name, found[name], shapes[name]) for name in shapes if name in found]
    problems = {
        "missing weights": [n for n in shapes if n not in found],
        "unknown weights": [found[n].name for n in found if n not in shapes and not n.endswith("rotary_emb.inv_freq")],
        "weights of another shape": [
            f"{n} {list(have.shape)} (config: {list(want)})" for n, have, want in both if have.shape != want
        ],
        f"weights other than {', '.join(DTYPES.values())}": [
            f"{n} {have.dtype}" for n, have, _ in both if have.dtype not in DTYPES.values()
        ],
    }
    if text := "; ".join(f"{what}: {_some(which)}" for what, which in problems.items() if which):
        raise UserError(f"{path} does not fit its config.json ({config.family}): {text}\n{_remedy(shapes, found)}")


def _remedy(wanted: Mapping[str, Any], found: Mapping[str, OnDisk]) -> str:
    """What to do about a folder whose weights are not those that its config calls for."""
    strange = [name for name in found if name not in wanted]
    if any(re.search(r"\.(lora_|base_layer\.|modules_to_save\.)", name) for name in strange):
        return f"they hold an adapter that is not merged; merge it with peft: {MERGE}"
    packed = (
        r"\.(qweight|qzeros|g_idx|scales|absmax|weight_packed|weight_scale\w*|SCB)$|\.(absmax|quant_map|quant_state)"
    )
    dtypes = {tensor.dtype for name, tensor in found.items() if name in wanted} - set(DTYPES.values())
    if dtypes - {"F64"} or any(re.search(packed, name) for name in strange):
        return "quantised weights are not read; take the folder of the model before it was quantised"
    if dtypes:
        return f"convert: {_CONVERT}"
    if [name for name in wanted if name not in found] == [HEAD]:
        return "set tie_word_embeddings to true if the output head is the embedding, or download the folder again"
    return "the config is another model's, or files are of another; download the folder again"


def _some(names: Sequence[str], shown: int = 3) -> str:
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")
