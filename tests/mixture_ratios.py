"""How noisy ratios of tokens and of sequences are on a mixture of experts.

``PYTHONPATH=tests python tests/mixture_ratios.py OUT_DIR`` trains a tiny random Qwen3-MoE in bfloat16 by GRPO and by
GSPO, each with and without ``rollout.router_replay``, and prints a row of means over seeds for each. An update's ratio
is that of the policy after earlier updates of the same rollout to the policy before them.
"""

import sys
from pathlib import Path

import numpy as np
from runs import numbers
from tiny_run import make_mixture, make_run

from grpojax.cli import main as cli

SEEDS, STEPS = 3, 8
SIZES = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHOWN = ("sampling/logp_difference_mean", "sampling/logp_difference_max", "log_ratio_rms", "clip_ratio/region_mean")


def main(folder: Path) -> None:
    """Runs all of it and prints the table."""
    folder.mkdir(parents=True)
    recipe = make_run(folder)
    mixture = make_mixture(folder, folder / "mixture", **SIZES)
    given = [f"model.path={mixture}", "model.dtype=bfloat16", "rewards.0.name=tiny_run:parity", "rollout.group=8",
             "rollout.max_tokens=16", "train.ppo_epochs=2", "train.minibatches=2", f"train.steps={STEPS}",
             "train.eval_every=0", "train.checkpoint_every=0", "optimizer.learning_rate=1e-3", "mesh.fsdp=1",
             "data.validation=null"]  # fmt: skip
    rows = []
    for variant in ("grpo", "gspo"):
        for replay in ("false", "true"):
            found = []
            for seed in range(SEEDS):
                run = folder / f"{variant}-{replay}-{seed}"
                mine = [f"variant={{name: {variant}, kl_coef: 0}}", f"rollout.router_replay={replay}"]
                assert cli.main(["train", str(recipe), *given, *mine, f"train.seed={seed}", f"run.dir={run}"]) == 0
                lines = [line for line in numbers(run) if "log_ratio_rms" in line]
                found.append([np.mean([line[name] for line in lines]) for name in SHOWN])
            rows.append(f"| {variant} | {replay} | " + " | ".join(_shown(x) for x in np.transpose(found)) + " |")
    print("\n".join(["| variant | replay | " + " | ".join(SHOWN) + " |", "|---" * (2 + len(SHOWN)) + "|", *rows]))


def _shown(of_seeds: np.ndarray) -> str:
    return f"{of_seeds.mean():.2g} ({of_seeds.min():.2g} to {of_seeds.max():.2g})"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
