"""Kills processes of runs at random moments: ``python tests/kills.py --count 100``.

A run of several processes is started, one of them is killed, and jax must end what is left and say so: half a minute
after the time by which silence is taken for death (`joining.HEARTBEAT_S`, shorter here), so that it is a minute with
that of the library. Then the same command goes on, until all kills are done and the run is finished. Its metrics must
be those of a run that nothing happened to, bit for bit. The last line is the summary; the status is 0 where all of that
holds.
"""

import argparse
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import runs
import tiny_run

from grpojax.extensions.pods import joining

LIMBO_S = 60.0
STEPS_A_KILL = 5
# What compiles is what a cycle costs: two programs of one layer, samples of one length, no reference, no evaluation.
OVERRIDES = (
    "train.checkpoint_every=1",
    "train.eval_every=0",
    "data.validation=null",
    "rewards=[{name: tiny_run:parity}]",
    "variant.kl_coef=0",
    "optimizer.learning_rate=2.0e-4",
    "rollout.max_tokens=4",
    "mesh.fsdp=1",
)
# `grpojax train` with another limit of silence.
PROGRAM = """
import sys
from grpojax.host import startup
startup.prepare()
from grpojax.extensions.pods import joining
joining.HEARTBEAT_S = {silent_s}
from grpojax.cli import main as cli
sys.exit(cli.main(sys.argv[1:]))
"""


class Together:
    """The processes of a run, and what they say."""

    def __init__(self, recipe: Path, directory: Path, count: int, silent_s: int, *overrides: str):
        program = ("-c", PROGRAM.format(silent_s=silent_s))
        self.group = runs.start_together(recipe, directory, *overrides, processes=count, devices=1, program=program)
        self.said: list[list[str]] = [[] for _ in self.group]
        self._threads = [threading.Thread(target=self._read, args=(i,), daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def _read(self, index: int) -> None:
        self.said[index].extend(iter(self.group[index].stdout.readline, ""))

    def wait_for(self, what: str, times: int) -> None:
        """Until the first process has said so, so many times."""
        until = time.monotonic() + 600
        while sum(what in line for line in self.said[0]) < times and time.monotonic() < until:
            if any(p.poll() is not None for p in self.group):
                return
            time.sleep(0.02)

    def wait(self, seconds: float) -> bool:
        """Whether all have ended within that time; they have afterwards."""
        until = time.monotonic() + seconds
        while any(p.poll() is None for p in self.group) and time.monotonic() < until:
            time.sleep(0.05)
        ended = all(p.poll() is not None for p in self.group)
        for p in self.group:
            p.kill()
        for p, thread in zip(self.group, self._threads, strict=True):
            p.wait()
            thread.join(10)
        return ended


def kill_once(run: Together, rng: random.Random) -> tuple[float, bool]:
    """Kills one of the processes; seconds until the others have ended, and whether they said why."""
    count = len(run.group)
    victim = rng.randrange(count)
    if rng.random() < 0.9:
        run.wait_for(" reward ", rng.randint(1, 3))
        time.sleep(rng.uniform(0, 0.2))
    else:  # they may die while they start, once they are joined
        run.wait_for("rewards run", 1)
        time.sleep(rng.uniform(0, 10))
    run.group[victim].kill()
    killed = time.monotonic()
    ended = run.wait(2 * LIMBO_S)
    seconds = time.monotonic() - killed if ended else float("inf")
    others = [i for i in range(count) if i != victim]
    explained = all(any("another task died" in x for x in run.said[i]) for i in others)
    wrong = [run.group[i].returncode for i in others if run.group[i].returncode != -signal.SIGABRT]
    print(f"process {victim} of {count}: {seconds:.0f} s, explained {explained}, other status {wrong}", flush=True)
    if not explained or wrong:
        print("".join(run.said[others[0]]), flush=True)
    return seconds, explained and not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=100, help="kills")
    parser.add_argument("--processes", type=int, default=2, choices=[2, 4], help="of a run")
    parser.add_argument("--silent", type=int, default=10, help="seconds by which silence is taken for death")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, started, usual = random.Random(args.seed), time.monotonic(), joining.HEARTBEAT_S
    with tempfile.TemporaryDirectory() as folder:
        recipe = tiny_run.make_run(Path(folder), layers=1, eos=-2.0)
        overrides = (*OVERRIDES, f"train.steps={STEPS_A_KILL * args.count + 6}", f"mesh.data={args.processes}")
        quiet, killed = Path(folder) / "undisturbed", Path(folder) / "killed"

        def begin(directory: Path, *more: str) -> Together:
            return Together(recipe, directory, args.processes, args.silent, *overrides, *more)

        if not _finish(begin(quiet, "train.checkpoint_every=0")):
            return 1
        print(f"undisturbed: {time.monotonic() - started:.0f} s", flush=True)
        found = [kill_once(begin(killed), rng) for _ in range(args.count)]
        equal = _finish(begin(killed)) and runs.numbers(killed) == runs.numbers(quiet)
    longest, explained = max(seconds for seconds, _ in found), sum(said for _, said in found)
    print(
        f"{args.count} kills of one of {args.processes} processes, seed {args.seed}, silence of {args.silent} s "
        f"taken for death ({usual} s usually): longest limbo {longest:.0f} s, explained in {explained}, metrics "
        f"{'bit-equal' if equal else 'DIFFER'}; {time.monotonic() - started:.0f} s in all"
    )
    return 0 if equal and explained == args.count and longest + usual - args.silent <= LIMBO_S else 1


def _finish(run: Together) -> bool:
    ended = run.wait(3600) and all(p.returncode == 0 for p in run.group)
    if not ended:
        print("".join(run.said[0][-20:]), flush=True)
    return ended


if __name__ == "__main__":
    sys.exit(main())
