"""Reads the samples of a run's steps, in a compressed file for each step, as ``grpojax show`` does. Their columns are
made in `grpojax.run.batch.sample_rows`."""

import gzip
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from grpojax.host import files
from grpojax.host.errors import UserError


def samples_path(directory: epath.PathLike, step: int) -> epath.Path:
    """The path of a step's samples."""
    return files.path(directory) / "samples" / f"step_{step:06d}.jsonl.gz"


def sample_steps(directory: epath.PathLike) -> list[int]:
    """The steps whose samples were kept; raises `UserError` if there are none."""
    folder = files.path(directory) / "samples"
    if files.path(directory).is_file():
        raise UserError(f"{directory} is a file; give a run directory")
    names = [re.fullmatch(r"step_([0-9]{6})\.jsonl\.gz", file.name) for file in files.listing(folder)]
    steps = sorted(int(name[1]) for name in names if name)
    if not steps:
        there = files.path(directory).exists()
        raise UserError(f"{folder} holds no samples" if there else f"{directory}: no such run")
    return steps


def read_samples(directory: epath.PathLike, step: int | None = None) -> tuple[int, list[dict[str, Any]]]:
    """The step (the newest if not given) and its samples; raises `UserError` if there are none."""
    folder, steps = files.path(directory) / "samples", sample_steps(directory)
    step = steps[-1] if step is None else step
    if step not in steps:
        raise UserError(f"{folder} has no samples of step {step}; it has {steps[0]} to {steps[-1]}")
    path = samples_path(directory, step)
    try:
        text = gzip.decompress(files.read(path)).decode()
        return step, [json.loads(line) for line in text.split("\n") if line]
    except (OSError, EOFError, ValueError, zlib.error) as e:
        raise UserError(f"{path} cannot be read: {e}") from None


def ranked_samples(samples: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Samples from best to worst; samples without a reward come last."""
    return sorted(samples, key=lambda s: (s["reward"] is None, -(s["reward"] or 0.0)))
