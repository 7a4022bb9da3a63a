"""Model folders in buckets: tensors by byte ranges, and the small files in a folder of this machine."""

import atexit
import functools
import json
import math
import shutil
import tempfile
from collections.abc import KeysView
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from etils import epath

from grpojax.host import files
from grpojax.host.errors import UserError
from grpojax.models.hf.folder import damaged

_DTYPES = {"F32": np.dtype(np.float32), "BF16": jnp.dtype(jnp.bfloat16), "F16": np.dtype(np.float16)}
_DTYPES |= {"U8": np.dtype(np.uint8)}  # of numbers in four bits
_LONGEST = 100 * 10**6  # bytes of a header, as safetensors itself has it
_SMALL = (".json", ".jinja", ".txt", ".model")  # tokenizers' and configs' files


class TensorFile:
    """A safetensors file in a bucket, read like one that `safetensors.safe_open` opens.

    Raises:
      UserError: it cannot be read, is cut off or is none.
    """

    def __init__(self, file: epath.Path):
        self.file, length = file, files.size(file)
        try:
            head = int.from_bytes(files.read_part(file, 0, min(8, length)).tobytes(), "little")
            if length < 8 or head > min(_LONGEST, length - 8):
                raise ValueError("its header is not all there")
            described = json.loads(files.read_part(file, 8, 8 + head).tobytes())
            described.pop("__metadata__", None)
            self._start, self._tensors = 8 + head, described
            if self._start + max((t["data_offsets"][1] for t in described.values()), default=0) != length:
                raise ValueError("its tensors are not all there")
            for name, tensor in described.items():
                start, stop = tensor["data_offsets"]
                known = _DTYPES.get(tensor["dtype"])
                if start < 0 or (known and stop - start != math.prod(tensor["shape"]) * known.itemsize):
                    raise ValueError(f"{name} is not of the size of its shape")
        except UserError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as e:
            raise damaged(file, e) from None

    def keys(self) -> KeysView[str]:
        """The names of its tensors."""
        return self._tensors.keys()

    def get_slice(self, name: str) -> "BucketTensor":
        """A tensor, of which nothing is read yet."""
        return BucketTensor(self.file, self._start, self._tensors[name])


class BucketTensor:
    """A tensor that reads the rows that are asked for, and keeps those that it read last.

    Args:
      file: where it is.
      start: of the file's tensors, in bytes.
      described: its entry in the file's header.
    """

    def __init__(self, file: epath.Path, start: int, described: dict[str, Any]):
        self._file, self._shape, self._dtype = file, tuple(described["shape"]), described["dtype"]
        self._start = start + described["data_offsets"][0]
        self._row = math.prod(self._shape[1:]) * _DTYPES.get(self._dtype, np.dtype(np.uint8)).itemsize  # bytes
        self._kept: tuple[int, int, np.ndarray] | None = None

    def get_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self._shape

    def get_dtype(self) -> str:
        """As the header has it, such as "BF16"."""
        return self._dtype

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        first, last, _ = index[0].indices(self._shape[0])
        if self._kept is None or not self._kept[0] <= first <= last <= self._kept[1]:
            self._kept = None  # before there are others
            content = files.read_part(self._file, self._start + first * self._row, self._start + last * self._row)
            self._kept = first, last, content.view(_DTYPES[self._dtype]).reshape(-1, *self._shape[1:])
        start, _, rows = self._kept
        return rows[(slice(first - start, last - start), *index[1:])]


@functools.cache
def small_files(folder: epath.Path) -> Path:
    """A folder of this machine with the tokenizer and the configs of one in a bucket, until the process ends."""
    here = Path(tempfile.mkdtemp(prefix="grpojax-model-"))
    atexit.register(shutil.rmtree, here, ignore_errors=True)
    with files.naming(folder):
        small = [file for file in files.listing(folder) if file.name.endswith(_SMALL)]
        for file, content in zip(small, files.read_all(small), strict=True):
            (here / file.name).write_bytes(content)
    return here
