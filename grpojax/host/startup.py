"""Settings of a process that are made before jax or anything else heavy is imported."""

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import MutableMapping
from pathlib import Path

from grpojax.host.console import setup_console
from grpojax.host.errors import UserError

# glibc's mallopt parameters.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8


def prepare() -> None:
    """Sets up console, allocator and import path. Reward functions may be in the current folder."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        raise UserError("the folder that you are in is gone; go to another one (cd)") from None
    if here not in sys.path:
        sys.path.append(here)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    spare_libtpu(os.environ)
    keep_memory()
    setup_console()


def spare_libtpu(environ: MutableMapping[str, str], root: Path = Path("/")) -> None:
    """Keeps jax from trying a TPU that is not there; call before jax is imported.

    libtpu prints several lines to standard error for each such try. So if it is installed, no TPU is found and nothing
    is chosen yet, ``JAX_PLATFORMS`` is set to the existing platforms: "cpu", or "cuda,cpu" if there is an NVIDIA GPU.
    If there may be a TPU, the choice, and all output of libtpu, is left to jax.

    Args:
      environ: environment variables of the process.
      root: root of the file system, whose ``/dev`` and ``/sys`` are read.
    """
    chosen = "JAX_PLATFORMS" in environ or "JAX_FORCE_TPU_INIT" in environ
    if chosen or importlib.util.find_spec("libtpu") is None or _may_have_tpu(environ, root):
        return
    plugins = importlib.metadata.entry_points(group="jax_plugins").names
    if any(not name.startswith("xla_cuda") for name in plugins):
        return  # belongs to an accelerator that is not known here
    devices = (root / "dev/nvidia0", root / "dev/nvidiactl", root / "dev/dxg")
    shown = environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1")
    cuda = bool(plugins) and shown and any(device.exists() for device in devices)
    environ["JAX_PLATFORMS"] = "cuda,cpu" if cuda else "cpu"


_NO_SIGN = ("TPU_SKIP_MDS_QUERY", "TPU_LIBRARY_PATH")  # jax and libtpu set these wherever they are imported


def _may_have_tpu(environ: MutableMapping[str, str], root: Path) -> bool:
    """Whether anything shows a TPU: a device, or a variable that a TPU VM or GKE sets."""
    if any(name.startswith("TPU_") and name not in _NO_SIGN for name in environ):
        return True
    if any((root / "dev").glob("accel*")) or any((root / "dev/vfio").glob("[0-9]*")):
        return True
    return any(_is_google_chip(device) for device in (root / "sys/bus/pci/devices").glob("*"))


def _is_google_chip(device: Path) -> bool:
    """Whether a PCI device is Google's and neither a disk (class 01) nor a network card (02), which all VMs have."""
    try:
        vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
    except OSError:
        return False
    return vendor == "0x1ae0" and kind[:4] not in ("0x01", "0x02")


def keep_memory() -> None:
    """Keeps freed memory in the process (glibc only); call before the first large allocation.

    On a CPU, a program's buffers take gigabytes. If they are returned to the system after each call, the page faults of
    the next call cost more than many of the kernels that fill them.
    """
    if platform.system() == "Linux" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        for option, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, 64 * 2**20), (_ARENA_MAX, 1)):
            libc.mallopt(option, value)
