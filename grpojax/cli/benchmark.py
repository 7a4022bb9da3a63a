"""How a recipe's step spends its time: tokens a second, useful FLOPs, share of this device's matmul rate."""

import dataclasses
import itertools
import resource
import sys
import time
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from grpojax.device import Program
from grpojax.host import files, processes
from grpojax.host.errors import UserError
from grpojax.models import DecoderConfig
from grpojax.programs.sampler import own_tokens
from grpojax.records.metrics import read_metrics
from grpojax.run import work
from grpojax.run.profiling import ProfileConfig
from grpojax.run.recipe import Config
from grpojax.train import Updates, open_run, train

WARM = 2  # steps before the timed ones: they compile

PHASES = ("rollout", "score", "late", "update", "step")


def measure(config: Config, *, steps: int, full_length: bool = False) -> dict[str, float]:
    """Trains ``WARM + steps`` steps in a new folder of ``<run.dir>_bench``; medians of the last ``steps``.

    Args:
      config: the recipe; its evaluation, checkpoints and profile are left out.
      steps: timed steps.
      full_length: let no token end a sample.

    Returns:
      For each of `PHASES` that the run has, "PHASE_s" (seconds), "PHASE_tokens_per_s" (tokens of completions that it
      works through), "PHASE_gflop" and "PHASE_of_matmul_rate". The phase "late" is the signals that need the rewards
      first. With ``rollout.ahead`` there is only the step, since the other phases overlap. In addition "steps",
      "tokens_per_step", "matmul_gflops" (a second), "useful_token_fraction", "first_step_s", "compile_s", "reward_s"
      (in which the host waited for rewards) and "peak_memory_gib". With several processes, only the first returns them,
      and the others return nothing.
    """
    config = _timed(config, WARM + steps)
    prompts: list[list[int]] = []  # tokens of each prompt, step by step
    lengths: list[np.ndarray] = []  # [P, G] tokens of each completion, without what an environment answered
    flops: list[Mapping[str, float]] = []  # of each phase

    def note(updates: Updates) -> None:
        prompts.append([len(p.ids) for p in updates.batch.problems])
        lengths.append(own_tokens(updates.batch.rollout).lengths)
        flops.append(updates.flops)

    run = open_run(config, eos_ids=() if full_length else None)
    train(run, note)
    if not processes.is_first():
        return {}
    rows = read_metrics(config.run.dir)
    model = run.policy.config
    shapes = list(zip(prompts, lengths, strict=True))[WARM:]
    tokens = float(np.median([n.sum() for _, n in shapes]))
    width = int(np.median([sum(ids) + n.sum() for ids, n in shapes]))
    rate = matmul_rate(model, min(width, 8192), config.model.dtype) * jax.device_count()
    figures = {"steps": float(steps), "tokens_per_step": tokens, "matmul_gflops": rate / 1e9}
    passes = {
        "score": run.scores_a_step,
        "update": config.train.ppo_epochs,
    }
    names = ("step",) if config.rollout.ahead else PHASES
    figures |= phase_figures(rows[WARM:], flops[WARM:], tokens, rate, passes, names)
    figures["useful_token_fraction"] = _median(rows[WARM:], "useful_token_fraction")
    figures["reward_s"] = _median(rows[WARM:], "time/reward_s")
    figures["first_step_s"] = rows[0]["time/step_s"]
    figures["compile_s"] = figures["first_step_s"] - figures["step_s"]
    figures["peak_memory_gib"] = _peak_memory()
    return figures


def measure_rollouts(config: Config, *, steps: int, full_length: bool = False) -> dict[str, float]:
    """Draws ``WARM + steps`` rollouts one after the other from a policy that learns nothing; medians of the last
    ``steps``.

    A rollout is all that a step draws, also what a filter asks for. The rewards' time is not in it, but where a filter
    waits for them.

    Args:
      config, steps, full_length: as in `measure`.

    Returns:
      What `measure` returns of the phase "rollout", and "steps", "tokens_per_step", "matmul_gflops", "first_step_s" (of
      the first rollout), "compile_s" and "peak_memory_gib".

    Raises:
      UserError: the recipe draws its samples while it learns.
    """
    for name in ("ahead", "overlap"):
        if value := getattr(config.rollout, name):
            raise UserError(f"--only rollout with rollout.{name}={value}: it is drawn during an update; set it to 0")
    seconds, tokens, widths, flops = [], [], [], []
    with open_run(_timed(config, WARM + steps), eos_ids=() if full_length else None, learns=False) as run:
        state, model = run.state, run.policy.config
        for number in range(1, WARM + steps + 1):
            started = time.perf_counter()
            batch = run.source.next(state, run.source.begin(state))
            seconds.append(time.perf_counter() - started)
            lengths = own_tokens(batch.rollout).lengths
            tokens.append(float(lengths.sum()))
            widths.append(int(sum(len(p.ids) for p in batch.problems) + lengths.sum()))
            flops.append(work.step_flops(model, batch, scores=0, ppo_epochs=0)["rollout"])
            state = dataclasses.replace(state, step=number).having(run.source.after_step())
    if not processes.is_first():
        return {}
    rate = matmul_rate(model, min(int(np.median(widths[WARM:])), 8192), config.model.dtype) * jax.device_count()
    median, drawn, gflop = (float(np.median(x[WARM:])) for x in (seconds, tokens, [f / 1e9 for f in flops]))
    return {
        "steps": float(steps),
        "tokens_per_step": drawn,
        "matmul_gflops": rate / 1e9,
        "rollout_s": median,
        "rollout_tokens_per_s": drawn / median,
        "rollout_gflop": gflop,
        "rollout_of_matmul_rate": gflop * 1e9 / median / rate,
        "first_step_s": seconds[0],
        "compile_s": seconds[0] - median,
        "peak_memory_gib": _peak_memory(),
    }


def phase_figures(
    rows: Sequence[Mapping[str, float]],
    flops: Sequence[Mapping[str, float]],
    tokens: float,
    rate: float,
    passes: Mapping[str, int],
    names: Sequence[str] = PHASES,
) -> dict[str, float]:
    """Seconds, tokens a second, GFLOP and share of the matmul rate, by phase.

    Args:
      rows: the metrics of the timed steps.
      flops: their FLOPs by phase (`grpojax.run.work.step_flops`).
      tokens: tokens of all completions of a step.
      rate: FLOP/s of all devices' matrix products.
      passes: how often a phase works through the tokens, if not once.
      names: names of the phases.
    """
    figures = {}
    for name in names:
        if f"time/{name}_s" not in rows[0]:
            continue
        seconds = _median(rows, f"time/{name}_s")
        spent = float(np.median([sum(f.values()) if name == "step" else f[name] for f in flops]))
        figures[f"{name}_s"] = seconds
        figures[f"{name}_tokens_per_s"] = tokens * passes.get(name, 1) / seconds if seconds else 0.0
        figures[f"{name}_gflop"] = spent / 1e9
        figures[f"{name}_of_matmul_rate"] = spent / seconds / rate if seconds else 0.0
    return figures


def matmul_rate(c: DecoderConfig, tokens: int, dtype: str) -> float:
    """FLOP/s of this device at the model's own largest shapes: the MLP forward and its two backward products. A mixture
    has the MLPs of its experts only."""
    d, f = c.hidden_size, c.intermediate_size if c.mlp is None else c.mlp.width
    x, w, y = jnp.ones((tokens, d), dtype), jnp.ones((d, f), dtype), jnp.ones((tokens, f), dtype)
    products = (
        (Program("", lambda a, b: a @ b), x, w),
        (Program("", lambda a, b: a @ b.T), y, w),
        (Program("", lambda a, b: a.T @ b), x, y),
    )
    at_once = 1 if jax.default_backend() == "cpu" else 20  # a call may take longer than an accelerator
    seconds = 0.0
    for f_, a, b in products:
        f_(a, b).block_until_ready()
        times = []
        for _ in range(5):
            start = time.perf_counter()
            jax.block_until_ready([f_(a, b) for _ in range(at_once)])
            times.append((time.perf_counter() - start) / at_once)
        seconds += float(np.median(times))
    return 3 * 2 * tokens * d * f / seconds


def format_table(figures: dict[str, float], dtype: str) -> str:
    """The figures as text for people."""
    lines = [f"{'phase':8s} {'seconds':>9s} {'tokens/s':>10s} {'GFLOP':>9s} {'of matmul rate':>15s}"]
    for name in PHASES:
        if f"{name}_s" not in figures:
            continue
        lines.append(
            f"{name:8s} {figures[name + '_s']:9.3f} {figures[name + '_tokens_per_s']:10.0f} "
            f"{figures[name + '_gflop']:9.1f} {100 * figures[name + '_of_matmul_rate']:13.1f} %"
        )
    line = (
        f"matmul rate {figures['matmul_gflops']:.0f} GFLOP/s in {dtype}; peak memory "
        f"{figures['peak_memory_gib']:.2f} GiB; compile {figures['compile_s']:.1f} s"
    )
    if "reward_s" in figures:
        line += (
            f"; useful positions {100 * figures['useful_token_fraction']:.0f} %; rewards waited for "
            f"{figures['reward_s']:.2f} s a step"
        )
    return "\n".join([*lines, line])


def _timed(config: Config, steps: int) -> Config:
    """The recipe for this number of whole steps and nothing else, in a new folder of its own."""
    own = files.path(config.run.dir)  # stays free for the recipe's own run
    places = (own.parent / f"{own.name}_bench" / str(n) for n in itertools.count(1))
    folder = next(place for place in places if not place.exists())
    folder = processes.meet(str(folder))[0]  # another process may have made it already
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, steps=steps, tokens=None, checkpoint_every=0, eval_every=0),
        data=dataclasses.replace(config.data, validation=None, test=None),
        run=dataclasses.replace(config.run, dir=folder),
        profile=ProfileConfig(),
        critic=config.critic and dataclasses.replace(config.critic, warmup_steps=0),
    )


def _median(rows: Sequence[Mapping[str, float]], name: str) -> float:
    return float(np.median([row[name] for row in rows]))


def _peak_memory() -> float:
    """GiB: the device's own count where it keeps one, otherwise the process's peak."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"] / 2**30
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 2**30
