"""One compiled program of a plan: its memory, the data it moves, and the seconds that each resource is busy with it."""

import math
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from grpojax.extensions.plan import hlo, plan_links
from grpojax.extensions.plan.plan_calls import PlannedCall
from grpojax.extensions.plan.plan_report import ProgramReport
from grpojax.models import flops
from grpojax.programs import kv_cache

_GIB = 2**30
# GiB that the TPU compiler has for a program, from its message when one does not fit (libtpu 0.0.52).
_ROOM = {"TPU v4": 30.75, "TPU v5 lite": 15.75, "TPU v5": 95.73, "TPU v5p": 95.73, "TPU v6 lite": 31.24}
_UNITS = {"K": 2**-20, "M": 2**-10, "G": 1.0, "T": 2.0**10}  # the units in its message, in GiB
_KEPT_BACK = 1 / 64  # of a GPU's memory, assumed to be as a v5e's


def per_chip(tree: Any) -> int:
    """Bytes of a tree of shapes on one chip. A number that the host passes is on no chip beforehand."""
    placed = [x for x in jax.tree.leaves(tree) if x.sharding is not None]
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in placed)


def room(device_kind: str) -> float:
    """GiB of a chip that programs may use; infinite for an unknown chip."""
    chip = flops.CHIPS.get(device_kind)
    return _ROOM.get(device_kind, math.inf if chip is None else chip.memory * (1 - _KEPT_BACK) / _GIB)


def compile_program(
    name: str, call: PlannedCall, *, run: Mapping[str, int], compute_s: float | None, devices: Sequence[Any]
) -> ProgramReport:
    """Compiles a program of a run.

    Args:
      name: the name of the program.
      call: the program and its arguments.
      run: bytes of everything that the run keeps on a chip, by name.
      compute_s: seconds that its FLOPs take at the data sheet's rate; None if that is not known.
      devices: the devices of the mesh, in its order.

    Raises:
      JaxRuntimeError: the compiler refuses the program for another reason than its memory.
    """
    kind, own = devices[0].device_kind, per_chip(call.own)
    kept = {what: size / _GIB for what, size in run.items()}
    resident = sum(kept.values()) - own / _GIB
    started = time.perf_counter()
    try:
        compiled, text = _with_hlo(call.program.lower(*call.args))
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        sizes = re.search(r"[^.:]*\(([\d.]+)(\w)\)[^.]*\([\d.]+\w\)", str(e))
        error = (sizes[0] if sizes else str(e).splitlines()[0]).strip()
        temp = float(sizes[1]) * _UNITS.get(sizes[2], math.nan) if sizes else math.nan
        consumers = kept | _of_call(call, own, temp)
        seconds = time.perf_counter() - started
        return ProgramReport(
            name=name, compile_s=seconds, error=error, consumers=consumers, resident=resident, room=room(kind)
        )
    seconds, memory = time.perf_counter() - started, compiled.memory_analysis()
    module = hlo.analyse(text, {kv_cache.LOOP: call.blocks, **call.loops})
    once, each = hlo.by_kind(module.collectives)
    links = (
        plan_links.loads(module.collectives, devices),
        plan_links.loads(module.collectives, devices, unknown=True),
    )
    temp = memory.temp_size_in_bytes / _GIB
    return ProgramReport(
        name=name,
        compile_s=seconds,
        argument=memory.argument_size_in_bytes / _GIB,
        temp=temp,
        output=memory.output_size_in_bytes / _GIB,
        alias=memory.alias_size_in_bytes / _GIB,
        resident=resident,
        room=room(kind),
        consumers=kept | _of_call(call, own, temp),
        seconds=_seconds(kind, compute_s, module, links, call),
        collectives=once,
        per_iteration=each,
        samples=call.samples,
        links=links[0],
        links_each=links[1],
        read=module.once / _GIB,
        read_each=module.each / _GIB,
        optional_each=module.optional / _GIB,
    )


def _seconds(
    kind: str,
    compute_s: float | None,
    module: hlo.Module,
    links: tuple[Mapping[str, plan_links.LinkLoad], Mapping[str, plan_links.LinkLoad]],
    call: PlannedCall,
) -> dict[str, float]:
    """The time that each resource is busy, with loops of unknown length at their longest."""
    chip, iterations = flops.CHIPS.get(kind), max(call.iterations, 1)
    if chip is None:
        return {}
    each = module.each - (1 - call.live) * module.optional
    busy = {} if compute_s is None else {"compute": compute_s}
    busy["HBM"] = (module.once + iterations * each) / chip.bandwidth
    for link in plan_links.LINKS:
        once, again = (part[link].seconds if link in part else 0.0 for part in links)
        if total := once + iterations * again:
            busy[link] = total
    return busy


def _of_call(call: PlannedCall, own: int, temp: float) -> dict[str, float]:
    """GiB that a program needs besides the run's state: its arguments, and the memory that it allocates."""
    given = (sum(per_chip(x) for x in call.args if x is not None) - own) / _GIB
    cast = (per_chip(call.args[0]) - own) / _GIB if call.samples else 0.0
    cache = call.cache / _GIB
    allocated = 0.0 if temp < cache else cache
    parts = {
        "weights cast for the rollout": cast,
        "keys and values": cache,
        "batch": max(given - cast, 0.0),
        "temporaries": temp - allocated,
    }
    return {what: size for what, size in parts.items() if size}


def _with_hlo(lowered: jax.stages.Lowered) -> tuple[Any, str]:
    """``(compiled, optimised HLO)``. The HLO is the compiler's dump, since ``as_text`` cannot read all of libtpu's."""
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        return compiled, next(Path(folder).glob("*.after_optimizations.txt")).read_text(encoding="utf-8")
