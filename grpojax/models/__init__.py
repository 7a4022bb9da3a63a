"""Decoders and their Hugging Face form."""

from grpojax.models.decoder import Compute as Compute
from grpojax.models.decoder import Decoder as Decoder
from grpojax.models.decoder import Scores as Scores
from grpojax.models.decoder import score as score
from grpojax.models.decoder_config import DecoderConfig as DecoderConfig
from grpojax.models.hf import load as load
from grpojax.models.hf import load_tokenizer as load_tokenizer
from grpojax.models.hf import save as save
