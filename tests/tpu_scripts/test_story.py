"""The whole story, with `grpojax` itself on four workers that are folders of this machine."""

import sys

import pytest
import quick_xla
import runs
from tpu_play import ROOT

SHORT = ["train.steps=6", "train.checkpoint_every=2", "train.eval_every=0", "data.eval=null", "mesh.fsdp=4"]
SHORT += ["rollout.prompts=8", "rollout.group=4", "rollout.max_tokens=12"]

# The bucket is a folder, which this program finds where the command says gs://.
GRPOJAX = f"""#!/bin/sh
for word; do
    shift
    set -- "$@" "$(printf %s "$word" | sed "s|gs://|${{FAKE_RUN%/run}}/bucket/|")"
done
exec {sys.executable} -P -m grpojax.tools.cli "$@"
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The metrics of four processes that nothing happens to."""
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    recipe = ROOT / "configs/quickstart.yaml"
    for process in runs.start_together(recipe, directory, *SHORT, processes=4, devices=1):
        said = process.communicate(timeout=900)[0]
        assert process.returncode == 0, said
    return runs.numbers(directory)


@pytest.mark.slow
@pytest.mark.parametrize("taken", [["TERM", "KILL"], ["KILL"]], ids=["with notice", "without"])
def test_created_preempted_resumed_finished_and_fetched(play, undisturbed, taken):
    run = "my-bucket/runs/story"
    env = {"PYTHONPATH": f"{ROOT}:{ROOT}/tests", "XLA_FLAGS": quick_xla.flags(1), "JAX_PLATFORMS": "cpu"}
    states = [[f"ACTIVE@{play.cloud}/bucket/{run}/metrics.jsonl:3", "SUSPENDED"], ["PROVISIONING", "ACTIVE"]]
    play.scenario(hosts=4, env=env, states=states, taken=taken, notice=10, deleting=2)
    play.env(grace_seconds=120, poll_seconds=0.2, lost_seconds=60, call_seconds=60)
    play.runs(GRPOJAX)
    (play.folder / "configs").mkdir()
    (play.folder / "configs/quickstart.yaml").write_text((ROOT / "configs/quickstart.yaml").read_text())
    (play.cloud / "bucket" / run).parent.mkdir(parents=True)

    play.tpu("create")
    play.tpu("wait")
    play.tpu("setup")
    play.tpu("launch", "--", "grpojax", "train", "configs/quickstart.yaml", f"run.dir=gs://{run}", *SHORT)
    said = play.tpu("watch")
    assert "grpo is gone (SUSPENDED): once more, 1 of at most 50 times" in said and "finished" in said
    assert "exit status: worker0 0, worker1 0, worker2 0, worker3 0" in said
    assert play.ledger()["failures"] == 0 and len(play.calls("queued-resources create")) == 2
    play.tpu("fetch")
    play.tpu("delete")
    assert runs.numbers(play.folder / "runs/story") == undisturbed
