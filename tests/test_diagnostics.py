import credit_oracles
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from credit_examples import example, nthr_data
from oracles import close

from grpojax import diagnostics as D

NAN = float("nan")


def test_golden_displacement():
    """Over all samples, wrong ones included, it would be -1.8 / 3."""
    before, after = jnp.array([[-5.0, -7, -1], [-1, -2, -3]]), jnp.array([[-4.5, -7.9, -2.4], [0, 0, 0]])
    got = D.likelihood_displacement(before, after, jnp.array([[1, 1, 0], [0, NAN, 0]]))
    close(got[0], -0.2)
    assert np.isnan(got[1])  # no right sample: not a displacement of 0
    mask = np.arange(3) < np.array([[2, 3]])[..., None]
    tokens = jnp.where(mask, 0.5, NAN)
    close(D.likelihood_displacement(tokens, 3 * tokens, jnp.ones((1, 2)), mask), 2.5)
    with pytest.raises(ValueError, match=r"\(2, 3\).*without"):
        D.likelihood_displacement(before, after, before, before)


def test_displacement_is_of_an_update_on_one_prompt():
    """Exact on a tabular softmax: a step up on token 0 raises it by what the logits say; the wrong token falls."""
    logits, rewards = jnp.array([0.2, -0.1, 0.4]), jnp.array([[1.0, 0.0]])
    drawn = jnp.array([0, 1])

    def objective(x):
        return (jnp.array([1.0, -1.0]) * jax.nn.log_softmax(x)[drawn]).sum()

    stepped = logits + 0.1 * jax.grad(objective)(logits)
    before, after = (jax.nn.log_softmax(x)[drawn][None] for x in (logits, stepped))
    delta = D.likelihood_displacement(before, after, rewards)[0]
    close(delta, jax.nn.log_softmax(stepped)[0] - jax.nn.log_softmax(logits)[0])
    assert delta > 0.05


@pytest.mark.slow
def test_golden_gwhes():
    """With the signs of its two terms exchanged it would be positive."""
    got = jax.jit(D.gwhes)(**nthr_data(), rewards=jnp.array([[1.0, 1, 0]]))
    close(got, [[-0.49497475, -0.41012193, 0]])
    for rewards in ([[1.0, 1, 1]], [[0.0, 0, 0]], [[1.0, NAN, NAN]]):
        assert not np.asarray(D.gwhes(**nthr_data(), rewards=jnp.array(rewards))).any()


def test_gwhes_oracle():
    rewards, s = example(5)
    got = jax.jit(D.gwhes)(s.probs, s.hidden, s.columns, s.mask, rewards)
    weights, want = np.zeros(s.mask.shape), np.zeros(rewards.shape)
    mixed = []
    for p in range(len(rewards)):
        valid = [g for g in range(5) if np.isfinite(rewards[p, g])]
        share = sum(rewards[p, g] == 1 for g in valid) / len(valid)
        mixed.append(0 < share < 1)
        for g in valid:
            if mixed[-1]:
                sigma = np.sqrt(share * (1 - share))
                weights[p, g] = -(1 - share) / sigma if rewards[p, g] == 1 else share / sigma
    scores = credit_oracles.influence(s.probs, s.hidden, s.columns, s.mask, weights)
    for p, g in np.argwhere(rewards == 1):
        want[p, g] = scores[p, g][s.mask[p, g]].sum() if mixed[p] else 0
    assert any(mixed)
    close(got, want, atol=1e-4)


@pytest.mark.slow
def test_group_statistics():
    """A group without a valid sample is no group; by std == 0 the 0.1s might not count as equal."""
    metric = jnp.array([[0, 0, NAN], [1, 1, 1], [1, 0, 1], [0.1, 0.1, 0.1], [NAN, NAN, NAN]], jnp.float32)
    got = jax.jit(D.group_statistics)(metric)
    want = {"all_fail": 0.25, "all_correct": 0.25, "zero_variance": 0.75, "invalid": 4 / 15}
    for name, x in want.items():
        close(got[name], x)
    assert set(got) == set(want)
    close(D.group_statistics(metric, fail=0.1)["all_fail"], 0.5)
    some = jnp.array([[1, 1, NAN], [1, 1, 1], [NAN, NAN, NAN]], jnp.float32)
    got = D.group_statistics(some)  # the sample without a metric may have failed
    close(got["all_correct"], 0.5), close(got["invalid"], 4 / 9)
    got = D.group_statistics(some, drawn=jnp.array([[True, True, False], [True] * 3, [False] * 3]))
    close(got["all_correct"], 1), close(got["invalid"], 0)


def effective(metrics):
    return D.effective_sample_size(*(float(metrics[f"sampler_ratio{end}"].value) for end in ("", "_square")))


def test_mismatch():
    """π_train / π_sampler of [1.25, 0.6, 4, 1]; on the sampler's whole distribution its mean is 1."""
    train, sampler = (jnp.log(jnp.array([*x, NAN])) for x in ([0.5, 0.3, 0.2, 0.1], [0.4, 0.5, 0.05, 0.1]))
    mask = jnp.array([True] * 4 + [False])
    got = jax.jit(D.mismatch)(train, sampler, mask)
    w = np.array([1.25, 0.6, 4, 1])
    want = {
        "logp_difference": np.abs(np.log(w)).mean(), "logp_difference_max": np.log(4),
        "sampler_kl": (w - 1 - np.log(w)).mean(), "sampler_ratio": w.mean(), "sampler_ratio_square": (w**2).mean(),
    }  # fmt: skip
    assert set(got) == set(want)
    for name, x in want.items():
        close(got[name].value, x)
    close(
        effective(got),
        w.sum() ** 2 / 4 / (w**2).sum(),
    )
    same = D.mismatch(train, train, mask)
    assert same["logp_difference_max"].value == same["sampler_kl"].value == 0
    assert effective(same) == 1


def test_mismatch_of_parts_adds_up():
    """Averaged over parts, the mean would be 0.75, of which one token has 1.5 and three none."""
    train, sampler = jnp.array([[-1.5, NAN, NAN], [-1.0, -1.0, -1.0]]), jnp.array([[-3.0, 0, 0], [-1.0, -1.0, -1.0]])
    mask = jnp.array([[True, False, False], [True] * 3])
    whole = D.mismatch(train, sampler, mask)
    parts = [D.mismatch(*x) for x in zip(train, sampler, mask, strict=True)]
    for name, x in whole.items():
        close((parts[0][name] + parts[1][name]).value, x.value)
    close(whole["logp_difference"].value, 1.5 / 4)
    close(whole["logp_difference_max"].value, 1.5)


def test_mismatch_is_constant_for_the_gradient():
    def total(logps):
        return sum(x.value for x in D.mismatch(logps, jnp.zeros(3), jnp.array([True, True, False])).values())

    assert not np.asarray(jax.grad(total)(jnp.array([-1.0, -0.5, NAN]))).any()


def repeated(ids, ngram):
    """The share of n-grams that a plain walk through a sample has met before."""
    grams = [tuple(ids[i : i + ngram]) for i in range(len(ids) - ngram + 1)]
    return sum(gram in grams[:i] for i, gram in enumerate(grams)) / len(grams) if grams else NAN


@pytest.mark.parametrize("ngram", [1, 2, 3, 4])
def test_repetition_against_a_plain_walk(ngram):
    """What stands behind a sample's end is not read, a token of id 0 is one like others."""
    rng = np.random.default_rng(ngram)
    tokens, lengths = rng.integers(0, 3, (3, 5, 11)).astype(np.int32), rng.integers(0, 12, (3, 5))
    lengths[0, :3] = 0, 11, 2
    want = [[repeated(ids[:n].tolist(), ngram) for ids, n in zip(*group, strict=True)]
            for group in zip(tokens, lengths, strict=True)]  # fmt: skip
    np.testing.assert_allclose(D.repetition(tokens, lengths, ngram), want)


def test_golden_repetition():
    """Ids far apart, whose four-digit codes in base 2^17 would be the same modulo 2^64."""
    loop, fresh, high = [7, 8] * 4, list(range(150000, 150008)), [2**13, 1, 2, 3, 2**14, 1, 2, 3]
    got = D.repetition(np.array([[loop, fresh, high]]), np.full((1, 3), 8))
    close(got, [[3 / 5, 0, 0]])


def test_mismatch_shows_a_broken_sampler():
    """49 nats apart; only what goes into exp is limited."""
    got = D.mismatch(jnp.array([-1.0, -50.0]), jnp.array([-1.0, -1.0]), jnp.ones(2, bool))
    assert (got["logp_difference"].value, got["logp_difference_max"].value) == (24.5, 49.0)
    assert np.isfinite(got["sampler_kl"].value)
    nothing = D.mismatch(jnp.ones(2), jnp.zeros(2), jnp.zeros(2, bool))
    assert all(x.value == 0 for x in nothing.values())
    assert effective(nothing) == 0
