"""A run's directory: which run owns it, and whether a run that resumes there is the same one.

Nothing is written there before a run can begin. Any recipe may take over a directory in which no run has finished a
step.
"""

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from etils import epath

from grpojax.host import claims, files, settings
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.records import lines, method_diff

REPLACED = "replaced"  # the folder for the files of a run that another run has replaced
_NOTHING = ("lock", "config.json.tmp", REPLACED)  # files that do not show that a run, or anyone else, uses the folder


class RunDirectory:
    """The directory of one run.

    Three files in it say how the run ended. ``done`` exists exactly if the run is finished, and has the number of
    steps. ``stopped`` exists if it was stopped and has saved: it has the step, the notice, and the seconds from the
    notice to the end of the save. ``failed`` exists if an error ended it, and has the step and the reason.

    Args:
      path: where it is, or will be.
      resolved: the whole recipe as plain data. If the recipe has a variant, ``method`` describes it
        (`grpojax.run.run_method.describe`).
      may_differ: whether a run may be resumed although the setting with this dotted name differs.
      read: resolves a stored recipe, of which it gets only the settings. If it raises `UserError`, the recipe is
        compared as it stands. The stored method is compared separately: a default of a variant shows only there.
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
        self._own: dict[str, bytes] = {}

    @property
    def started(self) -> bool:
        """Whether the directory has the recipe."""
        return (self.path / "config.json").exists()

    @property
    def has_steps(self) -> bool:
        """Whether a run in it has finished a step or has a checkpoint."""
        saved = any(folder.name.isdigit() for folder in files.listing(self.path / "checkpoints"))
        if saved or files.listing(self.path / "broken"):
            return True
        return any(line["step"] > 0 for line in lines.read(self.path))

    def check(self, *, take_over: bool = False) -> None:
        """Raises `UserError` if the directory is neither new nor this recipe's run, if it cannot be one, or if another
        process holds it. Changes nothing."""
        _check_place(self.path)
        with _read(self.path):
            self._check()
        claims.check(self.path, take_over=take_over)

    def _check(self) -> list[str]:
        """The settings that differ from this run's in a stored run without a step, which may be replaced."""
        if not self.started:
            if any(file.name not in _NOTHING for file in files.listing(self.path)):
                raise UserError(f"{self.path} exists and is not a run; give the run another run.dir")
            return []
        differ = [line for line in self._changes() if not self._may_differ(line.partition(":")[0])]
        if self.has_steps and [line.partition(":")[0] for line in differ] == ["variant.source"]:
            name = self._resolved["variant"]["name"]
            raise UserError(
                f"{self.path} holds a run of {name}, and the file {name.partition(':')[0]}.py has changed since\n"
                f"restore the file, or start another run from its weights: grpojax export {self.path} --to FOLDER, "
                "then model.path=FOLDER and another run.dir"
            )
        if differ and self.has_steps:
            raise UserError(
                f"{self.path} holds a run of another config: {'; '.join(differ[:5])}\n"
                f"give it another run.dir, or the config it was started with{_why_not_longer(differ)}"
            )
        if differ:
            return differ
        changed = method_diff.differences(self._stored().get("method", {}), self._resolved.get("method", {}))
        if changed and self.has_steps:
            raise UserError(
                f"{self.path} holds a run of another method, though the recipe is the same: "
                f"{method_diff.in_a_line(changed)}\ngive this run another run.dir, or go on with the code that began it"
            )
        return [f"{name}: {before} -> {now}" for name, (before, now) in changed.items()]

    def _changes(self) -> list[str]:
        stored = self._stored()
        before = _settings(stored)
        with contextlib.suppress(UserError):
            before = _settings(self._read(before))
        same = method_diff.equal_options(stored.get("method"), self._resolved.get("method"))
        lines = settings.diff(before, _settings(self._resolved))
        return [line for line in lines if line.partition(":")[0].removeprefix("variant.") not in same]

    def _stored(self) -> dict[str, Any]:
        return json.loads((self.path / "config.json").read_text())

    def changed(self, names: tuple[str, ...]) -> bool:
        """Whether a setting whose name begins with this has changed since the run was last started."""
        return any(line.startswith(names) for line in self._changes())

    def claim(self, held: contextlib.ExitStack, *, take_over: bool = False) -> None:
        """Takes the directory until ``held`` releases it (`grpojax.host.claims`); from here on it is this run's.
        Replaces the files of a run of another config that has no step."""
        _make(self.path)
        held.enter_context(claims.hold(self.path, take_over=take_over))
        with _read(self.path):
            differ = self._check()  # checked again: another process may have been here
        if differ:
            self._replace("; ".join(differ[:5]))

    def _replace(self, change: str) -> None:
        """Makes room for this run in place of one without a step: removes the old recipe and moves all other files."""
        recipe = [self.path / name for name in ("data.json", "config.json")]
        keep = (*_NOTHING, *(file.name for file in recipe))
        found = [x for x in files.listing(self.path) if x.name not in keep]
        left, place = [x for x in found if not x.is_dir() or files.listing(x)], ""
        if left:
            to = self.path / REPLACED / str(len(files.listing(self.path / REPLACED)) + 1)
            place = f", and what else was there is in {to}"
            files.make_folder(to)
            for x in [*left, *(file for file in recipe if file.exists())]:
                files.move(x, to / x.name)
        # The recipe goes last: a folder that has other files and no recipe counts as somebody else's.
        for x in recipe:
            x.unlink(missing_ok=True)
        log.info(
            "%s held a run without a step; it begins anew with this recipe (changed: %s)%s", self.path, change, place
        )

    def write(self) -> None:
        """Writes the recipe, and logs what has changed since the run was last started."""
        for line in self._changes() if self.started else ():
            log.info("resumed with a change: %s", line)
        files.write_json(self.path / "config.json", self._resolved)

    def check_data(self, fingerprints: Mapping[str, str | None]) -> None:
        """Raises `UserError` if the data is not what the run started with. A run without a step is replaced."""
        file = self.path / "data.json"
        before = json.loads(file.read_text()) if file.exists() else fingerprints
        if changed := [name for name in fingerprints if before.get(name) != fingerprints[name]]:
            message = f"the rows of data.{' and data.'.join(changed)} have changed"
            if self.has_steps:
                raise UserError(
                    f"{message} since {self.path} was started\nrestore the file, or give the run another run.dir"
                )
            self._replace(message)
            self.write()
        if not file.exists():
            files.write_json(file, dict(fingerprints))

    @property
    def gone(self) -> bool:
        """Whether it was removed or moved away after `goes_on`; not known of one in a bucket."""
        return bool(self._own) and not files.in_bucket(self.path) and not self.started

    def make_again(self) -> None:
        """Writes again what a later start reads besides the checkpoints, after it was removed or moved away."""
        files.make_folder(self.path)
        for name, content in self._own.items():
            files.write(self.path / name, content)

    def goes_on(self, *, finished: bool) -> None:
        """Removes the files that say how the run ended, except ``done`` if the run is still ``finished``."""
        names = ("config.json", "data.json", "base.json")
        self._own = {name: files.read(self.path / name) for name in names if (self.path / name).exists()}
        for name in ("stopped", "failed") if finished else ("stopped", "failed", "done"):
            (self.path / name).unlink(missing_ok=True)

    def finished(self, step: int) -> None:
        """Says that the run is finished."""
        files.write_json(self.path / "done", {"step": step})

    def failed(self, step: int, reason: str) -> None:
        """Says that the run has ended by an error after a step, and why."""
        files.write_json(self.path / "failed", {"step": step, "reason": reason})

    def stopped(self, step: int, *, notice: str | None, seconds: float) -> None:
        """Marks the run as stopped and saved."""
        log.info("stopped and saved at step %d, %.1f s after the notice (%s)", step, seconds, notice)
        files.write_json(self.path / "stopped", {"step": step, "notice": notice, "seconds": round(seconds, 3)})


def _why_not_longer(differ: Iterable[str]) -> str:
    """Why a run cannot be made longer, if its length is among the differences."""
    lengths = {"train.steps", "train.tokens", "train.epochs"} & {line.partition(":")[0] for line in differ}
    return f", since optimizer.schedule (or a critic's) depends on {min(lengths)}" if lengths else ""


def _settings(resolved: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in resolved.items() if key != "method"}


def _check_place(path: epath.Path) -> None:
    """Raises `UserError` if the folder cannot be made; does not make it."""
    if files.in_bucket(path):
        return _make(path)  # this asks whether the bucket exists
    above = path
    while not os.path.lexists(above) and above != above.parent:
        above = above.parent
    if not above.is_dir():
        raise UserError(f"run.dir={str(path)!r} cannot be made: {above} is no folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"run.dir={str(path)!r} cannot be made: {os.strerror(errno.EACCES)}")


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


def check_base(directory: epath.Path, digest: str, name: str, *, keep: bool = False) -> None:
    """Raises `UserError` if a run's adapters were learned on other base weights, which no checkpoint has.

    Args:
      directory: of the run.
      digest: of the base weights that are loaded.
      name: of their folder, for the message.
      keep: write the digest down; the run has no step yet.
    """
    file = directory / "base.json"
    if keep:
        files.write_json(file, {"weights": digest})
    elif not file.exists() or json.loads(file.read_text())["weights"] != digest:
        raise UserError(
            f"the adapters of {directory} were not learned on the weights in {name}\n"
            "set model.path to the folder that the run was started with"
        )
