"""Run directories as a trainer leaves them, with numbers that are made up."""

import json
from pathlib import Path

import numpy as np

from grpojax.evaluation import Attempt, Sample
from grpojax.records import evaluations

CONFIG = {
    "model": {"path": "builtin:tiny"},
    "data": {"train": "train.jsonl", "validation": None, "prompt": "question", "answer": "answer"},
    "rollout": {"group": 4, "prompts": 3, "max_tokens": 8},
    "train": {"steps": 6, "seed": 0, "ppo_epochs": 1, "minibatches": 1},
    "optimizer": {"learning_rate": 1e-3},
    "tracking": {"samples": True},
}


def write_data(path: Path, problems: int = 12) -> Path:
    """Held-out rows of two difficulties."""
    rows = [{"question": f"what is {i} < {i + 1} & 2?", "answer": str(i), "level": 1 + i % 2} for i in range(problems)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_run(
    path: Path,
    variant: dict | str,
    seed: int,
    skill: float | list[float],
    *,
    data: Path | None,
    steps: int = 6,
    done: int | None = None,
    problems: int = 12,
    metrics: dict | None = None,
    test: float | None = None,
    ended: str | None = None,
    method: dict | None = None,
    **train,
) -> Path:
    """Writes a run whose model solves the share ``skill`` of the problems at the end, or the given share of each.

    Args:
      data: its held-out rows; None for a run without.
      done: steps that it got to, all of them if left out.
      metrics: more for each step.
      test: the share of the test set that it solves, read at the end; None for a run without.
      ended: "stopped" for a run that was told to stop, or the reason of a failure.
      method: the resolved one, a tree.
      train: settings of that section.
    """
    path.mkdir(parents=True)
    config = json.loads(json.dumps(CONFIG))
    config["train"] |= {"steps": steps, "seed": seed, **train}
    config["data"]["validation"] = str(data) if data else None
    config["run"] = {"dir": str(path)}
    config["variant"] = {"name": variant} if isinstance(variant, str) else variant
    if method is not None:
        config["method"] = method
    if ended is not None:
        name = "stopped" if ended == "stopped" else "failed"
        (path / name).write_text(json.dumps({"step": done or 0, "reason": ended}))
    (path / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(seed)
    lines, done = [], steps if done is None else done
    skills = np.broadcast_to(np.asarray(skill, float), (problems,))
    for step in range(done + 1):
        if step:
            lines.append({
                "step": step, "reward": 0.1 * step + 0.01 * seed, "groups/all_fail": 1 - step / 10, "entropy": 1 / step,
                "grad_norm": None if step == 2 else rng.random(), "completions/mean_length": 5.0 + step,
                "sampled_tokens": 100.0 * step + seed, "flops": 1e12 * step, "time/step_s": 30.0, **(metrics or {}),
            })  # fmt: skip
        if data and step in (0, done):
            lines.append({"step": step, **_evaluate(path / "eval", step, skills * (step > 0), problems)})
    if test is not None:
        of_test = _evaluate(path / "test", done, np.full(problems, test), problems)
        lines.append({"step": done, **{name.replace("eval/", "test/"): x for name, x in of_test.items()}})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _evaluate(folder: Path, step: int, skills: np.ndarray, problems: int) -> dict[str, float]:
    done, name = [], folder.parent.name
    for i in range(problems):
        right = [j < round(4 * skills[i]) for j in range(4)]
        samples = tuple(
            Sample(completion=f"<b>{name}</b> {j}", answer=str(i), vote=str(i), correct=r, tokens=5, stopped=True,
                   reward=float(r), rewards={"answer": float(r)})
            for j, r in enumerate(right)
        )  # fmt: skip
        done.append(Attempt(uid=i, prompt=f"what is {i} < {i + 1} & 2?", gold=str(i), samples=samples))
    evaluations.write(folder / f"step_{step}.jsonl", done)
    accuracy = float(np.mean([a.accuracy for a in done]))
    solved = float(np.mean([a.accuracy > 0 for a in done]))
    return {"eval/reward": accuracy, "eval/accuracy": accuracy, "eval/pass@4": solved}
