"""The policy without its unlikely tokens, a proxy that Lp-Reg compares it with."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from grpojax.device import ROWS, Program, cut
from grpojax.models import decoder as dec
from grpojax.models import flops
from grpojax.models.compute import Compute
from grpojax.programs import blocks, policy_state, policy_update
from grpojax.run.batch import Batch
from grpojax.run.make_programs import ProgramInputs
from grpojax.run.minibatch import Minibatch
from grpojax.run.parts.part import Declared, InRows, Networks, Part
from grpojax.run.work import forward_flops
from grpojax.types import Array, Rows, Tokens

PROGRAM = "proxy"


def ratios(logits: Array, tokens: Array, noise: float) -> Array:
    """``π' / π`` of tokens ``[...]``, where π' is the softmax of logits ``[..., V]`` without its unlikely tokens.

    Those are left out whose probability is under ``noise`` times the likeliest one's. Their own ratio is 0.

    Example:
      >>> logits = jnp.log(jnp.array([[0.8, 0.19, 0.01]] * 3))
      >>> [round(float(x), 4) for x in ratios(logits, jnp.arange(3), 0.02)]
      [1.0101, 1.0101, 0.0]
    """
    shares = jnp.exp(logits - logits.max(-1, keepdims=True))  # of the likeliest one's
    kept = jnp.where(shares >= noise, shares, 0.0).sum(-1)
    own = jnp.take_along_axis(shares, tokens[..., None], -1)[..., 0]
    return jnp.where(own >= noise, shares.sum(-1) / kept, 0.0)


def make_ratios(graph: Any, compute: Compute, *, temperature: float, noise: float) -> Callable[[Any, Rows], Array]:
    """``(params, rows [M, ...]) -> [M, B, R, S]``, the `ratios` of all tokens of samples.

    Args:
      graph, compute, temperature: as in `grpojax.programs.policy_update.make_score`.
      noise: as in `ratios`.
    """

    def program(params: Any, rows: Rows) -> Array:
        model = nnx.merge(graph, params)

        def of_block(part: Rows) -> Array:
            states = dec.token_states(model, part, compute)
            b, r, s, d = states.shape
            # As many positions at a time as have logits of `compute.logits_bytes`.
            at_once = max(1, min(r * s, compute.logits_bytes // (4 * b * model.config.vocab_size)))
            pieces = -(-r * s // at_once)
            pad = pieces * at_once - r * s
            states = jnp.pad(states.reshape(b, r * s, d), ((0, 0), (0, pad), (0, 0)))
            tokens = jnp.pad(part.tokens.reshape(b, r * s), ((0, 0), (0, pad)))

            def piece(x: tuple[Array, Array]) -> Array:
                return ratios(dec.logits(model, x[0], compute) / temperature, x[1], noise)

            split = [jnp.moveaxis(x.reshape(b, pieces, at_once, *x.shape[2:]), 1, 0) for x in (states, tokens)]
            found = jnp.moveaxis(jax.lax.map(piece, tuple(split)), 0, 1)
            return found.reshape(b, -1)[:, : r * s].reshape(b, r, s)

        return blocks.each(of_block, rows, functools.partial(policy_update.reader(graph, compute), params, None))

    return program


class Proxy(Part):
    """The policy before the step's updates, without its unlikely tokens. It scores each sample once."""

    options = ("noise",)
    signals = {"proxy_ratios": Declared("P G T", "how much likelier a token is without the unlikely ones; 0 for those")}
    scorings = 1

    def make(self, inputs: ProgramInputs) -> Mapping[str, Program]:
        """``(params, rows) -> ratios``."""
        how = {"temperature": inputs.temperature, "noise": self.variant.options["noise"]}
        made = make_ratios(inputs.graph, inputs.compute, **how)
        work = functools.partial(flops.forward_flops, inputs.model)
        return {PROGRAM: Program(PROGRAM, made, out=cut(inputs.compute.mesh, ROWS), flops=work)}

    def before(self, networks: Networks, minis: Sequence[Minibatch]) -> tuple[dict[str, Tokens], InRows]:
        rows = self.on_rows(self.programs.parts[PROGRAM], minis, policy_state.weights(networks))
        return {"proxy_ratios": self.whole(minis, rows)}, {}

    def flops(self, batch: Batch) -> dict[str, float]:
        return {"score": forward_flops(self.shape.config, batch)}
