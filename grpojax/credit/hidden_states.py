"""Which tokens of wrong samples make right ones less likely, from hidden states and prediction errors (NTHR)."""

from typing import Literal

import jax
import jax.numpy as jnp

from grpojax import masked, shapes
from grpojax.advantages.baselines import signs
from grpojax.advantages.signals import Signals, Transform, described, need, per_token
from grpojax.types import Array, Hidden, PerPrompt, Samples, Tokens


def group_vocabulary(tokens: Tokens, mask: Tokens, size: int) -> tuple[Array, Tokens, PerPrompt]:
    """The distinct tokens of each group: `nthr` is restricted to this vocabulary.

    From NTHR (arXiv 2505.18830). `nthr` and `nthr_scores` take probabilities of these entries, which must be 0 where
    ``entries`` is -1. From all probabilities ``p [P, G, T, V]``::

        rows = entries[:, None, None]  # [P, 1, 1, W]
        probs = jnp.where(rows >= 0, jnp.take_along_axis(p, jnp.maximum(rows, 0), -1), 0.0)  # [P, G, T, W]

    Args:
      tokens: ``[P, G, T]`` int32.
      mask: ``[P, G, T]`` bool.
      size: W, the most distinct tokens; ``G T`` is always enough.

    Returns:
      ``(entries [P, W] int32, columns [P, G, T] int32, counts [P] int32)``: the vocabulary ids in rising order, then
      -1; the place of each token among them, -1 for padding and for tokens beyond ``size``; and the number of distinct
      tokens. If it is over ``size``, the scores leave tokens out.

    Example:
      >>> tokens = jnp.array([[[7, 3], [3, 9]]])
      >>> entries, columns, counts = group_vocabulary(tokens, jnp.ones((1, 2, 2), bool), 4)
      >>> entries.tolist(), columns.tolist(), counts.tolist()
      ([[3, 7, 9, -1]], [[[1, 0], [0, 2]]], [3])
    """
    shapes.check("group_vocabulary", "P G T", tokens=tokens, mask=mask)
    tokens = jnp.asarray(tokens)
    last = jnp.iinfo(jnp.int32).max
    flat = jnp.where(mask, tokens, last).astype(jnp.int32).reshape(tokens.shape[0], -1)
    ranked = jnp.sort(flat, -1)
    first = jnp.concatenate([jnp.ones_like(ranked[:, :1], bool), ranked[:, 1:] != ranked[:, :-1]], -1)
    first &= ranked != last
    entries = jnp.sort(jnp.where(first, ranked, last), -1)[:, :size]
    entries = jnp.pad(entries, ((0, 0), (0, size - entries.shape[1])), constant_values=last)
    columns = jax.vmap(jnp.searchsorted)(entries, flat)
    columns = jnp.minimum(columns, size - 1)
    found = (jnp.take_along_axis(entries, columns, -1) == flat) & (flat != last)
    return (
        jnp.where(entries == last, -1, entries),
        jnp.where(found, columns, -1).astype(jnp.int32).reshape(tokens.shape),
        first.sum(-1),
    )


def _errors_matrix(probs: Array, hidden: Array, columns: Array, weights: Array) -> Array:
    """``M [W, D] = Σ_n weights_n g_n h_nᵀ`` with ``g = onehot(column) - probs``, without ever storing g."""
    weighted = weights[:, None] * hidden
    drawn = jnp.zeros((probs.shape[1], hidden.shape[1]), jnp.float32)
    drawn = drawn.at[columns].add(jnp.where((columns >= 0)[:, None], weighted, 0.0))
    return drawn - probs.T @ weighted


def _errors_scores(probs: Array, hidden: Array, columns: Array, matrix: Array) -> Array:
    """``gᵀ M h`` of every row: ``[N]``."""
    drawn = jnp.where((columns >= 0)[:, None], matrix[columns], 0.0)
    return ((drawn - probs @ matrix) * hidden).sum(-1)


def influence(probs: Array, hidden: Hidden, columns: Tokens, mask: Tokens, weights: Tokens) -> Tokens:
    """``s_n = Σ_m weights_m <g_n, g_m> <h_n, h_m>`` over a group's tokens, for each of them: ``[P, G, T]``.

    The prediction error of token y is ``g = onehot(y) - π`` over the restricted vocabulary. The double sum factors
    exactly: ``s_n = g_nᵀ M h_n`` with ``M = Σ_m weights_m g_m h_mᵀ [W, D]``, so that it costs two matrix products and
    builds nothing pairwise. Prompts are computed one after the other, so that only one prompt's temporaries are in
    memory.

    Measured on 2 CPU cores for P=8, G=8, T=512, D=896, W=2048 in float32: `nthr_scores` takes 1.3 s; its matrix
    products alone take 1.4 s, which is the same up to noise. Its peak memory is 1.22 times the 368 MiB of inputs and
    outputs.

    The double sum is from NTHR (arXiv 2505.18830); the factorisation is this package's.

    Args:
      probs: ``[P, G, T, W]`` probabilities under the policy that drew the tokens, not renormalised; 0 where an entry
        of `group_vocabulary` is -1.
      hidden: ``[P, G, T, D]`` hidden states that the output head reads.
      columns: ``[P, G, T]`` int32, the drawn token's entry of ``probs``, -1 for none.
      mask: ``[P, G, T]`` bool.
      weights: ``[P, G, T]`` float32.

    Example:
      >>> half, ones = jnp.full((1, 2, 1, 2), 0.5), jnp.ones((1, 2, 1))
      >>> columns, weights = jnp.array([[[0], [1]]]), jnp.array([[[1.0], [0.0]]])
      >>> influence(half, ones[..., None], columns, ones > 0, weights).tolist()
      [[[0.5], [-0.5]]]
    """

    _check("influence", probs, hidden, columns, mask, weights=weights)

    def one(group: tuple[Array, ...]) -> Array:
        probs, hidden, columns, mask, weights = group
        probs = jnp.where(mask[:, None], probs, 0.0).astype(jnp.float32)
        hidden = jnp.where(mask[:, None], hidden, 0.0).astype(jnp.float32)
        matrix = _errors_matrix(probs, hidden, columns, jnp.where(mask, weights, 0.0))
        return _errors_scores(probs, hidden, columns, matrix)

    arrays = (jnp.asarray(x) for x in (probs, hidden, columns, mask, weights))
    scores = jax.lax.map(one, tuple(x.reshape(x.shape[0], -1, *x.shape[3:]) for x in arrays))
    return scores.reshape(shapes.shape_of(columns))


def _check(function: str, probs: Array, hidden: Hidden, columns: Tokens, mask: Tokens, **more: Tokens) -> shapes.Sizes:
    sizes = shapes.check(function, "P G T W", probs=probs)
    sizes = shapes.check(function, "P G T D", sizes, hidden=hidden)
    return shapes.check(function, "P G T", sizes, columns=columns, mask=mask, **more)


def nthr_scores(
    probs: Array, hidden: Hidden, columns: Tokens, mask: Tokens, sign: Samples, *, self_term: bool = True
) -> tuple[Tokens, Samples]:
    """Negative token hidden rewards and the positive samples' own mean scores (arXiv 2505.18830, eq. 7).

    Scores are ``s = influence(...)`` with weight 1 on the tokens of right samples and 0 on all others.

    Args:
      probs, hidden, columns, mask: as in `influence`.
      sign: ``[P, G]``, over 0 for right samples and under 0 for wrong ones.
      self_term: whether a right sample counts itself in its mean score. The formula and third-party code do. The text
        says *other* right samples, which gives 0 if there is only one.

    Returns:
      ``(scores [P, G, T], means [P, G])``: how much a penalty on a token works against the right samples (``s``, also
      for tokens of right samples), and the mean of ``s`` over each sample's tokens.

    Example:
      >>> half, hidden = jnp.full((1, 3, 1, 2), 0.5), jnp.array([[[[1.0]], [[1.0]], [[2.0]]]])
      >>> columns, sign = jnp.zeros((1, 3, 1), jnp.int32), jnp.array([[1.0, 1.0, -1.0]])
      >>> scores, means = nthr_scores(half, hidden, columns, columns == 0, sign)
      >>> scores[..., 0].tolist(), means.tolist()
      ([[1.0, 1.0, 2.0]], [[1.0, 1.0, 2.0]])
    """
    shapes.check("nthr_scores", "P G", _check("nthr_scores", probs, hidden, columns, mask), sign=sign)
    right = jnp.broadcast_to((sign > 0)[..., None], mask.shape).astype(jnp.float32)
    scores = influence(probs, hidden, columns, mask, right)
    means = masked.mean(scores, mask, -1)
    if not self_term:
        # Each sample a group of its own.
        own = influence(*(x.reshape(-1, 1, *x.shape[2:]) for x in (probs, hidden, columns, mask, right)))
        means = means - masked.mean(own.reshape(mask.shape), mask, -1)
    return scores, means


@described
def nthr(
    *,
    beta: float = 1.0,
    eta: float | None = None,
    self_term: bool = True,
    select: Literal["influence", "random", "all"] = "influence",
) -> Transform:
    """Softens penalties that would make right samples less likely, on ``[P, G, T]`` (NTHR, arXiv 2505.18830).

    In a group with right and wrong samples, the advantages under 0 of wrong samples' tokens whose score `nthr_scores`
    is over ``beta min_i s̄_i`` (i over the right samples) are multiplied by ``eta``. Nothing else changes.

    Reads ``signals.influence`` and ``influence_means``, the results of `nthr_scores`, if a trainer has computed them.
    Otherwise it needs ``signals.hidden``, ``probs`` and ``columns`` from the forward of the policy that drew the tokens
    (`group_vocabulary`). The paper's rewards are 0 and 1. Here ``signals.outcome`` says which samples are right
    (`outcome_signs`), not the reward, which may have a bonus for the format. A wrong sample whose bonus lifts its
    advantage over 0 has no penalty and does not change.

    Args:
      beta: 1 in most of the paper's runs, 0 in one.
      eta: the factor; None for the paper's ``2 |1/2 - p|``, p the share of right samples.
      self_term: as in `nthr_scores`.
      select: the paper's ablations. "random" chooses the same number of tokens at random from a group's wrong samples
        (``signals.draws``). "all" takes every token of wrong samples; with eta 0 it is the paper's "Pos Only".

    Example:
      >>> signals = Signals(
      ...     probs=jnp.full((1, 3, 1, 2), 0.5), hidden=jnp.array([[[[1.0]], [[1.0]], [[2.0]]]]),
      ...     columns=jnp.zeros((1, 3, 1), jnp.int32), mask=jnp.ones((1, 3, 1), bool),
      ...     rewards=jnp.array([[1.0, 1.0, 0.0]]), valid=jnp.ones((1, 3), bool),
      ... )
      >>> [round(float(a), 4) for a in nthr()(jnp.array([[[0.7071], [0.7071], [-1.4142]]]), signals)[0, :, 0]]
      [0.7071, 0.7071, -0.4714]
    """

    def transform(values: Tokens, signals: Signals | None = None) -> Tokens:
        values, signals = per_token(values, signals, "nthr")
        valid = need(signals, "valid", "nthr")
        mask = jnp.asarray(need(signals, "mask", "nthr")) & valid[..., None]
        sign = outcome_signs(signals)
        if signals.influence is not None:
            scores, means = signals.influence, need(signals, "influence_means", "nthr")
        else:
            probs, hidden, columns = (need(signals, name, "nthr") for name in ("probs", "hidden", "columns"))
            scores, means = nthr_scores(probs, hidden, columns, mask, sign, self_term=self_term)
        right = (sign > 0) & mask.any(-1)
        lowest = jnp.where(right, means, jnp.inf).min(1, keepdims=True)
        threshold = jnp.where(right.any(1, keepdims=True), beta * lowest, jnp.inf)
        share = masked.mean((sign > 0).astype(jnp.float32), _known(signals), 1)
        factor = 2.0 * jnp.abs(0.5 - share) if eta is None else jnp.full_like(share, eta)
        wrong = (sign < 0)[..., None] & mask & right.any(1)[:, None, None] & (values < 0)
        selected = wrong & (scores > threshold[..., None])
        if select == "random":
            selected = _as_many(selected, wrong, need(signals, "draws", "nthr(select='random')"))
        elif select == "all":
            selected = wrong
        return jnp.where(mask, values * jnp.where(selected, factor[:, None, None], 1.0), 0.0)

    return transform


def _known(signals: Signals) -> Samples:
    """``[P, G]`` bool: valid samples whose outcome is known."""
    valid = need(signals, "valid", "nthr")
    return valid if signals.outcome is None else valid & jnp.isfinite(jnp.asarray(signals.outcome, jnp.float32))


def outcome_signs(signals: Signals) -> Samples:
    """``[P, G]`` float32: 1 for right samples, -1 for wrong ones, 0 where a group has only one kind (`nthr`).

    The sign of ``outcome - mean outcome`` over the samples whose outcome is known, 0 on all others. An outcome of 0
    and 1 gives exactly right and wrong; a graded one is compared with its group's mean. Without ``signals.outcome``
    the rewards are the outcome.

    Example:
      >>> signals = Signals(
      ...     rewards=jnp.array([[1.1, 1.0, 0.1], [0.1, 0.0, 0.0]]), valid=jnp.ones((2, 3), bool),
      ...     outcome=jnp.array([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))
      >>> outcome_signs(signals).tolist()
      [[1.0, 1.0, -1.0], [0.0, 0.0, 0.0]]
    """
    outcome = need(signals, "rewards", "nthr") if signals.outcome is None else signals.outcome
    return signs(Signals(rewards=jnp.asarray(outcome, jnp.float32), valid=_known(signals)))


def _as_many(selected: Tokens, among: Tokens, draws: Tokens) -> Tokens:
    """``[P, G, T]`` bool: as many of each group as are selected, those of ``among`` with the lowest draws."""
    groups = selected.shape[0]
    ranked = jnp.where(among, draws, jnp.inf).reshape(groups, -1)
    places = jnp.argsort(jnp.argsort(ranked, -1), -1)
    count = selected.reshape(groups, -1).sum(-1, keepdims=True)
    return (places < count).reshape(selected.shape) & among
