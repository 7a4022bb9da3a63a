"""A server that answers as OpenAI's does, for one model on this machine."""

from grpojax.extension import Names

NAMES = Names(commands={"serve": "grpojax.extensions.serve.cli.serve"})
