"""The policy in the state of a run: one role if every weight learns, two roles if adapters learn.

``"policy"`` is what learns: all weights, or the adapters' factors. With factors there is also ``"base"``, the frozen
weights. Checkpoints do not contain the base.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import optax

from grpojax.models.weight import WeightTable
from grpojax.models.weight_table import DECODER, leaf_name
from grpojax.programs.adapter import Adapter, joined
from grpojax.programs.policy import Policy, PolicyShape
from grpojax.programs.state import Network, decoder_network, init_state
from grpojax.programs.update import Learner, Metrics
from grpojax.types import Rows, Scalar

POLICY, BASE = "policy", "base"


def table_of(adapter: Adapter | None) -> WeightTable:
    """The table of the weights that learn."""
    return DECODER if adapter is None else adapter.table


def networks(shape: PolicyShape, optimizer: optax.GradientTransformation | None) -> dict[str, Network]:
    """The policy's networks by role. Checkpoints save `POLICY` only.

    Raises:
      UserError: a weight does not divide over the mesh, or the model cannot have factors.
    """
    config, adapter = shape.config, shape.adapter
    _, whole = decoder_network(config, optimizer, shape.mesh)
    if adapter is None:
        return {POLICY: whole}

    def frozen(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype if DECODER[leaf_name(path)].exact else shape.compute.dtype)

    kept = jax.tree_util.tree_map_with_path(frozen, whole.params)
    return {
        POLICY: Network(params=adapter.abstract(config), optimizer=optimizer, table=table_of(adapter)),
        BASE: Network(params=jax.eval_shape(adapter.on_base, kept)),
    }


def start(
    policy: Policy, params: Any, optimizer: optax.GradientTransformation, *, seed: int, restored: Any = None
) -> dict[str, Any]:
    """The policy's state by role.

    Args:
      policy: the policy.
      params: the weights that its `grpojax.programs.policy.Policy.load` read; the state takes them over.
      optimizer: the policy's optimiser.
      seed: seed of random factors.
      restored: the `TrainState` of a checkpoint; None in a new run.
    """
    device = policy.device
    if policy.adapter is None:
        return {POLICY: init_state(params, optimizer, device) if restored is None else restored}
    if restored is None:
        factors = policy.adapter.first(policy.config, params, seed, device)
        restored = init_state(factors, optimizer, device, policy.adapter.table)
    return {POLICY: restored, BASE: params}


def at_start(policy: Policy, seed: int = 0) -> Any:
    """The weights of a loaded policy in the form that its programs take, before any update."""
    if policy.adapter is None:
        return policy.params
    base = policy.params
    return joined(base, policy.adapter.first(policy.config, base, seed, policy.device))


def weights(state: Mapping[str, Any]) -> Any:
    """The policy's weights in a run's state, in the form that its programs take. Copies nothing."""
    learned = state[POLICY].params
    return joined(state[BASE], learned) if BASE in state else learned


def frozen(state: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of the state that the policy's loss reads and no update changes, by role."""
    return {BASE: state[BASE]} if BASE in state else {}


def on_base(learner: Learner) -> Learner:
    """How factors learn with the loss of a whole policy. The loss finds their base in ``frozen``."""

    def loss(factors: Any, frozen: Any, micro: Any) -> tuple[Scalar, Metrics]:
        return learner.loss(joined(frozen[BASE], factors), frozen, micro)

    def read(factors: Any, frozen: Any, rows: Rows) -> Any:
        assert learner.read is not None
        return learner.read(joined(frozen[BASE], factors), frozen, rows)

    reads = None if learner.read is None else read
    return dataclasses.replace(learner, loss=loss, read=reads)
