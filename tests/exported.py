"""Programs exported for NVIDIA where there is none, and what their StableHLO says: products, operations, loops."""

import math
import re
from collections import Counter

import jax
from jax import export

from grpojax.device import Program

TRITON = "__gpu$xla.gpu.triton"
# Operations that move numbers, and compute none.
MOVES = "concatenate convert dynamic_slice dynamic_update_slice gather pad reverse scatter slice sort transpose".split()
_TENSOR = re.compile(r"tensor<(?:([\dx]+)x)?(\w+)>")


def nvidia():
    """Has a kernel know for which GPU it is made; before jax 0.11 it is an H100 where there is none."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def stablehlo(program, *args):
    """Of a jitted function, or a `grpojax.device.Program`, for CUDA."""
    program = program.jitted(*args) if isinstance(program, Program) else program
    kernel = export.DisabledSafetyCheck.custom_call(TRITON)
    with nvidia():
        return export.export(program, platforms=["cuda"], disabled_checks=[kernel])(*args).mlir_module()


def in_kernels(program, *args):
    """Dtypes of the operands of each product inside of a kernel, which is no StableHLO."""

    def inside(x):
        if isinstance(x, list | tuple):
            return [j for y in x for j in inside(y)]
        x = getattr(x, "jaxpr", x)
        return [x] if hasattr(x, "eqns") else []

    def products(jaxpr, kernel):
        for e in jaxpr.eqns:
            if kernel and e.primitive.name == "dot_general":
                yield tuple(str(x.aval.dtype) for x in e.invars)
            for part in inside(list(e.params.values())):
                yield from products(part, kernel or e.primitive.name == "pallas_call")

    with nvidia():
        return list(products(program.trace(*args).jaxpr.jaxpr, False))


def factors(text):
    """Operands of each product of matrices, as in ``3x5xbf16``."""
    return re.findall(r"dot_general.* : \(tensor<([^>]*)>, tensor<([^>]*)>\)", text)


def finer(text):
    """Those of products that are not of bfloat16 with bfloat16."""
    return [pair for pair in factors(text) if not all(x.endswith("bf16") for x in pair)]


def decode_loop(text):
    """Lines of the innermost loop that calls the kernel."""
    lines = text.splitlines()
    starts = [k for k, line in enumerate(lines) if "stablehlo.while" in line]
    of_slots = max(k for k, line in enumerate(lines) if "call @attend" in line)
    start = max(k for k in starts if k < of_slots)
    margin = len(lines[start]) - len(lines[start].lstrip())
    end = next(k for k in range(of_slots, len(lines)) if lines[k].startswith(" " * margin + "}"))
    return lines[start + 1 : end]


def made(text, least, lines=None):
    """Counts ``(operation, shape, dtype)`` of the first results that have ``least`` numbers or more, wherever they are
    called from; ``lines`` are part of the text, all of the program's otherwise."""
    functions, name = {}, None
    for line in text.splitlines():
        if found := re.match(r"\s*func\.func .*@([\w.]+)\(", line):
            functions[name := found[1]] = []
        elif name:
            functions[name].append(line)
    known = {}

    def of(name):
        if name not in known:
            known[name] = count(functions[name])
        return known[name]

    def count(lines):
        out, regions = Counter(), []
        for line in lines:
            if called := re.search(r"\bcall @([\w.]+)\(", line):
                out += of(called[1])
                continue
            found = re.search(r"= \"?stablehlo\.(\w+)", line)
            if found and line.endswith("({"):  # its type stands behind its regions
                regions.append(found[1])
                continue
            ends = line.lstrip().startswith("})") and regions
            if not (found or ends):
                continue
            op, results = regions.pop() if ends else found[1], line.rsplit("->" if "->" in line else " : ", 1)[-1]
            if typed := _TENSOR.search(results):
                shape = tuple(map(int, (typed[1] or "1").split("x")))
                if math.prod(shape) >= least:
                    out[op, shape, typed[2]] += 1
        return out

    return count(lines) if lines is not None else of("main")
