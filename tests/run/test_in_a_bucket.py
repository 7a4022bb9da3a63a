"""Model, data, run, compiled programs and trace in a bucket, behind a network with faults: as on a disk, also after a
kill."""

import json
import re
import subprocess
import sys
from pathlib import Path

import bucket
import pytest
import runs
from refusals import RECIPE

from grpojax import data
from grpojax.host import files
from grpojax.records import samples

SHORT = ("train.steps=4", "train.checkpoint_every=1", "train.eval_every=0", "train.eval_limit=4",
         "rollout.prompts=2", "rollout.group=4", "rollout.max_tokens=12", "profile.steps=[4, 4]")  # fmt: skip
RUN = f"{bucket.URL}/runs/first"
COMMANDS = "import json, sys; from grpojax.cli.main import main; sys.exit(any(map(main, json.loads(sys.argv[1]))))"


def commands(*each: list[str], env: dict[str, str]) -> None:
    """Several commands in one process, which imports and compiles once."""
    process = [sys.executable, "-c", COMMANDS, json.dumps(each)]
    done = subprocess.run(process, env=runs.environment() | env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr


def after(run: str, place: str) -> list[list[str]]:
    """What is done with a run, all of it beside the run's folder."""
    evaluation = ["--limit", "4", "--samples", "2", "--batch", "4", "--max-tokens", "12"]
    return [
        ["eval", run, *evaluation],
        ["export", run, "--to", f"{place}/policy"],
    ]


def data_in(place: str) -> dict[str, str]:
    test = f"{place}/test.jsonl"
    parts = {"validation": f"{{path: '{test}', rows: [4, 132]}}", "test": f"{{path: '{test}', rows: [0, 4]}}"}
    return {"data.train": f"{place}/train.jsonl"} | {f"data.{name}": given for name, given in parts.items()}


@pytest.mark.slow
def test_a_life_in_a_bucket(tmp_path):
    with bucket.clients(tmp_path / "server") as proxy:
        inputs = {
            "model.path": bucket.put_folder(Path(data.locate("builtin:tiny")), "tiny"),
            **data_in(f"{bucket.URL}/data"),
        }
        bucket.put_folder(Path(data.locate("builtin:arithmetic")), "data")
        given = [f"{name}={place}" for name, place in inputs.items()]
        proxy.every(120, 503, "torn", 429)  # a client waits for seconds after each
        env = bucket.variables(proxy.address)
        own = env | {"JAX_COMPILATION_CACHE_DIR": ""}  # beside run.dir
        killed = runs.start(RECIPE, RUN, *SHORT, *given, env=own)
        assert killed.stdout is not None
        said = ""
        while "step 3/4" not in said:
            said += (line := killed.stdout.readline())
            assert line, said
        killed.kill()
        killed.wait()
        assert "compiled update" in said, said
        refused = runs.start(RECIPE, RUN, *SHORT, *given, env=own)
        said = refused.communicate(timeout=1800)[0]
        assert refused.returncode == 2 and "--take-over" in said and "prompts" not in said, said
        resumed = runs.start(RECIPE, RUN, *SHORT, *given, "--take-over", env=own)
        said = resumed.communicate(timeout=1800)[0]
        assert resumed.returncode == 0 and re.search(f"resumed {RUN} at step [123]", said), said
        assert "could not be" not in said and "failed" not in said, said
        assert "read update from the compile cache" in said, said
        commands(*after(RUN, bucket.URL), env=env)

        local = tmp_path / "runs/first"
        here = [f"{name}={value}" for name, value in data_in("builtin:arithmetic").items()]
        commands(["train", RECIPE, f"run.dir={local}", *SHORT, *here], *after(str(local), str(tmp_path)), env={})
        assert proxy.met > 10
        proxy.faults = iter(())
        assert runs.numbers(RUN) == runs.numbers(local)
        for step in range(1, 5):
            assert samples.read_samples(RUN, step) == samples.read_samples(local, step)
        for name in ("data.json", "eval/step_4/problems.jsonl", "curve.png", "done"):
            assert files.read(f"{RUN}/{name}") == (local / name).read_bytes(), name
        policy = tmp_path / "policy"
        assert bucket.objects(f"{bucket.URL}/policy") == sorted(p.name for p in policy.iterdir())
        for file in policy.iterdir():
            assert files.read(f"{bucket.URL}/policy/{file.name}") == file.read_bytes(), file.name
        trace = [name.rpartition(".")[2] for name in bucket.objects(f"{RUN}/profile")]
        assert "pb" in trace
        kept = bucket.objects(f"{bucket.URL}/runs/compile_cache")
        assert any(name.startswith("jit_update") for name in kept) and not (files.path(RUN) / "lock").exists()
