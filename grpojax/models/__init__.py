"""Decoders, and loading and saving them in the Hugging Face format.

What loads flax is imported when it is used: a recipe names a model, and is read without one.
"""

import importlib
from typing import TYPE_CHECKING, Any

from grpojax.models.compute import Compute, ModelConfig, compute_of
from grpojax.models.decoder_config import DecoderConfig

if TYPE_CHECKING:
    from grpojax.models.decoder import Decoder, Scores, score
    from grpojax.models.hf import load, load_tokenizer, save

_OF_MODULE = {"decoder": ("Decoder", "Scores", "score"), "hf": ("load", "load_tokenizer", "save")}
_MODULE_OF = {name: module for module, names in _OF_MODULE.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


__all__ = [
    "Compute",
    "Decoder",
    "DecoderConfig",
    "ModelConfig",
    "Scores",
    "compute_of",
    "load",
    "load_tokenizer",
    "save",
    "score",
]
