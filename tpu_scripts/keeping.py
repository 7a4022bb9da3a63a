"""Keeps a request alive: waits for it, asks again if it is gone, counts its chip-hours, deletes it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from cloud import ACTIVE, GONE, MISSING, Cloud, Seen, Worker
from errors import Failure, Mistake, Passing
from ledger import Ledger
from settings import Settings


class Spent(Failure):
    """Raised when the budget is spent, with the workers that are still there; none while a VM is repaired."""

    def __init__(self, said: str, workers: tuple[Worker, ...]):
        super().__init__(said)
        self.workers = workers


@dataclasses.dataclass
class Keeper:
    """Manages the request of a name.

    Args:
      cloud: the calls to the cloud.
      ledger: the ledger of the name.
      say: prints a line for the user.
      detail: the state that was printed last.
      pauses: number of pauses in a row that were made longer.
    """

    cloud: Cloud
    ledger: Ledger
    say: Callable[[str], None]
    detail: str = ""
    pauses: int = 0

    @property
    def settings(self) -> Settings:
        """Of the env file."""
        return self.cloud.settings

    def look(self) -> Seen:
        """The present state, counted. Raises Failure if the cloud is silent for long, Spent over the budget."""
        since = time.monotonic()
        while True:
            try:
                seen = self.cloud.look()
                break
            except Passing as error:
                if time.monotonic() - since > self.settings.lost_seconds:
                    raise Failure(f"the cloud does not answer ({error}); the same command again goes on") from None
                self.say(f"no answer: {error}")
                self.pause(growing=True)
        self.ledger.note(seen, time.time())
        if seen.detail != self.detail and not self.cloud.dry:
            self.detail, self.pauses = seen.detail, 0
            self.say(f"{self.settings.name}: {seen.detail}; {self.spent()}")
        self.check_budget(seen)
        return seen

    def check_budget(self, seen: Seen) -> None:
        """Raises Spent if VMs, also ones in repair, cost more than the budget."""
        if self.ledger.since is not None and self.ledger.chip_hours(time.time()) > self.settings.max_chip_hours:
            raise Spent(f"the budget is spent: {self.spent()}; run delete, or raise MAX_CHIP_HOURS", seen.workers)

    def create(self) -> None:
        """Asks for the VMs, unless there is a request already; one that is gone is deleted first.

        Raises:
          Mistake: the name is in use for another type, or the budget is spent.
        """
        s = self.settings
        if self.ledger.chip_hours(time.time()) >= s.max_chip_hours:
            raise Mistake(f"{self.spent()} are spent under {s.name}: raise MAX_CHIP_HOURS, or take another NAME")
        seen = self.look()
        if seen.kind not in (MISSING, GONE):
            if seen.accelerator not in ("", s.accelerator.name):
                raise Mistake(f"{s.name} is a request for {seen.accelerator}; delete it, or take another NAME")
            self.say(f"{s.name} was asked for before")
            return
        if seen.kind == GONE:
            self.delete()
        self.ledger.relaunches = self.ledger.failures = 0
        self.ledger.next_attempt()
        self.ask()

    def available(self) -> Seen:
        """Waits until every VM is there; asks again for VMs that will not come."""
        while True:
            seen = self.look()
            if seen.kind == ACTIVE:
                return seen
            if seen.kind == MISSING:
                raise Mistake(f"{self.settings.name}: no such request; run create, and what was launched can go on")
            # One that somebody deletes is not asked for again.
            if seen.kind == GONE and not seen.detail.startswith("DELETING"):
                self.replace(seen.detail)
            self.pause(growing=True)

    def replace(self, why: str) -> None:
        """Deletes the request, which keeps its quota until then, and asks once more."""
        said = f"{self.settings.name} is gone ({why})"
        self.check_relaunches(said)
        self.delete()
        self.count(said)  # not before: what is counted starts anew
        self.ask()

    def count(self, why: str) -> None:
        """Counts a repeated request, or a repeated start of the command; raises Failure over the limit."""
        self.check_relaunches(why)
        self.ledger.relaunches += 1
        self.ledger.next_attempt()
        self.say(f"{why}: once more, {self.ledger.relaunches} of at most {self.settings.max_relaunches} times")

    def check_relaunches(self, why: str) -> None:
        """Raises Failure if no start is left."""
        most = self.settings.max_relaunches
        if self.ledger.relaunches >= most:
            raise Failure(f"{why}, and MAX_RELAUNCHES={most} are used up; {self.spent()}; run delete, or launch again")

    def ask(self) -> None:
        """Asks for the VMs. A request that was just deleted may count against the quota for a while."""
        since = time.monotonic()
        while True:
            try:
                self.cloud.create()
                return
            except (Failure, Passing) as error:
                # The first request has nothing to wait for.
                limit = self.settings.lost_seconds if self.ledger.relaunches or isinstance(error, Passing) else 0
                if time.monotonic() - since >= limit:
                    raise Failure(str(error)) from None
                self.say(str(error))
                self.pause(growing=True)

    def delete(self) -> None:
        """Deletes the request, and waits until it is gone."""
        since, asked = time.monotonic(), False
        while True:
            try:
                if not asked:
                    self.cloud.delete()
                    asked = True
                self.cloud.pretend = MISSING
                seen = self.cloud.look()
                self.cloud.pretend = ACTIVE
                self.ledger.note(seen, time.time())
                if seen.kind == MISSING:
                    return
                trouble = seen.detail
            except Passing as error:
                trouble = str(error)
            if time.monotonic() - since > self.settings.lost_seconds:
                raise Failure(f"{self.settings.name} is still not deleted ({trouble}), and costs: run delete again")
            self.pause()

    def pause(self, growing: bool = False) -> None:
        """Waits until the next look; each pause is longer, up to eight times."""
        self.pauses = min(self.pauses + 1, 4) if growing else 0
        if not self.cloud.dry:
            time.sleep(self.settings.poll_seconds * 2 ** max(0, self.pauses - 1))

    def spent(self) -> str:
        """The spent chip-hours as a text for the user."""
        return f"{self.ledger.chip_hours(time.time()):.2f} of {self.settings.max_chip_hours:g} chip-hours"
