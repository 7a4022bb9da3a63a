"""Decoders, and loading and saving them in the Hugging Face format."""

from grpojax.models.compute import Compute, ModelConfig, compute_of
from grpojax.models.decoder import Decoder, Scores, score
from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.hf import load, load_tokenizer, save

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
