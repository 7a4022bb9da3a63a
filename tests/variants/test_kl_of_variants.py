"""Where the KL of a variant stands: in the loss, in the sample's reward, or in its tokens'."""

import numpy as np
import pytest
from oracles import close
from variant_examples import built, on_tokens

from grpojax import advantages as A
from grpojax import variants

# k1 of two samples of two tokens: 0.5 + 0.5 and -1 + 0; with a coefficient of 0.4 a reward loses 0.4, the other gains
# it.
LOGPS = {"behavior_logps": [[[-1.0, -1.0], [-2.0, -1.0]]], "ref_logps": [[[-1.5, -1.5], [-1.0, -1.0]]]}


def test_token_kl_is_in_the_chain_and_the_reference_asked_for():
    for name in ("reinforce_pp", "ppo"):
        variant = variants.get(name, kl_coef=0.1)
        assert variant.objective.kl_in == "token_reward" and variant.objective.needs_reference
        assert not variants.get(name).objective.needs_reference
    with pytest.raises(ValueError, match=r"token_rewards.*signals\.behavior_logps"):
        on_tokens("reinforce_pp", [[1, 0]], options={"kl_coef": 0.1})
    with pytest.raises(ValueError, match="weighted_by='words'"):
        variants.get("reinforce_pp_baseline", weighted_by="words")
    with pytest.raises(ValueError, match="clip_hi"):
        variants.grpo(clip_hi=0.3)
    with pytest.raises(ValueError, match="constant"):
        variants.get("dr_grpo")


@pytest.mark.parametrize(("name", "options", "want"), [
    ("rloo", {}, [[[0.2, 0.2], [-0.2, -0.2]]]),
    ("rloo", {"kl_in": "loss", "kl_kind": "k2"}, [[[1, 1], [-1, -1]]]),
    ("grpo", {"kl_in": "reward", "kl_kind": "k1", "ddof": 0, "eps": 0.0}, [[[1, 1], [-1, -1]]]),
    ("dr_grpo", {"constant": 8.0, "kl_in": "reward", "kl_kind": "k1"}, [[[0.1, 0.1], [-0.1, -0.1]]]),
])  # fmt: skip
def test_the_kl_is_where_the_objective_says(name, options, want):
    """In the reward it is taken off once, by the pure functions; in the loss the advantages know nothing of it."""
    signals = {k: np.array(v, np.float32) for k, v in LOGPS.items()}
    got = on_tokens(name, [[1, 0]], size=2, options={"kl_coef": 0.4, **options}, **signals)
    close(got, want, atol=1e-6)


def test_reinforce_pp_takes_the_kl_off_once():
    """Returns [0.6, 0.8] and [0.4, 0] with the KL in the tokens; in the sample's reward 0.6 and 0.4."""
    signals = {k: np.array(v, np.float32) for k, v in LOGPS.items()}

    def whitened(x):
        return (x - x.mean()) / x.std()

    for options, want in (
        ({}, [[[0.6, 0.8], [0.4, 0.0]]]),
        ({"kl_in": "reward"}, [[[0.6, 0.6], [0.4, 0.4]]]),
        ({"kl_in": "loss", "kl_kind": "k2"}, [[[1.0, 1.0], [0.0, 0.0]]]),
    ):
        got = on_tokens("reinforce_pp", [[1, 0]], size=2, options={"kl_coef": 0.4, **options}, **signals)
        close(got, whitened(np.array(want)), atol=1e-5)


def test_the_chain_takes_the_kl_off_where_the_objective_says_so():
    for name in ("reinforce_pp", "ppo"):
        for place, kind, coef in (("token_reward", "k1", 0.1), ("reward", "k1", 0.0), ("loss", "k3", 0.0)):
            made = variants.get(name, kl_coef=0.1, kl_in=place, kl_kind=kind)
            assert f"token_rewards(kl_coef={coef})" in A.text_of(made.advantage)


@pytest.mark.parametrize("name", sorted(set(variants.names()) - {"ppo", "reinforce_pp"}))
def test_a_kl_that_nothing_would_apply_is_refused(name):
    with pytest.raises(ValueError, match="no token rewards"):
        built(name, kl_coef=0.1, kl_kind="k1", kl_in="token_reward")
