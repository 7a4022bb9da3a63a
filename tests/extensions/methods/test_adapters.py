"""Adapters under methods that need more than the core."""

import jax
import numpy as np
import pytest
from adapter_runs import check_both, hf_params, trainer
from safetensors.numpy import load_file

from grpojax.cli import main as cli
from grpojax.programs.adapter import joined
from grpojax.programs.state import merged
from grpojax.train import train

# Two programs that are late, and critics that score.
VARIANTS = {
    "nthr": ["variant=nthr"],
    "gt_likelihood": ["variant=gt_likelihood"],
    "ppo": ["variant=ppo", "critic.layers=1"],
    "ppo on a frozen trunk": ["variant=ppo", "critic.trunk=frozen", "critic.warmup_steps=1"],
    "ahead": ["rollout.ahead=1", "model.dtype=bfloat16"],
}


@pytest.mark.in_ci("nthr", "ppo")
@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_what_reads_the_policys_weights_reads_both(recipe, tmp_path, name):
    check_both(recipe, tmp_path, *VARIANTS[name], most=0.3 if name == "ahead" else 1e-4)


@pytest.mark.slow
def test_a_critic_stands_on_the_policys_base(recipe, tmp_path):
    short = ["train.steps=2", "data.validation=null", "rewards.0.name=tiny_run:parity", "rollout.max_tokens=4"]
    ppo = [*short, "variant=ppo", "critic.optimizer.learning_rate=0.02"]
    run = trainer(recipe, tmp_path / "run", *ppo, eos_ids=())
    start = jax.tree.map(np.asarray, run.state.networks["critic"].params)
    assert train(run)
    state = run.state.networks
    assert set(state) == {"policy", "critic", "base"} and set(run.saved_networks()) == {"policy", "critic"}
    moved = {name: np.abs(x - start[name]).max() for name, x in state["critic"].params.items()}
    assert moved["token_head"] > 1e-3 and moved["q_b"] > 1e-4 and "embed" not in moved
    assert any(
        np.abs(x - state["policy"].params[n]).max() > 1e-4 for n, x in state["critic"].params.items() if "_b" in n
    )
    again = trainer(recipe, tmp_path / "run", *ppo, "train.steps=3", eos_ids=())
    jax.tree.map(np.testing.assert_array_equal, again.state.networks, state)
    again.close()
    assert cli.main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 0
    trunk = hf_params(tmp_path / "out" / "critic")
    base = joined(state["base"], state["critic"].params)
    want = merged(base, "float32")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), trunk, want)
    head = load_file(tmp_path / "out" / "critic" / "token_head.safetensors")["token_head.weight"]
    np.testing.assert_array_equal(head, state["critic"].params["token_head"])
