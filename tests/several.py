"""Commands by several processes that join."""

import json
import subprocess
import sys

import runs

COMMANDS = """
import json, sys
from grpojax.cli import main as cli
for arguments in json.loads(sys.argv[1]):
    print("status", cli.main(arguments), flush=True)
"""


def together(*commands, processes=2, devices=2):
    """What each process says of some commands, one after the other: for each a list of lines, its status the last."""
    given = json.dumps([[str(x) for x in arguments] for arguments in commands])
    group = [
        subprocess.Popen(
            [sys.executable, "-c", COMMANDS, given],
            env=runs.environment(devices) | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for env in runs.together(processes)
    ]
    said = []
    for process in group:
        words = process.communicate(timeout=900)[0]
        lines = [line for line in words.splitlines() if "peer ranks" not in line]  # Gloo's own, torn at times
        ends = [n for n, line in enumerate(lines) if line.startswith("status ")]
        # One of several processes leaves with 2 where it was refused, and with 1 where another was.
        assert process.returncode in (0, 1, 2) and len(ends) == len(commands), words
        said.append([lines[i + 1 : j + 1] for i, j in zip([-1, *ends], ends, strict=False)])
    return said
