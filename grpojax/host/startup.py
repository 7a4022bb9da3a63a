"""Settings of a process from before jax or anything else heavy is imported."""

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import MutableMapping
from pathlib import Path

from grpojax.host.console import setup_console

# glibc's mallopt parameters.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8


def prepare() -> None:
    """Console, allocator and import path. Reward functions may stand in the folder one is in."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    spare_libtpu(os.environ)
    keep_memory()
    setup_console()


def spare_libtpu(environ: MutableMapping[str, str], root: Path = Path("/")) -> None:
    """Keeps jax from trying a TPU that is not there; call before jax is imported.

    libtpu tells of every such try in several lines on standard error. So where it is installed, no TPU is in sight and
    nothing is chosen yet, ``JAX_PLATFORMS`` is set to what there is: "cpu", or "cuda,cpu" where there is an NVIDIA GPU.
    Whatever might be a TPU leaves the choice, and all that libtpu says, to jax.

    Args:
      environ: the process's variables.
      root: of the file system; ``/dev`` and ``/sys`` are read.
    """
    chosen = "JAX_PLATFORMS" in environ or "JAX_FORCE_TPU_INIT" in environ
    if chosen or importlib.util.find_spec("libtpu") is None or _may_have_tpu(environ, root):
        return
    plugins = importlib.metadata.entry_points(group="jax_plugins").names
    if any(not name.startswith("xla_cuda") for name in plugins):
        return  # of an accelerator that is not known here
    devices = (root / "dev/nvidia0", root / "dev/nvidiactl", root / "dev/dxg")
    shown = environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1")
    cuda = bool(plugins) and shown and any(device.exists() for device in devices)
    environ["JAX_PLATFORMS"] = "cuda,cpu" if cuda else "cpu"


_NO_SIGN = ("TPU_SKIP_MDS_QUERY", "TPU_LIBRARY_PATH")  # jax and libtpu set these wherever they are imported


def _may_have_tpu(environ: MutableMapping[str, str], root: Path) -> bool:
    """Whether there is a sign of a TPU: a device, or a variable that a TPU VM or GKE sets."""
    if any(name.startswith("TPU_") and name not in _NO_SIGN for name in environ):
        return True
    if any((root / "dev").glob("accel*")) or any((root / "dev/vfio").glob("[0-9]*")):
        return True
    return any(_is_google_chip(device) for device in (root / "sys/bus/pci/devices").glob("*"))


def _is_google_chip(device: Path) -> bool:
    """Whether a PCI device is Google's and neither a disk (class 01) nor a network card (02), as any VM there has."""
    try:
        vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
    except OSError:
        return False
    return vendor == "0x1ae0" and kind[:4] not in ("0x01", "0x02")


def keep_memory() -> None:
    """Keeps freed memory in the process (glibc only); call before the first large allocation.

    On a CPU a program's buffers are gigabytes. Giving them back to the system after each call costs more, in page
    faults at the next one, than many of the kernels that fill them.
    """
    if platform.system() == "Linux" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        for option, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, 64 * 2**20), (_ARENA_MAX, 1)):
            libc.mallopt(option, value)
