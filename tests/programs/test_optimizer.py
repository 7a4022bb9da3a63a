import dataclasses
import math

import jax
import numpy as np
import pytest
from plain_decoder import BASE, random_decoder

from grpojax.host.errors import UserError
from grpojax.programs import optimizer as opt
from grpojax.programs.update import make_update
from grpojax.types import TrainState

CONFIG = dataclasses.replace(BASE, vocab_size=56, hidden_size=16, intermediate_size=24, num_layers=2)


def cosine(share):
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share))


@pytest.mark.parametrize(
    ("schedule", "want"),
    [
        ("constant", [0.5, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.7, 0.4]),
        ("cosine", [0.5, 1, 1, 0.775, 0.325]),
    ],
)
def test_schedules(schedule, want):
    final = {} if schedule == "constant" else {"final_fraction": 0.1}
    config = opt.OptimizerConfig(learning_rate=1.0, schedule=schedule, warmup_steps=2, **final)
    rate = opt.learning_rate(config, 5)
    got = [float(rate(n)) for n in range(5)]
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "want"),
    [
        ("constant", [0.5, 1, 1, 1]),
        ("linear", [0.5 * (1 - 0.9 * 0.1), 1 - 0.9 * 0.3, 1 - 0.9 * 0.85, 0.1]),
        ("cosine", [0.5 * cosine(0.1), cosine(0.3), cosine(0.85), 0.1]),
    ],
)
def test_schedules_that_follow_the_share_of_the_run(schedule, want):
    final = {} if schedule == "constant" else {"final_fraction": 0.1}
    config = opt.OptimizerConfig(
        name="sgd", b1=0.0, learning_rate=2.0, grad_clip=0.0, schedule=schedule, warmup_steps=2, **final
    )
    make = jax.jit(
        make_update(lambda w, frozen, x: ((w * x).sum(), {}), opt.make_optimizer(config, None)), donate_argnums=0
    )
    w = jax.numpy.array([0.0])
    state = TrainState(step=jax.numpy.int32(0), params=w, opt_state=opt.make_optimizer(config, None).init(w))
    moved = []
    for share in (0.1, 0.3, 0.85, 1.0):
        before = state.params.item()
        state, _ = make(state, {"progress": np.float32(share)}, jax.numpy.array([[1.0]]))
        moved.append((before - state.params.item()) / 2.0)
    np.testing.assert_allclose(moved, want, rtol=1e-5)


def test_weight_decay_spares_norms_and_biases():
    _, params = random_decoder(CONFIG)
    mask = opt.decayed(params)
    names = {jax.tree_util.keystr(p): m for p, m in jax.tree_util.tree_leaves_with_path(mask)}
    for name, on in names.items():
        assert on == (not any(w in name for w in ("norm", "bias"))), name
    assert sum(names.values()) == 8


@pytest.mark.parametrize("bad", [
    {"learning_rate": 0.0}, {"b1": 1.0}, {"eps": 0.0}, {"grad_clip": -1.0}, {"final_fraction": 0.1},
    {"schedule": "linear", "final_fraction": 2.0}, {"warmup_steps": -1}, {"name": "sgd", "weight_decay": 0.1},
    {"name": "sgd", "b2": 0.9}, {"name": "sgd", "eps": 1e-6},
])  # fmt: skip
def test_bad_optimizers_are_refused(bad):
    with pytest.raises(UserError):
        opt.OptimizerConfig(**bad)
