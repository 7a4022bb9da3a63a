"""Names of TPU slices, as people and as Google Cloud write them, and their numbers of chips and hosts."""

from __future__ import annotations

import dataclasses
import re

from errors import Mistake


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """A slice.

    Args:
      name: as Google Cloud writes it.
      runtime: the usual image of its VMs.
      chips: number of its chips.
      hosts: number of its VMs.
    """

    name: str
    runtime: str
    chips: int
    hosts: int


# Generation: Google Cloud's prefix, image, cores that a chip counts as in the name, chips of the largest slice of one
# host, chips of a host in a larger one.
_GENERATIONS = {
    "v4": ("v4", "tpu-ubuntu2204-base", 2, 4, 4),
    "v5e": ("v5litepod", "v2-alpha-tpuv5-lite", 1, 8, 4),
    "v5p": ("v5p", "v2-alpha-tpuv5", 2, 4, 4),
    "v6e": ("v6e", "v2-alpha-tpuv6e", 1, 8, 4),
}


def parse(text: str) -> Accelerator:
    """Reads v5e-16 (or v5litepod-16).

    Example:
      >>> parse("v5e-16")
      Accelerator(name='v5litepod-16', runtime='v2-alpha-tpuv5-lite', chips=16, hosts=4)
      >>> parse("v5p-32").chips
      16
    """
    found = re.fullmatch(r"(v4|v5e|v5litepod|v5p|v6e)-([1-9]\d*)", text)
    if not found:
        raise Mistake(f"TYPE={text}: one of v4-N, v5p-N (N cores, two a chip), v5e-N, v6e-N (N chips), such as v5e-16")
    prefix, runtime, cores, one_host, a_host = _GENERATIONS[found[1].replace("litepod", "e")]
    chips, odd = divmod(int(found[2]), cores)
    hosts, left = (1, 0) if chips <= one_host else divmod(chips, a_host)
    if odd or left or not chips:
        raise Mistake(f"TYPE={text}: there is no slice of that many; try {prefix}-{4 * cores} or {prefix}-{16 * cores}")
    return Accelerator(f"{prefix}-{found[2]}", runtime, chips, hosts)
