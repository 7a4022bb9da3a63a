"""What `grpojax show` prints of a run's samples."""

import subprocess
import sys

from grpojax.records import metrics as tracking


def test_a_closed_pipe_ends_it_quietly(recipe, tmp_path):
    """As with `grpojax show RUN | head -1`."""
    metrics = tracking.Metrics(tmp_path, 0)
    row = {"uid": 0, "sample": 0, "prompt": "p" * 5000, "completion": "\x1b[2Jc" * 1000, "reward": 1.0, "rewards": {},
           "advantage": 0.0, "length": 3, "stop": "eos", "gold": "1", "answer": None}  # fmt: skip
    metrics.write_samples(1, [row] * 50)
    metrics.close()
    show = [sys.executable, "-m", "grpojax", "show", str(tmp_path), "-n", "50"]
    process = subprocess.Popen(show, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    process.wait()
    process.stderr.close()
    out = subprocess.run([*show[:-1], "1"], capture_output=True, text=True).stdout
    assert "\x1b" not in out and "\\x1b[2Jc" in out
