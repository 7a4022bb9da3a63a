"""The picture of a run: what is drawn, and against which axis."""

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt  # noqa: E402

from grpojax.records.curve import draw_curve  # noqa: E402

STEPS = [{"step": i, "reward": 10.0 * i} for i in range(1, 4)]


def drawn(lines, path, monkeypatch):
    """Labels of the lines on each axis, and the points of the held-out ones."""
    seen = []
    monkeypatch.setattr(plt, "close", seen.append)
    draw_curve(lines, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    monkeypatch.undo()
    axes = seen[0].axes
    labels = [[line.get_label() for line in one.get_lines()] for one in axes]
    points = {line.get_label(): line.get_xydata().tolist() for one in axes for line in one.get_lines()}
    legend = [text.get_text() for text in axes[0].get_legend().get_texts()] if axes[0].get_legend() else []
    plt.close(seen[0])
    return labels, points, legend


def test_held_out_reward_shares_the_axis_of_rewards_and_accuracy_has_its_own(tmp_path, monkeypatch):
    evals = [
        {"step": 0, "eval/reward": 5.0, "eval/accuracy": 0.25},
        {"step": 3, "eval/reward": None, "eval/accuracy": 0.5},
    ]
    labels, points, legend = drawn([*STEPS, *evals], tmp_path / "c.png", monkeypatch)
    assert labels == [["reward of the step", "mean of 1 steps", "held-out reward"], ["held-out accuracy"]]
    assert points["held-out reward"] == [[0, 5.0]] and points["held-out accuracy"] == [[0, 0.25], [3, 0.5]]
    assert legend == [*labels[0], *labels[1]]


def test_without_a_judge_there_is_one_axis(tmp_path, monkeypatch):
    labels, _, _ = drawn([*STEPS, {"step": 3, "eval/reward": 5.0}], tmp_path / "c.png", monkeypatch)
    assert labels == [["reward of the step", "mean of 1 steps", "held-out reward"]]
    assert drawn([{"step": 1, "reward": None}], tmp_path / "d.png", monkeypatch)[2] == []
