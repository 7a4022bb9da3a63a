"""A run's directory: whose it is, and that what comes back to it is the same run."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from etils import epath

from grpojax.host import claims, files, settings
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.records import checkpoint


class RunDirectory:
    """The directory of one run.

    ``done`` in it, with the number of steps, is there exactly when the run is finished; ``stopped`` when it was told to
    stop and has saved: the step, the notice, and the seconds from the notice to the end of the save.

    Args:
      path: where it is, or will be.
      resolved: the whole recipe as plain data.
      may_differ: whether a run may be resumed although the setting with this dotted name differs.
      read: makes of a stored recipe what ``resolved`` is of it today, so that settings which are new since have their
        defaults. It raises `UserError` for what is no recipe any more, which is then compared as it stands.
    """

    def __init__(
        self,
        path: epath.PathLike,
        resolved: Mapping[str, Any],
        may_differ: Callable[[str], bool],
        read: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
    ):
        self.path = files.path(path)
        self._resolved, self._may_differ, self._read = dict(resolved), may_differ, read

    @property
    def started(self) -> bool:
        """Whether the recipe stands in it."""
        return (self.path / "config.json").exists()

    def check(self, *, take_over: bool = False) -> None:
        """Raises `UserError` for a directory that is neither new nor this recipe's run, that cannot be one, or that
        another process holds."""
        _make(self.path)
        with _read(self.path):
            self._check()
        claims.check(self.path, take_over=take_over)

    def _check(self) -> None:
        if not self.started:
            if any(file.name not in ("lock", "config.json.tmp") for file in files.listing(self.path)):
                raise UserError(f"{self.path} exists and holds no run; give the run another run.dir")
            return
        checkpoint.check_format(self.path / "checkpoints")
        if differ := [line for line in self._changes() if not self._may_differ(line.partition(":")[0])]:
            raise UserError(
                f"{self.path} holds a run of another config: {'; '.join(differ[:5])}\n"
                "give it another run.dir, or the config it was started with"
            )

    def _changes(self) -> list[str]:
        before = json.loads((self.path / "config.json").read_text())
        with contextlib.suppress(UserError):
            before = self._read(before)
        return settings.diff(before, self._resolved)

    def changed(self, names: tuple[str, ...]) -> bool:
        """Whether a setting whose name begins so is another than when the run was last started."""
        return any(line.startswith(names) for line in self._changes())

    def claim(self, held: contextlib.ExitStack, *, take_over: bool = False) -> None:
        """Takes the directory until ``held`` lets go (`grpojax.host.claims`); from here on it is this run's."""
        held.enter_context(claims.hold(self.path, take_over=take_over))
        with _read(self.path):
            self._check()  # again: another process may have been here

    def write(self) -> None:
        """Writes the recipe; what has changed since the run was last started is said."""
        for line in self._changes() if self.started else ():
            log.info("resumed with a change: %s", line)
        files.write_json(self.path / "config.json", self._resolved)

    def check_data(self, fingerprints: Mapping[str, str | None]) -> None:
        """Raises `UserError` where the data is not what the run started with."""
        file = self.path / "data.json"
        if not file.exists():
            return files.write_json(file, dict(fingerprints))
        before = json.loads(file.read_text())
        if changed := [name for name in fingerprints if before.get(name) != fingerprints[name]]:
            raise UserError(
                f"the rows of data.{' and data.'.join(changed)} have changed since {self.path} was started\n"
                "restore the file, or give the run another run.dir"
            )

    def goes_on(self, *, finished: bool) -> None:
        """Takes back what says how the run ended, but for ``done`` where it still is ``finished``."""
        for name in ("stopped",) if finished else ("stopped", "done"):
            (self.path / name).unlink(missing_ok=True)

    def finished(self, step: int) -> None:
        """Says that the run is finished."""
        files.write_json(self.path / "done", {"step": step})

    def stopped(self, step: int, *, notice: str | None, seconds: float) -> None:
        """Says that the run was told to stop, and has saved."""
        log.info("stopped and saved at step %d, %.1f s after the notice (%s)", step, seconds, notice)
        files.write_json(self.path / "stopped", {"step": step, "notice": notice, "seconds": round(seconds, 3)})


def _make(path: epath.Path) -> None:
    if str(path.parent) == "gs://":
        raise UserError(f"run.dir={str(path)!r} is a whole bucket; give a folder in it: {path}/RUN")
    try:
        files.make_folder(path)
    except OSError as e:
        raise UserError(f"run.dir={str(path)!r} cannot be made: {e.strerror}") from None


@contextlib.contextmanager
def _read(path: epath.Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise UserError(f"run.dir={str(path)!r} cannot be read: {e.filename}: {e.strerror}") from None
