"""Decoders read from a folder beside transformers' own: the same weights, the same log-probs."""

import jax
import numpy as np
import quick_xla
import tiny_hf
import transformers
from flax import nnx

from grpojax import models
from grpojax.models import Compute
from grpojax.types import Rows

# (prompt length, completion length) of four sequences.
LENGTHS = [(3, 11), (5, 4), (1, 7), (17, 9)]


def sequences(vocab: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab, p + c).tolist() for p, c in LENGTHS]


def plain_rows(tokens: list[list[int]]) -> Rows:
    """One sequence a shard: the first tokens are the prompt, the rest its one completion."""
    prompts, rows, segments = (np.zeros((len(LENGTHS), 1, n), np.int32) for n in (19, 13, 13))
    for i, (p, c) in enumerate(LENGTHS):
        prompts[i, 0, :p], rows[i, 0, :c], segments[i, 0, :c] = tokens[i][:p], tokens[i][p:], 1
    offsets = np.broadcast_to(np.arange(13, dtype=np.int32), rows.shape) * segments
    lengths = np.array([[p] for p, _ in LENGTHS], np.int32)
    return Rows(
        prompts=prompts, prompt_lengths=lengths, tokens=rows, segments=segments, offsets=offsets,
        token_prompt=np.zeros_like(rows),
    )  # fmt: skip


def our_logps(model, *, mesh=None, rows=None) -> list[np.ndarray]:
    """Log-probs of the completions of `sequences`, or of these ``rows``."""
    compute = Compute(mesh=mesh)
    rows = rows or plain_rows(sequences(model.config.vocab_size))
    graph, params = nnx.split(model)
    score = jax.jit(
        lambda params: models.score(graph, params, rows, compute).logps,
        compiler_options=quick_xla.OPTIONS,
    )
    out = score(params)
    return [np.asarray(out)[i, 0, :c] for i, (_, c) in enumerate(LENGTHS)]


def their_logps(made) -> list[np.ndarray]:
    tokens = sequences(made.config.vocab_size)
    return [tiny_hf.logps(made, t)[p - 1 :].numpy() for t, (p, _) in zip(tokens, LENGTHS, strict=True)]


def leaves(model) -> dict[str, jax.Array]:
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(nnx.state(model))}


def assert_same_weights(a, b):
    a, b = leaves(a), leaves(b)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        np.testing.assert_array_equal(np.asarray(a[name]), np.asarray(b[name]), err_msg=name)


def assert_same_torch(a, b):
    from with_torch import torch

    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


def their(folder, **kwargs):
    import with_torch  # noqa: F401

    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **kwargs).eval()
