"""Where the time of a recipe's step goes: tokens a second, useful FLOPs, share of this device's matmul rate."""

import dataclasses
import itertools
import json
import resource
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from grpojax.host.console import log
from grpojax.models import DecoderConfig
from grpojax.models.flops import forward_flops
from grpojax.records.metrics import read_metrics
from grpojax.run.recipe import Config
from grpojax.run.trainer import Trainer


def matmul_rate(c: DecoderConfig, tokens: int, dtype: str) -> float:
    """FLOP/s of this device at the model's own largest shapes: the MLP forward and its two backward products."""
    d, f = c.hidden_size, c.intermediate_size
    x, w, y = jnp.ones((tokens, d), dtype), jnp.ones((d, f), dtype), jnp.ones((tokens, f), dtype)
    products = (
        (jax.jit(lambda a, b: a @ b), x, w),
        (jax.jit(lambda a, b: a @ b.T), y, w),
        (jax.jit(lambda a, b: a.T @ b), x, y),
    )
    seconds = 0.0
    for f_, a, b in products:
        f_(a, b).block_until_ready()
        times = []
        for _ in range(5):
            start = time.perf_counter()
            f_(a, b).block_until_ready()
            times.append(time.perf_counter() - start)
        seconds += float(np.median(times))
    return 3 * 2 * tokens * d * f / seconds


def run(config: Config, *, steps: int, full_length: bool, json_path: str | None) -> dict[str, float]:
    """Trains 2 + ``steps`` steps in a new folder of ``run.dir`` and reports medians of the last ``steps``.

    Args:
      config: the recipe; its evaluation and checkpoints are left out.
      steps: timed steps.
      full_length: let no token end a sample.
      json_path: where to write the figures too; None does not.
    """
    warm = 2
    train = dataclasses.replace(config.train, steps=warm + steps, checkpoint_every=0, eval_every=0)
    folder = next(f for n in itertools.count(1) if not (f := Path(config.run.dir) / str(n)).exists())
    config = dataclasses.replace(
        config, train=train, data=dataclasses.replace(config.data, eval=None),
        run=dataclasses.replace(config.run, dir=str(folder)),
    )  # fmt: skip
    trainer = Trainer(config)
    policy = trainer.policy
    if full_length:
        policy.eos_ids = ()
    shapes: list[tuple[list[int], np.ndarray]] = []
    trainer.on_step = lambda problems, rollout: shapes.append(([len(p.ids) for p in problems], rollout.lengths))
    trainer.run()
    rows = read_metrics(config.run.dir)
    first, rows, shapes = rows[0], rows[warm:], shapes[warm:]
    c = policy.config
    forward = float(np.median([forward_flops(c, *s) for s in shapes]))
    per_step = config.train.iterations
    scores = int(trainer.ref_params is not None) + int(config.train.iterations * config.train.minibatches > 1)
    median = lambda name: float(np.median([r[name] for r in rows]))  # noqa: E731
    tokens = float(np.median([s[1].sum() for s in shapes]))
    width = int(np.median([sum(s[0]) + s[1].sum() for s in shapes]))
    rate = matmul_rate(c, min(width, 8192), config.model.dtype) * jax.device_count()
    phases = {
        "rollout": (median("time/rollout_s"), forward, tokens),
        "score": (median("time/score_s"), forward * scores, tokens * scores),
        "update": (median("time/update_s"), 3 * forward * per_step, tokens * per_step),
        "step": (median("time/step_s"), forward * (1 + scores + 3 * per_step), tokens),
    }
    figures: dict[str, float] = {
        "steps": float(steps),
        "tokens_per_step": tokens,
        "matmul_gflops": rate / 1e9,
    }
    for name, (seconds, flops, done) in phases.items():
        figures[f"{name}_s"] = seconds
        figures[f"{name}_tokens_per_s"] = done / seconds if seconds else 0.0
        figures[f"{name}_gflop"] = flops / 1e9
        figures[f"{name}_of_matmul_rate"] = flops / seconds / rate if seconds else 0.0
    figures["useful_token_fraction"] = median("useful_token_fraction")
    figures["first_step_s"] = first["time/step_s"]
    figures["compile_s"] = figures["first_step_s"] - figures["step_s"]
    figures["peak_memory_gib"] = _peak_memory()
    print(_table(config, figures))
    if json_path:
        record_ = {
            "device": jax.devices()[0].device_kind,
            "devices": jax.device_count(),
            "jax": jax.__version__,
            **figures,
        }
        Path(json_path).write_text(json.dumps(record_, indent=2) + "\n", encoding="utf-8")
        log.info("wrote %s", json_path)
    return figures


def _peak_memory() -> float:
    """GiB: the device's own count where it keeps one, otherwise the process's peak."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"] / 2**30
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 2**30


def _table(config: Config, f: dict[str, float]) -> str:
    lines = [f"{'phase':8s} {'seconds':>9s} {'tokens/s':>10s} {'GFLOP':>9s} {'of matmul rate':>15s}"]
    for name in ("rollout", "score", "update", "step"):
        lines.append(
            f"{name:8s} {f[name + '_s']:9.3f} {f[name + '_tokens_per_s']:10.0f} {f[name + '_gflop']:9.1f} "
            f"{100 * f[name + '_of_matmul_rate']:13.1f} %"
        )
    lines.append(
        f"matmul rate {f['matmul_gflops']:.0f} GFLOP/s in {config.model.dtype}; peak memory {f['peak_memory_gib']:.2f} GiB; "
        f"compile {f['compile_s']:.1f} s; useful positions {100 * f['useful_token_fraction']:.0f} %"
    )
    return "\n".join(lines)
