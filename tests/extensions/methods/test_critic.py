"""Runs with a critic: it learns beside the policy, alone at first if asked, and comes back as it was."""

import json
import signal

import jax
import numpy as np
import pytest
import runs
from runs import numbers, start, train_apart

from grpojax.cli import main as cli
from grpojax.extensions.methods import critic_model as models
from grpojax.extensions.methods.critic import LearnedCritic
from grpojax.host.errors import UserError
from grpojax.records.samples import read_samples
from grpojax.run import learn
from grpojax.run import recipe as config
from grpojax.train import train

SHORT = ("train.steps=2", "data.validation=null", "rewards.0.name=tiny_run:parity", "rollout.max_tokens=4")
FAST = "critic.optimizer.learning_rate=0.01"


def trainer(recipe, directory, *overrides, devices=1):
    """All samples of one length: an update compiles once."""
    loaded = config.load(recipe, [f"run.dir={directory}", *SHORT, FAST, *overrides])
    return runs.opened(loaded, devices=devices, eos_ids=())


def weights(state):
    return jax.tree.map(np.asarray, state)


def moved(a, b):
    pairs = zip(jax.tree.leaves(weights(a)), jax.tree.leaves(weights(b)), strict=True)
    return max(float(np.abs(x - y).max()) for x, y in pairs)


@pytest.fixture(scope="module")
def warmed(recipe, tmp_path_factory):
    """A PPO run of one step of the critic alone, and one of both; with the states after each."""
    directory = tmp_path_factory.mktemp("runs") / "ppo"
    run = trainer(recipe, directory, "variant=ppo", "critic.warmup_steps=1")
    states = [weights(run.state.networks)]
    assert train(run, lambda updates: states.append(weights(run.state.networks)))
    return directory, states


@pytest.mark.slow
def test_in_the_warm_up_the_policy_is_left_alone(warmed):
    directory, (start, first, second) = warmed
    jax.tree.map(np.testing.assert_array_equal, first["policy"], start["policy"])
    assert moved(start["critic"].params, first["critic"].params) > 1e-3
    assert moved(first["policy"].params, second["policy"].params) > 1e-3
    assert moved(first["critic"].params, second["critic"].params) > 1e-4
    assert (int(second["policy"].step), int(second["critic"].step)) == (1, 2)
    alone, both = (line for line in numbers(directory) if "reward" in line)
    assert alone.keys() >= {"critic/loss", "critic/grad_norm", "critic/explained_variance"} <= both.keys()
    assert "grad_norm" not in alone and both["grad_norm"] > 0 and not any("skipped" in k and "/" in k for k in both)
    assert alone["critic/explained_variance"] == 0.0 < alone["critic/grad_norm"]  # all values are 0


@pytest.mark.slow
def test_it_is_saved_exported_and_shown(warmed, recipe, tmp_path, capsys):
    directory, states = warmed
    items = {p.name for p in (directory / "checkpoints" / "2").iterdir()}
    assert items >= {"policy_params", "critic_params", "critic_opt_state"} and "critic_trunk_params" not in items
    assert cli.main(["export", str(directory), "--to", str(tmp_path / "policy")]) == 0
    folder = tmp_path / "policy" / "critic"
    again = trainer(recipe, tmp_path / "again", "variant=ppo", f"critic.path={folder}")
    jax.tree.map(
        np.testing.assert_array_equal, weights(again.state.networks["critic"].params), states[2]["critic"].params
    )
    again.close()
    (critic,) = (part for part in again.parts if isinstance(part, LearnedCritic))
    assert models.read_head(folder, critic.model.config).any()

    _, samples = read_samples(directory)
    capsys.readouterr()
    assert cli.main(["show", str(directory), "--critic", "-n", "1"]) == 0
    shown = capsys.readouterr().out.split("critic:\n")[1].splitlines()[:4]
    best = next(s for s in samples if [float(line.split()[0]) for line in shown] == np.round(s["critic"], 4).tolist())
    assert len(best["ids"]) == 4 and all(line.split("  ")[-1].strip("'") for line in shown)
    assert cli.main(["show", str(directory)]) == 0 and "critic:" not in capsys.readouterr().out


def test_show_says_where_there_was_no_critic(tmp_path, capsys):
    from grpojax.records import metrics

    row = {"uid": 1, "sample": 0, "reward": 1.0, "prompt": "p", "completion": "c", "rewards": {}, "advantage": 0.0}
    writer = metrics.Metrics(tmp_path, 0)
    writer.write_samples(1, [row | {"length": 1, "stop": "eos", "gold": "1", "answer": None}])
    writer.close()
    assert cli.main(["show", str(tmp_path), "--critic"]) == 2
    assert "a run without a critic" in capsys.readouterr().err


@pytest.mark.parametrize(("overrides", "message"), [
    (["variant=grpo", "critic.warmup_steps=1"], "variant 'grpo' has no critic"),
    (["variant=ppo", "critic.warmup_steps=2"], "the policy would never learn"),
    (["variant=ppo", "critic.seed=3"], "seed=3: seeds random weights"),
    (["variant=ppo", "critic={path: x, layers: 1}"], "leave one out"),
    (["variant=ppo", "critic={layers: 1, trunk: frozen}"], "random weights must learn"),
    (["variant=ppo", "critic.trunk=melted"], "critic.trunk"),
    (["variant=ppo", "critic.layers=0"], "layers=0"),
    (["variant={name: token_critic, l2: -1}"], "l2=-1"),
    (["variant={name: ppo, value_clip: 0}"], "value_clip=0"),
])  # fmt: skip
def test_settings_without_meaning_are_refused(recipe, tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        config.load(recipe, [f"run.dir={tmp_path}", *SHORT, *overrides])


def test_a_critic_spelt_out_is_the_same_run(recipe):
    plain = config.load(recipe, [*SHORT, "variant=ppo"])
    spelt = config.load(recipe, [*SHORT, "variant=ppo", "critic={trunk: trained, optimizer: {learning_rate: 1.0e-5}}"])
    assert plain.resolved() == spelt.resolved() and plain.resolved()["critic"]["optimizer"]["learning_rate"] == 1e-5
    assert plain.may_differ("train.steps")
    fading = config.load(recipe, [*SHORT, "variant=ppo", "critic.optimizer.schedule=linear"])
    assert not fading.may_differ("train.steps")


@pytest.mark.in_ci("overrides0")
@pytest.mark.slow
@pytest.mark.parametrize("overrides", [["variant=token_critic"], ["variant=ppo", "critic.trunk=frozen"]])
def test_minibatches_iterations_and_microbatches(recipe, tmp_path, overrides):
    # Adam would make as much of a rounding error as of a gradient, and a second step would draw other samples by it.
    several = ["train.minibatches=2", "train.ppo_epochs=2", "train.steps=1", "critic.optimizer.name=sgd"]
    run = trainer(recipe, tmp_path / "run", *overrides, *several, "train.microbatches=2")
    before = weights(run.state.networks)
    assert train(run)
    after = weights(run.state.networks)
    assert int(after["critic"].step) == int(after["policy"].step) == 4
    assert moved(before["critic"].params, after["critic"].params) > 1e-3
    assert ("critic_trunk" in before) == ("critic.trunk=frozen" in overrides)
    if "critic_trunk" in before:
        jax.tree.map(np.testing.assert_array_equal, before["critic_trunk"], after["critic_trunk"])
        jax.tree.map(np.testing.assert_array_equal, before["critic_trunk"], before["policy"].params)
        assert moved(before["policy"].params, after["policy"].params) > 1e-3
    whole = trainer(recipe, tmp_path / "whole", *overrides, *several)
    assert train(whole)
    assert moved(whole.state.networks["critic"].params, after["critic"].params) < 1e-5


@pytest.mark.slow
def test_the_bias_acts_on_the_next_advantages(recipe, tmp_path, monkeypatch):
    run = trainer(recipe, tmp_path / "run", "variant=token_critic", "critic.optimizer.learning_rate=0.1")
    told, plain = [], learn.weigh

    def weigh(setup, networks, minis, batch, signals):
        minis, batch, measured = plain(setup, networks, minis, batch, signals)
        targets = [np.asarray(m.rows.arrays["critic_targets"]) for m in minis]
        told.append(((batch.advantages, measured), signals["token_bias"], targets))
        return minis, batch, measured

    monkeypatch.setattr(learn, "weigh", weigh)
    assert train(run)
    ((first, _), none, _), ((second, metrics), bias, _) = told
    assert not none.any() and np.abs(bias).max() > 0.01
    alone = second - bias
    assert np.abs(alone - alone[..., :1]).max() < 1e-5  # the sample's own, the same for all of its tokens
    assert metrics["critic/bias_abs"] == pytest.approx(np.abs(bias).mean(), rel=1e-5)
    for _, _, targets in told[:1]:
        np.testing.assert_allclose(np.sort(targets[0].reshape(-1)), np.sort(first.reshape(-1)), atol=1e-6)


@pytest.mark.exhaustive("extensions/methods/test_critic.py::test_it_goes_on_on_another_mesh")
def test_kill_nine_changes_nothing(recipe, tmp_path):
    overrides = [*SHORT, FAST, "variant={name: token_critic, bound: 1.0}", "critic.trunk=frozen",
                 "critic.warmup_steps=2", "train.steps=6", "train.minibatches=2",
                 "train.checkpoint_every=1"]  # fmt: skip
    train_apart(recipe, tmp_path / "unbroken", *overrides)
    process = start(recipe, tmp_path / "killed", *overrides)
    assert any("step 3/6" in line for line in process.stdout)
    process.kill()
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    train_apart(recipe, tmp_path / "killed", *overrides)
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "unbroken")


@pytest.mark.slow
def test_it_goes_on_on_another_mesh(recipe, tmp_path):
    overrides = ["variant=token_critic", "critic.trunk=frozen"]
    meshes = [("mesh.data=1", 1), ("mesh.data=2", 8)]
    for mesh, devices in meshes:
        run = trainer(recipe, tmp_path / mesh, *overrides, mesh, devices=devices)
        assert train(run)
    for mesh, devices in reversed(meshes):  # each on what the other ran on
        directory = tmp_path / next(m for m, _ in meshes if m != mesh)
        run = trainer(recipe, directory, *overrides, mesh, "train.steps=3", devices=devices)
        assert run.state.step == 2 and train(run)
    one, other = (
        [json.loads(line) for line in (tmp_path / m / "metrics.jsonl").read_text().splitlines()] for m, _ in meshes
    )
    for name in ("critic/loss", "critic/grad_norm", "grad_norm"):
        assert [line[name] for line in one] == pytest.approx([line[name] for line in other], rel=2e-3, abs=1e-4)
