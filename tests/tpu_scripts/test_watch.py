"""A launched command is seen to its end, whatever happens to it and to its VMs."""

import dataclasses
import signal
import time
import types

import fake_gcloud
import pytest
import tpu_play  # isort: split

import keeping
import watching
import workers

LOST = "ssh: connect to host 1.2.3.4 port 22: Connection timed out"

# Keeps the contract of `grpojax train`: saves every step where all workers see it, goes on from there, exits with 75
# if it is told to stop. The first worker saves. From step $3 on it waits until the first VMs are gone.
TRAIN = r"""#!/bin/sh
steps=$1 each=$2 run=${FAKE_RUN%/run}/bucket
mkdir -p "$run"
trap 'echo "saved at $(cat "$run/step")"; exit 75' TERM
[ -e "$run/step" ] || echo 0 >"$run/step"
step=$(cat "$run/step")
echo "worker $JAX_PROCESS_ID of $JAX_NUM_PROCESSES goes on from $step"
while [ "$step" -lt "$steps" ]; do
    sleep "$each"
    while [ "$step" -ge "${3:-$steps}" ] && [ ! -e "${run%/bucket}/gone-0-grpo-0" ]; do sleep 0.05; done
    step=$((step + 1))
    if [ "$JAX_PROCESS_ID" = 0 ]; then echo "$step" >"$run/step"; echo "step $step" | tee -a "$run/metrics"; fi
done
touch "$run/done"
"""


@pytest.fixture
def hours(play, monkeypatch):
    """Hours take no time: whoever sleeps is told that it is later.

    To bury a process may take some looks of five minutes each, hence GRACE_SECONDS.
    """
    ahead = 0.0

    def sleep(seconds):
        nonlocal ahead
        ahead += seconds
        time.sleep(0.02)

    clock = types.SimpleNamespace(
        sleep=sleep, monotonic=lambda: time.monotonic() + ahead, time=time.time, time_ns=time.time_ns
    )
    for module in (keeping, watching, workers):
        monkeypatch.setattr(module, "time", clock)
    play.env(poll_seconds=300, settle_seconds=60, grace_seconds=40000, lost_seconds=900)


def test_what_finishes(play):
    play.runs("#!/bin/sh\necho one; echo two >&2; printf 'no newline %s' \"$JAX_PROCESS_ID\"\n")
    play.ready("grpojax")
    said = play.tpu("watch")
    for line in (
        "[worker0] one",
        "[worker1] two",
        "[worker1] no newline 1",
        "exit status: worker0 0, worker1 0",
        "finished",
    ):
        assert said.count(line) == 1, said
    assert (play.folder / ".tpu/grpo/worker1.log").read_text() == "one\ntwo\nno newline 1"


def test_several_slices_are_one_run(play):
    play.env(type="v5e-4", slices=2)
    play.scenario(hosts=1)
    play.runs('#!/bin/sh\necho "$JAX_PROCESS_ID of $JAX_NUM_PROCESSES on $(basename "$HOME")"\n')
    play.ready("grpojax")
    said = play.tpu("watch")
    assert "[slice0-worker0] 0 of 2 on grpo-0-0" in said and "[slice1-worker0] 1 of 2 on grpo-1-0" in said
    assert (play.folder / ".tpu/grpo/slice1-worker0.log").exists()


def test_a_mistake_is_not_repeated(play):
    play.runs('#!/bin/sh\necho "learning_rat: unknown"; exit "$((2 - JAX_PROCESS_ID))"\n')
    play.ready("grpojax")
    said = play.tpu("watch", status=2)
    assert "[worker0] learning_rat: unknown" in said and "status 2 is a mistake" in said
    assert play.ledger()["relaunches"] == 0


def test_a_failure_is_repeated_to_the_cap(play):
    play.env(max_failures=2)
    play.runs('#!/bin/sh\necho x >>"$HOME/starts"; exit 1\n')
    play.ready("grpojax")
    said = play.tpu("watch", status=1)
    assert "failed for the 3. time, MAX_FAILURES=2" in said
    assert (play.home() / "starts").read_text() == "x\n" * 3
    assert len(play.calls("queued-resources create")) == 1


def test_a_preempted_run_on_vms_that_stay_goes_on_there(play):
    play.env(max_failures=0)
    play.runs('#!/bin/sh\nif [ -e "$HOME/once" ]; then echo resumed; else touch "$HOME/once"; exit 75; fi\n')
    play.ready("grpojax")
    said = play.tpu("watch")
    assert "preempted: once more, 1 of at most 50" in said and "[worker1] resumed" in said
    assert not play.calls("queued-resources delete")


@pytest.mark.parametrize(
    ("words", "again"),
    [
        (["grpojax", "train", "c.yaml", "a=b c"], "train --take-over c.yaml a=b c"),
        (["sh", "-c", 'grpojax train "c.yaml" $TAKE_OVER'], "train c.yaml --take-over"),
    ],
)
@pytest.mark.slow
def test_the_claim_of_what_has_ended_is_taken_over(play, words, again):
    """By a start after another, on the same VMs and on new ones; never by the first."""
    play.scenario(hosts=1, states=[["ACTIVE*8", "SUSPENDED"], ["ACTIVE"]])
    play.runs('#!/bin/sh\necho "$@" >>"$FAKE_RUN.args"; [ -e "$FAKE_RUN.over" ] || exit 1\n')
    play.env(max_failures=50)
    play.ready(*words)
    play.env(max_relaunches=3)
    play.tpu("watch", status=1)
    first, *rest = (play.cloud / "run.args").read_text().splitlines()
    assert first == again.replace(" --take-over", "")
    assert rest == [again] * len(rest) and len(play.calls("queued-resources create")) == 2 and len(rest) >= 2
    (play.cloud / "run.over").touch()
    play.tpu("launch", "--", *words)
    play.tpu("watch")
    assert (play.cloud / "run.args").read_text().splitlines()[-1] == first


def test_what_never_started_takes_over_nothing(play):
    """The claim is another's then."""
    play.scenario(hosts=1, states=[["ACTIVE*2", "SUSPENDED"], ["ACTIVE"]])
    play.runs('#!/bin/sh\necho "$@" >>"$FAKE_RUN.args"\n')
    play.ready()
    play.scenario(hosts=1, states=[["ACTIVE*2", "SUSPENDED"], ["ACTIVE"]],
                  rules=[{"match": "ssh.*poll", "code": 255, "stderr": LOST}])  # fmt: skip
    assert "run wait, then" in play.tpu("launch", "--", "grpojax", "train", status=1)
    play.scenario(hosts=1)
    play.tpu("wait")
    play.tpu("setup")
    play.tpu("launch", "--", "grpojax", "train")
    play.tpu("watch")
    assert (play.cloud / "run.args").read_text() == "train\n"


def test_a_request_that_somebody_deletes_stays_deleted(play):
    play.scenario(deleting=5)
    play.runs('#!/bin/sh\n[ -e "${FAKE_RUN%run}gone-0-grpo-0" ] || exec sleep 60\n')
    play.ready("grpojax", "train")
    where = ["--zone", "z", "--project", "p", "--force", "--quiet"]
    assert fake_gcloud.Call(play.cloud, "compute tpus queued-resources delete grpo".split() + where).run(b"")[0] == 0
    assert "no such request; run create" in play.tpu("watch", status=2)
    assert len(play.calls("queued-resources create")) == 1


@pytest.mark.slow
def test_processes_that_cannot_be_killed_cost_their_vms(play):
    play.env(grace_seconds=0.1)
    play.runs('#!/bin/sh\n[ -e "$FAKE_RUN.once" ] && exit 0\ntouch "$FAKE_RUN.once"\nexit 1\n')
    play.ready("grpojax")
    play.scenario(rules=[{"match": "ssh.*--worker=1.*poll 2", "stdout": "grpojax: running\n"}])
    said = play.tpu("watch")
    assert "processes that cannot be killed" in said and "finished" in said
    play.runs("#!/bin/sh\nexec sleep 60\n")
    play.tpu("launch", "--", "grpojax")
    play.scenario(rules=[{"match": "ssh.*poll", "stdout": "grpojax: running\n"}])
    assert "cannot be killed; run delete" in play.tpu("stop", status=1)


@pytest.mark.slow
def test_a_vm_that_was_made_anew_ends_the_run_that_lost_it(play):
    play.runs('#!/bin/sh\n[ -e "$FAKE_RUN.over" ] && exit 0\ntrap "exit 75" TERM\nwhile :; do sleep 0.1; done\n')
    play.ready("grpojax", "train")
    play.home(1).rename(play.cloud / "lost")
    (play.cloud / "run.over").touch()
    said = play.tpu("watch")
    assert "sending" in said and "finished" in said and len(play.calls("queued-resources create")) == 1


@pytest.mark.parametrize("taken", [["KILL"], pytest.param(["TERM"], marks=pytest.mark.exhaustive)])
def test_vms_that_are_taken_are_asked_for_again(play, taken):
    """While it runs, and twice before it runs again: once while they are made, once while they are set up."""
    step = f"{play.cloud}/bucket/metrics:2"
    states = [
        [f"ACTIVE@{step}", "SUSPENDING"],
        ["PROVISIONING", "SUSPENDED"],
        ["ACTIVE", "ACTIVE/PREEMPTED"],
        ["ACTIVE"],
    ]
    no_ssh = {"match": "ssh.*start setup", "skip": 2, "times": 4, "code": 1, "stderr": "TPU is in state PREEMPTED"}
    play.scenario(states=states, taken=[taken], deleting=1, rules=[no_ssh])
    play.runs(TRAIN)
    play.ready("grpojax", "6", "0.1", "2")
    said = play.tpu("watch")
    assert said.count("is gone") == 3 and "3 of at most 50" in said
    lines = (play.cloud / "bucket/metrics").read_text().splitlines()
    assert [int(line[5:]) for line in lines] == [1, 2, *range(3, 7)] and (play.cloud / "bucket/done").exists()
    assert "[worker1] worker 1 of 2 goes on from 2" in said
    assert [line[3] for line in play.calls("queued-resources") if line[3] != "describe"].count("create") == 4
    # What is over is deleted before it is asked for again, and costs nothing more.
    assert play.ledger()["spent_seconds"] > 0 and play.ledger()["failures"] == 0


def test_quota_that_is_not_free_at_once_is_waited_for(play):
    quota = "ERROR: (gcloud) RESOURCE_EXHAUSTED: Quota limit 'X' has been exceeded"
    play.scenario(
        states=[["ACTIVE*4", "SUSPENDED"], ["ACTIVE"]],
        rules=[{"match": "queued-resources create", "skip": 1, "times": 2, "code": 1, "stderr": quota}],
    )
    play.runs('#!/bin/sh\nif [ -e "$FAKE_RUN.once" ]; then echo resumed; else touch "$FAKE_RUN.once"; sleep 60; fi\n')
    play.ready("grpojax")
    said = play.tpu("watch")
    assert said.count("no quota") == 2 and "[worker0] resumed" in said


@pytest.mark.slow
def test_a_connection_that_hangs_or_breaks_costs_nothing(play):
    play.env(call_seconds=1)
    play.runs(TRAIN)
    play.ready("grpojax", "3", "0.2")
    play.scenario(
        rules=[
            {"match": "ssh.*--worker=1.*poll", "times": 1, "hang": 60},
            {"match": "ssh.*--worker=1.*poll", "skip": 0, "times": 2, "code": 255, "stderr": LOST},
            {"match": "ssh.*--worker=0.*poll", "skip": 1, "times": 1, "stdout": ""},
        ]
    )
    said = play.tpu("watch")
    assert "finished" in said and said.count("[worker0] step 2") == 1 and play.ledger()["relaunches"] == 0
    assert not play.calls("queued-resources delete")


@pytest.mark.slow
def test_a_worker_that_stays_out_of_reach_costs_its_vms(play):
    play.env(lost_seconds=0.5)
    play.runs('#!/bin/sh\nif [ -e "$FAKE_RUN.once" ]; then echo resumed; else sleep 60; fi\n')
    play.ready("grpojax")
    play.scenario(rules=[{"match": "ssh.*--worker=1.*poll 2", "code": 255, "stderr": LOST}])
    (play.cloud / "run.once").touch()
    said = play.tpu("watch")
    assert f"no answer: worker1: {LOST}" in said and "workers out of reach for 0.5 s" in said
    assert said.count("] resumed") == 2 and len(play.calls("queued-resources create")) == 2


@pytest.mark.parametrize("first", ["SUSPENDED", "PROVISIONING", "ACTIVE/REPAIRING"])
def test_hours_in_the_queue_are_no_silence_of_the_workers(play, hours, first):
    """One of them does not answer the first time that it is asked."""
    play.scenario(
        states=[["ACTIVE*2", first, *["WAITING_FOR_RESOURCES*10"] * (first != "SUSPENDED"), "ACTIVE"],
                ["WAITING_FOR_RESOURCES*10", "ACTIVE"]],
        rules=[{"match": "ssh.*--worker=1.*poll [23] ", "times": 2, "code": 255, "stderr": LOST}],
    )  # fmt: skip
    play.ready("grpojax")
    said = play.tpu("watch")
    assert "no answer: worker1" in said and "finished" in said
    assert len(play.calls("queued-resources create")) == 1 + (first == "SUSPENDED")


@pytest.mark.slow
def test_a_long_setup_is_no_silence_of_the_workers(play, hours):
    play.ready("grpojax")
    play.scenario(
        states=[["ACTIVE*2", "SUSPENDED"], ["ACTIVE"]],
        rules=[
            {"match": "ssh.*poll setup-", "times": 24, "stdout": "grpojax: running\n"},
            {"match": "ssh.*--worker=1.*poll 3 ", "skip": 1, "times": 2, "code": 255, "stderr": LOST},
        ],
    )
    said = play.tpu("watch")
    assert "no answer: worker1" in said and len(play.calls("queued-resources create")) == 2


def test_the_silence_of_vms_that_went_is_not_that_of_new_ones(play, hours):
    play.scenario(
        states=[["ACTIVE*5", "SUSPENDED"], ["ACTIVE"]],
        rules=[
            {"match": "ssh.*--worker=1.*poll 2 ", "code": 255, "stderr": LOST},
            {"match": "ssh.*--worker=1.*poll 3 ", "times": 2, "code": 255, "stderr": LOST},
        ],
    )
    play.ready("grpojax")
    said = play.tpu("watch")
    assert said.count("no answer: worker1") == 4 and len(play.calls("queued-resources create")) == 2


@pytest.mark.slow
def test_new_vms_have_their_own_grace(play, hours):
    """One ends, then all VMs go; after hours, one ends before the other again."""
    play.runs(
        '#!/bin/sh\n[ "$JAX_PROCESS_ID" = 0 ] && exit 0\n'
        'until [ "$(grep -c "job.sh poll 3 " "${FAKE_RUN%run}calls.jsonl")" -ge 8 ]; do sleep 0.02; done\n'
    )
    play.scenario(states=[["ACTIVE*4", "SUSPENDED"], ["WAITING_FOR_RESOURCES*20", "ACTIVE"]])
    play.ready("grpojax")
    while not (play.home() / "grpojax/jobs/2/exit").exists():
        time.sleep(0.02)
    said = play.tpu("watch")
    assert "exit status: worker0 0, worker1 0" in said and play.ledger()["failures"] == 0
    assert len(play.calls("queued-resources create")) == 2


@pytest.mark.parametrize("wheel", [False, True])
def test_new_vms_get_what_setup_was_given_wherever_one_watches(play, tmp_path, wheel):
    """Another checkout, too, is not what was set up."""
    other = tpu_play.start(tmp_path / "other")
    elsewhere = dataclasses.replace(play, folder=other.folder)
    (play.folder / "mine").write_text("")
    (play.folder / "grpojax-1-py3-none-any.whl").write_bytes(b"a wheel")
    play.scenario(states=[["ACTIVE*2", "SUSPENDED"], ["ACTIVE"]])
    play.tpu("create")
    play.tpu("setup", *["--from", "grpojax-1-py3-none-any.whl"] * wheel)
    play.tpu("launch", "--", "grpojax")
    assert "finished" in elsewhere.tpu("--env", str(play.folder / "tpu.env"), "watch")
    for index in (0, 1):
        assert (play.home(index) / "grpojax/current/tree/mine").exists()
        asked = "./grpojax-1-py3-none-any.whl[tpu,gcs]" if wheel else "./tree[tpu,gcs]"
        assert asked in (play.home(index) / "uv.log").read_text()


@pytest.mark.slow
def test_one_process_that_ends_ends_the_others(play):
    """The others do not even listen to being told."""
    play.env(max_failures=0, grace_seconds=4, poll_seconds=1)  # there are systems that bury the dead once a second
    play.runs("#!/bin/sh\n[ \"$JAX_PROCESS_ID\" = 0 ] && exit 1\ntrap '' TERM\nwhile :; do sleep 0.1; done\n")
    play.ready("grpojax")
    said = play.tpu("watch", status=1)
    assert "exit status: worker0 1, worker1 137" in said


@pytest.mark.slow
def test_a_watch_that_is_stopped_goes_on_where_it_was(play):
    play.runs(TRAIN)
    play.ready("grpojax", "8", "0.3")
    first = play.start("watch")
    said = ""
    while "[worker0] step 2" not in said:
        said += first.stdout.readline()
    first.send_signal(signal.SIGINT)
    said += first.communicate()[0]
    assert first.returncode == 130 and "runs on" in said
    said += play.tpu("watch")
    assert [said.count(f"[worker0] step {i}\n") for i in range(1, 9)] == [1] * 8
    assert (play.folder / ".tpu/grpo/worker0.log").read_text().count("step") == 8
    assert play.ledger()["relaunches"] == 0


def test_a_long_log_comes_whole(play):
    play.runs("#!/bin/sh\nseq 30000\n")
    play.ready("grpojax")
    play.tpu("watch")
    assert (play.folder / ".tpu/grpo/worker1.log").read_text().split() == [str(i) for i in range(1, 30001)]


def test_the_budget_ends_the_run_after_a_save(play):
    """16 chips of an hour ago are 16 chip-hours, though nobody has looked since."""
    play.runs(TRAIN)
    play.env(max_chip_hours=17)
    play.ready("grpojax", "1000", "0.1")
    play.tpu("stop")
    ledger = play.folder / ".tpu/grpo.json"
    born = play.ledger()["since"]
    ledger.write_text(ledger.read_text().replace(f'"since": {born}', f'"since": {born - 3500}'))
    play.tpu("launch", "--", "grpojax", "1000", "0.1")
    ledger.write_text(ledger.read_text().replace(f'"since": {born - 3500}', f'"since": {born - 3900}'))
    # Nor does it go on because the cloud is busy just then.
    busy = "ERROR: (gcloud) UNAVAILABLE: The service is currently unavailable."
    play.scenario(rules=[{"match": "describe", "skip": 2, "times": 1, "code": 1, "stderr": busy}])
    said = play.tpu("watch", status=1)
    assert "telling the run to save" in said and "[worker1] saved at" in said and "stopped and deleted: 17." in said
    assert len(play.calls("queued-resources delete")) == 1
    assert "raise MAX_CHIP_HOURS" in play.tpu("create", status=2)
    play.env(max_chip_hours=18)
    play.tpu("create")
    assert play.ledger()["spent_seconds"] >= 16 * 3900


def test_the_budget_ends_a_repair_too(play):
    """Its VMs are paid for, and nobody is there to be told."""
    play.scenario(states=[["ACTIVE*2", "ACTIVE/REPAIRING*20", "ACTIVE"]])
    play.ready("grpojax", "train")
    ledger = play.folder / ".tpu/grpo.json"
    born = play.ledger()["since"]
    ledger.write_text(ledger.read_text().replace(f'"since": {born}', f'"since": {born - 6.1 * 3600}'))
    said = play.tpu("watch", status=1)
    assert "VMs READY" not in said and "stopped and deleted: 97." in said and "telling" not in said
    assert len(play.calls("queued-resources delete")) == 1 and play.ledger()["since"] is None


def test_a_job_is_not_taken_for_one_of_before_a_reboot(play):
    play.env(max_failures=0)
    play.runs("#!/bin/sh\nexec sleep 60\n")
    play.ready("grpojax")
    for index in (0, 1):
        pid = play.home(index) / "grpojax/jobs/2/pid"
        text = pid.read_text()
        pid.write_text(text.split()[0] + " another-boot\n")
    said = play.tpu("watch", status=1)
    assert "worker0 137, worker1 137" in said
