"""Credit, against loops on random ragged input: all of it in one program."""

import functools
import itertools

import advantage_oracles
import credit_oracles
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given
from oracles import close
from ragged import SEEDS, D, G, P, T, W, many, masks, on, scores

from grpojax import advantages as A
from grpojax import credit as C
from grpojax.advantages.baselines import signs
from grpojax.losses import loss_weights

BOUNDS = [None, 0.7]

BIAS_LOSSES = list(itertools.product(BOUNDS, [0.0, 0.3], ["sum", "mean"], [2, 3]))

SELF = [True, False]

RARE = ["sample", "group", "batch"]

CREDIT = {
    **{
        f"bias {bound}": A.chain(A.center(), A.to_tokens(), C.add_token_bias(bound=bound, center=True))
        for bound in BOUNDS
    },
    "conflicts": A.chain(A.center(), A.to_tokens(), C.conflict_weights(1.5, count_norm=True)),
    "spared": A.chain(A.center(), A.to_tokens(), C.protect_rare_tokens(0.4, coef=0.5)),
    "equal groups": A.chain(A.center(), A.to_tokens(), C.entropy_of_equal_groups(0.3, success=0.25)),
    "penalty": A.chain(A.center(), C.entropy_penalty(0.2)),
    "penalty everywhere": A.chain(A.center(), C.entropy_penalty(0.2, everywhere=True)),
    "filter": A.chain(A.center(), C.entropy_filter(0.9, initial=0.8)),
    "no filter": A.chain(A.center(), C.entropy_filter(0.9, initial=1.0)),
    **{
        f"rare {of}": A.chain(
            A.center(), A.to_tokens(), C.compensate_rare_tokens(relative_to=of, positive_only=False)
        )
        for of in RARE
    },
    "rare of all": A.chain(
        A.center(), A.to_tokens(), C.compensate_rare_tokens(1.1, relative_to="vocabulary", positive_only=False)
    ),
    **{f"nthr {own}": A.chain(A.center(), A.to_tokens(), C.nthr(beta=0.5, self_term=own)) for own in SELF},
}  # fmt: skip


@jax.jit
def token_level(rewards, signals, advantages):
    losses = {}
    for bound, l2, normalise, ndim in BIAS_LOSSES:
        loss = functools.partial(C.token_bias_loss, bound=bound, l2=l2)
        of = advantages if ndim == 3 else advantages[..., 0]
        weights = signals.mask if normalise == "sum" else loss_weights(signals.mask, "token_mean")
        losses[bound, l2, normalise, ndim] = jax.value_and_grad(loss)(signals.token_bias, of, weights)
    sign = signs(A.Signals(rewards=jnp.nan_to_num(rewards), valid=jnp.isfinite(rewards)))
    valid = signals.mask & jnp.isfinite(rewards)[..., None]
    nthr = [C.nthr_scores(signals.probs, signals.hidden, signals.columns, valid, sign, self_term=own) for own in SELF]
    return {name: chain(rewards, signals) for name, chain in CREDIT.items()}, list(losses.values()), nthr


@many
@given(seed=SEEDS)
@pytest.mark.slow
def test_token_level(seed):
    rng = np.random.default_rng(seed)
    r, mask = scores(rng), masks(rng, holes=False)
    bias, advantages = on(mask, rng.normal(size=mask.shape)), on(mask, rng.normal(size=mask.shape))
    advantages[..., 0] = rng.normal(size=(P, G))  # read alone where advantages are of samples
    s = A.Signals(
        mask=mask, token_bias=bias, behavior_logps=on(mask, -rng.exponential(size=mask.shape)),
        entropy=on(mask, rng.exponential(size=mask.shape)), max_logps=on(mask, -0.1 * rng.random(mask.shape)),
        proxy_ratios=on(mask, np.where(rng.random(mask.shape) < 0.3, 0, 1 + rng.random(mask.shape))),
        tokens=rng.integers(0, 2, mask.shape).astype(np.int32),
        probs=on(mask, rng.dirichlet(np.ones(W + 1), (P, G, T))[..., :W]),
        hidden=on(mask, rng.normal(size=(P, G, T, D))), columns=rng.integers(-1, W, mask.shape).astype(np.int32),
    )  # fmt: skip
    got, losses, nthr = token_level(r, s, advantages)
    centred, there = advantage_oracles.advantages(r), np.isfinite(r)
    sign, valid = np.sign(centred), mask & there[..., None]
    flat = np.where(valid, centred[..., None], 0)
    tell = functools.partial(close, atol=1e-5, rtol=1e-4)

    for bound in BOUNDS:
        tell(got[f"bias {bound}"], credit_oracles.add_token_bias(centred, bias, valid, bound, True))
    for (bound, l2, normalise, ndim), (value, gradient) in zip(BIAS_LOSSES, losses, strict=True):
        of = advantages if ndim == 3 else np.repeat(advantages[..., :1], T, -1)
        want = credit_oracles.token_bias_loss(bias, of, mask, bound, l2, normalise)
        tell(value, want[0], atol=1e-4)
        tell(gradient, want[1], atol=1e-4)

    weights = credit_oracles.conflict_weights(s.tokens, valid, sign, 1.5)
    tell(got["conflicts"], flat * weights / credit_oracles.conflict_counts(s.tokens, valid, sign)[..., None])
    entropy = oracles.sample_means(s.entropy, mask)
    penalty = functools.partial(credit_oracles.entropy_penalty, centred, r, s.entropy, mask, 0.2)
    of_equal = credit_oracles.entropy_of_equal_groups(flat, r, r, s.entropy, valid, 0.3, 0.25)
    tell(got["equal groups"], of_equal)
    spared = credit_oracles.protect_rare_tokens(flat, s.behavior_logps, s.proxy_ratios, valid, 0.4, 0.5)
    tell(got["spared"], spared)
    tell(got["penalty"], penalty())
    tell(got["penalty everywhere"], penalty(everywhere=True))
    tell(got["filter"], np.where(entropy <= 0.9, centred, 0))
    tell(got["no filter"], centred)
    rare = functools.partial(credit_oracles.compensate_rare_tokens, centred, s.behavior_logps, valid)
    for of in RARE:
        tell(got[f"rare {of}"], rare(relative_to=of, positive_only=False))
    tell(got["rare of all"], rare(limit=1.1, positive_only=False, max_logps=s.max_logps))

    for own, (all_scores, means) in zip(SELF, nthr, strict=True):
        want, apart, want_scores, want_means = credit_oracles.nthr(
            flat, r, s.probs, s.hidden, s.columns, valid, sign, 0.5, None, own
        )
        tell(np.where(valid, all_scores, 0), want_scores, atol=1e-4)
        tell(means, want_means, atol=1e-4)
        tell(np.where(apart < 1e-4, 0, got[f"nthr {own}"]), np.where(apart < 1e-4, 0, want))
