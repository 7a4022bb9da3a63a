"""Whole runs of a tiny random model: they learn, they resume bit for bit, and they end as they should."""

import itertools
import json
import os
import random
import signal
import time

import jax
import numpy as np
import pytest
import spies
from refusals import check_said
from runs import numbers, opened, start, start_together, train_apart

from grpojax.cli import main as cli
from grpojax.host.errors import UserError
from grpojax.records import metrics as tracking
from grpojax.records.checkpoint import Checkpoints
from grpojax.records.samples import read_samples, samples_path
from grpojax.run import recipe as config
from grpojax.run.closing_report import check_learned
from grpojax.train import train

# How many times the run is killed; the README says what 200 gave.
KILLS = int(os.environ.get("GRPOJAX_KILLS", "2"))


@pytest.fixture(scope="module")
def unbroken(recipe, tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "unbroken"
    return directory, train_apart(recipe, directory)


@pytest.mark.slow
def test_a_run_learns_and_says_so(unbroken):
    directory, out = unbroken
    lines = [line for line in numbers(directory) if "reward" in line]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert lines[-1]["reward"] > lines[0]["reward"] + 1.0  # rewarded for length, it writes longer
    assert max(line["sampling/logp_difference_max"] for line in lines) < 1e-4
    assert abs(lines[0]["kl"]) < 1e-6 and lines[-1]["kl"] > 1e-4
    assert all(line["grad_norm"] > 0 for line in lines)
    for text in ("compiling rollout", "step 12/12", "reward curve"):
        assert text in out
    for name in ("rollout", "update", "score"):  # an earlier test may have compiled it
        assert f"compiled {name}" in out or f"read {name} from the compile cache" in out
    assert (directory / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((directory / "tensorboard").glob("events*"))
    assert json.loads((directory / "config.json").read_text())["train"]["steps"] == 12


@pytest.mark.slow
def test_kill_nine_at_any_moment_changes_nothing(recipe, tmp_path):
    """Kills at random moments, saves included (one is in flight after every step), then the same command again."""
    rng, kills, steps = random.Random(0), 0, max(24, 12 * KILLS)
    overrides = [f"train.steps={steps}", "train.checkpoint_every=1", "train.eval_every=7"]
    train_apart(recipe, tmp_path / "unbroken", *overrides)
    directory = tmp_path / "killed"
    for _ in range(KILLS):
        process = start(recipe, directory, *overrides)
        if rng.random() < 0.9:  # the others may die while they start
            done = (line for line in process.stdout if f"/{steps} " in line)
            list(itertools.islice(done, rng.randint(1, 8)))
            time.sleep(rng.uniform(0, 0.5))
        else:
            time.sleep(rng.uniform(0, 6))
        process.kill()
        process.stdout.close()
        kills += process.wait() == -signal.SIGKILL
        if KILLS > 20:
            print(f"kill {kills}: {tracking.read_metrics(directory)[-1:]}"[:60], flush=True)
    assert kills >= 0.9 * KILLS
    train_apart(recipe, directory, *overrides)
    assert numbers(directory) == numbers(tmp_path / "unbroken")


@pytest.mark.slow
def test_sigterm_saves_and_exits_75(recipe, unbroken, tmp_path):
    directory = tmp_path / "stopped"
    process = start(recipe, directory)
    for line in process.stdout:
        if "step 2/12" in line:
            process.send_signal(signal.SIGTERM)
    assert process.wait() == os.EX_TEMPFAIL
    process.stdout.close()
    last = numbers(directory)[-1]["step"]
    assert 2 <= last < 12
    checkpoints = Checkpoints(directory / "checkpoints")
    assert checkpoints.latest() == last
    checkpoints.close()
    train_apart(recipe, directory)
    assert numbers(directory) == numbers(unbroken[0])


MESH = ["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"]


@pytest.fixture(scope="module")
def meshed(recipe, tmp_path_factory):
    """A run of one process with eight devices."""
    directory = tmp_path_factory.mktemp("runs") / "meshed"
    train_apart(recipe, directory, *MESH, devices=8)
    return directory


def same_to_rounding(directory, other, *names, rel, abs):
    for got, want in zip(numbers(directory), numbers(other), strict=True):
        assert got.keys() == want.keys()
        for name in set(names or want) & want.keys():
            assert got[name] == want[name] or got[name] == pytest.approx(want[name], rel=rel, abs=abs), (
                got["step"],
                name,
            )


@pytest.mark.slow
def test_several_processes_train_as_one_stop_as_one_and_go_on(recipe, meshed, tmp_path):
    """A signal to the second of two stops both, and what the first refuses the second leaves too."""
    directory = tmp_path / "two"
    pair = {"processes": 2, "devices": 4}
    first, second = start_together(recipe, directory, *MESH, **pair)
    for line in first.stdout:
        if "step 2/12" in line:
            second.send_signal(signal.SIGTERM)
    said = second.communicate(timeout=300)[0]
    assert (first.wait(), second.returncode) == (os.EX_TEMPFAIL, os.EX_TEMPFAIL), said
    first.stdout.close()
    assert "step" not in said and 2 <= numbers(directory)[-1]["step"] < 12
    for process in start_together(recipe, directory, *MESH, **pair):
        said = process.communicate(timeout=300)[0]
        assert process.returncode == 0, said
    same_to_rounding(directory, meshed, rel=1e-3, abs=1e-4)

    first, second = start_together(recipe, directory, *MESH, "train.seed=5", **pair)
    assert "holds a run of another config" in first.communicate(timeout=300)[0] and first.returncode == 2
    assert "process 0 could not go on" in second.communicate(timeout=300)[0] and second.returncode == 1


@pytest.mark.slow
def test_another_mesh_trains_the_same_and_restores(recipe, unbroken, meshed):
    """Eight devices give one device's metrics to rounding, and a checkpoint of one mesh goes on on another."""
    same_to_rounding(meshed, unbroken[0], "reward", "entropy", "grad_norm", rel=2e-2, abs=1e-3)
    from grpojax import sharding
    from grpojax.models import hf
    from grpojax.programs.optimizer import make_optimizer
    from grpojax.programs.state import abstract_state, decoder_network

    loaded = config.load(recipe, [f"run.dir={meshed}"])
    model = hf.load(loaded.model.path)
    optimizer = make_optimizer(loaded.optimizer, loaded.train.updates)
    checkpoints = Checkpoints(meshed / "checkpoints")
    states = []
    for sizes in (None, (1, 4, 2)):
        grid = None if sizes is None else sharding.make_mesh(sharding.MeshConfig(data=1, fsdp=4, tensor=2))
        abstract = abstract_state({"policy": decoder_network(model.config, optimizer, grid)[1]}, grid)
        state, meta = checkpoints.restore(abstract)
        assert meta["step"] == 12 and int(state["policy"].step) == 12
        states.append(state["policy"])
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert not states[1].params["embed"][...].sharding.is_fully_replicated
    checkpoints.close()


@pytest.mark.slow
def test_half_written_checkpoints_are_never_loaded(recipe, unbroken, tmp_path):
    import shutil

    directory = tmp_path / "torn"
    shutil.copytree(unbroken[0], directory)
    saved = directory / "checkpoints"
    before = Checkpoints(saved, keep=5)
    newest = before.latest()
    before.close()
    torn = saved / f"{newest + 1}.orbax-checkpoint-tmp-7"
    (torn / "policy_params").mkdir(parents=True)
    after = Checkpoints(saved, keep=5)
    assert after.latest() == newest
    after.close()


@pytest.mark.slow
def test_a_directory_of_another_config_is_refused(recipe, unbroken, capsys):
    assert (
        cli.main(["train", str(recipe), f"run.dir={unbroken[0]}", "train.seed=5", "optimizer.learning_rate=1.0"]) == 2
    )
    error = capsys.readouterr().err
    assert "train.seed: 0 -> 5" in error and "optimizer.learning_rate" in error and error.count("\n") <= 2


def test_a_foreign_directory_is_refused(recipe, tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("mine")
    assert cli.main(["train", str(recipe), f"run.dir={tmp_path}"]) == 2
    assert "is not a run" in capsys.readouterr().err


@pytest.mark.slow
def test_export_opens_in_transformers_and_sample_reads_it(recipe, unbroken, tmp_path, capsys):
    import transformers
    import with_torch  # noqa: F401

    target = tmp_path / "policy"
    assert cli.main(["export", str(unbroken[0]), "--to", str(target)]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    start = transformers.AutoModelForCausalLM.from_pretrained(config.load(recipe).model.path)
    moved = [(a - b).abs().max().item() for a, b in zip(model.parameters(), start.parameters(), strict=True)]
    assert 0 < max(moved) < 1
    capsys.readouterr()
    assert (
        cli.main(["sample", str(target), "--prompt", "1+1=", "-n", "2", "--max-tokens", "5", "--temperature", "0"]) == 0
    )
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert first == second
    assert cli.main(["export", str(unbroken[0]), "--to", str(target)]) == 2


@pytest.mark.in_ci("overrides0")
@pytest.mark.slow
@pytest.mark.parametrize("overrides", [
    ["variant={name: dr_grpo, kl_coef: 0.1, kl_kind: unbiased}", "train.ppo_epochs=2", "train.minibatches=2",
     "rollout.prompts=16", "mesh.data=4"],
    ["variant={name: grpo, kl_coef: 0.1, kl_kind: k1, kl_in: reward}"],
    ["variant={name: grpo, entropy_coef: 0.01, aggregate: token_mean}", "train.microbatches=4", "model.dtype=bfloat16"],
    ["variant={name: grpo, kl_kind: k2, aggregate: prompt_mean, clip_high: 0.28}", "rollout.decode_slots=2",
     "optimizer.name=sgd"],
])  # fmt: skip
def test_options_run(recipe, tmp_path, overrides):
    recipe = config.load(recipe, [f"run.dir={tmp_path / 'run'}", "train.steps=2", *overrides])
    assert train(opened(recipe, devices=recipe.mesh.data))
    lines = [line for line in numbers(tmp_path / "run") if "reward" in line]
    assert len(lines) == 2 and all(np.isfinite(list(line.values())).all() for line in lines)
    if "train.ppo_epochs=2" in overrides:
        assert lines[0]["ratio_mean"] != 1.0
    _, samples = read_samples(tmp_path / "run", 2)  # a KL in the reward is in the advantages only
    assert all(s["reward"] == s["rewards"]["tiny_run:length"] for s in samples)
    assert lines[1]["reward"] == pytest.approx(np.mean([s["reward"] for s in samples]))


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_dropped_groups_are_in_no_statistic(recipe, tmp_path):
    """GPG's factor makes up for groups without variance that are in the batch; those that were dropped are not."""
    overrides = [f"run.dir={tmp_path / 'run'}", "train.steps=1", "data.validation=null", "variant=gpg",
                 "rewards.0.name=tiny_run:even", "filter={max_rollouts: 1}", "rollout.group=3"]  # fmt: skip
    trainer = opened(config.load(recipe, overrides))
    assert train(trainer)
    (line,) = [line for line in numbers(tmp_path / "run") if "reward" in line]
    assert 0 < line["groups/missing"] < 1
    _, samples = read_samples(tmp_path / "run", 1)
    for i in range(0, len(samples), 3):
        rewards = np.array([s["reward"] for s in samples[i : i + 3]])
        got = [s["advantage"] for s in samples[i : i + 3]]
        np.testing.assert_allclose(got, rewards - rewards.mean(), atol=1e-5)


@pytest.mark.usefixtures("fakes")
@pytest.mark.in_ci("prompt_mean")
@pytest.mark.slow
@pytest.mark.parametrize("aggregate", ["prompt_mean", "sequence_mean", "token_mean"])
def test_dropped_groups_do_not_dilute_the_others(recipe, tmp_path, aggregate):
    """The weights of the tokens that learn sum to 1, however many groups fill the batch up; in each minibatch."""
    overrides = [f"run.dir={tmp_path / 'run'}", "train.steps=2", "train.minibatches=2", "data.validation=null",
                 f"variant={{name: grpo, aggregate: {aggregate}, kl_coef: 0}}", "rewards.0.name=tiny_run:even",
                 "filter={max_rollouts: 1}", "rollout.group=3"]  # fmt: skip
    trainer = opened(config.load(recipe, overrides))
    sums = []

    def train_step(state, frozen, packed):
        sums.append(float(np.asarray(packed.arrays["weights"]).sum()))
        return plain(state, frozen, packed)

    plain = spies.update_by(trainer, train_step)
    assert train(trainer)
    assert any(line["groups/missing"] > 0 for line in numbers(tmp_path / "run"))
    assert len(sums) == 4 and all(x == pytest.approx(1.0, abs=1e-5) or x == 0 for x in sums) and max(sums) > 0


@pytest.mark.usefixtures("fakes")
def test_an_advantage_that_cannot_be_is_the_users_to_mend(recipe, tmp_path):
    """NGRPO with lengths for rewards: only the rewards themselves tell that 1 is not the best."""
    overrides = [f"run.dir={tmp_path / 'run'}", "variant=ngrpo", "filter=none", "data.validation=null"]
    trainer = opened(config.load(recipe, overrides))
    with pytest.raises(UserError, match=r"variant 'ngrpo': virtual_best\(reward_max=1.0\): a reward is"):
        train(trainer)
    assert trainer.store.checkpoints.directory.exists()


def test_no_reference_without_a_kl_term(recipe, tmp_path):
    trainer = opened(config.load(recipe, [f"run.dir={tmp_path / 'run'}", "variant.kl_coef=0"]))
    assert set(trainer.state.networks) == {"policy"}
    trainer.close()


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_invalid_samples_are_left_out(recipe, tmp_path, capsys):
    """A reward of None counts in no statistic, and a run of nothing else changes no weight and ends with status 2."""
    overrides = [f"run.dir={tmp_path / 'run'}", "train.steps=1", "variant.kl_coef=0"]
    trainer = opened(config.load(recipe, [*overrides, 'rewards=[{name: "tiny_run:nothing"}]']))
    before = np.asarray(trainer.state.networks["policy"].params["embed"][...])
    train(trainer)
    np.testing.assert_array_equal(np.asarray(trainer.state.networks["policy"].params["embed"][...]), before)
    line = numbers(tmp_path / "run")[-2]
    assert line["rewards/invalid"] == 1.0
    assert line["reward"] is None and line["rewards/tiny_run:nothing/mean"] is None  # unknown, not 0
    assert cli.main(["train", str(recipe), *overrides, 'rewards=[{name: "tiny_run:nothing"}]']) == 2
    check_said("nothing was learned in 1 steps: no sample had a valid reward", capsys)


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_a_column_that_some_rows_lack_is_none_for_them(recipe, tmp_path):
    rows = [json.loads(line) for line in (recipe.parent / "sums.jsonl").read_text().splitlines()]
    for row in rows[::2]:
        row["level"] = 2.0
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    overrides = [f"run.dir={tmp_path / 'run'}", f"data.train={tmp_path / 'data.jsonl'}", "data.validation=null",
                 "train.steps=2", "rewards.0.name=tiny_run:level"]  # fmt: skip
    trainer = opened(config.load(recipe, overrides))
    assert train(trainer)
    check_learned(trainer)
    for line in numbers(tmp_path / "run"):
        assert 0 < line["rewards/invalid"] < 1 and line["reward"] == 2.0


def test_held_out_answers_are_checked_by_what_judges_them(recipe, tmp_path):
    """A reward that teaches nothing judges, and reads the gold answers."""
    (tmp_path / "eval.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n{"question": "1+2=", "answer": "$$"}\n')
    overrides = [
        f"run.dir={tmp_path / 'run'}",
        f"data.validation={tmp_path / 'eval.jsonl'}",
        "data.answer=answer",
        "rewards=[{name: answer_format}, {name: math_answer, weight: 0}]",
    ]
    with pytest.raises(UserError, match=r"eval.jsonl:2.*'\$\$' is empty"):
        opened(config.load(recipe, overrides))


@pytest.mark.parametrize("place", ["/dev/null/run", "/proc/run", "{file}"])
def test_a_directory_that_cannot_be_is_refused(recipe, tmp_path, place, capsys):
    (tmp_path / "file").write_text("")
    place = place.format(file=tmp_path / "file")
    assert cli.main(["train", str(recipe), f"run.dir={place}"]) == 2
    assert place in capsys.readouterr().err


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_samples_show_the_answer_that_the_reward_looks_for(recipe, tmp_path, capsys):
    overrides = [f"run.dir={tmp_path / 'run'}", "data.validation=null", "train.steps=1",
                 'rewards=[{name: answer, options: {marker: "="}}, {name: "tiny_run:length"}]']  # fmt: skip
    assert train(opened(config.load(recipe, overrides)))
    _, samples = read_samples(tmp_path / "run")
    for s in samples:
        marked = s["completion"].rpartition("=")
        assert s["answer"] == ((marked[2].strip() or None) if marked[1] else None)
    path = samples_path(tmp_path / "run", 1)
    path.write_bytes(path.read_bytes()[:-20])
    (path.parent / "step_abcdef.jsonl.gz").write_bytes(b"")
    assert cli.main(["show", str(tmp_path / "run")]) == 2
    assert "cannot be read" in capsys.readouterr().err
