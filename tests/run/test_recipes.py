"""Every variant's recipe trains, and what it learned from is its own: the plain oracle's numbers in every step.

Elsewhere: culling's next pass (test_rollouts.py), enumerated gradients of both critics
(tests/variants/test_critics.py).
"""

import math
from collections import Counter

import advantage_oracles as oracles
import credit_oracles as credit
import numpy as np
import pytest
import recipe_runs
from oracles import close, live, sample_means, std, valid_of
from recipe_runs import CORE, FAST, STEPS, grpo, on_tokens, some
from runs import opened, start_together

from grpojax.records.samples import read_samples
from grpojax.run import recipe as config
from grpojax.train import train

# --- the advantages of each, [P, G] or [P, G, T], by loops


def centred(s):
    return oracles.advantages(s.rewards)


def by_batch(of):
    return lambda s: oracles.advantages(s.rewards, scale="batch", of=of)


def whitened(s, values):
    return oracles.whiten(np.broadcast_to(values[..., None], s.mask.shape), s.mask)


def entropy_shaping(s):
    flat = on_tokens(s, grpo(s))
    return flat + np.where(s.mask, np.minimum(0.4 * s.signals["entropy"], np.abs(flat) / 2), 0.0)


def of_equal_groups(s):
    flat = on_tokens(s, grpo(s))
    return credit.entropy_of_equal_groups(flat, s.rewards, s.outcome, s.signals["entropy"], s.mask, 0.1, 1.0)


def shorter_first(s):
    """GRPO on rewards of which the best-solved fifth of the prompts, two of eight, pays for length."""
    rewards = s.rewards.astype(float)
    for p in sorted(range(8), key=lambda p: (-np.mean(s.outcome[p]), p))[:2]:
        right = [g for g in range(4) if s.outcome[p, g] == 1]
        lengths = [float(s.lengths[p, g]) for g in right]
        for g in range(4):
            z = 0.0
            if len(set(lengths)) > 1:
                z = (float(s.lengths[p, g]) - np.mean(lengths)) / std(lengths, 0)
            rewards[p, g] = 1 - 0.6 / (1 + math.exp(-z)) if g in right else 0.0
    return oracles.advantages(rewards, scale="group")


def gtpo(s):
    values = credit.entropy_penalty(centred(s), s.rewards, s.signals["entropy"], s.mask, 0.1)
    sure = np.where(sample_means(s.signals["entropy"], s.mask) <= 9.0, values, 0.0)
    return on_tokens(s, sure) * credit.conflict_weights(s.tokens, s.mask, np.sign(centred(s)))


def high_entropy(s):
    return credit.entropy_mask(grpo(s), s.signals["entropy"], s.mask, 0.2, "quantile")


def rare(relative_to):
    return lambda s: credit.compensate_rare_tokens(grpo(s), s.logps, s.mask, relative_to=relative_to)


def rloo(s):
    k1 = s.signals["behavior_logps"] - s.signals["ref_logps"]
    told = oracles.subtract_kl(s.rewards, k1, s.mask, 0.03)
    return oracles.advantages(told, leave_one_out=True)


EXPECTED = {
    "deepseek_v3_2": centred,
    "dr_grpo": centred,
    "entropy_shaping": entropy_shaping,
    "gdpo": by_batch("advantages"),
    "gpg": lambda s: oracles.gpg(s.rewards),
    "grpo_lambda_length": shorter_first,
    "grpo_lambda_traces": lambda s: np.maximum(grpo(s), -0.1),
    "gtpo": gtpo,
    "high_entropy_tokens": high_entropy,
    "lite_ppo": by_batch("rewards"),
    "magistral": lambda s: oracles.whiten(centred(s), np.isfinite(s.rewards), ddof=1, eps=1e-4),
    "max_rl": lambda s: oracles.max_rl(s.rewards),
    "negative_advantage": lambda s: oracles.penalize_all_fail(grpo(s), s.rewards, s.outcome, 1.0, 0.0),
    "ngrpo": lambda s: oracles.virtual_best(s.rewards),
    "opo": lambda s: oracles.center_by_length(s.rewards, s.lengths),
    "pass_at_k": lambda s: oracles.pass_at_k(s.rewards, 2),
    "pass_at_k_margin": lambda s: oracles.best_margin(s.rewards),
    "rare_token": rare("sample"),
    "rare_token_group": rare("group"),
    "rare_token_batch": rare("batch"),
    "reinforce_pp": lambda s: whitened(s, s.rewards),
    "reinforce_pp_baseline": lambda s: whitened(s, centred(s)),
    "rl_zvp": of_equal_groups,
    "rloo": rloo,
    "scale_rl": by_batch("advantages"),
    "w_reinforce": lambda s: oracles.weigh_signs(s.rewards, s.outcome, 0.1, 1.0, 1.0),
}
# Those on GRPO's advantage: the base, those whose filter is new, and losses that leave the plain clip only when the
# policy has moved. A learning rate that moves it far shows how.
FILTERED = {"dapo", "high_entropy_tokens", "magistral", "ngrpo", "scale_rl"}
MOVED = {"cispo", "dppo", "gmpo", "gspo", "gspo_token", "kl_cov", "luspo", "sapo", "vespo"}
PLAIN = {"base", "grpo", "clip_cov", "culling", "dapo", "dual_clip"} | MOVED
# --- what else is only its own


def retired(run):
    """The last pass leaves prompts out, and only such as were solved."""
    left_out = {uid for made in run.trainer.state.passes for uid in made["left_out"]}
    return left_out and left_out <= {uid for uid, _ in run.trainer.state.solved}


def left_out(run):
    """Solved is whose samples were all right. The pass that goes on then may still draw it, and no later one."""
    solved_at = {}
    for n, s in enumerate(run.steps):
        for p in range(8):
            if s.outcome[p].min() == 1:
                solved_at.setdefault(s.problems[p], n)
    again = Counter(uid for n, s in enumerate(run.steps) for uid in s.problems if n > solved_at.get(uid, STEPS))
    solved = {uid for uid, _ in run.trainer.state.solved}
    return retired(run) and solved_at.keys() == solved and max(again.values(), default=0) <= 1


def constant(run):
    return all((s.weights == 1 / (32 * 4)).all() for s in run.steps)


OWN = {
    "base": some("kl_loss"),
    "cispo": some("clip_ratio/cap_mean"),
    "clip_cov": some("covariance/clipped_mean"),
    "culling": left_out,
    "deepseek_v3_2": lambda run: "off_policy" in run.lines[0] and some("kl_loss")(run),
    "dr_grpo": constant,
    "dual_clip": some("clip_ratio/dual_mean"),
    "gmpo": some("clip_ratio/high_mean"),
    "grpo": some("kl_loss"),
    "gspo": some("clip_ratio/region_mean", 0.3),
    "gspo_token": some("clip_ratio/region_mean", 0.3),
    "kl_cov": some("covariance/penalised_mean"),
    "luspo": some("clip_ratio/region_mean", 0.3),
    "scale_rl": retired,
}


def test_every_recipe_is_told_apart():
    assert set(CORE) == EXPECTED.keys() | PLAIN


@pytest.mark.in_ci("clip_cov", "culling", "gspo")
@pytest.mark.slow
@pytest.mark.parametrize("name", CORE)
def test_a_recipe_learns_from_its_own_numbers(name, recipe, tmp_path):
    more = [FAST] if name in MOVED | {"dual_clip"} else []
    more += ["variant={name: cispo, weight_max: 1.5}"] if name == "cispo" else []  # its own is rarely met in 20 steps
    run = recipe_runs.trained(name, recipe, tmp_path / "run", *more)
    assert recipe_runs.apart_from_grpo(run, EXPECTED.get(name, grpo)) == (name not in PLAIN)
    assert name not in OWN or OWN[name](run), run.lines[-1]
    if name in FILTERED:
        groups = [s.rewards[p] for s in run.steps for p in range(8) if valid_of(s.rewards, p)]
        assert all(live([g], 0) or (name == "ngrpo" and g.max() == 0) for g in groups)
        assert min(line["groups/kept"] for line in run.lines) < 1
    if name in MOVED:
        recipe_runs.leaves_the_plain_clip(name, run, recipe, tmp_path)


# --- rare tokens: beside which tokens, whatever the run is cut into


@pytest.mark.in_ci("batch-cut0-4")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("relative_to", "cut", "devices"),
    [
        ("batch", ["train.minibatches=2", "train.microbatches=2", "mesh.fsdp=4"], 4),
        *(
            (of, cut, devices)
            for of in ("sample", "group", "batch")
            for cut, devices in [(["train.minibatches=4"], 1), (["mesh.data=2", "mesh.fsdp=4"], 8)]
        ),
    ],
)
def test_rare_tokens_are_rare_beside_the_whole_rollout(relative_to, cut, devices, recipe, tmp_path):
    """Not beside those of a minibatch, a micro-batch or a device; samples of several lengths, some without a reward."""
    options = f"variant={{name: rare_token, relative_to: {relative_to}}}"
    more = [options, "rewards=[{name: 'tiny_run:some'}]", "rollout.max_tokens=7", *cut]
    loaded = recipe_runs.load("rare_token", recipe.parent, tmp_path / "run", *more)
    step = recipe_runs.weighed(opened(loaded, devices))
    assert 0 < np.isfinite(step.rewards).mean() < 1 and len(set(step.lengths.ravel())) > 2
    close(step.advantages, rare(relative_to)(step), atol=2e-5, rtol=1e-4)
    if relative_to == "batch":  # something of one half of the prompts is measured by the other half's likeliest token
        halves = [[x[part] for x in (grpo(step), step.logps, step.mask)] for part in (slice(4), slice(4, 8))]
        apart = np.concatenate([credit.compensate_rare_tokens(*half, relative_to="batch") for half in halves])
        assert np.abs(apart - step.advantages).max() > 1e-2


@pytest.mark.exhaustive("run/test_train.py::test_several_processes_train_as_one_stop_as_one_and_go_on")
def test_rare_tokens_of_two_processes(recipe, tmp_path):
    """The rollout is that of all processes."""
    model = recipe.parent
    more = ["variant={name: rare_token, relative_to: batch}", "train.steps=2", "data.validation=null", "mesh.fsdp=2",
            "rewards.0.name=tiny_run:parity"]  # fmt: skip
    for process in start_together(recipe, tmp_path / "two", *more, processes=2, devices=1):
        said = process.communicate(timeout=300)[0]
        assert process.returncode == 0, said
    alone = config.load(model / "recipe.yaml", [*more, f"run.dir={tmp_path / 'one'}"])
    assert train(opened(alone, devices=2))
    (two, one) = ([s["advantage"] for s in read_samples(tmp_path / d, 1)[1]] for d in ("two", "one"))
    np.testing.assert_allclose(two, one, rtol=1e-3, atol=1e-4)
