"""Runs of episodes in processes of their own, whose environments are in workers: killed, and by several processes."""

import json
import signal
import time

import bucket
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from runs import numbers, start, train_apart
from several import together

from grpojax.host import files
from grpojax.records.samples import read_samples

OVERRIDES = (
    "environment={name: 'fake_environments:Echo', format: 'fake_environments:calls_in', max_turns: 3, "
    "max_tool_tokens: 4, network: true, workers: 1}",
    "rewards=[{name: environment}]", "rollout.max_tokens=16", "rollout.max_turn_tokens=5", "rollout.prompts=4",
    "rollout.group=2", "data.validation=null", "train.eval_every=0", "train.steps=2", "variant.kl_coef=0",
)  # fmt: skip

# `grpojax train` that notes also in a bucket what became of each round.
NOTES_AT_ONCE = """
import sys
from grpojax.extensions.episodes import open_episodes
from grpojax.cli import main as cli
open_episodes._BUCKET_S = 0.0
sys.exit(cli.main(sys.argv[1:]))
"""


def noted(directory):
    """The number of the rollout that is noted, and which of its episodes are open."""
    file = directory / "episodes" / "open_0.json"
    notes = json.loads(files.read(file)) if file.exists() else {"rollout": -1, "episodes": []}
    return notes["rollout"], [is_open for _, _, is_open, _ in notes["episodes"]]


def killed_while_episodes_are_open(recipe, directory, *how):
    """Kills a run in its second rollout, when some episodes are over and others are not; how many are not."""
    process, until = start(recipe, directory, *how, program=("-c", NOTES_AT_ONCE)), time.monotonic() + 900
    while process.poll() is None and time.monotonic() < until:
        number, of_each = noted(directory)
        if number == 1 and 0 < sum(of_each) < len(of_each):
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    return sum(noted(directory)[1])


def weights(directory):
    restored = ocp.PyTreeCheckpointer().restore(directory / "checkpoints" / "2" / "policy_params")
    return jax.tree.leaves(restored)


def of(name):
    return *OVERRIDES, f"environment.name=fake_environments:{name}", "train.checkpoint_every=1"


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    """A run that nothing happened to."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    train_apart(recipe, directory, *of("Slow"))
    return directory


@pytest.fixture(params=["disk", pytest.param("bucket", marks=pytest.mark.exhaustive)])
def place(request, tmp_path):
    """A folder for runs."""
    if request.param == "disk":
        yield tmp_path
        return
    with bucket.clients(tmp_path):
        yield files.path(f"{bucket.URL}/runs")


@pytest.mark.slow
def test_a_run_that_is_killed_while_episodes_are_open_goes_on_bit_for_bit(recipe, whole, place):
    assert killed_while_episodes_are_open(recipe, place / "killed", *of("Slow"))
    train_apart(recipe, place / "killed", *of("Slow"), "--take-over")
    assert numbers(place / "killed") == numbers(whole)
    assert read_samples(place / "killed", 2) == read_samples(whole, 2)
    for got, want in zip(weights(place / "killed"), weights(whole), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.exhaustive(
    "extensions/episodes/test_episode_processes.py::test_a_run_that_is_killed_while_episodes_are_open_goes_on_bit_for_bit"
)
def test_open_episodes_of_a_class_that_states_nothing_are_drawn_again_after_a_kill(recipe, tmp_path):
    were_open = killed_while_episodes_are_open(recipe, tmp_path, *of("SlowAndRandom"))
    train_apart(recipe, tmp_path, *of("SlowAndRandom"))
    first, second = numbers(tmp_path)[-2:]
    assert second["episode/redrawn/resumed"] == were_open > 0
    assert "episode/redrawn/resumed" not in first and "episode/replay_differs" not in second


@pytest.mark.exhaustive("extensions/episodes/test_episodes.py::test_it_makes_no_difference_when_answers_come")
@pytest.mark.parametrize(("name", "prompts"), [("Echo", 4), ("Echo", 1), ("LateAndCrashes", 4)])
def test_two_processes_play_the_episodes_of_one(recipe, tmp_path, name, prompts):
    """Each drives the environments of its own prompts, of which it may have none, and they exchange the answers. Where
    an instance takes its worker with it, others begin again, and those of the other process do not."""
    how = *of(name), "mesh.fsdp=2", "optimizer={learning_rate: 1.0e-3, eps: 1.0e-3}", f"rollout.prompts={prompts}"
    said = together(["train", recipe, f"run.dir={tmp_path / 'two'}", *how], processes=2, devices=1)
    assert all(lines[-1] == "status 0" for of_one in said for lines in of_one), said
    train_apart(recipe, tmp_path / "one", *how, devices=2)
    two, one = numbers(tmp_path / "two"), numbers(tmp_path / "one")
    assert len(two) == len(one) >= 2
    again = [[line.pop("episode/redrawn/neighbour", 0) for line in lines] for lines in (two, one)]
    assert all(map(any, again)) == (name == "LateAndCrashes")
    for got, want in zip(two, one, strict=True):
        assert got == pytest.approx(want, rel=1e-6, abs=1e-6)
