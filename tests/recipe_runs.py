"""Twenty steps of a recipe of ``configs/variants`` on the tiny random model, with what each step learned from."""

import contextlib
import dataclasses
import math
from pathlib import Path
from typing import Any

import advantage_oracles as oracles
import jax
import numpy as np
import pytest
import yaml
from oracles import close
from runs import draw, numbers, opened
from tiny_run import make_teacher
from variant_examples import in_core

from grpojax import masked
from grpojax.run import learn
from grpojax.run import recipe as config
from grpojax.run.minibatch import whole
from grpojax.train import train

CONFIGS = Path(__file__).parents[1] / "configs" / "variants"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
FAST = "optimizer={learning_rate: 0.05}"
STEPS = 20
# Its samples have one length, so that an update compiles once. These need several, which the model's end of text gives.
RAGGED = ("grpo_lambda_length", "opo")
# What such a model and such groups ask for: half of a group of four, and an entropy as it has.
OPTIONS = {"pass_at_k": {"k": 2}, "gtpo": {"threshold": 9.0}}
REWARDS = {
    "gdpo": "[{name: 'tiny_run:parity'}, {name: 'tiny_run:low', weight: 0.1}]",
    "remax": "[{name: 'tiny_run:low'}]",  # a greedy sample repeats a token, so that its ids have an even sum
    "grpo_process": "[{name: 'tiny_run:parity'}, {name: 'tiny_run:steps', weight: 0.5}]",
}


@dataclasses.dataclass
class Step:
    """What a step learned from, ``[P, G]`` and ``[P, G, T]`` on the host.

    Attributes:
      rewards: NaN where a sample does not count.
      mask: tokens of samples that count.
      signals: all that the advantages were given besides, and ``greedy``.
      norms: gradient norms of its updates.
    """

    problems: Any
    rewards: np.ndarray
    outcome: np.ndarray
    lengths: np.ndarray
    tokens: np.ndarray
    logps: np.ndarray
    mask: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray
    signals: dict[str, Any]
    norms: list[float]


@dataclasses.dataclass
class Run:
    config: config.Config
    trainer: Any
    lines: list[dict[str, float]]
    steps: list[Step]


def variant(name):
    """Of the recipe, with its options."""
    given = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["variant"]
    return given if isinstance(given, dict) else {"name": given}


def load(name, model, directory, *overrides):
    """The recipe with another model, other data and a reward that a random policy gets half of the time."""
    options = OPTIONS.get(name, {})
    if name == "distill":
        options = {"teacher": str(make_teacher(Path(model), Path(directory).parent / "teacher"))}
    return config.load(CONFIGS / f"{name}.yaml", [
        f"run.dir={directory}", f"model={{path: {model}}}", f"data.train={model}/sums.jsonl",
        "data.validation=null", "data.test=null",
        "data.max_prompt_tokens=8", f"rewards={REWARDS.get(name, '[{name: tiny_run:parity}]')}",
        f"variant={variant(name) | options}", "optimizer={learning_rate: 5.0e-3}",
        "rollout.prompts=8", "rollout.group=4", "rollout.max_tokens=4", "train.tokens=null",
        f"train.steps={STEPS}", "train.eval_every=0",
        "train.checkpoint_every=0", *overrides,
    ])  # fmt: skip


def run(loaded, *, ragged=False):
    """Trains to the end; what it learned from."""
    trainer = opened(loaded, eos_ids=None if ragged else ())
    with _watched() as steps:
        assert train(trainer)
    return Run(loaded, trainer, [line for line in numbers(loaded.run.dir) if "reward" in line], steps)


@contextlib.contextmanager
def _watched():
    """A list that gets a `Step` whenever samples are weighed."""
    steps = []
    plain_weigh, plain_update = learn.weigh, learn.update

    def weigh(run, networks, minis, batch, signals):
        minis, batch, told = plain_weigh(run, networks, minis, batch, signals)
        steps.append(_step(run, minis, batch, batch.signals))
        np.testing.assert_array_equal(steps[-1].advantages, np.where(steps[-1].weights > 0, batch.advantages, 0.0))
        return minis, batch, told

    def update(*given, **options):
        state, owed = plain_update(*given, **options)
        steps[-1].norms = [float(x) for x in jax.device_get([o["grad_norm"] for o in owed if "grad_norm" in o])]
        return state, owed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learn, "weigh", weigh)
        patch.setattr(learn, "update", update)
        yield steps


def _step(run, minis, batch, signals):
    """Advantages and weights as they stand in the rows of the updates."""
    rewards, rollout = np.where(batch.dropped[:, None], np.nan, batch.total), batch.rollout
    mask = np.asarray(masked.from_lengths(rollout.lengths, rollout.tokens.shape[2])) & np.isfinite(rewards)[..., None]
    return Step(
        problems=[p.uid for p in batch.problems],
        rewards=rewards,
        outcome=batch.by_name[run.method.deciding],
        lengths=rollout.lengths,
        tokens=rollout.tokens,
        logps=rollout.logps,
        mask=mask,
        advantages=whole(run.policy.device, minis, [m.rows.arrays["advantages"] for m in minis]),
        weights=whole(run.policy.device, minis, [m.rows.arrays["weights"] for m in minis]),
        signals=signals,
        norms=[],
    )


def weighed(trainer):
    """The first step of a run as its updates would get it; none is taken."""
    batch = draw(trainer)
    try:
        batch = batch.with_rewards()
        minis = learn.pack(trainer, batch)
        networks = trainer.state.networks
        minis, signals = learn.score(trainer, networks, minis)
        minis, batch, _ = learn.weigh(trainer, networks, minis, batch, signals)
        return _step(trainer, minis, batch, signals)
    finally:
        trainer.close()


CORE = [name for name in NAMES if in_core(variant(name)["name"])]
OTHERS = [name for name in NAMES if name not in CORE]

# ------------------------------------------------------------------------------------------------ what is asked of each


def grpo(s, ddof=1):
    return oracles.advantages(s.rewards, scale="group", ddof=ddof)


def on_tokens(s, values):
    return np.where(s.mask, values[..., None], 0.0)


def some(name, least=0.0):
    return lambda run: max(line.get(name, math.nan) for line in run.lines) > least


def trained(name, recipe, directory, *more):
    """A run of a recipe to its end, whose numbers are finite and which has learned."""
    made = run(load(name, recipe.parent, directory, *more), ragged=name in RAGGED)
    assert len(made.lines) == len(made.steps) == STEPS
    assert all(np.isfinite(line["loss"]) for line in made.lines if "loss" in line)
    assert max(line.get("grad_norm", 0.0) for line in made.lines) > 1e-3
    return made


def apart_from_grpo(made, expected):
    """Every step learned from what ``expected`` says; whether that is ever another thing than GRPO's advantages."""
    apart = 0.0
    for step in made.steps:
        want, plain = (x if x.ndim == 3 else on_tokens(step, x) for x in (expected(step), grpo(step)))
        close(step.advantages, want, atol=2e-5, rtol=1e-4)
        apart = max(apart, np.abs(want - plain).max())
    return apart > 1e-3


def leaves_the_plain_clip(name, made, recipe, directory):
    """The first update of a rollout is that of PPO's clip, the last is not; GSPO-token's are all GSPO's."""
    objective = made.config.method.variant.objective
    plain = {"name": "grpo", "aggregate": objective.aggregate, "kl_coef": objective.kl_coef}
    other = run(load(name, recipe.parent, directory / "plain", FAST, f"variant={plain}", "train.steps=1"))
    mine, theirs = made.steps[0].norms, other.steps[0].norms
    assert len(mine) == len(theirs) == 4
    assert mine[0] == pytest.approx(theirs[0], rel=1e-3)
    assert abs(mine[-1] / theirs[-1] - 1) > 4e-3
    if name == "gspo_token":
        gspo = load("gspo", recipe.parent, directory / "gspo", FAST, "train.steps=1")
        assert run(gspo).steps[0].norms == pytest.approx(mine, rel=1e-3)
