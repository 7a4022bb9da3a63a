"""What is said after a run: its held-out figures, and whether it has learned anything."""

from grpojax.host import processes
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.records import curve, metrics
from grpojax.run import recorder
from grpojax.run.alarms import SAID
from grpojax.run.held_out import HeldOut
from grpojax.run.run import Run


def report(run: Run) -> None:
    """Prints the held-out reward before and after and three samples, and writes ``curve.png``."""
    if not processes.is_first():
        return
    with recorder.optional("the report"):
        lines = metrics.read_metrics(run.store.directory)
        assert isinstance(run.held_out, HeldOut), "it samples"
        run.held_out.report(lines)
        path = run.store.directory / "curve.png"
        if curve.draw_curve(lines, path):
            log.info("reward curve: %s", path)


def check_learned(run: Run) -> None:
    """Raises `UserError` after a run in which no sample had a valid reward: its policy has not changed."""
    alarms = run.journal.watch
    if alarms is not None and alarms.all_invalid:
        raise UserError(
            f"{run.store.directory}: nothing was learned in {run.state.step} steps: no sample had a valid reward\n"
            f"{SAID['rewards_invalid'][1]}; then start a new run"
        )
