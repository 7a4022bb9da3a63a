"""Adapters in and out of folders as peft has them: ``adapter_config.json`` and ``adapter_model.safetensors``."""

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import jax
import numpy as np
import safetensors.numpy
from etils import epath

from grpojax.device import Device, Real
from grpojax.extensions.adapters.adapter_config import LINEAR, AdapterConfig, Target
from grpojax.extensions.adapters.factors import FACTORS, abstract
from grpojax.host import files, processes
from grpojax.host.errors import UserError
from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.hf.config_json import text_part
from grpojax.models.hf.folder import ADAPTER as CONFIG
from grpojax.models.hf.folder import read_json, write_json
from grpojax.models.hf.tensor_part import is_finite
from grpojax.models.hf.weights import Tensor, joined, joined_shape, names_of, open_file, plain_name
from grpojax.models.hf.writing import appearing
from grpojax.models.weight_table import DECODER
from grpojax.types import Array

WEIGHTS = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
_CONVERT = "peft.AutoPeftModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"

# Keys of adapter_config.json that change nothing about what saved factors compute.
_OF_TRAINING = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "task_type",
}
_READ = {"r", "lora_alpha", "target_modules", "use_rslora", "use_dora", "peft_type", "bias", "init_lora_weights"}
# Families that transformers reads without images from a folder of a model with images, by the names of a text model.
_READ_WITHOUT_IMAGES = ("qwen3_5_text",)
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")  # others change the base
_MERGE = "merge the adapter into its base with peft"
# Kinds of adapters that add tokens, keys or values, and change no weight.
_UNMERGEABLE = ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "ADAPTION_PROMPT")


def read_config(path: str | os.PathLike) -> tuple[AdapterConfig, str]:
    """The adapters in a folder, with it as their ``path``, and the base that they name; "" where they name none.

    Raises:
      UserError: it holds no LoRA adapter, or one with something that is not known here.
    """
    folder = files.path(path)
    raw = read_json(folder / CONFIG)
    if (kind := raw.get("peft_type")) != "LORA":
        named = "no peft_type" if kind is None else f"peft_type={kind!r}"
        remedy = "take a LoRA adapter" if kind in _UNMERGEABLE else _MERGE
        raise UserError(f"{folder / CONFIG} has {named}, and only 'LORA' is read; {remedy}")
    odd = [name for name, x in raw.items() if x and name not in _READ | _OF_TRAINING]
    usual = {"bias": ("none", None), "init_lora_weights": _STARTS}
    odd += [name for name, known in usual.items() if raw.get(name) not in known]
    if odd:
        shown = ", ".join(f"{name}={raw[name]!r}" for name in odd[:3])
        raise UserError(f"{folder / CONFIG} has {shown}, which is not read; {_MERGE}")
    for name, kinds, what in (("r", (int,), "a whole number"), ("lora_alpha", (int, float), "a number")):
        if type(x := raw.get(name, 8)) not in kinds or not x > 0:
            raise UserError(f"{folder / CONFIG}: {name}={x!r} must be {what} over 0; set the one of its training")
    with _open(folder) as (_, names):
        modules = {name.split(".")[-3 if name.endswith(".weight") else -2] for name in names}
    if strange := sorted(modules - set(get_args(Target))):
        raise UserError(f"{folder} adapts {', '.join(strange)}; adapters can be of {', '.join(get_args(Target))}")
    config = AdapterConfig(
        rank=raw.get("r", 8),
        alpha=raw.get("lora_alpha", 8),
        target=tuple(name for name in get_args(Target) if name in modules),
        rslora=bool(raw.get("use_rslora")),
        dora=bool(raw.get("use_dora")),
        path=str(path),
    )
    return config, raw.get("base_model_name_or_path") or ""


@contextlib.contextmanager
def _open(folder: epath.Path) -> Iterator[tuple[Any, dict[str, str]]]:
    """A folder's factors, and the name that each has in the file, by the name under which peft saves it.

    A state that somebody saved without peft has the adapter's name, often ``default``, in the names of its tensors.
    """
    if not (folder / WEIGHTS).exists():
        if (folder / _PICKLED).exists():
            raise UserError(f"{folder / _PICKLED} is pickled, which can run code; convert:\n{_CONVERT}")
        raise UserError(f"{folder} has {CONFIG} but no {WEIGHTS}; copy that file there, too")
    with open_file(folder / WEIGHTS) as f:
        names = dict[str, str]()
        for given in f.keys():
            name = re.sub(r"\.(lora_[AB])\.[^.]+\.weight$", r".\1.weight", plain_name(given))
            name = re.sub(r"\.lora_magnitude_vector\.([^.]+\.)?weight$", ".lora_magnitude_vector", name)
            name = f"base_model.model.{name}"
            if name in names:
                raise UserError(
                    f"{folder / WEIGHTS}: {names[name]} and {given} are the same factor of two adapters; "
                    "save each in a folder of its own"
                )
            names[name] = given
        yield f, names


def load(config: AdapterConfig, decoder: DecoderConfig, device: Device | None = None) -> dict[str, Array]:
    """The factors in ``config.path``, on some devices; None is the first of this process.

    Raises:
      UserError: it was made with other settings than ``config`` has, or for a model of another shape.
    """
    assert config.path is not None
    check(config, decoder)
    shapes = {ours: x.shape for ours, x in abstract(config, decoder).items()}
    tensors, made = _tensors(shapes, decoder), {ours: np.empty(shape, np.float32) for ours, shape in shapes.items()}
    with _open(files.path(config.path)) as (f, names):
        there = {name: tuple(f.get_slice(given).get_shape()) for name, given in names.items()}
        parts = _parts(tensors, decoder)
        expected = {name: joined_shape(decoder.family, name, of, tensors) for name, of in parts.items()}
        if there.items() < expected.items():
            raise UserError(
                f"{config.path} has no {min(expected.keys() - there.keys())}, and {len(expected) - len(there)} in all "
                f"are not there, though other layers have theirs ({_selected(config.path)}); {_MERGE}"
            )
        if there != expected:
            wrong = sorted(there.items() ^ expected.items())
            raise UserError(
                f"{config.path} is no adapter of this model: {wrong[0][0]} {list(wrong[0][1])} is not on both sides, "
                f"and {len(wrong) - 1} more\ntake the base that it was trained on"
            )
        for name, of in parts.items():
            rows = np.asarray(f.get_slice(names[name])[:]).astype(np.float32)
            if not is_finite(rows):
                file = files.path(config.path) / WEIGHTS
                raise UserError(f"{file}: {names[name]} has NaN or infinity in it; take an older adapter")
            ends = np.cumsum([tensors[part].shape[0] for part in of])
            for part, mine in zip((tensors[part] for part in of), np.split(rows, ends[:-1]), strict=True):
                made[part.ours][part.at] = mine.T
    put = (device or Real()).put
    return {ours: put(x, FACTORS[ours].axes) for ours, x in made.items()}


def _selected(path: str) -> str:
    """The keys of a folder's config that say which layers have factors."""
    raw = read_json(files.path(path) / CONFIG)
    return ", ".join(f"{name}={raw[name]!r}" for name in ("target_modules", "exclude_modules") if raw.get(name))


def check(config: AdapterConfig, decoder: DecoderConfig) -> None:
    """Raises `UserError` where the folder in ``config.path`` was made with other settings."""
    assert config.path is not None
    found, _ = read_config(config.path)
    names = ("rank", "alpha", "rslora", "dora")
    differ = {name: getattr(found, name) for name in names if getattr(found, name) != getattr(config, name)}
    targets = found.target or ()
    if set(targets) != set(config.layers(decoder)):
        differ["target"] = f"[{','.join(targets)}]"
    if differ:
        given = " ".join(f"model.adapter.{name}={str(x).lower()}" for name, x in differ.items())
        raise UserError(f"model.adapter.path={config.path!r} was made with other settings\nset {given}")


def check_start(config: AdapterConfig, decoder: DecoderConfig, folder: epath.PathLike) -> str:
    """Refuses a run at its start if peft could not read its adapters, and names the layers that it could read.

    If there are none, as in Gemma 3 with images, the run may export merged weights; the result says why, else "".

    Args:
      config: config of the adapters.
      decoder: config of the base.
      folder: the base's folder.

    Raises:
      UserError: that, or the decoder cannot have these adapters.
    """
    abstract(config, decoder)
    if not (why := _unreadable(config, decoder, folder)):
        return ""

    def readable(layers: tuple[Target, ...]) -> bool:
        return bool(layers) and not _unreadable(dataclasses.replace(config, target=layers), decoder, folder)

    for among in (config, dataclasses.replace(config, target=None)):
        alone = tuple(layer for layer in among.layers(decoder) if readable((layer,)))
        for left in (alone, tuple(layer for layer in alone if layer not in _OF_MLP)):
            if readable(left):
                raise UserError(f"model.adapter: {why}\nset model.adapter.target=[{','.join(left)}]")
    return why


def check_modules(config: AdapterConfig, decoder: DecoderConfig, folder: epath.PathLike) -> None:
    """Raises `UserError` if peft could not read an export of adapters; arguments as of `check_start`."""
    if why := _unreadable(config, decoder, folder):
        raise UserError(f"{why}\nexport with --merged")


_OF_MLP = ("gate_proj", "up_proj", "down_proj")


def _unreadable(config: AdapterConfig, decoder: DecoderConfig, folder: epath.PathLike) -> str:
    """Why peft could not read adapters, or "". It passes over layers that it does not find in the base."""
    name_of = {str(DECODER[name].name).format(0, 0): LINEAR[name] for name in config.weights(decoder)}
    whole = joined(decoder.family, dict.fromkeys(name_of, Tensor("", (), ())))
    found = {name_of[part]: name.split(".")[-2] for name, parts in whole.items() for part in parts}
    elsewhere = [layer for layer, there in found.items() if layer != there]
    images = text_part(raw := read_json(files.path(folder) / "config.json")) is not raw
    if images and decoder.family not in _READ_WITHOUT_IMAGES:
        elsewhere = list(found)
    if elsewhere:
        return f"peft finds no {', '.join(elsewhere)} in {folder}: they have other names there"
    names, why = config.weights(decoder), ""
    if any(name.startswith("shared_") for name in names):
        why = "to the expert that all tokens go to"
    elif ("expert_gate" in names) != ("expert_up" in names):
        why = "to only one of gate_proj and up_proj of experts"
    elif "expert_gate" in names and config.rslora:
        why = "with rslora=true to experts: their gate and up are one layer of twice the rank there"
    return f"peft cannot give factors {why}" if why else ""


def save(
    path: str | os.PathLike,
    factors: Mapping[str, Array],
    config: AdapterConfig,
    decoder: DecoderConfig,
    device: Device | None = None,
    *,
    base: str,
    dtype: str = "float32",
) -> None:
    """Writes a folder that peft and `load` read; it appears whole or not at all.

    With several processes all of them call this, and process 0 writes.

    Args:
      path: the new folder, local or in a bucket; it may exist if it is empty.
      factors: by the names in `grpojax.extensions.adapters.factors.FACTORS`.
      config: what they were made with.
      decoder: config of the base.
      device: where the factors are; None is the first of this process.
      base: the model that they belong to, as peft is to find it.
      dtype: of the file.
    """
    get = (device or Real()).get
    whole = {ours: get(x).astype(jax.numpy.dtype(dtype)) for ours, x in factors.items()}
    parts = _tensors({ours: x.shape for ours, x in whole.items()}, decoder)
    tensors = {
        name: np.ascontiguousarray(np.concatenate([whole[parts[part].ours][parts[part].at].T for part in of]))
        for name, of in _parts(parts, decoder).items()
    }
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "target_modules": sorted(config.layers(decoder)),
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    lead = processes.is_first()
    with appearing(files.path(path)) if lead else contextlib.nullcontext((None, None)) as (large, small):
        if lead:
            assert large is not None and small is not None
            files.write(files.path(large) / WEIGHTS, safetensors.numpy.save(tensors, {"format": "pt"}))
            write_json(small / CONFIG, described)


def _tensors(shapes: Mapping[str, tuple[int, ...]], decoder: DecoderConfig) -> dict[str, Tensor]:
    """What each tensor holds, a factor of one layer, by our names; transposed, as peft has factors."""
    ordered = [(ours, shapes[ours]) for ours in FACTORS if ours in shapes]  # as their rows are in a file
    return {
        name: Tensor(ours, at, shape[FACTORS[ours].lead :][::-1])
        for ours, shape in ordered
        for at, name in names_of(ours, shape, decoder, FACTORS).items()
    }


def _parts(tensors: Mapping[str, Tensor], decoder: DecoderConfig) -> dict[str, list[str]]:
    """The tensors of the file: of each the names of ours whose rows it has, one below the other."""
    return {f"base_model.model.{name}": of for name, of in joined(decoder.family, tensors).items()}
