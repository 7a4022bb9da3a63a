"""The parts that need no cloud: the env file, the names of slices, what is decided, what is counted."""

import shlex

import pytest
from tpu_play import ENV  # isort: split

import accelerators
import cloud
import errors
import ledger
import settings
import watching
import workers


@pytest.mark.parametrize(
    ("text", "name", "chips", "hosts"),
    [
        ("v5e-1", "v5litepod-1", 1, 1),
        ("v5e-8", "v5litepod-8", 8, 1),
        ("v5litepod-16", "v5litepod-16", 16, 4),
        ("v6e-256", "v6e-256", 256, 64),
        ("v4-8", "v4-8", 4, 1),
        ("v4-32", "v4-32", 16, 4),
        ("v5p-16", "v5p-16", 8, 2),
    ],
)
def test_slices(text, name, chips, hosts):
    found = accelerators.parse(text)
    assert (found.name, found.chips, found.hosts) == (name, chips, hosts)


def loaded(tmp_path, **changes):
    given = dict(line.split("=", 1) for line in ENV.split()) | changes
    file = tmp_path / "tpu.env"
    file.write_text("# a comment\n\n" + "".join(f"{k}={v}\n" for k, v in given.items() if v is not None))
    return settings.load(file)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"PROJECT": None}, "PROJECT must be given"),
        ({"BUCKET": "gs://b"}, "without gs://"),
        ({"ZONE": "us-west4"}, "ZONE=us-west4"),
        ({"NAME": "Grpo"}, "NAME=Grpo"),
        ({"TYPE": "v3-8"}, "TYPE=v3-8"),
        ({"TYPE": "v4-9"}, "no slice of that many; try v4-8 or v4-32"),
        ({"TYPE": "v5e-18"}, "no slice of that many"),
        ({"SPOTS": "true"}, "did you mean SPOT?"),
        ({"SPOT": "yes"}, "must be true or false"),
        ({"SLICES": "two"}, "must be a whole number"),
        ({"SLICES": "0"}, "at least 1"),
        ({"MAX_CHIP_HOURS": "nan"}, "at least 0"),
        ({"POLL_SECONDS": "0"}, "must be over 0"),
        ({"FORWARD": "A B"}, "needs quotes"),
        ({"FORWARD": '"A'}, "not closed"),
        ({"PACKAGES_AS_OF": "today"}, "2026-11-20"),
    ],
)
def test_mistakes_in_the_env_file(tmp_path, changes, says):
    with pytest.raises(errors.Mistake) as told:
        loaded(tmp_path, **changes)
    assert says in str(told.value) and "\n" not in str(told.value)


def test_the_env_file(tmp_path):
    found = loaded(tmp_path, FORWARD="'A B' # both", TYPE="v4-32", SLICES="2")
    assert found.forward == "A B" and found.chips == 32 and found.spot and found.poll_seconds == 0.02
    (tmp_path / "tpu.env").write_bytes(("\ufeff" + ENV.strip().replace("\n", "\r\n")).encode())
    assert settings.load(tmp_path / "tpu.env").call_seconds == 20
    with pytest.raises(errors.Mistake, match="copy tpu_scripts/example.env"):
        settings.load(tmp_path / "none.env")


@pytest.mark.parametrize(
    ("states", "exit_age", "silence", "deed"),
    [
        ("running running", 0, 0, "wait"),
        ("absent absent", 0, 0, "start"),
        ("running absent", 0, 0, "start"),
        ("unprepared running", 0, 0, "stop"),
        ("running lost", 0, 899, "wait"),
        ("running lost", 0, 901, "replace"),
        ("0 lost", 0, 100, "wait"),
        ("1 running", 179, 0, "wait"),
        ("1 running", 181, 0, "stop"),
        ("0 0", 0, 0, "finished"),
        ("0 absent", 0, 0, "failed"),
        ("1 2", 0, 0, "mistake"),
        ("2 absent", 0, 0, "mistake"),
        ("absent unprepared", 0, 0, "setup"),
        ("1 75", 0, 0, "preempted"),
        ("0 75", 0, 0, "preempted"),
        ("0 1", 0, 0, "failed"),
        ("137 1", 0, 0, "failed"),
    ],
)
def test_what_is_decided(tmp_path, states, exit_age, silence, deed):
    given = loaded(tmp_path, GRACE_SECONDS="180", LOST_SECONDS="900")
    reports = {}
    for i, word in enumerate(states.split()):
        report = workers.Report("exited", int(word)) if word.isdigit() else workers.Report(word)
        reports[cloud.Worker(0, i, "grpo", f"worker{i}")] = report
    assert watching.judge(reports, exit_age, silence, given) == deed


def seen(kind, identity="", born=None, detail=""):
    there = (cloud.Worker(0, 0, "grpo", "worker0"),) if kind == cloud.ACTIVE else ()
    return cloud.Seen(kind, detail, workers=there, identity=identity, born=born)


def test_chip_hours_are_counted_over_re_creations_and_between_watches(tmp_path):
    """From the making of the VMs (1000) though first seen at 2800; taken at 4600; none till 6000; then others."""
    file = tmp_path / "grpo.json"
    ledger.load(file, 16).note(seen(cloud.PENDING), 900)
    ledger.load(file, 16).note(seen(cloud.ACTIVE, "a", 1000), 2800)
    assert ledger.load(file, 16).chip_hours(2800) == 8
    ledger.load(file, 16).note(seen(cloud.PENDING, detail="ACTIVE, VMs REPAIRING"), 3000)
    ledger.load(file, 16).note(seen(cloud.GONE, detail="SUSPENDING"), 4600)
    assert ledger.load(file, 16).chip_hours(5900) == 16
    ledger.load(file, 16).note(seen(cloud.ACTIVE, "b", 6000), 6000)
    # Replaced by others while nobody looked: those of before count until they are seen gone.
    ledger.load(file, 16).note(seen(cloud.ACTIVE, "c", 7700), 7800)
    assert ledger.load(file, 16).chip_hours(7800) == pytest.approx(16 + 8 + 100 * 16 / 3600)
    file.write_text("{")
    with pytest.raises(errors.Failure, match="cannot be read"):
        ledger.load(file, 16)


@pytest.mark.parametrize(
    ("command", "again"),
    [
        ("grpojax train c.yaml a=b", "grpojax train --take-over c.yaml a=b"),
        ("env A=b C= grpojax --debug sft c.yaml", "env A=b C= grpojax --debug sft --take-over c.yaml"),
        ("/opt/bin/grpojax dpo c.yaml --take-over", "/opt/bin/grpojax dpo c.yaml --take-over"),
        ("python3.12 -m grpojax.cli.main train c.yaml", "python3.12 -m grpojax.cli.main train --take-over c.yaml"),
        ("grpojax eval gs://b/train", "grpojax eval gs://b/train"),
        ("grpojax", "grpojax"),
        ("python train.py", "env TAKE_OVER=--take-over python train.py"),
        ("env A=b", "env TAKE_OVER=--take-over env A=b"),
        (
            "sh -c 'grpojax train $TAKE_OVER'",
            "env TAKE_OVER=--take-over sh -c 'grpojax train $TAKE_OVER'",
        ),
    ],
)
def test_which_words_break_a_claim(command, again):
    assert ledger.taking_over(shlex.split(command)) == shlex.split(again)


def test_words_for_a_shell():
    assert workers.quoted(["a b", "it's", "$x"]) == """'a b' 'it'"'"'s' '$x'"""
