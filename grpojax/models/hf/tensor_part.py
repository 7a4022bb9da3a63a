"""Parts of the tensors in a folder's files, read by slices."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from grpojax.host.errors import UserError


def is_finite(values: np.ndarray) -> bool:
    """Whether no number is NaN or infinite.

    Example:
      >>> [is_finite(np.array([1, x], dtype)) for x in (2, -np.inf, np.nan) for dtype in ("bfloat16", "float16")]
      [True, True, False, False, False, False]
    """
    if values.dtype.itemsize != 2:
        return bool(np.isfinite(values).all())
    # numpy tests floats of 16 bits one by one; by their bits a tensor takes a quarter of the time.
    infinity = np.array(np.inf, values.dtype).view(np.uint16)
    return bool((values.view(np.uint16) & 0x7FFF).max(initial=0) < infinity)


class OnDisk(NamedTuple):
    """Where a tensor is and what its file calls it, from the header of the file.

    Attributes:
      file, name, shape, dtype: of the tensor, or of the part of it that this is.
      first: its first row in the file's tensor.
      step: how many rows of the file's tensor there are from one of its rows to the next.
      expert: its place along the first axis of the file's tensor, which has all experts; None if it has none.
      across: whether the file's tensor has its rows as columns.
      unpack: gives, with a function that opens a file, what slices are taken of; None takes them of the file's tensor.
    """

    file: epath.Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    first: int = 0
    step: int = 1
    expert: int | None = None
    across: bool = False
    unpack: Callable[[Callable[[epath.Path], Any]], Any] | None = None


class TensorPart:
    """The numbers of a tensor, read by slices as those of a tensor of its own. One that is not finite is a `UserError`.

    Args:
      there: where it is.
      opened: gives an open file.
    """

    def __init__(self, there: OnDisk, opened: Callable[[epath.Path], Any]):
        self._there = there
        self._tensor = there.unpack(opened) if there.unpack else opened(there.file).get_slice(there.name)

    def __getitem__(self, at: tuple[slice, ...]) -> np.ndarray:
        if not is_finite(values := self._read(at)):
            raise UserError(
                f"{self._there.file}: {self._there.name} has NaN or infinity in it\n"
                "download the file again, or take a checkpoint from before they came into it"
            )
        return values

    def _read(self, at: tuple[slice, ...]) -> np.ndarray:
        there, (rows, *rest) = self._there, at
        first = there.first + rows.start * there.step
        rows = slice(first, there.first + (rows.stop - 1) * there.step + 1)
        if there.expert is None:
            return self._tensor[(rows, *rest)]
        expert = slice(there.expert, there.expert + 1)
        if there.across:
            return self._tensor[(expert, *rest, rows)][0].T[:: there.step]
        return self._tensor[(expert, rows, *rest)][0][:: there.step]
