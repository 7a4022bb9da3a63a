"""Models in GGUF files, as folders of Hugging Face."""

from grpojax.extension import Names

NAMES = Names(commands={"convert": "grpojax.extensions.gguf.cli.convert"})
