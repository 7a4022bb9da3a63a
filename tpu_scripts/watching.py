"""Watches a launched command to its end, over preemptions, failures and lost connections, within the budget."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from bundle import Bundle
from cloud import ACTIVE, Worker
from errors import Failure, Mistake, Passing
from keeping import Keeper, Spent
from settings import Settings
from workers import MOST, Fleet, Report

FINISHED, MISTAKEN, PREEMPTED = 0, 2, 75  # as `grpojax train` exits; anything else is a failure


def judge(reports: dict[Worker, Report], since_exit: float, since_heard: float, settings: Settings) -> str:
    """What to do about a command: wait, setup, start, stop, replace, or finished, mistake, preempted, failed.

    Args:
      reports: the report of every worker.
      since_exit: seconds since the first process was seen ended.
      since_heard: seconds since every worker answered, without the time that the VMs were waited for.
      settings: the limits for both.
    """
    states = {r.state for r in reports.values()}
    codes = {r.code for r in reports.values() if r.state == "exited"}
    if "lost" in states and since_heard > settings.lost_seconds:
        return "replace"
    if "unprepared" in states:  # beside one that runs it is a VM that was made anew; what runs has lost it
        return "stop" if "running" in states else "setup"
    if "absent" in states and not codes:
        return "start"
    if "running" in states:
        return "stop" if codes and since_exit > settings.grace_seconds else "wait"
    if "lost" in states:
        return "wait"
    if MISTAKEN in codes:
        return "mistake"
    if codes == {FINISHED} and "absent" not in states:
        return "finished"
    return "preempted" if PREEMPTED in codes else "failed"


@dataclasses.dataclass
class Watch:
    """The launched command.

    Args:
      keeper: manages the VMs.
      logs: folder of the workers' logs.
      say: prints a line for the user.
      bundle: makes the bundle for a new VM.
    """

    keeper: Keeper
    logs: Path
    say: Callable[[str], None]
    bundle: Callable[[], Bundle]

    def run(self) -> int:
        """Watches until the command is over, and returns its status, 0 or 2. Raises Failure if it gives up."""
        if not self.keeper.ledger.command:
            raise Mistake("nothing was launched yet; run launch -- COMMAND")
        try:
            while True:
                status = self._see_out()
                if status is not None:
                    return status
        except Spent as spent:
            self._end_at_budget(spent.workers)
            raise AssertionError from None

    def fleet(self) -> Fleet:
        """The workers, once they are there."""
        return Fleet(self.keeper.cloud, self.keeper.available().workers, self.say)

    def setup(self, fleet: Fleet, again: bool = False) -> None:
        """Sets the workers up, and says if the packages have changed."""
        packages, ledger = fleet.setup(self.bundle(), again), self.keeper.ledger
        if ledger.packages and packages and packages != ledger.packages:
            self.say(f"the packages are others than before ({packages}, before {ledger.packages})")
        ledger.packages = packages or ledger.packages
        ledger.save()

    def end(self, fleet: Fleet) -> bool:
        """Tells the command to save and end on every worker, and kills it after GRACE_SECONDS.

        Returns:
          Whether it has ended on every worker that answers.
        """
        settings = self.keeper.settings
        for name in ("TERM", "KILL"):
            fleet.signal(self.keeper.ledger.attempt, name)
            until = time.monotonic() + settings.grace_seconds
            while time.monotonic() < until:
                if all(r.state != "running" for r in self._poll(fleet).values()):
                    return True
                time.sleep(settings.poll_seconds / 10)
        return False

    def _see_out(self) -> int | None:
        """One start of the command, to its end: its status if that was the last, None if there is to be another."""
        settings, ledger = self.keeper.settings, self.keeper.ledger
        attempt, heard = ledger.attempt, time.monotonic()
        first_exit: float | None = None
        while True:
            asked = time.monotonic()
            fleet = self.fleet()
            heard += time.monotonic() - asked  # that may have been hours in a queue
            if ledger.attempt != attempt:  # that is another start, on other VMs
                attempt, first_exit, heard = ledger.attempt, None, time.monotonic()
            reports = self._poll(fleet)
            now = time.monotonic()
            if all(r.state != "lost" for r in reports.values()):
                heard = now
            if first_exit is None and any(r.state == "exited" for r in reports.values()):
                first_exit = now
            deed = judge(reports, now - (first_exit or now), now - heard, settings)
            if deed in ("setup", "start"):
                try:
                    self._start(fleet, setup=deed == "setup")
                    heard = time.monotonic()
                except Passing as error:
                    self.say(f"no answer: {error}")
                    if time.monotonic() - heard > settings.lost_seconds:
                        deed = "replace"
            if deed == "replace":
                self.keeper.replace(f"workers out of reach for {settings.lost_seconds:g} s")
                return None
            if deed == "stop":
                if not self.end(fleet):
                    self.keeper.replace("processes that cannot be killed")
                    return None
            elif deed in ("finished", "mistake", "preempted", "failed"):
                return self._over(deed, reports)
            self.keeper.pause()

    def _start(self, fleet: Fleet, setup: bool) -> None:
        ledger = self.keeper.ledger
        try:
            if setup:
                self.setup(fleet)
            fleet.start(ledger.attempt, ledger.starting())
        except Failure as error:
            self.say(str(error))
            self._again("setup failed")

    def _over(self, deed: str, reports: dict[Worker, Report]) -> int | None:
        """Every process has ended."""
        codes = ", ".join(f"{worker.name} {report.code}" for worker, report in sorted(reports.items()))
        self.say(f"exit status: {codes}")
        there = f"{self.keeper.spent()}; the VMs are still there: run delete when done with them"
        if deed == "finished":
            self.say(f"finished; {there}")
            return FINISHED
        if deed == "mistake":
            self.say(f"status 2 is a mistake that another start would not mend; {there}")
            return MISTAKEN
        self._again(deed)
        return None

    def _again(self, deed: str) -> None:
        """Has the command started again. It was not its own failure if its VMs are going."""
        keeper, ledger, settings = self.keeper, self.keeper.ledger, self.keeper.settings
        identity, until = ledger.identity, time.monotonic() + settings.settle_seconds
        while time.monotonic() < until:
            seen = keeper.look()
            if seen.kind != ACTIVE or seen.identity != identity:
                return  # A new request is a new start.
            time.sleep(min(settings.poll_seconds, settings.settle_seconds / 4))
        if deed != "preempted":
            ledger.failures += 1
            if ledger.failures > settings.max_failures:
                raise Failure(
                    f"{deed} for the {ledger.failures}. time, MAX_FAILURES={settings.max_failures}; {keeper.spent()}; "
                    "the VMs are still there: mend it and launch again, or run delete"
                )
        keeper.count(deed)

    def _end_at_budget(self, workers: tuple[Worker, ...]) -> None:
        then = "telling the run to save" if workers else "there is nobody to be told"
        self.say(f"the budget is spent: {self.keeper.spent()}; {then}")
        self.end(Fleet(self.keeper.cloud, workers, self.say))
        self.keeper.delete()
        raise Failure(
            f"stopped and deleted: {self.keeper.spent()}; to go on raise MAX_CHIP_HOURS, then create, wait and watch"
        )

    def _poll(self, fleet: Fleet) -> dict[Worker, Report]:
        """How the command is. What is new in the logs is said line by line, and kept in a file for each worker."""
        ledger = self.keeper.ledger
        while True:
            reports, lines = fleet.poll(ledger.attempt, ledger.offsets), []
            for worker, report in reports.items():
                data = report.log
                if report.state == "running" and len(data) < MOST:
                    data = data[: data.rfind(b"\n") + 1]
                if report.state == "lost":
                    lines.append(f"no answer: {report.why}")
                if data:
                    self.logs.mkdir(parents=True, exist_ok=True)
                    with (self.logs / f"{worker.name}.log").open("ab") as file:
                        file.write(data)
                    lines += [f"[{worker.name}] {line}" for line in data.decode(errors="replace").splitlines()]
                    ledger.offsets[worker.name] = ledger.offsets.get(worker.name, 0) + len(data)
            ledger.save()
            if lines:
                self.say("\n".join(lines))  # at once: Ctrl-C in between would lose the rest
            if all(len(report.log) < MOST for report in reports.values()):
                return reports
