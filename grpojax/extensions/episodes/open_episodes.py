"""Notes of a rollout's open episodes on disk, by which a resumed run can tell what became of them.

A checkpoint falls between two steps, so a run that was stopped in the middle of a rollout draws that rollout again. Its
random keys are the same: the policy draws the same turns, and fresh instances get the same actions. Where the class of
an environment states that it is deterministic they give the same observations, which the notes allow to check. Episodes
of other classes are drawn again, and counted.
"""

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Iterable
from typing import Any

import jax
from etils import epath

from grpojax.extensions.episodes.environment_types import Episode
from grpojax.host import files, processes
from grpojax.host.console import log
from grpojax.run import recorder

_BUCKET_S = 5.0  # seconds between two writes of one object in a bucket


class Notes:
    """The notes of one process on its own episodes, and what all had noted when the run was stopped.

    All processes must make it at the same time. The notes of processes that the run has no more are removed once the
    first rollout is noted, which draws their episodes again.

    Args:
      folder: for one file a process.
    """

    def __init__(self, folder: epath.Path):
        self._file = folder / f"open_{jax.process_index()}.json"
        self._uploads, self._wrote = files.Uploads(), -_BUCKET_S
        self._before, self._outlived = _read(folder)
        self._number, self._warned = -1, False
        self._now: dict[Episode, list[list[str]]] = {}

    def begin(self, number: int) -> None:
        """Begins the rollout with that number in the run."""
        self._number, self._now = number, {}

    def open(self, episodes: Iterable[Episode]) -> None:
        """Notes that these episodes of the rollout are open, which are this process's own."""
        self._now = {episode: [] for episode in episodes}
        self._write(self._now)
        with recorder.optional("notes of processes that are gone are not removed"):
            while self._outlived:
                self._uploads.remove(self._outlived.pop())

    def was_open(self, episode: Episode) -> bool:
        """Whether the run was stopped in this rollout before the episode was over."""
        return episode in self._before.get(self._number, {}) and self._before[self._number][episode][0]

    def differs(self, episode: Episode, action: Any, observation: Any) -> bool:
        """Notes what an action has brought about. True where the same actions had brought about something else before
        the run was stopped; of an episode only for the first such action.

        Args:
          episode: one of this process's own.
          action: JSON; of the first, the row.
          observation: JSON.
        """
        noted = self._now[episode]
        entry = [_digest([noted, action]), _digest(observation)]
        _, before = self._before.get(self._number, {}).get(episode, (False, []))
        earlier = before[len(noted)] if len(noted) < len(before) else entry
        noted.append(entry)
        return earlier[0] == entry[0] and earlier[1] != entry[1]

    def write(self, still_open: Iterable[Episode]) -> None:
        """Writes the notes; in a bucket not more often than an object may be replaced."""
        if not files.in_bucket(self._file) or time.monotonic() > self._wrote + _BUCKET_S:
            self._write(still_open)

    def _write(self, still_open: Iterable[Episode]) -> None:
        goes_on = {*still_open}
        noted = [[*episode, episode in goes_on, entries] for episode, entries in self._now.items()]
        try:
            if not files.in_bucket(self._file):  # which has no folders, and would be asked each time
                files.make_folder(self._file.parent)
            self._uploads.write(self._file, json.dumps({"rollout": self._number, "episodes": noted}).encode())
        except OSError as e:
            if not self._warned:
                log.warning("open episodes are not noted, which a resume would count (shown once): %s", e)
            self._warned = True
        self._wrote = time.monotonic()


_Noted = dict[Episode, tuple[bool, list[list[str]]]]  # whether an episode was open, and what was noted of it


def _process_of(file: epath.Path) -> int:
    """The number of the process whose notes a file is; -1 for another file."""
    found = re.fullmatch(r"open_(\d+)\.json", file.name)
    return int(found[1]) if found else -1


def _read(folder: epath.Path) -> tuple[dict[int, _Noted], list[epath.Path]]:
    """The notes of all processes by the rollout's number, the same on all; for the first process also the files of
    those that the run has no more."""
    there: list[epath.Path] = []
    texts: list[str] = []
    if processes.is_first():
        with recorder.optional("the notes on open episodes cannot be read"):
            there = [place for place in files.listing(folder) if place.name.endswith(".json")]
            texts = [content.decode() for content in files.read_all(there)]
    found: dict[int, _Noted] = {}
    for text in json.loads(processes.meet(json.dumps(texts))[0]):
        with contextlib.suppress(ValueError, KeyError, TypeError):  # not of this version
            noted = json.loads(text)
            each = {(uid, sample): (goes_on, entries) for uid, sample, goes_on, entries in noted["episodes"]}
            found.setdefault(noted["rollout"], {}).update(each)
    return found, [place for place in there if _process_of(place) >= jax.process_count()]


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()
