"""Processes that agree, and those that do not: every one of them says who differs in what."""

import json
import socket
import subprocess
import sys

import pytest
import runs

from grpojax.host import agreement, coordination, processes
from grpojax.host.errors import UserError

PAIR = """
import json, os, sys, jax
from grpojax.host import agreement, processes
from grpojax.host.errors import UserError
processes.start()
me = jax.process_index()
here, apart = sys.argv[1:]

def attempt(part):
    try:
        with processes.AllOrNone():
            part()
        print(json.dumps("fine"))
    except (UserError, OSError) as e:
        print(json.dumps(f"{type(e).__name__}: {e}"))

config = {"train": {"steps": 3}, "run": {"dir": "x"}}
attempt(lambda: agreement.agree(config=config, data={"train": "5f"}))
attempt(lambda: agreement.agree(config={**config, "train": {"steps": 3 + me}}, data={"train": "5f" + "a" * me}))
attempt(lambda: agreement.agree(tokenizer="ab", **({"critic": "c"} if me else {})))
attempt(lambda: processes.prove_shared(here))
attempt(lambda: processes.prove_shared(os.path.join(apart, str(me))))

def fails(who, error):
    if me == who:
        raise error
    agreement.agree(data="5f")

attempt(lambda: fails(0, UserError("run.dir is in use")))
attempt(lambda: fails(1, OSError("no file")))
attempt(lambda: agreement.agree(config=config))
"""


@pytest.mark.slow
def test_two_processes(tmp_path):
    for name in ("here", "apart", "apart/0", "apart/1"):
        (tmp_path / name).mkdir()
    command = [sys.executable, "-c", PAIR, str(tmp_path / "here"), str(tmp_path / "apart")]
    group = [
        subprocess.Popen(command, env=runs.environment() | env, stdout=subprocess.PIPE, text=True)
        for env in runs.together(2)
    ]
    first, second = ([json.loads(x) for x in p.communicate(timeout=120)[0].splitlines()] for p in group)
    host = socket.gethostname()
    assert len(first) == len(second) == 8
    for said in (first, second):
        assert said[0] == said[3] == said[7] == "fine"
        assert said[1].startswith(f"UserError: the processes do not start the same run; process 0 ({host}) and others")
        assert said[1].endswith(f"process 1 ({host}): train.steps: 3 -> 4; data train: '5f' -> '5fa'")
        assert said[2].endswith(f"process 1 ({host}): critic: None -> c")
        assert "apart/" in said[4] and f"process 1 ({host}) cannot see" in said[4] and "gs://" in said[4]
    assert first[5] == "UserError: run.dir is in use" and second[6] == "OSError: no file"
    assert second[5] == f"_Elsewhere: process 0 could not go on, {host}: run.dir is in use"
    assert first[6] == f"_Elsewhere: process 1 could not go on, {host}: no file"
    assert not [*(tmp_path / "here").iterdir()] and not [*(tmp_path / "apart").rglob(".shared*")]


def test_who_of_three_differs(monkeypatch):
    """Versions too, which no argument gives."""
    words = []

    def meet(word):
        words.append(json.loads(word))
        if len(words) == 1:
            other = {**words[0], "host": "c", "digests": {**words[0]["digests"], "versions": "?"}}
            return [word, word, json.dumps(other)]
        other = {**words[1], "versions": {**words[1]["versions"], "jax": "0.9.9"}}
        return [word, word, json.dumps(other)]

    monkeypatch.setattr(processes, "meet", meet)
    version = agreement.versions()["jax"]
    with pytest.raises(UserError, match=rf"\nprocess 2 \(c\): versions jax: '{version}' -> '0.9.9'$"):
        agreement.agree(data="5f")


def test_alone(tmp_path):
    agreement.agree(data="5f")
    processes.prove_shared(tmp_path / "nowhere")
    with pytest.raises(UserError, match="^mine$"), processes.AllOrNone():
        raise UserError("mine")


def test_files_are_told_apart(tmp_path):
    (tmp_path / "a.json").write_text("1")
    (tmp_path / "a.bin").write_bytes(bytes(3 << 20))
    both = agreement.digest_of_files(tmp_path, "*.json", "*.bin")
    assert (
        both == agreement.digest_of_files(tmp_path, "*.json", "*.bin") != agreement.digest_of_files(tmp_path, "*.bin")
    )
    with (tmp_path / "a.bin").open("r+b") as f:
        f.seek((3 << 20) - 1)
        f.write(b"1")
    assert both != agreement.digest_of_files(tmp_path, "*.json", "*.bin")
    (tmp_path / "lr=[1]").mkdir()
    (tmp_path / "lr=[1]/a.bin").write_bytes(b"")
    assert agreement.digest_of_files(tmp_path / "lr=[1]", "*.bin") != agreement.digest()


def test_versions_are_those_that_results_depend_on():
    needed = {"python", "jax", "jaxlib", "grpojax", "flax", "optax", "numpy"}
    assert needed | {"transformers", "tokenizers", "orbax-checkpoint"} <= agreement.versions().keys()


def test_who_failed_waits_for_the_others_no_longer_than_they_may_take_to_end(monkeypatch):
    waits = []
    monkeypatch.setattr(coordination, "exchange", lambda name, text, seconds: waits.append(seconds) or [text])
    with pytest.raises(UserError, match="mine"), processes.AllOrNone():
        raise UserError("mine")
    assert waits == [20.0]
