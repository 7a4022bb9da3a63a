"""Kills processes of runs at random moments: ``python tests/kills.py --count 100``.

A run of several processes is started, one of them is killed, and what is left must end within a minute and say which
one is gone; then the same command goes on, until all kills are done and the run is finished. Its metrics must be those
of a run that nothing happened to, bit for bit. The last line is the summary; the status is 0 where all of that holds.
"""

import argparse
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

import runs
import tiny_run

LIMBO_S = 60.0
STEPS_A_KILL = 3


class Together:
    """The processes of a run, and what they say."""

    def __init__(self, recipe: Path, directory: Path, count: int, *overrides: str):
        self.group = runs.start_together(recipe, directory, *overrides, processes=count, devices=1)
        self.said: list[list[str]] = [[] for _ in self.group]
        self._threads = [threading.Thread(target=self._read, args=(i,), daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def _read(self, index: int) -> None:
        self.said[index].extend(iter(self.group[index].stdout.readline, ""))

    def steps(self) -> int:
        """Of the first process, said so far."""
        return sum(" reward " in line for line in self.said[0])

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


def kill_once(rng: random.Random, recipe: Path, directory: Path, count: int, *overrides: str) -> tuple[float, bool]:
    """Kills one of the processes; seconds until the others have ended, and whether they said which one was gone."""
    run, victim = Together(recipe, directory, count, *overrides), rng.randrange(count)
    if rng.random() < 0.9:  # the others may die while they start
        steps, until = rng.randint(1, STEPS_A_KILL), time.monotonic() + 600
        while run.steps() < steps and time.monotonic() < until and all(p.poll() is None for p in run.group):
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.5))
    else:
        time.sleep(rng.uniform(0, 20))
    run.group[victim].kill()
    killed = time.monotonic()
    ended = run.wait(2 * LIMBO_S)
    seconds = time.monotonic() - killed if ended else float("inf")
    others = [i for i in range(count) if i != victim]
    named = all(any(f"process {victim} (" in x and "is gone" in x for x in run.said[i]) for i in others)
    wrong = [run.group[i].returncode for i in others if run.group[i].returncode != 1]
    print(f"process {victim} of {count}: {seconds:.0f} s, named {named}, other status {wrong}", flush=True)
    if not named or wrong:
        print("".join(run.said[others[0]][-5:]), flush=True)
    return seconds, named and not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=100, help="kills")
    parser.add_argument("--processes", type=int, default=2, choices=[2, 4], help="of a run")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, started = random.Random(args.seed), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        recipe = tiny_run.make_run(Path(folder))
        overrides = (f"train.steps={STEPS_A_KILL * args.count + 6}", "train.checkpoint_every=1", "train.eval_every=7",
                     f"mesh.data={args.processes}", "mesh.fsdp=1")  # fmt: skip
        quiet, killed = Path(folder) / "undisturbed", Path(folder) / "killed"
        if not _finish(recipe, quiet, args.processes, *overrides):
            return 1
        found = [kill_once(rng, recipe, killed, args.processes, *overrides) for _ in range(args.count)]
        equal = _finish(recipe, killed, args.processes, *overrides) and runs.numbers(killed) == runs.numbers(quiet)
    longest, named = max(seconds for seconds, _ in found), sum(said for _, said in found)
    print(
        f"{args.count} kills of one of {args.processes} processes, seed {args.seed}: longest limbo {longest:.0f} s, "
        f"named in {named}, metrics {'bit-equal' if equal else 'DIFFER'}; {time.monotonic() - started:.0f} s in all"
    )
    return 0 if equal and longest <= LIMBO_S else 1


def _finish(recipe: Path, directory: Path, count: int, *overrides: str) -> bool:
    run = Together(recipe, directory, count, *overrides)
    ended = run.wait(3600) and all(p.returncode == 0 for p in run.group)
    if not ended:
        print("".join(run.said[0][-20:]), flush=True)
    return ended


if __name__ == "__main__":
    sys.exit(main())
