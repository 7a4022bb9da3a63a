#!/usr/bin/env python3
"""Cloud TPU VMs from a laptop: asks for them, sets them up, runs one command on all of them, and watches it to its end.

Needs only Python 3.9 and gcloud. An env file has the settings. ``tpu_scripts/README.md`` leads from nothing to a
trained policy.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import bundle as bundles
import ledger as ledgers
import settings as settings_module
from cloud import MISSING, Cloud, end_calls
from errors import Failure, Mistake, Passing
from keeping import Keeper
from watching import Watch
from workers import Fleet


def main(argv: Sequence[str] | None = None) -> int:
    """Status 0; 2 for a user's mistake, 1 for a failure, 130 for Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    args = parser().parse_args(words[:cut])
    args.command = words[cut + 1 :]
    try:
        if args.command and args.name != "launch":
            raise Mistake(f"{args.name} takes no command; only launch does")
        settings = settings_module.load(args.env)
        secrets = [os.environ[n] for n in settings.forward.split() if len(os.environ.get(n, "")) >= 4]
        say = Speaker(secrets, args.dry_run)
        # Beside the env file, so that it is found from any folder.
        file = args.env.resolve().parent / ".tpu" / f"{settings.name}.json"
        if args.dry_run:
            return Commands(args, settings, ledgers.Ledger(None, settings.chips), say).run()
        with ledgers.alone(file):
            return Commands(args, settings, ledgers.load(file, settings.chips), say).run()
    except Mistake as error:
        print(f"tpu.py: {error}", file=sys.stderr)
        return 2
    except Failure as error:
        print(f"tpu.py: {error}", file=sys.stderr)
        return 1
    except Passing as error:
        print(f"tpu.py: no answer: {error}; run wait, then the same command again", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tpu.py: stopped here; what runs on the TPU runs on, and costs", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    top = argparse.ArgumentParser(prog="tpu.py", description=__doc__.split("\n\n")[0])
    top.add_argument(
        "--env",
        type=Path,
        default=Path("tpu.env"),
        metavar="FILE",
        help="settings, such as the machines to ask for; see example.env",
    )
    top.add_argument("--dry-run", action="store_true", help="print every command, run none")
    commands = top.add_subparsers(dest="name", required=True, metavar="COMMAND")
    commands.add_parser("create", help="ask for the VMs")
    commands.add_parser("wait", help="wait until every VM is there; ask again for VMs that were taken away or refused")
    setup = commands.add_parser("setup", help="install Python, packages and this folder on every worker")
    setup.add_argument("--again", action="store_true", help="even where it is done already")
    setup.add_argument(
        "--from",
        dest="source",
        default="",
        metavar="WHAT",
        help="grpojax of this folder (.), of FILE.whl or git+URL@REF",
    )
    usage = "tpu.py launch -- COMMAND [ARGUMENT...]"
    commands.add_parser("launch", usage=usage, help="start a command on every worker, independent of this machine")
    commands.add_parser("watch", help="print its logs and state; start it again after preemptions until it ends")
    commands.add_parser("stop", help="save the run and end it; watch would start it again")
    fetch = commands.add_parser("fetch", help="copy the run's folder from the bucket")
    fetch.add_argument("source", nargs="?", default="", help="gs://...; default: run.dir of the launched command")
    fetch.add_argument("--to", default="", metavar="FOLDER", help="default: runs/NAME")
    fetch.add_argument("--checkpoints", action="store_true", help="copy checkpoints too")
    commands.add_parser("delete", help="delete the VMs and the request")
    return top


class Speaker:
    """Prints lines for the user, with forwarded values masked; in a dry run only comments."""

    def __init__(self, secrets: Sequence[str], dry: bool):
        self.secrets, self.dry = secrets, dry

    def __call__(self, text: str) -> None:
        """Prints some, all at once."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        stamp = "#" if self.dry else time.strftime("%H:%M:%S")
        print("\n".join(f"{stamp} {line}" for line in text.splitlines()), flush=True)


class Commands:
    """Each subcommand is a method."""

    def __init__(
        self, args: argparse.Namespace, settings: settings_module.Settings, ledger: ledgers.Ledger, say: Speaker
    ):
        self.args, self.settings, self.ledger, self.say = args, settings, ledger, say
        self.cloud = Cloud(settings, dry=args.dry_run)
        self.keeper = Keeper(self.cloud, ledger, say)
        state = args.env.resolve().parent / ".tpu"
        self.watcher = Watch(self.keeper, state / settings.name, say, self._bundle)

    def run(self) -> int:
        """The one that was asked for."""
        return getattr(self, f"_{self.args.name}")() or 0

    def _create(self) -> None:
        self.cloud.pretend = MISSING
        self.keeper.create()
        kind, slices = self.settings.accelerator, self.settings.slices
        self.say(f"asked for {slices} x {kind.name}: {self.settings.chips} chips, {slices * kind.hosts} workers")

    def _wait(self) -> None:
        self.keeper.available()

    def _setup(self) -> None:
        fleet, source = self._fleet(), self.args.source or self.ledger.installed or "."
        # Kept once they are set up: new VMs get the same, whatever folder `watch` is in then.
        self.ledger.installed = str(Path(source).absolute()) if source.endswith(".whl") else source
        self.ledger.folder = str(Path.cwd())
        self.watcher.setup(fleet, self.args.again)
        self.say(
            f"set up: {self.ledger.installed} ({self.ledger.folder}), packages as of {self.settings.packages_as_of}"
        )

    def _launch(self) -> None:
        command = self.args.command
        if not command:
            raise Mistake("launch needs a command: launch -- grpojax train configs/... run.dir=gs://...")
        local = next((a for a in command if a.startswith("run.dir=") and not a.startswith("run.dir=gs://")), "")
        if local and self.settings.accelerator.hosts * self.settings.slices > 1:
            raise Mistake(f"{local}: workers share no folder; give run.dir=gs://{self.settings.bucket}/...")
        if len(command) == 1 and " " in command[0]:
            raise Mistake(f"launch -- {command[0]!r}: no program has that name; take the quotes away, or write sh -c")
        fleet = self._fleet()
        reports = fleet.poll(self.ledger.attempt, {}).values()
        running, lost = any(r.state == "running" for r in reports), [r.why for r in reports if r.state == "lost"]
        if lost:
            raise Passing("; ".join(lost))
        if running and command != self.ledger.command and not self.args.dry_run:
            raise Mistake("another command is running; see it to its end with watch, or run stop")
        self.ledger.command = command
        if not running:
            self.ledger.relaunches = self.ledger.failures = 0
            self.ledger.started = False
            self.ledger.next_attempt()
        fleet.start(self.ledger.attempt, self.ledger.starting())
        self.say(f"launched on {len(fleet.workers)} workers; now watch")

    def _watch(self) -> int:
        if not self.args.dry_run:
            return self.watcher.run()
        self.ledger.command = ["COMMAND"]
        fleet = self._fleet()
        fleet.poll(1, {})
        self.say("after a preemption, in this order:")
        self.keeper.replace("an example")
        self.watcher.setup(self._fleet())
        fleet.start(2, ["COMMAND", "of", "launch"])
        return 0

    def _stop(self) -> None:
        if not self.watcher.end(self._fleet()):
            raise Failure("there are processes that cannot be killed; run delete to delete their VMs")

    def _fetch(self) -> None:
        found = [a[len("run.dir=") :] for a in self.ledger.command if a.startswith("run.dir=gs://")]
        source = self.args.source or (found[0] if found else "")
        if self.args.dry_run and not source:
            source = f"gs://{self.settings.bucket}/runs/{self.settings.name}"
        if not re.match(r"gs://[^/]+/.", source):
            raise Mistake(f"fetch {source or 'what?'}: give the run's folder, gs://{self.settings.bucket}/...")
        folder = self.args.to or f"runs/{source.rstrip('/').split('/')[-1]}"
        if not self.args.dry_run:
            Path(folder).mkdir(parents=True, exist_ok=True)
        self.cloud.copy_down(source.rstrip("/"), folder, "" if self.args.checkpoints else "^(checkpoints|broken)/.*")
        self.say(f"{source} is in {folder}; the workers' own logs are in {self.watcher.logs}")

    def _delete(self) -> None:
        self.keeper.delete()
        self.say(f"{self.settings.name} is deleted; {self.keeper.spent()}")

    def _fleet(self) -> Fleet:
        """The workers, which must be there."""
        seen = self.keeper.look()
        if not seen.workers:
            raise Failure(f"{self.settings.name} is {seen.kind} ({seen.detail}): run create and wait first")
        return Fleet(self.cloud, seen.workers, self.say)

    def _bundle(self) -> bundles.Bundle:
        if self.args.dry_run:
            return bundles.Bundle("BUNDLE", b"", bundles.arguments(f"./tree{bundles.EXTRAS}", self.settings))
        folder = Path(self.ledger.folder or Path.cwd())
        return bundles.make(self.settings, self.ledger.installed or ".", folder, self.args.env.resolve())


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    end_calls()
    os._exit(status)  # after Ctrl-C calls may hang in other threads
