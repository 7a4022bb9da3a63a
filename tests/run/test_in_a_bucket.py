"""The quickstart with its directory in a bucket, behind a network with faults: as on a disk, also after a kill."""

import subprocess
import sys
from pathlib import Path

import bucket
import pytest
import runs

from grpojax.host import files
from grpojax.records import samples

QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.yaml"
SHORT = ("train.steps=6", "train.checkpoint_every=2", "train.eval_every=3", "train.eval_limit=16",
         "rollout.prompts=4", "rollout.group=4")  # fmt: skip
RUN = f"{bucket.URL}/run"


def grpojax(*args: str, env=None) -> str:
    command = [sys.executable, "-m", "grpojax.tools.cli", *args]
    done = subprocess.run(command, env=runs.environment() | (env or {}), capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_quickstart(tmp_path):
    with bucket.behind_proxy(tmp_path / "server") as proxy:
        proxy.latency = 0.01
        proxy.every(30, 503, "torn", 429)
        env = bucket.variables(proxy.address)
        killed = runs.start(QUICKSTART, RUN, *SHORT, env=env)
        assert killed.stdout is not None
        said = ""
        while "step 5/6" not in said:
            said += (line := killed.stdout.readline())
            assert line, said
        killed.kill()
        killed.wait()
        refused = runs.start(QUICKSTART, RUN, *SHORT, env=env)
        assert "--take-over" in refused.communicate(timeout=1800)[0] and refused.returncode == 2
        resumed = runs.start(QUICKSTART, RUN, *SHORT, "--take-over", env=env)
        said = resumed.communicate(timeout=1800)[0]
        assert resumed.returncode == 0 and f"resumed {RUN} at step" in said, said
        assert "could not be" not in said and "failed" not in said, said

        local = tmp_path / "run"
        runs.train(QUICKSTART, local, *SHORT)
        evaluation = ("--limit", "16", "--samples", "2", "--batch", "8")
        for folder, place, given in ((str(local), str(tmp_path), {}), (RUN, bucket.URL, env)):
            grpojax("eval", folder, *evaluation, env=given)
            grpojax("export", folder, "--to", f"{place}/policy", env=given)
            grpojax("report", folder, "--to", f"{place}/report.html", env=given)
        assert proxy.met > 10
        proxy.faults = iter(())
        with bucket.environment(proxy.address):
            assert runs.numbers(RUN) == runs.numbers(local)
            for step in range(1, 7):
                assert samples.read_samples(RUN, step) == samples.read_samples(local, step)
            same = ["data.json", *(f"eval/step_{n}.jsonl" for n in (0, 3, 6)),
                    "eval/step_6/problems.jsonl", "eval/step_6/summary.json", "curve.png"]  # fmt: skip
            for name in same:
                assert files.read(f"{RUN}/{name}") == (local / name).read_bytes(), name
            policy = tmp_path / "policy"
            assert bucket.objects(f"{bucket.URL}/policy") == sorted(p.name for p in policy.iterdir())
            for file in policy.iterdir():
                assert files.read(f"{bucket.URL}/policy/{file.name}") == file.read_bytes(), file.name
            assert files.listing(bucket.URL) and not (files.path(RUN) / "lock").exists()
