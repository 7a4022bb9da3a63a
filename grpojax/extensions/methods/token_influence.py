"""How much the tokens of a group influence each other (`grpojax.credit.influence`), computed on the policy's devices.

The program takes one group after the other, and holds the hidden states of that group. A loop takes the group's
vocabulary in blocks. For each block it computes the probabilities of the block's tokens micro-batch by micro-batch, and
does so twice: for the matrix ``M [block, D]``, and for the scores. So it never holds the hidden states of all prompts,
or an array ``[tokens, vocabulary]``.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from grpojax.host.errors import UserError
from grpojax.models import decoder as dec
from grpojax.models.compute import Compute
from grpojax.models.logprobs import UnusedRows, log_normalisers, mask_unused
from grpojax.sharding import TRAIN, shards
from grpojax.types import Array, Rows, Tokens

_BLOCK = 2048  # entries of a group's vocabulary at a time
_HIGHEST = jax.lax.Precision.HIGHEST


class Influence(NamedTuple):
    """The result of `make_influence`: ``scores [M, B, R, S]``, and ``own [prompts, B, G]`` or None."""

    scores: Array
    own: Array | None


def vocabulary(tokens: Tokens, mask: Tokens, size: int) -> np.ndarray:
    """The distinct tokens of each group in rising order, ``[P, W]`` int32, padded with -1; on the host.

    Args:
      tokens: ``[P, G, T]``.
      mask: ``[P, G, T]`` bool, the policy's own tokens.
      size: size of the vocabulary.

    Returns:
      The tokens. W has its largest possible value, so that one program serves all batches. The program takes W in
      blocks, and skips empty blocks.

    Example:
      >>> mask = np.array([[[True, True], [True, False]]])
      >>> vocabulary(np.array([[[7, 3], [3, 9]]]), mask, 16).tolist()
      [[3, 7, -1, -1]]
    """
    entries = [np.unique(t[m]) for t, m in zip(tokens, mask, strict=True)]
    out = np.full((len(entries), vocabulary_width(mask[0].size, size)), -1, np.int32)
    for row, ids in zip(out, entries, strict=True):
        row[: len(ids)] = ids
    return out


def vocabulary_width(tokens: int, size: int) -> int:
    """W of `vocabulary`: room for each of a group's ``tokens`` positions, or for the vocabulary of ``size`` if smaller.

    Example:
      >>> vocabulary_width(2, 16), vocabulary_width(5000, 152064)
      (2, 6144)
    """
    width = min(size, tokens)
    return width if width <= _BLOCK else -(-width // _BLOCK) * _BLOCK


class _Group(NamedTuple):
    """The micro-batches of one group of each shard, ``[splits, B, N, ...]``, where N are the positions of the rows."""

    hidden: Array
    normalisers: Array
    tokens: Array
    mask: Array
    samples: Array
    weights: Array


def make_influence(graph: Any, compute: Compute, *, temperature: float = 1.0) -> Callable[..., Influence]:
    """``(params, rows, samples, weights, entries, *, copies=1, group=0) -> Influence``, without gradient.

    ``scores`` are `grpojax.credit.influence` over the group's tokens. ``own`` is the sum of the influence of a sample's
    tokens on each other, ``|M_i|²``.

    The arguments of the function:

    * ``rows [M, B, ...]`` have one prompt of each shard in a micro-batch. A prompt's micro-batches are adjacent.
    * ``samples [M, B, R, S]`` says which of the shard's samples a token belongs to.
    * ``weights [M, B, R, S]`` has the weight of each token.
    * ``entries [prompts of a shard, B, W]`` comes from `vocabulary`. Tokens outside of it count as never drawn.
    * ``copies`` is the number of adjacent shards that have parts of the same group; static.
    * ``group`` is the number of samples of a group in a shard, for ``own``; 0 leaves ``own`` out; static.

    Args:
      graph: the decoder's graph definition.
      compute: how to run the decoder.
      temperature: the temperature that the samples were drawn at.
    """

    def influence(
        params: Any, rows: Rows, samples: Array, weights: Array, entries: Array, *, copies: int = 1, group: int = 0
    ) -> Influence:
        model = nnx.merge(graph, params)
        head = model.unembed
        if model.config.logits_cap:
            raise UserError(
                f"family {model.config.family!r}: the influence of tokens on each other does not know logits with a "
                "soft cap; choose a variant that does not need it"
            )
        lean = dataclasses.replace(compute, lean=True)

        def states(part: Rows) -> tuple[Array, Array]:
            hidden = dec.token_states(model, part, lean)
            hidden = hidden.reshape(hidden.shape[0], -1, hidden.shape[-1])
            sums = log_normalisers(
                hidden,
                head,
                inverse_temperature=1.0 / temperature,
                chunk=compute.vocab_chunk,
                logits_bytes=compute.logits_bytes,
                unused=model.config.unused_rows,
                mesh=compute.mesh,
            )
            return hidden, sums

        def one(x: tuple[Rows, Array, Array, Array]) -> tuple[Array, Array]:
            parts, samples, weights, entries = x
            hidden, sums = jax.lax.map(states, parts)
            flat = (parts.tokens, parts.segments > 0, samples, weights)
            whole = _Group(hidden, sums, *(y.reshape(*y.shape[:2], -1) for y in flat))
            return _on_shards(whole, entries, head)

        def _on_shards(whole: _Group, entries: Array, head: Array) -> tuple[Array, Array]:
            def shards(whole: _Group, entries: Array, used: Array, head: Array) -> tuple[Array, Array]:
                unused = model.config.unused_rows
                return _stream(
                    whole,
                    entries,
                    used,
                    head,
                    compute=compute,
                    inverse_temperature=1.0 / temperature,
                    unused=unused,
                    copies=copies,
                    group=group,
                )

            block = min(_BLOCK, entries.shape[1])
            used = -(-(entries >= 0).sum(1).max() // block)
            if compute.mesh is None:
                return shards(whole, entries, used, head)
            shard = TRAIN["shard"]
            return jax.shard_map(
                shards,
                mesh=compute.mesh,
                in_specs=(jax.P(None, shard), jax.P(shard), jax.P(), jax.P("tensor", TRAIN["embed"])),
                out_specs=(jax.P(None, shard), jax.P(shard)),
                check_vma=False,
            )(whole, entries, used, head)

        def by_prompt(x: Array) -> Array:
            return x.reshape(entries.shape[0], -1, *x.shape[1:])

        scores, own = jax.lax.map(one, (*jax.tree.map(by_prompt, (rows, samples, weights)), entries))
        return Influence(scores.reshape(weights.shape), own if group else None)

    return influence


def _stream(
    whole: _Group,
    entries: Array,
    used: Array,
    head: Array,
    *,
    compute: Compute,
    inverse_temperature: float,
    unused: UnusedRows,
    copies: int,
    group: int,
) -> tuple[Array, Array]:
    """Scores ``[splits, 1, N]`` and ``|M_i|² [1, G]`` of one shard. ``used`` is the largest number of blocks of the
    vocabulary that any shard uses."""
    if entries.shape[0] != 1:
        raise ValueError(f"{entries.shape[0]} shards on a device: there is one")
    shard = jax.tree.map(lambda x: x[:, 0], whole)
    width, dim = min(_BLOCK, entries.shape[1]), whole.hidden.shape[-1]
    nothing = jnp.zeros((width, dim), jnp.float32)

    def block(carry: tuple[Array, Array], ids: Array) -> tuple[Array, Array]:
        scores, own = carry
        rows = _rows_of(head, ids, whole.hidden.dtype, compute)

        def errors(part: _Group) -> Array:
            """``onehot(token) - probs`` on the block, ``[N, block]``; 0 on padding."""
            logits = jnp.einsum("nd,wd->nw", part.hidden, rows, preferred_element_type=jnp.float32)
            logits = mask_unused(logits * inverse_temperature, unused, ids)
            probs = jnp.exp(logits - part.normalisers[:, None])
            drawn = (part.tokens[:, None] == ids).astype(jnp.float32)
            return jnp.where(part.mask[:, None] & (ids >= 0), drawn - probs, 0.0)

        def total(weigh: Callable[[_Group], Array]) -> Array:
            def add(matrix: Array, part: _Group) -> tuple[Array, None]:
                weighted = errors(part) * weigh(part)[:, None]
                hidden = part.hidden.astype(jnp.float32)
                return matrix + jnp.einsum("nw,nd->wd", weighted, hidden, precision=_HIGHEST), None

            return jax.lax.scan(add, nothing, shard)[0]

        def sample(matrix: Array, i: Array) -> tuple[Array, Array]:
            mine = total(lambda part: jnp.where(part.samples == i, part.weights, 0.0))
            return matrix + mine, jnp.square(mine).sum()

        if group:
            matrix, squares = jax.lax.scan(sample, nothing, jnp.arange(group, dtype=jnp.int32))
            own = own + squares
        else:
            matrix = total(lambda part: part.weights)
        if copies > 1:
            matrix = _over_copies(matrix, compute, copies)

        def score(part: _Group) -> Array:
            pulled = jnp.einsum("nd,wd->nw", part.hidden.astype(jnp.float32), matrix, precision=_HIGHEST)
            return (errors(part) * pulled).sum(-1)

        return scores + jax.lax.map(score, shard), own

    start = jnp.zeros(shard.weights.shape, jnp.float32), jnp.zeros(group, jnp.float32)
    blocks = entries[0].reshape(-1, width)
    scores, own = jax.lax.fori_loop(0, used, lambda i, carry: block(carry, blocks[i]), start)
    return scores[:, None], own[None]


def _rows_of(head: Array, ids: Array, dtype: Any, compute: Compute) -> Array:
    """The rows ``[W, D]`` of ``head [V, D]`` for the entries ``ids``."""
    if compute.mesh is None:
        return jnp.take(head, ids, axis=0, mode="clip").astype(dtype)
    return dec.rows_of_shards(head, ids[None], dtype)[0]


def _over_copies(matrix: Array, compute: Compute, copies: int) -> Array:
    """Sums ``matrix`` over the shards that have parts of the same group."""
    axes = TRAIN["shard"]
    mine = jax.lax.axis_index(axes) // copies

    def add(total: Array, i: Array) -> tuple[Array, None]:
        of_group = jax.lax.psum(jnp.where(mine == i, matrix, 0.0), axes)
        return jnp.where(mine == i, of_group, total), None

    assert compute.mesh is not None
    groups = shards(compute.mesh) // copies
    return jax.lax.scan(add, jnp.zeros_like(matrix), jnp.arange(groups, dtype=jnp.int32))[0]
