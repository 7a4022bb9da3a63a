"""``grpojax report``: several runs compared, as a page, a picture and numbers."""

import argparse
from collections.abc import Callable

from grpojax.host.errors import UserError


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Its arguments."""
    report = command("report", run, "Compares runs of several methods and seeds, as a page that opens offline.")
    report.add_argument(
        "runs", nargs="+", metavar="RUN", help="run directory, a folder of runs, or the folder of a sweep"
    )
    report.add_argument(
        "--baseline", metavar="NAME", help="method that others are compared with; by default grpo, or the first"
    )
    report.add_argument(
        "--by",
        action="append",
        metavar="SETTING",
        help="setting that makes a method (may be repeated); by default the sweep's, or variant",
    )
    report.add_argument(
        "--margin", type=float, metavar="X", help="differences of at most X count as none; the sweep's by default"
    )
    text = "the comparisons to test: all, or those with a method's own control; the others are described"
    report.add_argument("--family", choices=("all", "controls"), default="all", help=text)
    report.add_argument("--metric", metavar="NAME", help="held-out metric that decides, such as eval/pass@8")
    report.add_argument(
        "--to", default="report.html", metavar="FILE.html", help="file of the page; the picture goes next to it"
    )
    report.add_argument("--json", metavar="FILE", help="also write the numbers to this JSON file")


def run(args: argparse.Namespace) -> int:
    """Writes the page and the picture."""
    from grpojax.extensions.experiments import report
    from grpojax.extensions.experiments.report_charts import picture
    from grpojax.extensions.experiments.report_page import page
    from grpojax.host import files

    file = files.path(args.to)
    if file.suffix not in (".html", ".htm"):
        raise UserError(f"--to {args.to}: give a name that ends in .html")
    given = {name: getattr(args, name) for name in ("by", "baseline", "metric", "margin", "family")}
    built = report.build(args.runs, **given)
    beside = file.with_suffix(".png")
    try:
        files.make_folder(file.parent)
        files.write(file, page(built).encode(errors="replace"))
        files.write(beside, picture(built.curves, [m.name for m in built.methods]))
        if args.json:
            files.write_json(args.json, report.to_json(built))
    except OSError as e:
        raise UserError(f"{e.filename}: {e.strerror}; give another --to or --json") from None
    for note in built.notes:
        print(note)
    print("\n".join(report.headlines(built)))
    print(f"wrote {file} and {beside}" + (f" and {args.json}" if args.json else ""))
    return 0
