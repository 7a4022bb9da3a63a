"""The files of a Hugging Face folder but its weights: where they are, what is damaged, JSON in and out."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etils import epath

from grpojax.host import files
from grpojax.host.errors import UserError
from grpojax.models.hf.fields import shown

_LFS = b"version https://git-lfs.github.com/spec/"  # how a pointer of Git LFS begins
MERGE = "peft.AutoPeftModelForCausalLM.from_pretrained(FOLDER).merge_and_unload().save_pretrained(NEW_FOLDER)"


def model_folder(path: str | os.PathLike) -> epath.Path:
    """The folder, local or in a bucket; raises `UserError` where there is none."""
    path = files.path(path)
    if files.in_bucket(path):
        with files.naming(path):
            if not path.is_dir():
                raise UserError(f"{path}: no such folder in the bucket")
    elif path.is_file():
        convert = f": grpojax convert {path} --to FOLDER" if path.suffix == ".gguf" else ""
        raise UserError(f"{path} is a file; give a folder with config.json and weights{convert}")
    elif not path.is_dir():
        owner = path.parent.name
        # Whoever downloads models puts them into such folders, so that these are no owners.
        if str(path) == f"{owner}/{path.name}" and owner not in ("..", "models", "runs") and not path.parent.exists():
            remedy = f"hf download {path} --local-dir models/{path.name}; then give models/{path.name}"
        else:
            remedy = f"hf download OWNER/{path.name or 'NAME'} --local-dir {path}"
        here = "" if path.is_absolute() else f" in {os.getcwd()}"
        raise UserError(f"{path}: no such folder{here}\na model of the hub is downloaded first: {remedy}")
    return path


ADAPTER = "adapter_config.json"  # of a folder with an adapter (LoRA and the like), as peft saves them


def is_adapter(folder: epath.Path) -> bool:
    """Whether a folder holds an adapter and no whole model."""
    return (folder / ADAPTER).exists() and not (folder / "config.json").exists()


def refuse_adapter(folder: epath.Path) -> None:
    """Raises `UserError` where the folder holds an adapter."""
    file = folder / ADAPTER
    if not file.exists():
        return
    base = shown(read_json(file).get("base_model_name_or_path"))
    merged = ", or remove adapter_* if it is merged already" if (folder / "config.json").exists() else ""
    raise UserError(
        f"{folder} holds an adapter of {base}, which is not a whole model; name it by model.adapter.path, or merge "
        f"it{merged}:\n{MERGE}"
    )


def read_json(file: Path | epath.Path) -> dict[str, Any]:
    """The JSON object in a file; raises `UserError` where there is none."""
    try:
        content = json.loads(files.read(file))
    except FileNotFoundError:
        raise UserError(f"{file.parent} has no {file.name}") from None
    except (ValueError, RecursionError) as e:
        raise damaged(file, e) from None
    except OSError as e:
        raise UserError(f"{file} cannot be read: {e}") from None
    if not isinstance(content, dict):
        raise damaged(file, "it holds no JSON object")
    return content


def damaged(file: Path | epath.Path, why: object) -> UserError:
    """The error for a file that cannot be what its name says, or that is only the pointer to it of Git LFS."""
    if is_lfs_pointer(file):
        return UserError(f"{file} is a pointer of Git LFS in place of the file; in its folder run: git lfs pull")
    return UserError(f"{file} is damaged: {' '.join(str(why).split())[:200]}; restore it, or download it again")


def is_lfs_pointer(file: Path | epath.Path) -> bool:
    """Whether a file is what a clone without Git LFS has in place of a large one."""
    if files.in_bucket(file):
        head = files.read_part(file, 0, min(len(_LFS), files.size(file))).tobytes()
    else:
        with Path(file).open("rb") as f:
            head = f.read(len(_LFS))
    return head == _LFS


def check_tokenizer_files(named: epath.Path, path: Path) -> None:
    """Raises `UserError`, which names the file, where one that transformers reads for a tokenizer is damaged, or is a
    pointer of Git LFS, or names ends that are no tokens' numbers.

    Args:
      named: the folder as the user has it.
      path: its files on this machine.
    """
    jsons = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
    for name in (*jsons, "added_tokens.json"):
        content = read_json(named / name) if (path / name).exists() else {}
        ends = content.get("eos_token_id") if name in jsons[:2] else None
        listed = ends if isinstance(ends, list) else [ends]
        if ends is not None and not all(type(i) is int and i >= 0 for i in listed):
            what = f"{named / name}: eos_token_id={repr(ends)[:200]}"
            raise UserError(f"{what}: must be a token's number, a list of them or null")
    for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"):
        if (path / name).exists() and is_lfs_pointer(path / name):
            raise damaged(named / name, "a pointer")


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON object as the hub's files have it."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
