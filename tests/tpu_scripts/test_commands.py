"""Each command against a stand-in for gcloud that fails as the real one does."""

import json
import signal
import time

import pytest

QUOTA = "ERROR: (gcloud) RESOURCE_EXHAUSTED: Quota limit 'TPUV5sPreemptibleLitepodPerProjectPerZone' has been exceeded"
BUSY = "ERROR: (gcloud) UNAVAILABLE: The service is currently unavailable."


def test_create_asks_once(play):
    assert "16 chips, 4 workers" in play.tpu("create")
    assert "asked for before" in play.tpu("create")
    (line,) = play.calls("queued-resources create")
    assert " ".join(line) == (
        "compute tpus queued-resources create grpo --node-id grpo --accelerator-type v5litepod-16 "
        "--runtime-version v2-alpha-tpuv5-lite --spot --zone us-west4-a --project my-project --quiet"
    )
    play.env(type="v5e-8")
    assert "is a request for v5litepod-16" in play.tpu("create", status=2)


def test_create_on_demand_of_several_slices(play):
    play.env(type="v4-32", slices=3, spot="false", network="net", service_account="me@x")
    assert "48 chips, 12 workers" in play.tpu("create")
    line = " ".join(play.calls("queued-resources create")[0])
    assert "--node-count 3 --node-prefix grpo --accelerator-type v4-32 --runtime-version tpu-ubuntu2204-base" in line
    assert "--network net --service-account me@x" in line and "--spot" not in line and "--node-id" not in line


@pytest.mark.parametrize("state", ["SUSPENDED", "FAILED", "SUSPENDING", "ACTIVE/PREEMPTED"])
def test_what_is_gone_is_deleted_before_another_is_asked_for(play, state):
    play.scenario(states=[[state], ["ACTIVE"]], deleting=2)
    play.tpu("create")
    play.tpu("create")
    told = [line[3] for line in play.calls("queued-resources") if line[3] != "describe"]
    assert told == ["create", "delete", "create"]
    assert "--force" in play.calls("queued-resources delete")[0]
    play.tpu("wait")


def test_no_quota_is_one_line_with_a_remedy(play):
    play.scenario(rules=[{"match": "queued-resources create", "code": 1, "stderr": QUOTA}])
    said = play.tpu("create", status=1)
    assert said.splitlines()[-1].startswith("tpu.py: no quota or no capacity: ERROR") and "another zone" in said
    assert len(play.calls("queued-resources create")) == 1


@pytest.mark.parametrize(
    "error",
    [
        "PERMISSION_DENIED: Permission denied",
        "You do not currently have an active account selected.",
        "INVALID_ARGUMENT: no",
    ],
)
def test_what_the_cloud_refuses_is_a_mistake(play, error):
    play.scenario(rules=[{"match": "describe", "code": 1, "stderr": f"ERROR: (gcloud) {error}\n"}])
    assert play.tpu("create", status=2).count("\n") == 1


def test_a_service_that_is_busy_is_asked_again(play):
    play.scenario(rules=[{"match": "create", "times": 1, "code": 1, "stderr": BUSY, "anyway": True}])
    play.tpu("create")
    play.scenario(rules=[{"match": "describe", "times": 2, "code": 1, "stderr": BUSY}])
    assert "VMs READY" in play.tpu("wait")
    play.scenario(rules=[{"match": "describe", "code": 1, "stderr": BUSY}])
    play.env(lost_seconds=0.2)
    assert "the cloud does not answer" in play.tpu("wait", status=1)


def test_a_call_that_hangs_is_given_up(play):
    play.tpu("create")
    play.env(call_seconds=0.7)
    play.scenario(rules=[{"match": "describe", "times": 1, "hang": 60}])
    began = time.monotonic()
    assert "no answer in 0.7 s" in play.outside("wait")
    assert time.monotonic() - began < 20


def test_wait_outlasts_the_queue_and_asks_again_for_what_was_taken(play):
    play.scenario(
        states=[["WAITING_FOR_RESOURCES", "PROVISIONING", "SUSPENDED"], ["FAILED"], ["PROVISIONING*2", "ACTIVE"]]
    )
    play.tpu("create")
    said = play.tpu("wait")
    assert "2 of at most 50" in said and said.count("is gone") == 2
    assert len(play.calls("queued-resources create")) == 3


def test_wait_has_a_cap(play):
    play.env(max_relaunches=1)
    play.scenario(states=[["FAILED"]])
    play.tpu("create")
    assert "MAX_RELAUNCHES=1 are used up" in play.tpu("wait", status=1)
    assert len(play.calls("queued-resources create")) == 2


def test_a_request_that_fails_says_why_each_time(play):
    play.env(max_relaunches=1)
    play.scenario(states=[["FAILED"]], why="There is no more capacity\n  in the zone; " + "try another. " * 40)
    play.tpu("create")
    lines = play.tpu("wait", status=1).splitlines()
    assert len(lines) == 3, lines  # seen, asked for again, given up
    for line in lines:
        assert "FAILED: There is no more capacity in the zone; try another. try" in line
        assert line.count("try another.") < 16 and "..." in line


def test_without_a_request_each_command_says_what_to_run(play):
    assert "run create" in play.tpu("wait", status=2)
    assert "run create" in play.tpu("setup", status=1)
    assert "run create" in play.tpu("launch", "--", "true", status=1)
    assert "nothing was launched" in play.tpu("watch", status=2)
    assert "is deleted" in play.tpu("delete")


def test_delete_waits_until_it_is_gone(play):
    play.scenario(deleting=3)
    play.tpu("create")
    assert "is deleted" in play.tpu("delete")
    assert "is deleted" in play.tpu("delete")
    play.scenario(deleting=10**6)
    play.env(lost_seconds=0.2)
    play.tpu("create")
    assert "still not deleted (DELETING)" in play.tpu("delete", status=1)


def test_setup_sends_what_git_sees_once(play):
    (play.folder / "recipe with space.yaml").write_text("new")
    play.tpu("create")
    assert "sending" in play.tpu("setup")
    home = play.home(1)
    tree = home / "grpojax/current/tree"
    assert (tree / "recipe with space.yaml").read_text() == "new" and not (tree / "ignored").exists()
    assert not (tree / "tpu.env").exists() and not list(home.glob("grpojax/bundles/*.tgz"))
    log = (home / "uv.log").read_text()
    assert "venv --clear --python 3.12" in log and "--reinstall-package grpojax ./tree[tpu,gcs]" in log
    assert "sending" not in play.tpu("setup")
    assert "sending" in play.tpu("setup", "--again")
    (play.folder / "recipe with space.yaml").write_text("newer")
    assert "sending" in play.tpu("setup")
    assert (home / "grpojax/current/tree/recipe with space.yaml").read_text() == "newer"
    assert len(list(home.glob("grpojax/bundles/*"))) == 1
    assert (home / "uv.log").read_text().count("venv --clear") == 1


def test_setup_of_a_wheel_and_of_a_ref(play):
    play.tpu("create")
    (play.folder / "grpojax-1-py3-none-any.whl").write_bytes(b"a wheel")
    play.tpu("setup", "--from", "grpojax-1-py3-none-any.whl")
    play.tpu("setup", "--from", "git+https://example.org/grpojax@main")
    log = (play.home() / "uv.log").read_text()
    assert "./grpojax-1-py3-none-any.whl[tpu,gcs]" in log
    assert "grpojax[tpu,gcs] @ git+https://example.org/grpojax@main" in log
    assert play.ledger()["installed"].startswith("git+")
    assert "no such file" in play.tpu("setup", "--from", "none.whl", status=2)
    assert "must be . (this folder)" in play.tpu("setup", "--from", "grpojax", status=2)


def test_a_setup_that_is_refused_is_forgotten(play):
    """New VMs get what those of before had."""
    play.runs("#!/bin/sh\nexec sleep 60\n")
    play.ready("grpojax", "train")
    assert "no such file" in play.tpu("setup", "--from", "none.whl", status=2)
    (play.folder / "other-1-py3-none-any.whl").write_bytes(b"a wheel")
    assert "is busy with 2" in play.tpu("setup", "--from", "other-1-py3-none-any.whl", status=2)
    assert play.ledger()["installed"] == "."


def test_setup_that_fails_says_where_and_why_and_can_be_repeated(play):
    play.tpu("create")
    (play.cloud / "run.fails").write_text("")
    said = play.tpu("setup", status=1)
    assert "[worker1] no such package" in said and "setup failed on worker0, worker1" in said
    assert "worker0 is not set up" in play.tpu("launch", "--", "true", status=2)
    (play.cloud / "run.fails").unlink()
    play.tpu("setup")


def test_setup_notices_workers_that_differ(play):
    play.tpu("create")
    play.tpu("setup")
    (play.home(1) / "grpojax/current/packages").write_text("others")
    assert "different packages" in play.tpu("setup", status=1)


def test_a_worker_out_of_reach_is_named(play):
    play.tpu("create")
    lost = "ssh: connect to host 1.2.3.4 port 22: Connection timed out"
    play.scenario(rules=[{"match": "ssh.*--worker=1", "code": 255, "stderr": lost}])
    assert f"worker1: {lost}" in play.tpu("setup", status=1)
    play.scenario(rules=[{"match": "ssh.*--worker=1", "times": 1, "code": 255, "stderr": lost}])
    play.tpu("setup")


def test_the_command_arrives_as_it_was_typed(play):
    words = ["grpojax", "a b", "it's", '"$HOME"', "`id`", "$(id)", "*", "new\nline", "\\", "", "  two", "é;|&<>"]
    play.runs('#!/bin/sh\nfor word; do printf \'%s\\0\' "$word"; done >"$HOME/words"\npwd >"$HOME/folder"\n')
    play.ready()
    play.outside("launch", "--", *words)
    play.outside("watch")
    for index in (0, 1):
        assert (play.home(index) / "words").read_text().split("\0")[:-1] == words[1:]
        assert (play.home(index) / "folder").read_text().rstrip().endswith("tree")


@pytest.mark.slow
def test_secrets_reach_the_run_and_nothing_else(play):
    secret = "hf_'se cr\"et$"
    play.env(forward="HF_TOKEN")
    play.runs('#!/bin/sh\nprintf %s "$HF_TOKEN" >"$HOME/token"\necho "the token is $HF_TOKEN"\n')
    play.tpu("create")
    assert "HF_TOKEN, which is not set" in play.tpu("setup", status=2)
    said = ""
    for words in (["setup"], ["launch", "--", "grpojax"], ["watch"]):
        said += play.outside(*words, env={"HF_TOKEN": secret})
    assert (play.home() / "token").read_text() == secret
    assert secret not in said and "the token is ***" in said
    assert not play.calls("se cr") and secret not in json.dumps(play.ledger())
    assert (play.home() / "grpojax/current/variables").stat().st_mode & 0o077 == 0


def test_launch_twice_runs_once(play):
    play.runs('#!/bin/sh\necho x >>"$HOME/starts"\nexec sleep 60\n')
    play.ready("grpojax", "train")
    play.tpu("launch", "--", "grpojax", "train")
    assert "another command is running" in play.tpu("launch", "--", "grpojax", "eval", status=2)
    assert "is busy with 2" in play.tpu("setup", "--again", status=2)
    assert (play.home().joinpath("starts")).read_text() == "x\n"
    play.tpu("stop")
    play.tpu("launch", "--", "grpojax", "train")
    assert (play.home().joinpath("starts")).read_text() == "x\nx\n"


def test_launch_wants_a_command_and_a_shared_folder(play):
    assert "launch needs a command" in play.tpu("launch", status=2)
    assert "take the quotes away" in play.tpu("launch", "--", "grpojax train c.yaml", status=2)
    assert "workers share no folder" in play.tpu("launch", "--", "grpojax", "train", "run.dir=runs/x", status=2)
    assert "takes no command" in play.tpu("watch", "--", "x", status=2)


def test_ctrl_c_does_not_wait_for_calls_that_hang(play):
    play.runs("#!/bin/sh\nexec sleep 60\n")
    play.ready("grpojax")
    play.scenario(rules=[{"match": "ssh", "hang": 60}])
    before = len(play.calls("ssh"))
    watch = play.start("watch")
    while len(play.calls("ssh")) < before + 2:
        time.sleep(0.02)
    watch.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert "runs on" in watch.communicate(timeout=60)[0] and watch.returncode == 130
    assert time.monotonic() - began < 5


def test_fetch_takes_the_run_without_its_checkpoints(play):
    run = play.cloud / "bucket/my-bucket/runs/first"
    (run / "checkpoints/3").mkdir(parents=True)
    (run / "checkpoints/3/x").write_text("large")
    (run / "metrics.jsonl").write_text("{}\n")
    play.ready("grpojax", "train", "run.dir=gs://my-bucket/runs/first")
    play.tpu("fetch")
    assert [p.name for p in (play.folder / "runs/first").iterdir()] == ["metrics.jsonl"]
    play.tpu("fetch", "gs://my-bucket/runs/first/", "--to", "here", "--checkpoints")
    assert (play.folder / "here/checkpoints/3/x").read_text() == "large"
    assert "nothing there" in play.tpu("fetch", "gs://my-bucket/none", status=2)
    assert "give the run's folder" in play.tpu("fetch", "runs/first", status=2)


def test_two_at_once_on_a_name_are_refused(play):
    play.scenario(states=[["PROVISIONING"]])
    play.tpu("create")
    first = play.start("wait")
    assert "PROVISIONING" in first.stdout.readline()
    assert "another tpu.py works on grpo" in play.tpu("delete", status=2)
    first.send_signal(signal.SIGINT)
    assert "stopped here" in first.communicate()[0] and first.returncode == 130
