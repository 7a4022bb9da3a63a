"""The whole story, with `grpojax` itself on two workers that are folders of this machine."""

import sys

import pytest
import quick_xla
import runs
from tpu_play import ROOT

SHORT = ["train.steps=5", "train.checkpoint_every=1", "train.eval_every=0", "data.validation=null", "mesh.fsdp=2"]
SHORT += ["rollout.prompts=4", "rollout.group=4", "rollout.max_tokens=8"]

# The bucket is a folder, which this program finds where the command says gs://.
GRPOJAX = f"""#!/bin/sh
for word; do
    shift
    set -- "$@" "$(printf %s "$word" | sed "s|gs://|${{FAKE_RUN%/run}}/bucket/|")"
done
exec {sys.executable} -P -m grpojax.cli.main "$@"
"""


@pytest.mark.exhaustive("tpu_scripts/test_watch.py::test_vms_that_are_taken_are_asked_for_again")
def test_created_preempted_resumed_finished_and_fetched(play, tmp_path):
    """Taken twice: with time to save, and without. The metrics are those of two processes that nothing happens to."""
    recipe = ROOT / "configs/quickstart.yaml"
    for process in runs.start_together(recipe, tmp_path / "undisturbed", *SHORT, processes=2, devices=1):
        said = process.communicate(timeout=900)[0]
        assert process.returncode == 0, said

    run = "my-bucket/runs/story"
    env = {"PYTHONPATH": f"{ROOT}:{ROOT}/tests", "XLA_FLAGS": quick_xla.flags(1), "JAX_PLATFORMS": "cpu"}
    metrics = play.cloud / "bucket" / run / "metrics.jsonl"
    states = [[f"ACTIVE@{metrics}:1", "SUSPENDED"], [f"ACTIVE@{metrics}:3", "SUSPENDED"], ["PROVISIONING", "ACTIVE"]]
    play.scenario(hosts=2, env=env, states=states, taken=[["TERM", "KILL"], ["KILL"]], notice=30, deleting=2)
    play.env(grace_seconds=120, poll_seconds=0.2, lost_seconds=60, call_seconds=60)
    play.runs(GRPOJAX)
    (play.folder / "configs").mkdir()
    (play.folder / "configs/quickstart.yaml").write_text(recipe.read_text())
    metrics.parents[1].mkdir(parents=True)

    for command in ("create", "wait", "setup"):
        play.outside(command)
    play.outside("launch", "--", "grpojax", "train", "configs/quickstart.yaml", f"run.dir=gs://{run}", *SHORT)
    said = play.outside("watch")
    assert said.count("grpo is gone (SUSPENDED): once more") == 2 and "finished" in said
    assert "exit status: worker0 0, worker1 0" in said
    assert said.count(" resumed /") == 2
    for worker in range(2):  # its VM was gone before anybody could ask
        assert (play.cloud / f"gone-0-grpo-{worker}/grpojax/jobs/2/exit").read_text() == "75\n"
    assert play.ledger()["failures"] == 0 and len(play.calls("queued-resources create")) == 3
    assert play.calls("start 3 grpojax train --take-over")
    play.outside("fetch")
    play.outside("delete")
    assert runs.numbers(play.folder / "runs/story") == runs.numbers(tmp_path / "undisturbed")
