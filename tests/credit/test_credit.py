import functools

import advantage_oracles
import credit_oracles
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from credit_examples import NAN, G, P, T, W, example, nthr_data
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import close
from ragged import prefix

from grpojax import advantages as A
from grpojax import credit as C
from grpojax import losses
from grpojax.credit import hidden_states


def run(*transforms, rewards, **signals):
    """A chain, compiled, that starts with the values as they come."""
    signals = A.Signals(**{name: jnp.asarray(x) for name, x in signals.items()})
    return jax.jit(A.chain(*transforms))(jnp.asarray(rewards, jnp.float32), signals)


def logs(*rows):
    """Probabilities of a group's samples to log-probs ``[1, G, T]``, NaN on padding; and the mask."""
    size = max(map(len, rows))
    out = np.full((1, len(rows), size), NAN, np.float32)
    for g, row in enumerate(rows):
        out[0, g, : len(row)] = np.log(row)
    return out, np.isfinite(out)


# --- learned bias


@pytest.mark.parametrize(
    ("bound", "center", "want"),
    [
        (None, False, [1.7, 1.4, 1.9]),
        (0.5, False, [1.68997448, 1.40131234, 1.83201839]),
        (None, True, [1.5 + 0.2 - 1 / 6, 1.5 - 0.1 - 1 / 6, 1.5 + 0.4 - 1 / 6]),
    ],
)
def test_golden_token_bias(bound, center, want):
    """Added once a sample it would be 1.5 + 0.5 for all."""
    got = run(
        A.to_tokens(), C.add_token_bias(bound=bound, center=center), rewards=[[1.5]],
        mask=prefix([[3]], 4), token_bias=[[[0.2, -0.1, 0.4, NAN]]],
    )  # fmt: skip
    close(got[0, 0], [*want, 0])
    if bound is None and not center:  # the policy's loss, a sum over tokens
        close(-(got[0, 0, :3] * np.log([0.9, 0.6, 0.3])).sum(), 3.18181708)


def test_golden_token_bias_loss():
    """The bias goes *with* the advantage: minimising their correlation would have +1.5 for a gradient."""
    bias, mask = jnp.array([[[0.2, -0.1, 0.4, NAN]]]), prefix([[3]], 4)

    def loss(b, **options):
        return C.token_bias_loss(b, jnp.array([[1.5]]), mask, **options)

    value, gradient = jax.value_and_grad(loss)(bias)
    close(value, -0.75)
    close(gradient[0, 0], [-1.5, -1.5, -1.5, 0])
    close(C.token_bias_loss(bias, jnp.array([[1.5]]), losses.loss_weights(mask, "token_mean")), -0.25)
    close(jax.grad(functools.partial(loss, l2=1.0))(jnp.full((1, 1, 4), 0.75)), 0)  # the best bias, A / 2
    close(loss(bias, bound=0.5), -1.5 * (0.18997448 - 0.09868766 + 0.33201839))
    assert not jax.grad(lambda a: C.token_bias_loss(bias, a, mask))(jnp.array([[1.5]])).any()


# --- rare tokens


@pytest.mark.parametrize(
    ("options", "advantage", "want"),
    [
        ({}, 1.5, [1.5, 2, 2.5]),
        ({}, -0.5, [-0.5, -0.5, -0.5]),
        ({"positive_only": False}, -0.5, [-0.5, -2 / 3, -2.5 / 3]),
        ({"limit": 1.5}, 1.5, [1.5, 2, 2.25]),
    ],
)
def test_golden_rare_tokens(options, advantage, want):
    """With p in place of p / p_max the first row would be [1.65, 2.1, 2.55]."""
    logps, mask = logs([0.9, 0.6, 0.3], [0.5])
    got = run(
        A.to_tokens(), C.compensate_rare_tokens(**options), rewards=[[advantage, advantage]], mask=mask,
        behavior_logps=logps,
    )  # fmt: skip
    close(got[0, 0], want)
    close(got[0, 1], [advantage, 0, 0])  # a single token is its own largest


@pytest.mark.parametrize(
    ("relative_to", "want"),
    [
        ("sample", [[[1.5, 1], [1, 0]], [[1, 0], [0, 0]]]),
        ("group", [[[1.75, 1.5], [1, 0]], [[1, 0], [0, 0]]]),
        ("batch", [[[1.875, 1.75], [1.5, 0]], [[1, 0], [0, 0]]]),
    ],
)
def test_golden_rare_tokens_beside_others(relative_to, want):
    """The last sample has no reward: its likely token is nobody's measure, nor is what stands behind an end."""
    logps = np.log([[[0.1, 0.2], [0.4, 0.9]], [[0.8, 0.9], [1.0, 1.0]]]).astype(np.float32)
    mask = np.array([[[1, 1], [1, 0]], [[1, 0], [1, 1]]], bool)
    rewards = np.array([[1.5, 1.5], [1.5, np.nan]], np.float32)
    chain = A.chain(A.to_tokens(), C.compensate_rare_tokens(relative_to=relative_to))
    got = chain(rewards, A.Signals(mask=mask, behavior_logps=logps))
    close(got, 1.5 * np.array(want))
    nobody = A.chain(A.to_tokens(), C.compensate_rare_tokens(relative_to=relative_to, positive_only=False))
    assert not np.asarray(nobody(np.full((2, 2), np.nan, np.float32), A.Signals(mask=mask, behavior_logps=logps))).any()


def test_rare_tokens_against_the_vocabulary():
    logps, mask = logs([0.9, 0.6, 0.3])
    got = run(
        A.to_tokens(), C.compensate_rare_tokens(relative_to="vocabulary"), rewards=[[1.0]], mask=mask,
        behavior_logps=logps, max_logps=np.log([[[0.9, 0.6, 0.6]]]),
    )  # fmt: skip
    close(got[0, 0], [1, 1, 1.5])
    with pytest.raises(ValueError, match="relative_to='prompt'.*must be one of sample, group, batch, vocabulary"):
        C.compensate_rare_tokens(relative_to="prompt")


# --- novelty


def test_golden_sharpen_novelty():
    """The second's bonus is 0.648 before the cap; without 1 - η but η - 1, the first would rise instead."""
    scores = np.repeat(np.array([[-0.4, -0.8, -0.5, -0.3]], np.float32)[..., None], 2, -1)
    got = run(C.sharpen_novelty(), rewards=[[1, 1, -1, -1]], mask=np.ones((1, 4, 2), bool), behavior_logps=scores)
    close(got, [[1, 1.5, -1, -1]])
    got = run(
        C.sharpen_novelty(cap=9.0), rewards=[[1, 1, -1, -1]], mask=np.ones((1, 4, 2), bool), behavior_logps=scores
    )  # fmt: skip
    close(got, [[1, 1.64795445, -1, -1]])


# --- entropy

H = np.array([[[0.1, 2, 0.5, 1.5, 0.05, 0.3, 0.9, 0.2, 0.01, 1.1]]], np.float32)


@pytest.mark.parametrize("rule", ["quantile", "top"])
def test_golden_entropy_mask(rule):
    """Divided by the tokens that are left, the loss would be 3.0."""
    got = run(A.to_tokens(), C.entropy_mask(0.2, rule=rule), rewards=[[1.0]], mask=np.ones(H.shape, bool), entropy=H)
    np.testing.assert_array_equal(np.flatnonzero(got), [1, 3])
    close((got * np.arange(1.0, 11)).mean(), 0.6)


def test_entropy_mask_keeps_ties_and_refuses():
    tied = np.where(prefix([[4]], 6), np.float32(0.3), np.float32(9.0))  # more entropy on the padding
    for rule in ("quantile", "top"):
        got = run(
            A.to_tokens(),
            C.entropy_mask(0.5, rule=rule),
            rewards=[[1.0]],
            mask=prefix([[4]], 6),
            entropy=tied,
        )
        close(got[0, 0], [1, 1, 1, 1, 0, 0])
    for options in ({"fraction": 0.0}, {"fraction": 1.5}, {"rule": "median"}):
        with pytest.raises(ValueError, match=str(next(iter(options.values())))):
            C.entropy_mask(**options)


@pytest.mark.parametrize(("advantage", "want"), [(1, [1.2, 1.5, 1]), (-1, [-0.8, -0.5, -1]), (0, [0, 0, 0])])
def test_golden_entropy_shaping(advantage, want):
    """Without the bound by |A| / 2 the second would be 1.8 and -0.2."""
    got = run(
        A.to_tokens(), C.entropy_shaping(0.4, 2.0), rewards=[[advantage]], mask=np.ones((1, 1, 3), bool),
        entropy=[[[0.5, 2, 0]]],
    )  # fmt: skip
    close(got[0, 0], want)


def test_golden_protect_rare_tokens():
    """Of the six tokens with A < 0 two are taken: one is noise, one is spared. A third of all tokens would be three."""
    logps = np.log(np.array([[[0.9, 0.1, 0.01], [0.8, 0.7, 0.6], [0.5, 0.02, 0.3]]], np.float32))
    ratios = np.array([[[1.1, 1.1, 1.1], [1.2, 1.2, 1.2], [1.25, 0, 1.5]]], np.float32)
    got = run(
        A.center("none"), A.to_tokens(), C.protect_rare_tokens(1 / 3, coef=2.0), rewards=[[1, -1, -1]],
        mask=np.ones((1, 3, 3), bool), behavior_logps=logps, proxy_ratios=ratios,
    )  # fmt: skip
    close(got, [[[1, 1, 1], [-1, -1, -1], [-1, -1, 0]]])
    with pytest.raises(ValueError, match="a share in"):
        C.protect_rare_tokens(0.0)


def test_golden_entropy_of_equal_groups():
    """Of the second the surest token loses most; by the deviation from the mean the last would gain. The third group
    differs, the sample without a reward is in none."""
    entropy = np.tile(np.array([0.5, 2, 1], np.float32), (3, 2, 1))
    got = run(
        A.center(), A.to_tokens(), C.entropy_of_equal_groups(0.1), rewards=[[1, 1], [0, NAN], [1, 0]],
        mask=np.ones((3, 2, 3), bool), entropy=entropy,
    )  # fmt: skip
    close(got[0], [[0.05, 0.2, 0.1]] * 2)
    close(got[1], [[-0.15, 0, -0.1], [0, 0, 0]])
    close(got[2], [[0.5] * 3, [-0.5] * 3])


def test_golden_gtpo_entropy():
    """Filtered before a penalty that is taken everywhere, the second would be -0.09."""
    rewards, mask = [[1, 0, 0]], np.ones((1, 3, 2), bool)
    entropy = np.repeat(np.array([[0.3, 0.9, 0.5]], np.float32)[..., None], 2, -1)
    steps = (A.center(), C.entropy_penalty(0.1))
    got = run(*steps, C.entropy_filter(), rewards=rewards, mask=mask, entropy=entropy)
    close(got, [[0.63666667, 0, -0.38333333]])
    got = run(*steps, C.entropy_filter(initial=0.8), rewards=rewards, mask=mask, entropy=entropy)
    close(got, [[0.63666667, -0.42333333, -0.38333333]])
    # Where all rewards are equal: nothing, or the code's push downwards.
    for everywhere, want in ((False, 0), (True, [[-0.03, -0.09, -0.05]])):
        got = run(
            A.center(), C.entropy_penalty(0.1, everywhere=everywhere), rewards=[[1, 1, 1]], mask=mask, entropy=entropy
        )  # fmt: skip
        close(got, want)


def test_gtpo_shapes_a_sample_at_the_mean_of_a_mixed_group():
    """Told by A = 0, the second sample would be left out: 0 in place of -0.09."""
    entropy = np.repeat(np.array([[0.3, 0.9, 0.5, 0.7]] * 2, np.float32)[..., None], 2, -1)
    rewards = [[1, 0.5, 0, NAN], [0.1, 0.1, 0.1, NAN]]
    got = run(
        A.center(), C.entropy_penalty(0.1), rewards=rewards, mask=np.ones((2, 4, 2), bool), entropy=entropy
    )  # fmt: skip
    close(got, [[0.47, -0.09, -0.55, 0], [0, 0, 0, 0]])


# --- conflicts

CONFLICT = np.array([[[5, 7, 9, 2, 8], [5, 7, 3, 2, 8], [5, 4, 9, 8, -1]]], np.int32)
LAMBDA = [[2, 2, 2, 4, 4], [0, 0, 1, 0, 0], [0, 1, 1, 0, 0]]


def test_golden_conflict_weights():
    """Sample by sample, 9 would not conflict (no wrong sample shares a whole beginning with it): 1 for its λ."""
    mask = prefix([[5, 5, 4]], 5)
    signs = np.array([[2 / 3], [-1 / 3], [-1 / 3]])
    chain = (A.center(), A.to_tokens(), C.conflict_weights())
    got = run(*chain, rewards=[[1, 0, 0]], mask=mask, tokens=CONFLICT)
    close(got[0], signs * np.array(LAMBDA))
    close(np.where(mask, credit_oracles.conflict_weights(CONFLICT, mask, [[1, -1, -1]]), 0)[0], LAMBDA)


def test_conflicts_of_equal_samples():
    tokens, mask = np.array([[[1, 2, 3], [1, 2, 3]]], np.int32), np.ones((1, 2, 3), bool)
    chain = (A.center(), A.to_tokens(), C.conflict_weights())
    close(run(*chain, rewards=[[1, 0]], mask=mask, tokens=tokens), [[[2, 2, 2], [0, 0, 0]]])
    close(run(*chain, rewards=[[1, NAN]], mask=mask, tokens=tokens), 0)
    same = (A.to_tokens(), C.conflict_weights())  # no positives: all weights 1
    close(run(*same, rewards=[[0.5, 0.5]], mask=mask, tokens=tokens), 0.5)


def test_conflict_count_as_in_the_code():
    """Forward [11111] and the backward run still reversed [11000] of the first sample: 5. Back in place it is 5 too;
    of the second, [11000] and [11000]: 2, where the true union would count 4."""
    mask = prefix([[5, 5, 4]], 5)
    chain = (A.center(), A.to_tokens(), C.conflict_weights(count_norm=True))
    got = run(*chain, rewards=[[1, 0, 0]], mask=mask, tokens=CONFLICT)
    close(got[0, 0], 2 / 3 * np.array(LAMBDA[0]) / 5)
    close(got[0, 1], [0, 0, -1 / 3 / 2, 0, 0])


# --- NTHR


def test_golden_nthr_scores():
    """Of the softmax's gradient without onehot(y), the first score would be 0.65."""
    data, sign = nthr_data(), jnp.array([[1.0, 1.0, -1.0]])
    weights = data["mask"][0] * (np.arange(3) < 2)[:, None]
    flat = {name: x[0].reshape(6, *x.shape[3:]) for name, x in data.items()}
    clean = {name: np.nan_to_num(flat[name]) for name in ("probs", "hidden")}
    matrix = hidden_states._errors_matrix(clean["probs"], clean["hidden"], flat["columns"], weights.reshape(-1))
    close(matrix, [[1.1, 0.5], [-0.5, 0.1], [-0.4, -0.4], [-0.2, -0.2]])
    score = jax.jit(C.nthr_scores, static_argnames="self_term")
    scores, means = score(sign=sign, **data)
    close(scores[0, 2], [0.75, -0.33])
    close(means[0, :2], [0.42, 1.28])
    close(score(sign=sign, **data, self_term=False)[1][0, :2], [0.14, 0.28])


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, [-0.47140452, -1.41421356]),  # η = 1/3, on the first token only
        ({"eta": 0.0}, [0, -1.41421356]),
        ({"beta": 2.0}, [-1.41421356, -1.41421356]),  # a threshold of 0.84
        ({"self_term": False, "beta": -2.0}, [-0.47140452, -1.41421356]),  # of -0.28; with itself -0.84
        ({"beta": -1.0}, [-0.47140452, -0.47140452]),  # of -0.42, and -0.33 is over it
    ],
)
def test_golden_nthr(options, want):
    got = run(
        A.center(), A.scale(ddof=0, eps=0.0), A.to_tokens(), C.nthr(**options), rewards=[[1, 1, 0]], **nthr_data()
    )  # fmt: skip
    close(got[0, 2], want)
    close(got[0, :2], [[0.70710678, 0.70710678], [0.70710678, 0]])


@pytest.mark.parametrize("own", [True, False])
def test_nthr_by_scores_that_are_there_already(own):
    data, sign = nthr_data(), jnp.array([[1.0, 1.0, -1.0]])
    scores, means = C.nthr_scores(sign=sign, **data, self_term=own)
    given = {"mask": data["mask"], "influence": scores, "influence_means": means}
    chain = (A.center(), A.to_tokens(), C.nthr(beta=0.5, self_term=own))
    close(run(*chain, rewards=[[1, 1, 0]], **given), run(*chain, rewards=[[1, 1, 0]], **data))
    with pytest.raises(ValueError, match="influence_means"):
        run(*chain, rewards=[[1, 1, 0]], mask=data["mask"], influence=scores)


def test_nthr_on_as_many_tokens_by_chance_and_on_all():
    """The first group has two tokens over its threshold of 1, the second none, the third none that is right."""
    mask = prefix([[2, 3, 3], [3, 3, 3], [3, 3, 3]], 3)
    scores = np.where(np.arange(3) == 2, 0, np.array([[[1], [5], [0]], [[9], [1], [1]], [[1], [2], [3]]])).astype(float)
    rewards = [[1, 0, 0], [1, 0, 0], [0, 0, 0]]
    draws = np.linspace(0.9, 0.1, 27).reshape(3, 3, 3)
    draws[0, 0] = 0.0  # right samples are none of those drawn
    given = {"mask": mask, "influence": scores, "influence_means": np.array([[1, 0, 0], [9, 0, 0], [0, 0, 0]]) * 1.0}
    chain = (A.center(), A.to_tokens())
    plain = run(*chain, rewards=rewards, **given)

    def changed(select, **signals):
        got = run(*chain, C.nthr(eta=0.0, select=select), rewards=rewards, **given, **signals)
        return np.argwhere(np.asarray(got != plain)).tolist()

    assert changed("influence") == [[0, 1, 0], [0, 1, 1]]
    assert changed("random", draws=draws) == [[0, 2, 1], [0, 2, 2]]  # the two lowest
    assert changed("all") == [[p, g, t] for p in (0, 1) for g in (1, 2) for t in range(3)]
    with pytest.raises(ValueError, match="random.*draws"):
        changed("random")


@pytest.mark.parametrize("rewards", [[[1, 1, 1]], [[0, 0, 0]], [[NAN, NAN, 0]]])
def test_nthr_leaves_groups_of_one_kind(rewards):
    got = run(A.to_tokens(), C.nthr(), rewards=rewards, **nthr_data())
    close(got, np.where(nthr_data()["mask"], np.nan_to_num(np.array(rewards))[..., None], 0))


@pytest.mark.slow
def test_group_vocabulary():
    rng = np.random.default_rng(0)
    tokens, mask = rng.integers(0, 9, (P, G, T)).astype(np.int32), prefix(rng.integers(0, T + 1, (P, G)), T)
    entries, columns, counts = jax.jit(C.group_vocabulary, static_argnums=2)(tokens, mask, W)
    for p in range(P):
        want = sorted(set(tokens[p][mask[p]].tolist()))
        assert entries[p].tolist() == want + [-1] * (W - len(want)) and counts[p] == len(want)
        assert (np.asarray(entries[p])[columns[p]] == tokens[p])[mask[p]].all()
    assert (np.asarray(columns)[~mask] == -1).all()
    entries, columns, counts = C.group_vocabulary(tokens, mask, 2)  # too small: the count says so
    assert (np.asarray(counts) > 2).all()
    np.testing.assert_array_equal(np.asarray(columns)[mask] >= 0, (tokens == np.asarray(entries)[:, :1, None])[mask]
                                  | (tokens == np.asarray(entries)[:, 1:, None])[mask])  # fmt: skip
    entries, columns, _ = C.group_vocabulary(tokens[:, :1, :2], mask[:, :1, :2], W)  # larger than the group
    assert entries.shape == (P, W)


# --- all of these against loops


CHAINS = {
    "grpo": A.chain(A.center(), A.scale()),
    "rare": A.chain(A.center(), A.scale(), A.to_tokens(), C.compensate_rare_tokens(limit=1.8)),
    "rare of all": A.chain(A.center(), A.to_tokens(), C.compensate_rare_tokens(relative_to="vocabulary")),
    "novelty": A.chain(A.center(), A.scale(), C.sharpen_novelty()),
    "bias": A.chain(A.center(), A.to_tokens(), C.add_token_bias(bound=0.7)),
    "quantile": A.chain(A.center(), A.to_tokens(), C.entropy_mask(0.3)),
    "top": A.chain(A.center(), A.to_tokens(), C.entropy_mask(0.3, rule="top")),
    "shaping": A.chain(A.center(), A.to_tokens(), C.entropy_shaping()),
    "penalty": A.chain(A.center(), C.entropy_penalty(), C.entropy_filter(0.9)),
    "conflicts": A.chain(A.center(), A.to_tokens(), C.conflict_weights()),
    "nthr": A.chain(A.center(), A.to_tokens(), C.nthr(beta=0.5, eta=0.25)),
}


@jax.jit
def compiled(rewards, signals):
    return {name: chain(rewards, signals) for name, chain in CHAINS.items()}


@settings(max_examples=25)
@given(seed=st.integers(0, 9999))
@pytest.mark.slow
def test_oracles(seed):
    rewards, s = example(seed)
    got = compiled(rewards, s)
    grpo = advantage_oracles.advantages(rewards, scale="group")
    centred = advantage_oracles.advantages(rewards)
    mask = s.mask & np.isfinite(rewards)[..., None]
    flat = np.where(mask, centred[..., None], 0)
    tell = functools.partial(close, atol=1e-4, rtol=1e-3)
    tell(got["rare"], credit_oracles.compensate_rare_tokens(grpo, s.behavior_logps, mask, limit=1.8))
    tell(got["rare of all"],
         credit_oracles.compensate_rare_tokens(centred, s.behavior_logps, mask, max_logps=s.max_logps))  # fmt: skip
    tell(got["novelty"], credit_oracles.sharpen_novelty(grpo, rewards, s.behavior_logps, s.mask))
    tell(got["bias"], np.where(mask, flat + 0.7 * np.tanh(np.nan_to_num(s.token_bias) / 0.7), 0))
    for rule in ("quantile", "top"):
        tell(got[rule], credit_oracles.entropy_mask(centred, s.entropy, mask, 0.3, rule))
    bonus = np.minimum(0.4 * np.nan_to_num(s.entropy), np.abs(flat) / 2)
    tell(got["shaping"], np.where(mask, flat + bonus, 0))
    penalized = credit_oracles.entropy_penalty(centred, rewards, s.entropy, s.mask, 0.1)
    tell(got["penalty"], np.where(oracles.sample_means(s.entropy, s.mask) <= 0.9, penalized, 0))
    sign = np.sign(centred)
    tell(got["conflicts"], flat * credit_oracles.conflict_weights(s.tokens, mask, sign))

    weights = np.where(mask, (sign > 0)[..., None], 0.0)
    scores = credit_oracles.influence(s.probs, s.hidden, s.columns, mask, weights)
    means = oracles.sample_means(scores, mask)
    want = flat.copy()
    for p in range(P):
        right = [g for g in range(G) if sign[p, g] > 0 and mask[p, g].any()]
        for g in [g for g in range(G) if sign[p, g] < 0 and right]:
            threshold = 0.5 * min(means[p, i] for i in right)
            near = np.abs(scores[p, g] - threshold) < 1e-4
            want[p, g] *= np.where(scores[p, g] > threshold, 0.25, 1.0)
            want[p, g][near] = got["nthr"][p, g][near]  # either side of a rounding
    tell(got["nthr"], want)


def test_influence_is_the_pairwise_sum():
    _, s = example(3)
    weights = np.random.default_rng(0).normal(size=s.mask.shape).astype(np.float32)
    got = jax.jit(C.influence)(s.probs, s.hidden, s.columns, s.mask, weights)
    close(np.where(s.mask, got, 0), credit_oracles.influence(s.probs, s.hidden, s.columns, s.mask, weights), atol=1e-4)


def test_nothing_pairwise_is_stored():
    """256 tokens have 65536 pairs; all temporaries together hold fewer numbers than that."""

    def abstract(*tail, dtype=jnp.float32):
        return jax.ShapeDtypeStruct((1, 4, 64, *tail), dtype)

    arrays = (abstract(8), abstract(4), abstract(dtype=jnp.int32), abstract(dtype=jnp.bool_), abstract())
    memory = jax.jit(C.influence).lower(*arrays).compile().memory_analysis()
    assert 0 < memory.temp_size_in_bytes < 4 * 256**2 / 2


def test_transforms_say_where_they_belong():
    rewards, s = example(0)
    for chain, names in (
        ((C.compensate_rare_tokens(),), "compensate_rare_tokens.*after to_tokens"),
        ((A.to_tokens(), C.sharpen_novelty()), "sharpen_novelty.*before to_tokens"),
        ((C.nthr(),), "nthr.*after to_tokens"),
    ):
        with pytest.raises(ValueError, match=names):
            A.chain(*chain)(rewards, s)
    for transform, field in (
        (C.conflict_weights(), "tokens"),
        (C.nthr(), "probs"),
        (C.entropy_mask(), "entropy"),
    ):
        with pytest.raises(ValueError, match=f"signals.{field}"):
            A.chain(A.to_tokens(), transform)(rewards, A.Signals(mask=s.mask))


NTHR = {
    "probs": jnp.full((1, 4, 1, 2), 0.5), "hidden": jnp.array([[[[1.0]], [[2.0]], [[2.0]], [[2.0]]]]),
    "columns": jnp.zeros((1, 4, 1), jnp.int32), "mask": jnp.ones((1, 4, 1), bool),
}  # fmt: skip


@pytest.mark.parametrize(
    ("rewards", "outcome", "want"),
    [
        # All wrong, one well formatted; all right, one well formatted: neither has anything to compare.
        ([0.1, 0, 0, 0], [0, 0, 0, 0], [0.075, -0.025, -0.025, -0.025]),
        ([1.1, 1, 1, 1], [1, 1, 1, 1], [0.075, -0.025, -0.025, -0.025]),
        # p is 1/4, and not the 1/2 of the rewards over their mean: η is 1/2.
        ([1, 0.9, 0, 0], [1, 0, 0, 0], [0.525, 0.425, -0.2375, -0.2375]),
        # A wrong sample whose outcome is unknown is in no share, and stays.
        ([1, 0, 0, 0], [1, 0, 0, NAN], [0.75, -0.25 / 3, -0.25 / 3, -0.25]),
        ([1, 0, 0, 0], None, [0.75, -0.125, -0.125, -0.125]),
    ],
)
def test_nthr_knows_right_from_wrong_by_the_outcome(rewards, outcome, want):
    given = NTHR if outcome is None else NTHR | {"outcome": jnp.array([outcome], jnp.float32)}
    close(run(A.center(), A.to_tokens(), C.nthr(), rewards=[rewards], **given)[0, :, 0], want)
