"""The curves of a report as one PNG."""

import io
import re
from importlib import resources

from etils import epath

from grpojax.extensions.experiments.report import Report
from grpojax.extensions.experiments.report_charts import look
from grpojax.host import files


def draw_report(report: Report, path: epath.PathLike) -> None:
    """Draws every curve by steps: means over seeds, with a band from the lowest to the highest value."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style = (resources.files("grpojax.extensions.experiments") / "page/style.css").read_text("utf-8")
    colours = re.findall(r"--colour-\d: (#\w+)", style)  # the light colours come first
    across = min(3, max(1, len(report.curves)))
    down = max(1, -(-len(report.curves) // across))
    size = 4.4 * across, 3 * down
    figure, axes = plt.subplots(down, across, figsize=size, dpi=120, squeeze=False, layout="constrained")
    for curve, one in zip(report.curves, axes.flat, strict=False):
        for line in curve.lines:
            colour, dashes = look(line.method)
            name = report.methods[line.method].name.replace("$", r"\$")  # two enclose a formula
            kind = "-" if dashes == "none" else (0, tuple(float(x) / 2 for x in dashes.split()))
            steps = line.at["steps"]
            one.plot(steps, line.mean, color=colours[colour], linestyle=kind, label=name)
            if max(line.seeds) > 1:
                one.fill_between(steps, line.low, line.high, color=colours[colour], alpha=0.15, linewidth=0)
        one.set_title(curve.title, fontsize=10)
        one.set_xlabel("step", fontsize=8)
        one.tick_params(labelsize=8)
        one.grid(alpha=0.3)
    for one in axes.flat[len(report.curves) :]:
        one.axis("off")
    if report.curves:
        handles = {label: h for one in axes.flat for h, label in zip(*one.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=4, fontsize=8)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    plt.close(figure)
    files.write(path, picture.getvalue())
