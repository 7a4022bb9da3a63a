"""MXFP4, the four bits that gpt-oss is published in: 32 numbers share a scale."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from etils import epath

from grpojax.models.hf.tensor_part import OnDisk

_NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_NUMBERS = np.concatenate([_NUMBERS, -_NUMBERS])


def four_bits(found: Mapping[str, OnDisk]) -> dict[str, OnDisk]:
    """The tensors of a folder, with the two of each MXFP4 matrix as one ``NAME [experts, in, out]`` of 32 bits:
    ``NAME_blocks [experts, out, in / 32, 16]`` and ``NAME_scales [experts, out, in / 32]``, bytes."""
    out = dict(found)
    for name, blocks in found.items():
        whole = name.removesuffix("_blocks")
        scales = found.get(f"{whole}_scales")
        if whole == name or scales is None or len(blocks.shape) != 4 or {blocks.dtype, scales.dtype} != {"U8"}:
            continue
        experts, rows, groups, size = blocks.shape
        if scales.shape == (experts, rows, groups) and size == 16:
            unpack = functools.partial(_FourBits, blocks, scales)
            out[whole] = blocks._replace(shape=(experts, groups * 32, rows), dtype="F32", unpack=unpack)
            del out[name], out[f"{whole}_scales"]
    return out


class _FourBits:
    """The numbers ``[experts, in, out]`` of one expert at a time."""

    def __init__(self, blocks: OnDisk, scales: OnDisk, opened: Callable[[epath.Path], Any]):
        self._blocks, self._scales = (opened(x.file).get_slice(x.name) for x in (blocks, scales))

    def __getitem__(self, at: tuple[slice, slice, slice]) -> np.ndarray:
        expert, columns, rows = at
        blocks, scales = self._blocks[(expert, rows)][0], self._scales[(expert, rows)][0]
        # The low half of a byte is the number before the high half.
        numbers = _NUMBERS[np.stack([blocks & 15, blocks >> 4], -1)].reshape(*blocks.shape[:2], -1)
        values = np.ldexp(numbers, scales[..., None].astype(np.int32) - 127).reshape(len(blocks), -1)
        return values[:, columns].T[None]
