"""Sweeps over methods and seeds, their statistics, and the report's page."""

from grpojax.extension import Names

NAMES = Names(
    commands={
        "compare": "grpojax.extensions.experiments.cli.compare",
        "sweep": "grpojax.extensions.experiments.cli.sweep",
        "report": "grpojax.extensions.experiments.cli.report",
        "traces": "grpojax.extensions.experiments.cli.traces",
    }
)
