"""Adapters in and out of folders as peft has them: ``adapter_config.json`` and ``adapter_model.safetensors``."""

import contextlib
import os
from collections.abc import Mapping
from typing import Any, get_args

import jax
import numpy as np
import safetensors.numpy
from etils import epath
from jax.sharding import Mesh

from grpojax.host import files, processes
from grpojax.host.errors import UserError
from grpojax.models.adapters import FACTORS, LINEAR, AdapterConfig, Target, abstract
from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.hf.config_json import text_part
from grpojax.models.hf.folder import read_json, write_json
from grpojax.models.hf.weights import joined, open_file
from grpojax.models.hf.writing import appearing
from grpojax.models.sharding import named
from grpojax.models.weight_table import DECODER
from grpojax.types import Array

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_KINDS = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
# Keys of adapter_config.json that change nothing about what saved factors compute.
_OF_TRAINING = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
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
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")  # others change the base


def is_adapter(folder: epath.Path) -> bool:
    """Whether a folder holds an adapter, as peft saves it, and no whole model."""
    return (folder / CONFIG).exists() and not (folder / "config.json").exists()


def read_config(path: str | os.PathLike) -> tuple[AdapterConfig, str]:
    """The adapters in a folder, with it as their ``path``, and the base that they name; "" where they name none.

    Raises:
      UserError: it holds no LoRA adapter, or one with something that is not known here.
    """
    folder = files.path(path)
    raw = read_json(folder / CONFIG)
    odd = [name for name, x in raw.items() if x and name not in _READ | _OF_TRAINING]
    odd += [name for name, usual in (("peft_type", ("LORA",)), ("bias", ("none", None))) if raw.get(name) not in usual]
    odd += [name for name in ("init_lora_weights",) if raw.get(name) not in _STARTS]
    if odd:
        shown = ", ".join(f"{name}={raw[name]!r}" for name in odd[:3] if name in raw) or "no peft_type"
        raise UserError(f"{folder / CONFIG} has {shown}, which is not read; merge the adapter into its base with peft")
    with open_file(folder / WEIGHTS) as f:
        modules = {name.split(".")[-3 if name.endswith(".weight") else -2] for name in f.keys()}
    if strange := sorted(modules - set(get_args(Target))):
        raise UserError(f"{folder} adapts {', '.join(strange)}; adapters can be of {', '.join(get_args(Target))}")
    config = AdapterConfig(
        rank=raw.get("r", 8),
        alpha=raw.get("lora_alpha", 8),
        target=tuple(name for name in LINEAR.values() if name in modules),
        rslora=bool(raw.get("use_rslora")),
        dora=bool(raw.get("use_dora")),
        path=str(path),
    )
    return config, raw.get("base_model_name_or_path") or ""


def load(config: AdapterConfig, decoder: DecoderConfig, mesh: Mesh | None = None) -> dict[str, Array]:
    """The factors in ``config.path``, cut over a mesh.

    Raises:
      UserError: it was made with other settings than ``config`` has, or for a model of another shape.
    """
    assert config.path is not None
    check(config)
    wanted, made = abstract(config, decoder), dict[str, Array]()
    with open_file(files.path(config.path) / WEIGHTS) as f:
        there = {name: tuple(f.get_slice(name).get_shape()) for name in f.keys()}
        expected = {n: s for ours, x in wanted.items() for n, s in zip(_names(ours, x.shape), _shapes(x), strict=True)}
        if there != expected:
            wrong = sorted(there.items() ^ expected.items())
            raise UserError(
                f"{config.path} is no adapter of this model: {wrong[0][0]} {list(wrong[0][1])} is not on both sides, "
                f"and {len(wrong) - 1} more\ntake the base that it was trained on"
            )
        for ours, x in wanted.items():
            tensors = [np.asarray(f.get_slice(name)[:]).astype(np.float32).T for name in _names(ours, x.shape)]
            made[ours] = processes.place(np.stack(tensors), named(mesh, FACTORS[ours].axes))
    return made


def check(config: AdapterConfig) -> None:
    """Raises `UserError` where the folder in ``config.path`` was made with other settings."""
    assert config.path is not None
    found, _ = read_config(config.path)
    names = ("rank", "alpha", "rslora", "dora")
    differ = {name: getattr(found, name) for name in names if getattr(found, name) != getattr(config, name)}
    if set(found.target) != set(config.target):
        differ["target"] = f"[{','.join(found.target)}]"
    if differ:
        given = " ".join(f"model.adapter.{name}={str(x).lower()}" for name, x in differ.items())
        raise UserError(f"model.adapter.path={config.path!r} was made with other settings\nset {given}")


def check_modules(config: AdapterConfig, decoder: DecoderConfig, folder: epath.PathLike) -> None:
    """Raises `UserError` if peft would not find the layers that have factors in the base: it passes over them without
    a word.

    Args:
      config: config of the adapters.
      decoder: config of the base.
      folder: the base's folder.
    """
    name_of = {LINEAR[name]: str(DECODER[name].name).format(0) for name in config.names}
    tensors: dict[str, Any] = dict.fromkeys(name_of.values())
    there = joined(decoder.family, tensors)
    elsewhere = [target for target, name in name_of.items() if name not in there]
    if text_part(raw := read_json(files.path(folder) / "config.json")) is not raw:
        elsewhere = list(name_of)
    if elsewhere:
        raise UserError(
            f"peft finds no {', '.join(elsewhere)} in {folder}: they have other names there\nexport with --merged"
        )


def save(
    path: str | os.PathLike, factors: Mapping[str, Array], config: AdapterConfig, *, base: str, dtype: str = "float32"
) -> None:
    """Writes a folder that peft and `load` read; it appears whole or not at all.

    With several processes all of them call this, and process 0 writes.

    Args:
      path: the new folder, local or in a bucket; it may exist if it is empty.
      factors: by the names in `grpojax.models.adapters.FACTORS`.
      config: what they were made with.
      base: the model that they belong to, as peft is to find it.
      dtype: of the file.
    """
    tensors = dict[str, np.ndarray]()
    for ours, x in factors.items():
        whole = processes.fetch(x).astype(jax.numpy.dtype(dtype))
        tensors |= {name: np.ascontiguousarray(w.T) for name, w in zip(_names(ours, x.shape), whole, strict=True)}
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "target_modules": sorted(config.target),
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


def _names(ours: str, shape: tuple[int, ...]) -> list[str]:
    """The tensors that hold a factor of all layers, one a layer."""
    weight, _, kind = ours.rpartition("_")
    name = (DECODER[weight].name or "").removesuffix("weight") + _KINDS[kind]
    return [f"base_model.model.{name.format(i)}" for i in range(shape[0])]


def _shapes(x: Any) -> list[tuple[int, ...]]:
    """Of these tensors, which lie the other way round."""
    return [x.shape[:0:-1]] * x.shape[0]
