"""Networks have roles: two that learn in one program, one that is frozen under another, and all of them on disk."""

import dataclasses
import os
import signal
import subprocess
import sys

import flat_batches
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plain_decoder import BASE, learning_batch, random_decoder
from runs import environment

from grpojax import losses, sharding
from grpojax.device import ROWS, Real
from grpojax.host.errors import UserError
from grpojax.models import Compute, score
from grpojax.models.weight import Weight, zeros
from grpojax.models.weight_table import shardings
from grpojax.programs import policy_update
from grpojax.programs.state import Network, abstract_state, decoder_network, init_state, make_frozen_copy
from grpojax.programs.update import Learner, make_joint_update, make_update, update_program
from grpojax.records.checkpoint import Checkpoints
from grpojax.types import Mean

CONFIG = dataclasses.replace(BASE, vocab_size=56, hidden_size=16, intermediate_size=24, num_layers=2)
# Of the toy network: a value head ``[D]``.
TABLE = {"head": Weight(("embed",), zeros)}
EXTRAS = {"norm": Weight(("hidden",), zeros)}
POLICY, HEAD = optax.sgd(0.5, momentum=0.5), optax.adam(0.1)


def networks(mesh):
    graph, policy = decoder_network(CONFIG, POLICY, mesh)
    head = Network(params={"head": jax.ShapeDtypeStruct((16,), jnp.float32)}, optimizer=HEAD, table=TABLE)
    return graph, {"policy": policy, "head": head}


def value_loss(graph, compute):
    """Squares of a linear head's error on the trunk's hidden states; the trunk is read as it was."""

    def loss(params, frozen, micro):
        hidden = score(graph, frozen["policy"], micro.bare, compute, hidden=True).hidden
        error = (hidden * params["head"]).sum(-1) - micro.arrays["advantages"]
        squares = jnp.where(micro.arrays["weights"] > 0, jnp.square(error), 0.0)
        return (micro.arrays["weights"] * squares).sum(), {
            "error": Mean(total=squares.sum(), count=(squares > 0).sum())
        }

    return loss


def train(sizes, updates, start=None, microbatches=1):
    """``(states, metrics of the last)`` after so many updates of both networks; on a mesh, or on one device."""
    mesh = None
    if sizes is not None:
        mesh = sharding.make_mesh(sharding.MeshConfig(data=sizes[0], fsdp=sizes[1], tensor=sizes[2]))
    compute = Compute(mesh=mesh)
    graph, described = networks(mesh)
    if start is None:
        params = random_decoder(CONFIG)[1]
        head = {"head": jnp.linspace(-1.0, 1.0, 16)}
        if mesh is not None:
            params = jax.device_put(params, shardings(params, mesh))
            head = jax.device_put(head, shardings(head, mesh, table=TABLE))
        start = {
            "policy": init_state(params, POLICY, Real(mesh)),
            "head": init_state(head, HEAD, Real(mesh), table=TABLE),
        }
    learners = {
        "policy": Learner(loss=policy_update.policy_objective(graph, losses.Objective(), compute), optimizer=POLICY),
        "head": Learner(loss=value_loss(graph, compute), optimizer=HEAD),
    }
    step = update_program("update", make_joint_update(learners), compute)
    states, metrics = start, {}
    for i in range(updates):
        packed, _ = flat_batches.pack(learning_batch(i), shards=sharding.shards(mesh), microbatches=microbatches)
        states, metrics = step(states, {}, Real(mesh).put(packed, ROWS))
    return states, metrics, abstract_state(described, mesh)


@pytest.fixture(scope="module")
def alone():
    states, metrics, _ = train(None, 2)
    return jax.tree.map(np.asarray, states), jax.tree.map(float, metrics)


@pytest.mark.in_ci("sizes0-1")
@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "microbatches"), [((2, 2, 2), 1), ((1, 8, 1), 1), (None, 4)])
def test_two_networks_learn_in_one_program_on_any_mesh(alone, sizes, microbatches):
    states, metrics, _ = train(sizes, 2, microbatches=microbatches)
    assert set(states) == {"policy", "head"} and int(states["head"].step) == 2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), states, alone[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), metrics, alone[1])
    assert alone[1]["head/error"].value > 0 and alone[1]["grad_norm"] > 0


@pytest.mark.slow
def test_each_network_reads_the_other_as_it_was():
    """Had the head seen the policy after its update, its gradient would be another one."""
    graph, params = random_decoder(CONFIG)
    head = {"head": jnp.linspace(-1.0, 1.0, 16)}
    packed, _ = flat_batches.pack(learning_batch())
    update = jax.jit(make_update(value_loss(graph, Compute()), HEAD), donate_argnums=0)
    want, _ = update(init_state(head, HEAD, table=TABLE), {"policy": params}, packed)
    got = train(None, 1)[0]["head"]
    np.testing.assert_array_equal(got.params["head"], want.params["head"])
    moved = train(None, 1)[0]["policy"].params
    other, _ = update(init_state({"head": jnp.linspace(-1.0, 1.0, 16)}, HEAD, table=TABLE), {"policy": moved}, packed)
    assert np.abs(np.asarray(other.opt_state[0].mu["head"]) - np.asarray(want.opt_state[0].mu["head"])).max() > 1e-4


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
import test_roles
from grpojax.records.checkpoint import Checkpoints
states, _, _ = test_roles.train((2, 2, 2), 2)
checkpoints = Checkpoints(sys.argv[1])
checkpoints.save(2, states, {"step": 2})
checkpoints.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_killed_run_of_two_networks_goes_on_on_another_mesh(tmp_path):
    here = os.path.dirname(__file__)
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), here], env=environment(8), capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
    there, _, _ = train((2, 2, 2), 2)
    for sizes in (None, (1, 8, 1), (2, 2, 2)):
        mesh = None
        if sizes is not None:
            mesh = sharding.make_mesh(sharding.MeshConfig(data=sizes[0], fsdp=sizes[1], tensor=sizes[2]))
        abstract = abstract_state(networks(mesh)[1], mesh)
        restored, meta = Checkpoints(tmp_path).restore(abstract)
        assert meta == {"step": 2}
        jax.tree.map(np.testing.assert_array_equal, restored, there)
        if mesh is not None:
            jax.tree.map(lambda a, x: a.sharding.is_equivalent_to(x.sharding, x.ndim) or 1 / 0, abstract, restored)
    went_on, _, _ = train((2, 2, 2), 1, start=restored)
    straight, _, _ = train((2, 2, 2), 1, start=there)
    jax.tree.map(np.testing.assert_array_equal, went_on, straight)


@pytest.mark.slow
def test_a_frozen_base_is_left_alone_by_its_extras():
    graph, base = random_decoder(CONFIG)
    before = jax.tree.map(np.array, base)
    policy = policy_update.policy_objective(graph, losses.Objective(), Compute())

    def loss(extras, frozen, micro):
        def joined(path, x):
            return x + extras["norm"] if "'norm'" in jax.tree_util.keystr(path) else x

        return policy(jax.tree_util.tree_map_with_path(joined, frozen["base"]), {}, micro)

    update = jax.jit(make_update(loss, optax.sgd(1.0)), donate_argnums=0)
    state = init_state({"norm": jnp.zeros(16)}, optax.sgd(1.0), table=EXTRAS)
    packed, _ = flat_batches.pack(learning_batch(), microbatches=2)
    state, metrics = update(state, {"base": base}, packed)
    assert np.abs(np.asarray(state.params["norm"])).max() > 1e-4 and float(metrics["grad_norm"]) > 0
    jax.tree.map(np.testing.assert_array_equal, base, before)


@pytest.mark.slow
def test_frozen_roles_are_saved_without_an_optimiser(tmp_path):
    _, params = random_decoder(CONFIG)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"reference": params}, {"step": 1})
    checkpoints.wait()
    assert {p.name for p in (tmp_path / "1").iterdir() if p.is_dir()} >= {"reference_params", "meta"}
    assert not (tmp_path / "1" / "reference_opt_state").exists()
    abstract = abstract_state({"reference": Network(params=decoder_network(CONFIG, None)[1].params)})
    got, _ = checkpoints.restore(abstract)
    jax.tree.map(np.testing.assert_array_equal, got["reference"], params)
    with pytest.raises(UserError, match="no policy_opt_state, policy_params"):
        checkpoints.restore(abstract | abstract_state({"policy": decoder_network(CONFIG, POLICY)[1]}))


@pytest.mark.slow
def test_a_frozen_copy_scores_the_same_to_the_bit_at_half_the_size():
    """Even of weights that 16 bits do not hold; one that is averaged, or of a float32 run, stays as it is."""
    compute = Compute(dtype="bfloat16")
    graph, params = random_decoder(CONFIG)
    params = jax.tree.map(lambda x: x * np.float32(1.1) + np.float32(1e-3), params)
    kept = make_frozen_copy(compute)(params)
    assert sum(x.nbytes for x in jax.tree.leaves(kept)) == sum(x.nbytes for x in jax.tree.leaves(params)) / 2 + 2 * 16
    scores = jax.jit(policy_update.make_score(graph, compute))
    want, got = (scores(x, flat_batches.pack(learning_batch())[0]).logps for x in (params, kept))
    np.testing.assert_array_equal(got, want)
    for copy in (make_frozen_copy(compute, averaged=True)(params), make_frozen_copy(Compute())(params)):
        jax.tree.map(np.testing.assert_array_equal, copy, params)
        assert copy["norm"].unsafe_buffer_pointer() != params["norm"].unsafe_buffer_pointer()
