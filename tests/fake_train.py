"""Stands in for ``grpojax train``: writes the metrics of a run, a step at a time, and goes on where it was stopped.

``DIR STEPS REWARD [fail | die | wait | preempted]``: "fail" ends with an error, "die" is killed after the second step
the first time, "wait" goes no further than step 1 until it is told to stop, which it is in an orderly way, as
"preempted" is by itself.
"""

import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path

folder, steps, reward, how = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), [*sys.argv[4:], ""][0]
folder.mkdir(parents=True, exist_ok=True)
lock = (folder / "lock").open("a")
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
told = []
signal.signal(signal.SIGINT, lambda *_: told.append(1))
with (folder / "starts").open("a") as file:
    file.write(f"{time.time()} {os.environ.get('CUDA_VISIBLE_DEVICES')} {os.getsid(0) == os.getpid()}\n")
if how == "fail":
    sys.exit("first line\nall is lost")
metrics = folder / "metrics.jsonl"
done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
with metrics.open("a") as file:
    for step in range(done + 1, steps + 1):
        file.write(json.dumps({"step": step, "eval/reward": reward}) + "\n")
        file.flush()
        if how == "die" and step == 2 and done == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        while how == "wait" and not told:
            time.sleep(0.01)
        if how == "preempted" and done == 0:
            sys.exit(os.EX_TEMPFAIL)
        if told:
            break
with (folder / "starts").open("a") as file:
    file.write(f"{time.time()} end\n")
