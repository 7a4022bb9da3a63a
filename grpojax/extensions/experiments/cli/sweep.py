"""``grpojax sweep``: a run for each of several methods and seeds, in a queue that resumes where it was stopped."""

import argparse
from collections.abc import Callable

from grpojax.host.errors import UserError


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Its arguments."""
    text = "Trains several variants with several seeds, one run after the other; the same command continues it."
    sweep = command("sweep", run, text, overrides=True)
    sweep.add_argument(
        "--variants",
        required=True,
        metavar="A,B",
        help="variants: names, or YAML such as '{name: dapo, clip_high: 0.3}'",
    )
    sweep.add_argument(
        "--seeds", default="3", metavar="N", help="number of seeds, from 0 on, or a range such as 5-9; 3 by default"
    )
    sweep.add_argument("--to", required=True, metavar="DIR", help="folder of the sweep; the runs go to DIR/runs")
    sweep.add_argument(
        "--devices", metavar="0,1", help="devices that each take one run at a time; by default one run takes all"
    )
    sweep.add_argument(
        "--controls", action="store_true", help="also run each variant's control: the same with its mechanism off"
    )
    sweep.add_argument(
        "--rates", metavar="X,Y,Z", help="at least 3 learning rates; each variant takes its best by held-out reward"
    )
    sweep.add_argument(
        "--rate-seeds", type=int, metavar="N", help="number of seeds for the choice of a rate; 3 by default"
    )
    sweep.add_argument("--margin", type=float, metavar="M", help="differences of at most M count as none in the report")
    sweep.add_argument(
        "--pilot", metavar="DIR", help="earlier runs, to print the smallest difference that these seeds can show"
    )
    sweep.add_argument("--at-once", type=int, default=1, metavar="N", help="runs at a time on each device")


def run(args: argparse.Namespace) -> int:
    """Makes the runs; returns 1 if any failed, 75 if it was stopped."""
    import os
    import shlex

    import jax

    if os.environ.get("JAX_COORDINATOR_ADDRESS"):
        raise UserError("JAX_COORDINATOR_ADDRESS is set: a sweep starts runs of one process; unset it")
    environment = dict(os.environ)
    jax.config.update("jax_platforms", "cpu")  # reading the recipes must not occupy an accelerator that the runs need
    from grpojax.extensions.experiments import rate_search, sweep
    from grpojax.extensions.experiments.jobs import Queue
    from grpojax.host import files

    folder = files.local(args.to, "--to").absolute()
    asked = sweep.Sweep(
        config=args.config,
        overrides=tuple(args.overrides),
        variants=sweep.read_variants(args.variants),
        seeds=sweep.read_seeds(args.seeds),
        folder=folder,
        rates=_numbers(args.rates),
        controls=args.controls,
        rate_count=args.rate_seeds,
        margin=args.margin,
    )
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "cache"))
    if args.at_once < 1:
        raise UserError(f"--at-once {args.at_once}: must be at least 1")
    queue = Queue(folder, environment, _devices(args.devices), at_once=args.at_once)
    try:
        outcome = rate_search.run(asked, queue, args.pilot)
    except OSError as e:
        raise UserError(f"{e.filename}: {e.strerror}; give another --to") from None
    if outcome.stopped:
        print("stopped; the same command goes on")
        return os.EX_TEMPFAIL
    for name, failure in outcome.failed.items():
        left_out = failure.status is None
        print(f"{name}: {failure.lines[-1]}" if left_out else f"{name} failed; the same command tries it again")
    if outcome.done:
        print(f"grpojax report {shlex.quote(str(folder))} --to {shlex.quote(str(folder / 'report.html'))}")
    return 1 if outcome.failed else 0


def _numbers(text: str | None) -> tuple[float, ...]:
    try:
        return tuple(float(x) for x in text.split(",")) if text else ()
    except ValueError:
        raise UserError(f"--rates {text}: give numbers with commas between them, such as 1e-6,3e-6") from None


def _devices(text: str | None) -> list[str]:
    each = [x.strip() for x in text.split(",")] if text else []
    if any(not x.isdigit() for x in each) or len(set(each)) < len(each):
        raise UserError(f"--devices {text}: give different numbers with commas between them, such as 0,1")
    return each
