"""XLA's options for programs that run for milliseconds and compile for seconds."""

from importlib.metadata import version

OPTIONS = {"xla_backend_optimization_level": 0}
if version("jaxlib").startswith("0.10."):  # it has two emitters of loops, and the older compiles in half the time
    OPTIONS["xla_cpu_use_fusion_emitters"] = False
    OPTIONS["xla_cpu_parallel_codegen_split_count"] = 1  # the workers keep the cores busy: a fifth less for an update


def flags(devices: int | None = None) -> str:
    """The same for ``XLA_FLAGS``, and so many CPU devices."""
    given = OPTIONS if devices is None else OPTIONS | {"xla_force_host_platform_device_count": devices}
    return " ".join(f"--{name}={str(value).lower()}" for name, value in given.items())
