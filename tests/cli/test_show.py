"""What `grpojax show` prints of a run's samples."""

import re
import subprocess
import sys

import pytest

from grpojax.cli import main as cli
from grpojax.records import metrics as tracking


def write(directory, rewards, **columns):
    """A step of samples: prompt's uid -> the rewards of its group."""
    usual = {"prompt": "p", "completion": "c", "rewards": {}, "advantage": 0.0, "length": 3, "stop": "eos", "gold": "1",
             "answer": None}  # fmt: skip
    rows = [
        {"uid": uid, "sample": g, "reward": r, **usual, **columns}
        for uid, group in rewards.items()
        for g, r in enumerate(group)
    ]
    metrics = tracking.Metrics(directory, 0)
    metrics.write_samples(1, rows)
    metrics.close()


@pytest.mark.parametrize(("rewards", "n", "best", "worst"), [
    # One prompt has the most of the highest rewards, one the most of the lowest, and the one between them some of both.
    ({1: [1, 0, 0], 2: [1, 1, 1], 3: [0, 0, 0], 4: [1, 1, 0]}, 1, [2], [3]),
    ({1: [1, 0, 0], 2: [1, 1, 1], 3: [0, 0, 0], 4: [1, 1, 0]}, 2, [2, 4], [3, 1]),
    # The lowest of all stand in a prompt that has the highest too.
    ({1: [2, -5], 2: [1, 1]}, 1, [2], [1]),
    ({1: [2, -5], 2: [1, 1], 3: [0.5, 0.25], 4: [3, -1]}, 2, [2, 3], [1, 4]),
    # Fewer prompts than twice as many as were asked for.
    ({1: [1, 0, 1], 2: [1, 1, 0.5], 3: [0.75, 0.5, 0.5]}, 3, [2, 3], [1]),
    ({1: [1, 0, 1]}, 3, [1], []),
    # Without a reward is neither good nor bad.
    ({1: [None, 0.5], 2: [None, None], 3: [1, None], 4: [0, 0]}, 2, [3, 1], [4]),
])  # fmt: skip
def test_samples_are_of_different_prompts_and_the_worst_are_the_worst(rewards, n, best, worst, tmp_path, capsys):
    write(tmp_path, rewards)
    assert cli.main(["show", str(tmp_path), "-n", str(n)]) == 0
    heads = re.findall(r"^--- (\w+): prompt (\d+) sample \d+  reward (\S+)", capsys.readouterr().out, re.M)
    shown = {name: [(int(uid), r) for other, uid, r in heads if other == name] for name in ("best", "worst", "invalid")}
    known = {uid: [r for r in group if r is not None] for uid, group in rewards.items()}
    assert shown["best"] == [(uid, format(max(known[uid]), ".3g")) for uid in best]
    assert shown["worst"] == [(uid, format(min(known[uid]), ".3g")) for uid in worst]
    assert shown["invalid"] == [(uid, "invalid") for uid, group in known.items() if not group][:n]


def test_a_file_is_no_run(tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text("model: {path: m}")
    assert cli.main(["show", str(tmp_path / "recipe.yaml")]) == 2
    assert "recipe.yaml is a file; give a run directory" in capsys.readouterr().err


def test_all_samples_of_one_prompt(tmp_path, capsys):
    write(tmp_path, {4: [0.5, None, 2.0], 5: [1.0]})
    assert cli.main(["show", str(tmp_path), "--uid", "4"]) == 0
    assert re.findall(r"^--- prompt 4 sample (\d)", capsys.readouterr().out, re.M) == ["2", "0", "1"]
    assert cli.main(["show", str(tmp_path), "--uid", "6"]) == 2
    assert "step 1 has no prompt 6; it has [4, 5]" in capsys.readouterr().err


def test_a_closed_pipe_ends_it_quietly(tmp_path):
    """As with `grpojax show RUN | head -1`."""
    write(tmp_path, {uid: [1.0] for uid in range(50)}, prompt="p" * 5000, completion="\x1b[2Jc" * 1000)
    show = [sys.executable, "-m", "grpojax.cli.main", "show", str(tmp_path), "-n", "50"]
    process = subprocess.Popen(show, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    process.wait()
    process.stderr.close()
    out = subprocess.run([*show[:-1], "1"], capture_output=True, text=True).stdout
    assert "\x1b" not in out and "\\x1b[2Jc" in out


def test_a_full_disk_under_what_it_prints_is_one_line(tmp_path):
    write(tmp_path, {4: [1.0]})
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "grpojax.cli.main", "show", str(tmp_path)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    said = "grpojax: standard output cannot be written: No space left on device\n"
    assert (done.stderr, done.returncode) == (said, 1)


def test_an_episode_is_shown_with_the_prompt_that_the_policy_saw(tmp_path, capsys):
    write(tmp_path, {1: [1]}, turns=["c"], sampled=[3], rendered_prompt='<tools>{"name": "add"}</tools> p')
    assert cli.main(["show", str(tmp_path)]) == 0
    assert '\n<tools>{"name": "add"}</tools> p\n>>> (3 tokens) c' in capsys.readouterr().out
