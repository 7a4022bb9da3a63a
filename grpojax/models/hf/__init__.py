"""Hugging Face folders in and out."""

from grpojax.models.hf.config_json import from_hf, read_config
from grpojax.models.hf.folder import model_folder
from grpojax.models.hf.loading import load
from grpojax.models.hf.tokenizer import (
    check_ends,
    decode_all,
    ends_note,
    eos_ids,
    fit_tokenizer,
    load_tokenizer,
    token_bytes,
    turn_end,
)
from grpojax.models.hf.writing import save

__all__ = [
    "check_ends",
    "decode_all",
    "ends_note",
    "eos_ids",
    "fit_tokenizer",
    "from_hf",
    "load",
    "load_tokenizer",
    "model_folder",
    "read_config",
    "save",
    "token_bytes",
    "turn_end",
]
