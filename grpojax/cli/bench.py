"""``grpojax bench``: how a recipe's step spends its time."""

import argparse
from collections.abc import Callable

from grpojax.host.errors import UserError


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Its arguments."""
    bench = command("bench", run, "Measures where the time of a recipe's step goes.", overrides=True, joins=True)
    bench.add_argument("--steps", type=int, default=5, help="timed steps; the median is reported")
    bench.add_argument(
        "--only", choices=("rollout",), help="draw rollouts one after the other, and learn nothing: compiles less"
    )
    bench.add_argument("--full-length", action="store_true", help="ignore end-of-sequence tokens")
    bench.add_argument("--json", metavar="FILE", help="also write the figures to this file")


def run(args: argparse.Namespace) -> int:
    """Prints the table of `grpojax.cli.benchmark`, and writes its figures."""
    import jax

    from grpojax.cli import benchmark
    from grpojax.host import files, processes
    from grpojax.host.console import log
    from grpojax.run import recipe

    if args.steps < 1:
        raise UserError(f"--steps {args.steps}: must be at least 1")
    config = recipe.load(args.config, args.overrides)
    measure = benchmark.measure_rollouts if args.only else benchmark.measure
    figures = measure(config, steps=args.steps, full_length=args.full_length)
    if not processes.is_first():
        return 0
    print(benchmark.format_table(figures, config.model.dtype))
    if args.json:
        device = {"device": jax.devices()[0].device_kind, "devices": jax.device_count(), "jax": jax.__version__}
        files.write_json(args.json, device | figures)
        log.info("wrote %s", args.json)
    return 0
