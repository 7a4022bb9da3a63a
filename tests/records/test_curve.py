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
    assert draw_curve(lines, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    monkeypatch.undo()
    axes = seen[0].axes
    labels = [[line.get_label() for line in one.get_lines()] for one in axes]
    points = {line.get_label(): line.get_xydata().tolist() for one in axes for line in one.get_lines()}
    legend = [text.get_text() for text in axes[0].get_legend().get_texts()] if axes[0].get_legend() else []
    plt.close(seen[0])
    return labels, points, legend


def test_rewards_of_any_size_share_an_axis_and_accuracy_has_its_own(tmp_path, monkeypatch):
    evals = [
        {"step": 0, "eval/reward": 5.0, "eval/accuracy": 0.25},
        {"step": 3, "eval/reward": None, "eval/accuracy": 0.5},
    ]
    labels, points, legend = drawn([*STEPS, *evals], tmp_path / "c.png", monkeypatch)
    assert labels == [["reward of the step", "held-out reward"], ["held-out accuracy"]]
    assert points["held-out reward"] == [[0, 5.0]] and points["held-out accuracy"] == [[0, 0.25], [3, 0.5]]
    assert legend == [*labels[0], *labels[1]]


def test_equal_numbers_are_drawn_at_one_height(tmp_path, monkeypatch):
    steps = [{"step": i, "reward": 0.25 * i} for i in range(1, 4)]
    evals = [
        {"step": 0, "eval/reward": 0.5, "eval/accuracy": 0.25},
        {"step": 3, "eval/reward": 0.75, "eval/accuracy": 0.75},
    ]
    labels, points, legend = drawn([*steps, *evals], tmp_path / "c.png", monkeypatch)
    assert labels == [["reward of the step", "held-out reward", "held-out accuracy"]] and legend == labels[0]
    same = [line | {"eval/reward": line["eval/accuracy"]} for line in evals]
    labels, points, legend = drawn([*steps, *same], tmp_path / "d.png", monkeypatch)
    assert labels == [["reward of the step", "held-out reward and accuracy"]] and legend == labels[0]
    assert points[legend[1]] == [[0, 0.25], [3, 0.75]]


def test_values_of_few_samples_are_crosses_beside_the_lines(tmp_path, monkeypatch):
    few = {"step": 2, "reward": 20.0, "rewards/invalid": 0.72}
    evals = [
        {"step": 0, "eval/reward": 5.0, "eval/accuracy": 0.25},
        {"step": 3, "eval/reward": 50.0, "eval/accuracy": 0.5, "eval/invalid": 13, "eval/samples": 16},
    ]
    labels, points, legend = drawn([STEPS[0], few, STEPS[2], *evals], tmp_path / "c.png", monkeypatch)
    crosses = "25% of the samples or more without a reward"
    assert labels == [["reward of the step", "held-out reward", crosses], ["held-out accuracy"]]
    assert points["reward of the step"] == [[1, 10.0], [3, 30.0]] and points["held-out accuracy"] == [[0, 0.25]]
    assert points["held-out reward"] == [[0, 5.0]] and points[crosses] == [[2, 20.0], [3, 50.0]]
    assert legend == [*labels[0], *labels[1]]


def test_without_a_judge_there_is_one_axis(tmp_path, monkeypatch):
    labels, _, _ = drawn([*STEPS, {"step": 3, "eval/reward": 5.0}], tmp_path / "c.png", monkeypatch)
    assert labels == [["reward of the step", "held-out reward"]]


def test_the_mean_is_of_a_twentieth_of_the_steps(tmp_path, monkeypatch):
    steps = [{"step": i, "reward": float(i)} for i in range(1, 41)]
    labels, points, _ = drawn(steps, tmp_path / "c.png", monkeypatch)
    assert labels == [["reward of the step", "mean of 2 steps"]]
    assert points["mean of 2 steps"][:3] == [[1, 1.0], [2, 1.5], [3, 2.5]]


def test_a_run_of_one_step_is_a_point_and_one_without_a_reward_no_picture(tmp_path, monkeypatch):
    marks = []
    plot = plt.Axes.plot
    monkeypatch.setattr(
        plt.Axes, "plot", lambda *a, **k: marks.append([x for x in a if isinstance(x, str)]) or plot(*a, **k)
    )
    assert draw_curve(STEPS[:1], tmp_path / "c.png") and marks == [[".-"]]
    few = {"step": 1, "eval/accuracy": 0.0, "eval/unjudged": 4, "eval/samples": 4}
    assert not draw_curve([{"step": 1, "reward": None}, few], tmp_path / "d.png") and not (tmp_path / "d.png").exists()
