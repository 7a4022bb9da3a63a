"""Every causal language model that transformers can make, as configs: whether grpojax reads them, and if not, why.

``python tests/every_model.py`` writes the tables of docs/reference/models.md.
"""

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from grpojax.host.errors import UserError
from grpojax.models.hf.config_json import read_config

PAGE = Path(__file__).parents[1] / "docs/reference/models.md"
KINDS = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

# Of whose config transformers makes none without further values.
NOT_MADE = {"gemma4_assistant": "its config takes none of its own defaults"}

# What makes a config small, by the names of fields; a config gets those that it has.
SMALL = {
    "vocab_size": 94,
    "hidden_size": 32,
    "intermediate_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "num_experts": 5,
    "num_local_experts": 5,
    "n_routed_experts": 5,
    "routed_scaling_factor": 1.5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 22,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
FULL = {"sliding_window": None, "layer_types": ["full_attention"] * SMALL["num_hidden_layers"]}
# Their sliding_window is a number, even if no layer has a window.
NOT_NULL = ("gemma2", "gemma3_text", "gpt_oss", "olmo3")


def config(kind: str, **fields):
    """The config of a kind; raises what its class raises."""
    return CONFIG_MAPPING[kind](**fields)


def small(kind: str, *, full: bool):
    """A small config; ``full`` says that no layer has a window."""
    default = config(kind)
    sizes = SMALL | (FULL if full else {})
    if kind in NOT_NULL:
        sizes = {name: value for name, value in sizes.items() if name != "sliding_window"}
    return config(kind, **{name: value for name, value in sizes.items() if hasattr(default, name)})


def write(made, kind: str, folder: Path) -> dict:
    """Writes ``config.json`` as transformers does for a model of the kind, and returns it."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    made.architectures = [names] if isinstance(names, str) else list(names[:1])
    made.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


class Found(NamedTuple):
    """What became of a kind: the error for its default config, if any, and whether some config of it is read."""

    error: str | None
    read: bool


def look(kind: str, folder: Path) -> Found:
    """Reads the configs of a kind, the one with its defaults and small ones."""

    def error(made) -> str | None:
        write(made, kind, folder)
        try:
            read_config(folder)
        except UserError as e:
            assert str(e).count("\n") <= 1, e
            return str(e).removeprefix(f"{folder / 'config.json'}: ")
        return None

    default, read = error(config(kind)), False
    for full in (False, True):
        try:
            made = small(kind, full=full)
        except Exception:  # sizes that the class does not take, with any error
            continue
        read |= error(made) is None
    return Found(default, read or default is None)


def reason(error: str | None) -> str:
    """The part of an error that says why, for a cell of a table."""
    unknown = re.match(r"unknown .*, model_type='[^']*': (.*)\n", error or "")
    text = unknown[1] if unknown else (error or "").split("\n")[0].rstrip(";")
    return re.sub(r"\[.{60,}?\.\.\.", "[...]", text).replace("|", "\\|")


def look_at_all(folder: Path) -> dict[str, Found]:
    """What became of each kind that has a default config."""
    return {kind: look(kind, folder) for kind in KINDS if kind not in NOT_MADE}


def tables(found: Mapping[str, Found]) -> str:
    """The tables of the page."""
    read = [f"| `{kind}` | {reason(f.error) or '-'} |" for kind, f in found.items() if f.read]
    refused = [f"| `{kind}` | {reason(f.error)} |" for kind, f in found.items() if not f.read]
    refused += [f"| `{kind}` | not tried: {why} |" for kind, why in NOT_MADE.items()]
    return "\n".join(
        [
            f"Made with transformers {transformers.__version__}.",
            "\n## Read\n",
            "| `model_type` | what its default config has that is not read |\n|---|---|",
            *read,
            "\n## Refused\n",
            "| `model_type` | what is unknown |\n|---|---|",
            *sorted(refused),
            "",
        ]
    )


def rows(text: str) -> dict[str, str]:
    """The tables' rows, by model_type, with the heading that they are under."""
    sections = re.split(r"^## (Read|Refused)$", text, flags=re.M)[1:]
    return {
        kind: heading
        for heading, body in zip(sections[::2], sections[1::2], strict=True)
        for kind in re.findall(r"^\| `([\w-]+)` \|", body, re.M)
    }


def page(found: Mapping[str, Found]) -> str:
    """The page with the tables of today."""
    return PAGE.read_text(encoding="utf-8").split("Made with transformers")[0] + tables(found)


if __name__ == "__main__":
    import tempfile

    logging.disable()
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(page(look_at_all(Path(folder))), encoding="utf-8")
