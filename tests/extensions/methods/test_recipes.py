"""The recipes of variants that need more than the core: the plain oracle's numbers in every step.

Elsewhere: the true answer's likelihood by transformers (test_true_answers.py), NTHR with a factor of 1 (test_nthr.py),
steps against outcomes (test_process_rewards.py), greedy baselines (test_greedy.py).
"""

import advantage_oracles as oracles
import credit_oracles as credit
import numpy as np
import pytest
import recipe_runs
from oracles import live
from recipe_runs import FAST, OTHERS, grpo, on_tokens, some

# --- the advantages of each, [P, G] or [P, G, T], by loops


def with_steps(s):
    return oracles.process_rewards(s.rewards, s.signals["step_rewards"], s.mask) + on_tokens(s, grpo(s))


def with_true_answers(s):
    told = oracles.likelihood_of_all_fail(s.rewards, s.outcome, s.signals["likelihood"], 0.0)
    return oracles.advantages(told, scale="group")


def spared(s):
    return credit.protect_rare_tokens(on_tokens(s, grpo(s)), s.logps, s.signals["proxy_ratios"], s.mask, 0.5, 50.0)


def ppo(s):
    values = s.signals["values"]
    return oracles.whiten(oracles.token_returns(s.rewards, s.mask, values=values, lam=0.95), s.mask)


def softened(s, select):
    """NTHR: of each mixed group the wrong samples' tokens over the threshold, or as many of them by their draws."""
    flat, scores, means = on_tokens(s, grpo(s, ddof=0)), s.signals["influence"], s.signals["influence_means"]
    out = flat.copy()
    for p in (p for p in range(8) if live(s.rewards, p)):
        right = [g for g in range(4) if s.rewards[p, g] == 1]
        wrong = [(g, t) for g in range(4) if g not in right for t in range(4)]
        chosen = [(g, t) for g, t in wrong if scores[p, g, t] > min(means[p, right])]
        if select == "random":
            chosen = sorted(wrong, key=lambda i: s.signals["draws"][p][i])[: len(chosen)]
        for g, t in chosen:
            out[p, g, t] *= abs(1 - 2 * len(right) / 4)
    return out


EXPECTED = {
    "distill": lambda s: np.where(s.mask, s.signals["ref_logps"] - s.signals["behavior_logps"], 0.0),
    "grpo_process": with_steps,
    "gt_likelihood": with_true_answers,
    "lp_reg": spared,
    "nthr": lambda s: softened(s, "influence"),
    "nthr_pos_only": lambda s: np.maximum(grpo(s, ddof=0), 0.0),
    "nthr_random": lambda s: softened(s, "random"),
    "ppo": ppo,
    "remax": lambda s: oracles.subtract_greedy(s.rewards, s.signals["greedy_rewards"]),
    "token_critic": lambda s: on_tokens(s, grpo(s)) + s.signals["token_bias"],
    "xrpo": lambda s: credit.sharpen_novelty(grpo(s), s.rewards, s.logps, s.mask),
}

# --- what else is only its own


def follows(run):
    """The bias has the advantage's sign more often than not, and grows."""
    signs = [np.sign(s.signals["token_bias"] * on_tokens(s, grpo(s)))[s.mask].sum() for s in run.steps[2:]]
    sizes = [np.abs(s.signals["token_bias"]).mean() for s in run.steps]
    return sizes[0] == 0 and sizes[-1] > 2 * sizes[2] and sum(signs) > 0


def learns_values(run):
    """The critic alone at first; then its loss is less."""
    losses = [line["critic/loss"] for line in run.lines]
    return "grad_norm" not in run.lines[2] and "grad_norm" in run.lines[3] and np.mean(losses[10:]) < losses[0]


def planned(run):
    """A step's 32 samples, from 2 to 8 of a prompt."""
    counts = [(s.lengths > 0).sum(1) for s in run.steps]
    return all(c.sum() == 32 and c.min() >= 2 for c in counts) and max(c.max() for c in counts) > 4


OWN = {
    "gt_likelihood": some("ground_truth/scored"),
    "llds": some("llds_loss"),
    "nthr": some("nthr/mixed_groups"),
    "ppo": learns_values,
    "remax": some("greedy_reward"),
    "token_critic": follows,
    "xrpo": planned,
}


def test_every_recipe_is_told_apart():
    """LLDS has GRPO's advantages, and leaves its loss when the policy has moved."""
    assert set(OTHERS) == EXPECTED.keys() | {"llds"}


@pytest.mark.in_ci("grpo_process", "gt_likelihood", "nthr", "xrpo")
@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_a_recipe_learns_from_its_own_numbers(name, recipe, tmp_path):
    more = [FAST] if name == "llds" else []
    more += ["variant={name: lp_reg, share: 0.5, coef: 50.0}"] if name == "lp_reg" else []  # its own is hardly seen
    run = recipe_runs.trained(name, recipe, tmp_path / "run", *more)
    assert recipe_runs.apart_from_grpo(run, EXPECTED.get(name, grpo)) == (name != "llds")
    assert name not in OWN or OWN[name](run), run.lines[-1]
    if name == "llds":
        recipe_runs.leaves_the_plain_clip(name, run, recipe, tmp_path)
