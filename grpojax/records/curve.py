"""A picture of a run."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from grpojax.host import files
from grpojax.records.lines import MANY_INVALID, is_sound

UNSOUND = f"{MANY_INVALID:.0%} of the samples or more without a reward"


def draw_curve(lines: Sequence[Mapping[str, Any]], path: epath.PathLike) -> bool:
    """Writes a PNG with the reward of each step, and with the held-out reward and accuracy where there are any.

    Rewards within [0, 1] share the axis of the accuracy; others have one of their own. Where held-out reward and
    accuracy are the same numbers, there is one line of both.

    Values of too few samples (`grpojax.records.lines.is_sound`) are grey crosses beside the lines.

    Returns:
      Whether there was a value to draw. Without one nothing is written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    names = ("reward", "eval/reward", "eval/accuracy")
    sound = {name: _measured(lines, name, sound=True) for name in names}
    crosses = [point for name in names[:2] for point in _measured(lines, name, sound=False)]
    if not any(sound.values()) and not crosses:
        return False
    train = sound["reward"]
    figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
    window = len(train) // 20
    if train and window < 2:  # draws points, since a line needs two of them
        axes.plot(*zip(*train, strict=True), ".-", color="#2171b5", linewidth=1, label="reward of the step")
    elif train:
        axes.plot(*zip(*train, strict=True), color="#9ecae1", linewidth=1, label="reward of the step")
        smooth = [
            (train[i][0], sum(r for _, r in train[max(0, i - window + 1) : i + 1]) / min(i + 1, window))
            for i in range(len(train))
        ]
        axes.plot(*zip(*smooth, strict=True), color="#2171b5", label=f"mean of {window} steps")
    evals, accuracy = sound["eval/reward"], sound["eval/accuracy"]
    if evals and evals != accuracy:
        axes.plot(*zip(*evals, strict=True), "o-", color="#d94801", label="held-out reward")
    if crosses:
        axes.plot(*zip(*crosses, strict=True), "x", color="#969696", label=UNSOUND)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("reward")
    axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    if accuracy:
        right = axes
        if all(0 <= value <= 1 for _, value in (*train, *evals, *crosses)):
            axes.set_ylabel("reward, accuracy")
        else:  # rewards of any size
            right = axes.twinx()
            right.set_ylabel("accuracy")
        label = "held-out reward and accuracy" if evals == accuracy else "held-out accuracy"
        handles += right.plot(*zip(*accuracy, strict=True), "s--", color="#31a354", label=label)
        labels.append(label)
        right.set_ylim(-0.02, 1.02)
    if handles:
        axes.legend(handles, labels)
    figure.tight_layout()
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    plt.close(figure)
    files.write(path, picture.getvalue())
    return True


def _measured(lines: Sequence[Mapping[str, Any]], name: str, *, sound: bool) -> list[tuple[int, float]]:
    """``(step, value)`` of the lines in which the metric has a value that is sound, or one that is not."""
    return [(x["step"], x[name]) for x in lines if x.get(name) is not None and is_sound(x, name) == sound]
