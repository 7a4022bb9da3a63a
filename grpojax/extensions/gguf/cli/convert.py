"""``grpojax convert``: a GGUF file as a Hugging Face folder."""

import argparse
from collections.abc import Callable


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Its arguments."""
    convert = command("convert", run, "Writes the model in a GGUF file (llama, qwen2, qwen3) as a Hugging Face folder.")
    convert.add_argument("model", metavar="MODEL.gguf", help="the file; its quantised weights become plain numbers")
    convert.add_argument("--to", required=True, help="folder to create")
    convert.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="type of the written weights"
    )


def run(args: argparse.Namespace) -> int:
    """Writes the folder."""
    from grpojax.extensions.gguf.gguf_file import convert

    convert(args.model, args.to, dtype=args.dtype)
    print(f"wrote {args.to}")
    return 0
