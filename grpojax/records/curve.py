"""A picture of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw_curve(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Reward a step, and evaluation accuracy where there is any, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
    train = [(line["step"], line["reward"]) for line in lines if line.get("reward") is not None]
    evals = [(line["step"], line["eval/accuracy"]) for line in lines if "eval/accuracy" in line]
    if train:
        axes.plot(*zip(*train, strict=True), color="#9ecae1", linewidth=1, label="reward of the step")
        window = max(1, len(train) // 20)
        smooth = [
            (train[i][0], sum(r for _, r in train[max(0, i - window + 1) : i + 1]) / min(i + 1, window))
            for i in range(len(train))
        ]
        axes.plot(*zip(*smooth, strict=True), color="#2171b5", label=f"mean of {window} steps")
    if evals:
        axes.plot(*zip(*evals, strict=True), "o-", color="#d94801", label="held-out greedy accuracy")
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
