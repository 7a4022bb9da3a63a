"""``grpojax env``: the facts that a bug report needs."""

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ALWAYS = ("grpojax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "transformers", "numpy")
PLUGINS = ("libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin", "jax-rocm7-plugin")  # shown where they are installed
_SHOWN = re.compile(r"(JAX|XLA|GRPOJAX)_\w+|LIBTPU_INIT_ARGS|CUDA_VISIBLE_DEVICES")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Its arguments."""
    text = "Prints versions, devices and settings of this machine, for a bug report; on several hosts run it on all."
    env = command("env", run, text, joins=True)
    env.add_argument("config", nargs="?", metavar="RECIPE", help="also say which mesh this recipe would get")
    env.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that replace the recipe's")
    env.add_argument("--json", action="store_true", help="as JSON")
    text = "look for no devices and no other hosts, where that fails or does not end"
    env.add_argument("--no-devices", dest="joins", action="store_false", help=text)


def run(args: argparse.Namespace) -> int:
    """Prints the report, on the first process."""
    import json

    found = report(args.config, args.overrides, devices=args.joins)
    if args.joins:
        from grpojax.host import processes

        if not processes.is_first():
            return 0
    print(json.dumps(found, indent=2) if args.json else format_report(found))
    return 0


def report(recipe: str | None = None, overrides: Sequence[str] = (), *, devices: bool = True) -> dict[str, Any]:
    """The report as plain data.

    Args:
      recipe: a file or a name, whose mesh and compile cache are reported; None reports neither.
      overrides: overrides of the recipe's settings.
      devices: whether to look for devices. Without them there is no mesh either.

    Raises:
      UserError: the recipe cannot be read, or its settings for the mesh are not possible.
    """
    from grpojax.host import settings
    from grpojax.sharding import MeshConfig

    tree = settings.override(settings.read(recipe), overrides)[0] if recipe is not None else {}
    found = {"versions": versions(), "machine": _machine()}
    if devices:
        found["devices"] = _devices()
        if recipe is not None:
            found["mesh"] = {"recipe": recipe, **_mesh(settings.build(MeshConfig, tree.get("mesh") or {}))}
    found["environment"] = variables(os.environ)
    found["compile_cache"] = _cache(tree)
    return found


def versions() -> dict[str, str | None]:
    """Versions of Python and the dependencies; None for a missing package."""
    import importlib.metadata
    import platform

    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    known = {name: version(name) for name in (*ALWAYS, *PLUGINS)}
    return {"python": platform.python_version()} | {n: v for n, v in known.items() if n in ALWAYS or v is not None}


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that change what jax or grpojax does. The value is left out if it may be a secret.

    Example:
      >>> variables({"HOME": "/root", "XLA_FLAGS": "--xla_x=1", "JAX_API_KEY": "abc"})
      {'JAX_API_KEY': '(set, not shown)', 'XLA_FLAGS': '--xla_x=1'}
    """
    shown = {name: value for name, value in sorted(environ.items()) if _SHOWN.fullmatch(name)}
    return {name: "(set, not shown)" if _SECRET.search(name) else value for name, value in shown.items()}


def _machine() -> dict[str, Any]:
    import platform

    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None
    return {"system": platform.platform(), "cpus": cpus, "memory_bytes": memory}


def _devices() -> dict[str, Any]:
    """The devices of all processes; the memory is that of one device of this process."""
    import jax

    first = jax.local_devices()[0]
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "count": jax.device_count(),
        "memory_bytes": (first.memory_stats() or {}).get("bytes_limit"),
        "processes": jax.process_count(),
    }


def _mesh(config: Any) -> dict[str, Any]:
    """The sizes of the axes, or the reason why these devices cannot form such a mesh."""
    import jax

    from grpojax import sharding
    from grpojax.host.errors import UserError

    try:
        learning, sampling = sharding.disaggregate(config, jax.devices())
        return {"axes": dict(sharding.make_mesh(config, learning).shape), "rollout": len(sampling)}
    except UserError as e:
        return {"problem": str(e)}


def _cache(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The folder of compiled programs, and its size if it is on this machine."""
    from pathlib import Path

    from grpojax.host import compile_cache, files

    run_dir = (tree.get("run") or {}).get("dir")
    chosen = compile_cache.cache_folder(tree.get("compile_cache", compile_cache.AUTO), run_dir)
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR") or chosen
    if folder is None or files.in_bucket(folder):
        return {"folder": folder, "bytes": None}
    return {"folder": folder, "bytes": sum(f.stat().st_size for f in Path(folder).rglob("*") if f.is_file())}


def format_report(found: Mapping[str, Any]) -> str:
    """The report as text, with one name and its value on each line."""
    machine, cache = found["machine"], found["compile_cache"]
    lines = {name: version or "missing" for name, version in found["versions"].items()}
    lines["system"] = machine["system"]
    lines["machine"] = f"{machine['cpus']} CPUs, memory {_size(machine['memory_bytes'])}"
    if devices := found.get("devices"):
        lines["devices"] = "{count} x {kind} ({platform})".format(**devices)
        lines["device memory"] = _size(devices["memory_bytes"])
        lines["processes"] = str(devices["processes"])
    if mesh := found.get("mesh"):
        axes = ", ".join(f"{axis} {size}" for axis, size in mesh.get("axes", {}).items())
        rollout = f"; {mesh['rollout']} devices sample" if mesh.get("rollout") else ""
        lines["recipe"] = mesh["recipe"]
        lines["mesh"] = mesh.get("problem", "").replace("\n", "; ") or axes + rollout
    lines["compile cache"] = f"{cache['folder']}, {_size(cache['bytes'])}" if cache["folder"] else "none"
    lines |= found["environment"]
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


def _size(count: int | None) -> str:
    if count is None:
        return "size unknown"
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
