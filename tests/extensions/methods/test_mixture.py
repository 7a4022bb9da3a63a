"""The routing of a mixture of experts beside other methods."""

import jax
import pytest
from runs import numbers
from tiny_run import make_mixture

from grpojax.cli import main as cli


@pytest.fixture(scope="module")
def folder(recipe, tmp_path_factory):
    return make_mixture(recipe.parent, tmp_path_factory.mktemp("mixture") / "model")


@pytest.mark.parametrize("other", ["variant=ppo", "variant=xrpo", "rollout.overlap=0.5"])
@pytest.mark.slow
def test_what_reads_samples_otherwise_does_not_go_with_a_replay(recipe, folder, tmp_path, capsys, other):
    given = [f"run.dir={tmp_path}", f"model.path={folder}", "rollout.router_replay=true", other]
    assert cli.main(["train", str(recipe), *given]) == 2
    assert "router_replay=true" in capsys.readouterr().err


@pytest.mark.slow
def test_a_rollout_drawn_ahead_of_its_step_keeps_what_its_sampler_chose(recipe, folder, tmp_path):
    given = [f"model.path={folder}", "train.steps=2", "train.eval_every=0", "rollout.router_replay=true"]
    given += ["mesh.expert=4", f"mesh.fsdp={jax.device_count() // 4}", "train.minibatches=2", "rollout.ahead=1"]
    assert cli.main(["train", str(recipe), f"run.dir={tmp_path / 'run'}", *given]) == 0
    first, _ = [line["sampling/logp_difference_max"] for line in numbers(tmp_path / "run") if "reward" in line]
    assert first < 1e-4
