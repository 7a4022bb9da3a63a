"""Every variant's recipe trains, and what it learned from is its own: the plain oracle's numbers in every step.

Elsewhere: culling's next pass (test_rollouts.py), the true answer's likelihood by transformers (test_true_answers.py),
NTHR with a factor of 1 (test_nthr.py), steps against outcomes (test_process_rewards.py), greedy baselines
(test_greedy.py), enumerated gradients of both critics (tests/variants/test_critics.py).
"""

import math

import advantage_oracles as oracles
import credit_oracles as credit
import numpy as np
import pytest
import recipe_runs
from oracles import close, live, sample_means, std, valid_of
from recipe_runs import NAMES, STEPS
from runs import Trainer, start_together

from grpojax.records.samples import read_samples
from grpojax.run import recipe as config

# --- the advantages of each, [P, G] or [P, G, T], by loops


def grpo(s, ddof=1):
    return oracles.advantages(s.rewards, scale="group", ddof=ddof)


def centred(s):
    return oracles.advantages(s.rewards)


def by_batch(of):
    return lambda s: oracles.advantages(s.rewards, scale="batch", of=of)


def whitened(s, values):
    return oracles.whiten(np.broadcast_to(values[..., None], s.mask.shape), s.mask)


def on_tokens(s, values):
    return np.where(s.mask, values[..., None], 0.0)


def entropy_shaping(s):
    flat = on_tokens(s, grpo(s))
    return flat + np.where(s.mask, np.minimum(0.4 * s.signals["entropy"], np.abs(flat) / 2), 0.0)


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


def with_steps(s):
    return oracles.process_rewards(s.rewards, s.signals["step_rewards"], s.mask) + on_tokens(s, grpo(s))


def with_true_answers(s):
    told = oracles.likelihood_of_all_fail(s.rewards, s.outcome, s.signals["likelihood"], 0.0)
    return oracles.advantages(told, scale="group")


def gtpo(s):
    values = credit.entropy_penalty(centred(s), s.rewards, s.signals["entropy"], s.mask, 0.1)
    sure = np.where(sample_means(s.signals["entropy"], s.mask) <= 9.0, values, 0.0)
    return on_tokens(s, sure) * credit.conflict_weights(s.tokens, s.mask, np.sign(centred(s)))


def high_entropy(s):
    return credit.entropy_mask(grpo(s), s.signals["entropy"], s.mask, 0.2, "quantile")


def ppo(s):
    values = s.signals["values"]
    return oracles.whiten(oracles.token_returns(s.rewards, s.mask, values=values, lam=0.95), s.mask)


def rare(relative_to):
    return lambda s: credit.compensate_rare_tokens(grpo(s), s.logps, s.mask, relative_to=relative_to)


def rloo(s):
    k1 = s.signals["behavior_logps"] - s.signals["ref_logps"]
    told = oracles.subtract_kl(s.rewards, k1, s.mask, 0.03)
    return oracles.advantages(told, leave_one_out=True)


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
    "deepseek_v3_2": centred,
    "distill": lambda s: np.where(s.mask, s.signals["ref_logps"] - s.signals["behavior_logps"], 0.0),
    "dr_grpo": centred,
    "entropy_shaping": entropy_shaping,
    "gdpo": by_batch("advantages"),
    "gpg": lambda s: oracles.gpg(s.rewards),
    "grpo_lambda_length": shorter_first,
    "grpo_lambda_traces": lambda s: np.maximum(grpo(s), -0.1),
    "grpo_process": with_steps,
    "gt_likelihood": with_true_answers,
    "gtpo": gtpo,
    "high_entropy_tokens": high_entropy,
    "lite_ppo": by_batch("rewards"),
    "magistral": lambda s: oracles.whiten(centred(s), np.isfinite(s.rewards), ddof=1, eps=1e-4),
    "max_rl": lambda s: oracles.max_rl(s.rewards),
    "negative_advantage": lambda s: oracles.penalize_all_fail(grpo(s), s.rewards, s.outcome, 1.0, 0.0),
    "ngrpo": lambda s: oracles.virtual_best(s.rewards),
    "nthr": lambda s: softened(s, "influence"),
    "nthr_pos_only": lambda s: np.maximum(grpo(s, ddof=0), 0.0),
    "nthr_random": lambda s: softened(s, "random"),
    "opo": lambda s: oracles.center_by_length(s.rewards, s.lengths),
    "pass_at_k": lambda s: oracles.pass_at_k(s.rewards, 2),
    "pass_at_k_margin": lambda s: oracles.best_margin(s.rewards),
    "ppo": ppo,
    "rare_token": rare("sample"),
    "rare_token_group": rare("group"),
    "rare_token_batch": rare("batch"),
    "reinforce_pp": lambda s: whitened(s, s.rewards),
    "reinforce_pp_baseline": lambda s: whitened(s, centred(s)),
    "remax": lambda s: oracles.subtract_greedy(s.rewards, s.signals["greedy_rewards"]),
    "rloo": rloo,
    "scale_rl": by_batch("advantages"),
    "token_critic": lambda s: on_tokens(s, grpo(s)) + s.signals["token_bias"],
    "xrpo": lambda s: credit.sharpen_novelty(grpo(s), s.rewards, s.logps, s.mask),
}
# Those on GRPO's advantage: the base, those whose filter is new, and losses that leave the plain clip only when the
# policy has moved. A learning rate that moves it far shows how.
FILTERED = {"dapo", "high_entropy_tokens", "magistral", "ngrpo", "scale_rl"}
MOVED = {"cispo", "dppo", "gmpo", "gspo", "gspo_token", "kl_cov", "llds", "luspo", "sapo", "vespo"}
PLAIN = {"base", "grpo", "clip_cov", "culling", "dapo", "dual_clip"} | MOVED
FAST = "optimizer={learning_rate: 0.05}"

# --- what else is only its own


def some(name, least=0.0):
    return lambda run: max(line.get(name, math.nan) for line in run.lines) > least


def retired(run):
    """The last pass leaves prompts out, and only such as were solved."""
    left_out = {uid for made in run.trainer.state.passes for uid in made["left_out"]}
    return left_out and left_out <= {uid for uid, _ in run.trainer.state.solved}


def left_out(run):
    """Solved is whose samples were all right, and it is not drawn again; the step after may be drawn already."""
    solved_at = {s.problems[p]: n for n, s in enumerate(run.steps) for p in range(8) if s.outcome[p].min() == 1}
    again = [uid for n, s in enumerate(run.steps) for uid in s.problems if n > solved_at.get(uid, STEPS) + 1]
    return retired(run) and solved_at.keys() == {uid for uid, _ in run.trainer.state.solved} and not again


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
    "gt_likelihood": some("ground_truth/scored"),
    "kl_cov": some("covariance/penalised_mean"),
    "llds": some("llds_loss"),
    "luspo": some("clip_ratio/region_mean", 0.3),
    "nthr": some("nthr/mixed_groups"),
    "ppo": learns_values,
    "remax": some("greedy_reward"),
    "scale_rl": retired,
    "token_critic": follows,
    "xrpo": planned,
}


def test_every_recipe_is_told_apart():
    assert set(NAMES) == EXPECTED.keys() | PLAIN


@pytest.mark.in_ci(
    "clip_cov", "culling", "grpo_process", "gspo", "gt_likelihood", "llds", "nthr", "ppo", "remax", "xrpo"
)
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_learns_from_its_own_numbers(name, recipe, tmp_path):
    more = [FAST] if name in MOVED | {"dual_clip"} else []
    more += ["variant={name: cispo, weight_max: 1.5}"] if name == "cispo" else []  # its own is rarely met in 20 steps
    loaded = recipe_runs.load(name, recipe.parent, tmp_path / "run", *more)
    run = recipe_runs.run(loaded, ragged=name in recipe_runs.RAGGED)
    assert len(run.lines) == len(run.steps) == STEPS
    assert all(np.isfinite(line["loss"]) for line in run.lines if "loss" in line)
    assert max(line.get("grad_norm", 0.0) for line in run.lines) > 1e-3

    expected, apart = EXPECTED.get(name, grpo), 0.0
    for step in run.steps:
        want, plain = (x if x.ndim == 3 else on_tokens(step, x) for x in (expected(step), grpo(step)))
        close(step.advantages, want, atol=2e-5, rtol=1e-4)
        apart = max(apart, np.abs(want - plain).max())
    assert (apart > 1e-3) == (name not in PLAIN)
    assert name not in OWN or OWN[name](run), run.lines[-1]
    if name in FILTERED:
        groups = [s.rewards[p] for s in run.steps for p in range(8) if valid_of(s.rewards, p)]
        assert all(live([g], 0) or (name == "ngrpo" and g.max() == 0) for g in groups)
        assert min(line["groups/kept"] for line in run.lines) < 1
    if name in MOVED:
        leaves_the_plain_clip(name, run, recipe, tmp_path)


def leaves_the_plain_clip(name, run, recipe, directory):
    """The first update of a rollout is that of PPO's clip, the last is not; GSPO-token's are all GSPO's."""
    objective = run.config.method.variant.objective
    plain = {"name": "grpo", "aggregate": objective.aggregate, "kl_coef": objective.kl_coef}
    other = recipe_runs.run(
        recipe_runs.load(name, recipe.parent, directory / "plain", FAST, f"variant={plain}", "train.steps=1")
    )
    mine, theirs = run.steps[0].norms, other.steps[0].norms
    assert len(mine) == len(theirs) == 4
    assert mine[0] == pytest.approx(theirs[0], rel=1e-3)
    assert abs(mine[-1] / theirs[-1] - 1) > 4e-3
    if name == "gspo_token":
        gspo = recipe_runs.load("gspo", recipe.parent, directory / "gspo", FAST, "train.steps=1")
        assert recipe_runs.run(gspo).steps[0].norms == pytest.approx(mine, rel=1e-3)


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
    step = recipe_runs.weighed(Trainer(loaded, devices))
    assert 0 < np.isfinite(step.rewards).mean() < 1 and len(set(step.lengths.ravel())) > 2
    close(step.advantages, rare(relative_to)(step), atol=2e-5, rtol=1e-4)
    if relative_to == "batch":  # something of one half of the prompts is measured by the other half's likeliest token
        halves = [[x[part] for x in (grpo(step), step.logps, step.mask)] for part in (slice(4), slice(4, 8))]
        apart = np.concatenate([credit.compensate_rare_tokens(*half, relative_to="batch") for half in halves])
        assert np.abs(apart - step.advantages).max() > 1e-2


@pytest.mark.exhaustive("run/test_trainer.py::test_several_processes_train_as_one_stop_as_one_and_go_on")
def test_rare_tokens_of_two_processes(recipe, tmp_path):
    """The rollout is that of all processes."""
    model = recipe.parent
    more = ["variant={name: rare_token, relative_to: batch}", "train.steps=2", "data.validation=null", "mesh.fsdp=2",
            "rewards.0.name=tiny_run:parity"]  # fmt: skip
    for process in start_together(recipe, tmp_path / "two", *more, processes=2, devices=1):
        said = process.communicate(timeout=300)[0]
        assert process.returncode == 0, said
    alone = config.load(model / "recipe.yaml", [*more, f"run.dir={tmp_path / 'one'}"])
    assert Trainer(alone, devices=2).run()
    (two, one) = ([s["advantage"] for s in read_samples(tmp_path / d, 1)[1]] for d in ("two", "one"))
    np.testing.assert_allclose(two, one, rtol=1e-3, atol=1e-4)
